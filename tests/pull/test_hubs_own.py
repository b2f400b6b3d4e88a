"""What is stored as Xet, or is too large for plain requests, comes by the hub's own downloader, and is checked all the same."""

from __future__ import annotations

import hashlib
import signal
import threading
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from supervisor.cli.exits import Exit
from supervisor.io import hub_download
from supervisor.io.hub import File, HubError, Listing
from tests.daemon import wait_until
from tests.pull.conftest import MIB, content

LIMIT = constants.MAX_HTTP_DOWNLOAD_SIZE
WEIGHTS = "model.safetensors"
TINY = {"config.json", "tokenizer.json", WEIGHTS}
SHA = hashlib.sha256(b"all of it").hexdigest()


class TestChoice:
    """By size, by how the hub keeps it, and by what is there already."""

    @pytest.mark.parametrize(
        ("size", "xet", "begun", "hubs"),
        [
            (1000, False, False, False),
            (1000, True, False, True),
            (LIMIT, False, False, False),
            (LIMIT + 1, False, False, True),
            (LIMIT + 1, True, False, True),
            (1000, True, True, False),
        ],
    )
    def test_of_each_file(self, size, xet, begun, hubs):
        assert hub_download.takes_hubs_own(size, xet=xet, begun=begun, largest_plain=LIMIT) == hubs

    def test_the_hub_draws_the_line_at_50_gb(self):
        assert LIMIT == 50 * 10**9


class TestXet:
    """From a hub that stores the weights as Xet, by what the real client makes of that."""

    @pytest.fixture(autouse=True)
    def stored(self, hub):
        hub.repos["acme/tiny"] = replace(hub.repos["acme/tiny"], xet=frozenset({WEIGHTS}))

    def test_comes_as_xet_and_nothing_else_is_left(self, pull, hub):
        done = pull("tiny")
        assert done.returncode == Exit.DONE, done.stderr
        assert hub.xet_reads == [WEIGHTS]
        assert "hub's own downloader" in done.stderr
        assert "%|" not in done.stderr, "its bars would be painted over ours"
        assert pull.names("acme/tiny") == TINY
        assert {path.name for path in (pull.models_dir / "acme/tiny").iterdir()} == {
            *TINY,
            hub_download.RECORD,
            hub_download.LOCK,
        }
        assert (pull.models_dir / "acme/tiny" / WEIGHTS).read_bytes() == content(5 * MIB, 2)

    def test_a_second_time_nothing_comes(self, pull, hub):
        pull("tiny")
        assert pull("tiny").returncode == Exit.DONE
        assert hub.xet_reads == [WEIGHTS]

    def test_the_storage_never_sees_the_persons_token(self, pull, hub):
        hub.repos["acme/tiny"].gated = True
        assert pull("tiny", HF_TOKEN="hf_good").returncode == Exit.DONE
        assert "Bearer xet_good" in hub.tokens_at_cdn
        assert hub.tokens_at_cdn <= {None, "Bearer xet_good"}

    def test_a_flipped_bit_is_fetched_again(self, pull, hub):
        hub.corrupt[WEIGHTS] = 1
        done = pull("tiny")
        assert done.returncode == Exit.DONE, done.stderr
        assert "another hash" in done.stderr
        assert hub.xet_reads == [WEIGHTS, WEIGHTS]
        assert (pull.models_dir / "acme/tiny" / WEIGHTS).read_bytes() == content(5 * MIB, 2)

    def test_wrong_content_is_never_taken(self, pull, hub):
        hub.corrupt[WEIGHTS] = 99
        done = pull("tiny")
        assert done.returncode == Exit.FAILED
        assert "twice with another hash" in done.stderr
        assert pull.names("acme/tiny") == TINY - {WEIGHTS}

    def test_without_xet_it_is_an_ordinary_file(self, pull, hub):
        hub.cuts[WEIGHTS] = [2 * MIB]
        done = pull("tiny", HF_HUB_DISABLE_XET="1")
        assert done.returncode == Exit.DONE, done.stderr
        assert hub.xet_reads == []
        assert "going on" in done.stderr
        assert hub.sent[WEIGHTS] == 5 * MIB

    def test_what_was_begun_plainly_goes_on_so(self, pull, hub):
        part = pull.models_dir / "acme/tiny" / f"{WEIGHTS}.{hashlib.sha256(content(5 * MIB, 2)).hexdigest()[:12]}.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(content(5 * MIB, 2)[: 2 * MIB])
        assert pull.rows("tiny")[0]["missing_bytes"] == 0
        assert hub.xet_reads == []
        assert hub.sent[WEIGHTS] == 3 * MIB

    def test_another_revision_replaces_it_only_when_it_is_whole(self, pull, hub):
        pull("tiny")
        path = pull.models_dir / "acme/tiny" / WEIGHTS
        pull.models["tiny"]["source"]["revision"] = "v2"
        hub.corrupt[WEIGHTS] = 99
        assert pull("tiny").returncode == Exit.FAILED
        assert path.read_bytes() == content(5 * MIB, 2)
        hub.corrupt.clear()
        assert pull("tiny").returncode == Exit.DONE
        assert path.read_bytes() == content(5 * MIB, 12)


class TestInterrupted:
    """It begins anew, and leaves nothing behind for long."""

    @pytest.fixture(autouse=True)
    def stored(self, hub):
        hub.repos["acme/tiny"] = replace(hub.repos["acme/tiny"], xet=frozenset({WEIGHTS}))
        hub.hold[WEIGHTS] = threading.Event()
        hub.half_way[WEIGHTS] = threading.Event()

    def test_by_ctrl_c(self, pull, hub):
        with pull.start("tiny") as process:
            assert hub.half_way[WEIGHTS].wait(30)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == Exit.INTERRUPTED
        assert not (pull.models_dir / "acme/tiny" / hub_download.ASIDE).exists()
        assert pull.names("acme/tiny") == TINY - {WEIGHTS}
        hub.hold.pop(WEIGHTS).set()
        assert pull("tiny").returncode == Exit.DONE
        assert (pull.models_dir / "acme/tiny" / WEIGHTS).read_bytes() == content(5 * MIB, 2)

    def test_by_being_killed(self, pull, hub):
        aside = pull.models_dir / "acme/tiny" / hub_download.ASIDE
        with pull.start("tiny") as process:
            assert hub.half_way[WEIGHTS].wait(30)
            process.kill()
        (left,) = aside.rglob("*.incomplete")
        left.write_bytes(content(2 * MIB))
        hub.hold.pop(WEIGHTS).set()
        assert pull.rows("tiny", "--dry-run")[0]["missing_bytes"] == 5 * MIB
        assert pull("tiny").returncode == Exit.DONE
        assert not aside.exists()
        assert pull.names("acme/tiny") == TINY
