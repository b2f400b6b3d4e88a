"""What is stored as Xet, or is too large for plain requests, comes by the hub's own downloader, and is checked all the same."""

from __future__ import annotations

import hashlib
import signal
import threading
from dataclasses import replace
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from supervisor.cli.exit_codes import ExitCode
from supervisor.host.hub import download, hub_download
from supervisor.host.hub.download import File
from supervisor.host.hub.hub import HubError, Listing
from tests.e2e.cli.pull.conftest import MIB, content
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S

LIMIT = constants.MAX_HTTP_DOWNLOAD_SIZE
WEIGHTS = "model.safetensors"
TINY = {"config.json", "tokenizer.json", WEIGHTS}


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
            (LIMIT, True, True, False),
            (LIMIT + 1, False, True, True),
            (LIMIT + 1, True, True, True),
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
        assert done.returncode == ExitCode.DONE, done.stderr
        assert set(hub.xet_reads) == {WEIGHTS}
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
        sent = hub.sent
        assert pull("tiny").returncode == ExitCode.DONE
        assert hub.sent == sent

    def test_the_storage_never_sees_the_persons_token(self, pull, hub):
        hub.repos["acme/tiny"].gated = True
        assert pull("tiny", HF_TOKEN="hf_good").returncode == ExitCode.DONE
        assert "Bearer xet_good" in hub.tokens_at_cdn
        assert hub.tokens_at_cdn <= {None, "Bearer xet_good"}

    def test_a_flipped_bit_is_fetched_again(self, pull, hub):
        hub.corrupt[WEIGHTS] = 1
        done = pull("tiny")
        assert done.returncode == ExitCode.DONE, done.stderr
        assert "another hash" in done.stderr
        assert (pull.models_dir / "acme/tiny" / WEIGHTS).read_bytes() == content(5 * MIB, 2)

    def test_wrong_content_is_never_taken(self, pull, hub):
        hub.corrupt[WEIGHTS] = 99
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert "twice with another hash" in done.stderr
        assert pull.names("acme/tiny") == TINY - {WEIGHTS}

    def test_another_size_than_listed_is_refused(self, pull, hub):
        hub.listed[WEIGHTS] = {"lfs": {"sha256": "0" * 64, "size": 5}, "size": 5}
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert f"the hub lists {WEIGHTS} with another size" in done.stderr
        assert hub.xet_reads == []

    def test_more_than_listed_is_cut_off(self, pull, hub):
        """How the library words it is its own affair, and varies."""
        hub.more_as_xet[WEIGHTS] = 200 * MIB
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert "the hub's own downloader gave up" in done.stderr
        assert pull.names("acme/tiny") == {"config.json", "tokenizer.json"}

    def test_without_xet_it_is_an_ordinary_file(self, pull, hub):
        hub.cuts[WEIGHTS] = [2 * MIB]
        done = pull("tiny", HF_HUB_DISABLE_XET="1")
        assert done.returncode == ExitCode.DONE, done.stderr
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
        assert pull("tiny").returncode == ExitCode.FAILED
        assert path.read_bytes() == content(5 * MIB, 2)
        hub.corrupt.clear()
        assert pull("tiny").returncode == ExitCode.DONE
        assert path.read_bytes() == content(5 * MIB, 12)


class TestAsking:
    """How the hub keeps a file is asked before any comes."""

    def test_errors_that_pass(self, pull, hub):
        hub.repos["acme/tiny"] = replace(hub.repos["acme/tiny"], xet=frozenset({WEIGHTS}))
        hub.head_errors[WEIGHTS] = [503, 429]
        done = pull("tiny")
        assert done.returncode == ExitCode.DONE, done.stderr
        assert set(hub.xet_reads) == {WEIGHTS}
        assert "Retrying" not in done.stderr, "the client's own words would be painted over ours"

    @pytest.mark.parametrize(("status", "asked"), [(503, download.ATTEMPTS), (404, 1)])
    def test_errors_that_stay(self, pull, hub, status, asked):
        hub.head_errors[WEIGHTS] = [status] * 50
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert str(status) in done.stderr
        assert 50 - len(hub.head_errors[WEIGHTS]) == asked

    def test_ctrl_c_ends_it(self, pull, hub, tmp_path):
        (tmp_path / "sitecustomize.py").write_text(
            "from supervisor.host.hub import download\ndownload.FIRST_PAUSE_S = 60\n"
        )
        hub.head_errors[WEIGHTS] = [503] * 50
        with pull.start("tiny", PYTHONPATH=f"{tmp_path}:{pull.environment()['PYTHONPATH']}") as process:
            wait_until(lambda: len(hub.head_errors[WEIGHTS]) < 50)
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == ExitCode.INTERRUPTED
        assert 50 - len(hub.head_errors[WEIGHTS]) < download.ATTEMPTS

    def test_ctrl_c_that_wakes_nobody(self, pull, hub, tmp_path):
        """The system may hand the signal to a thread that doesn't wait, or just before the wait begins."""
        (tmp_path / "sitecustomize.py").write_text(
            "import signal, threading\n"
            "from supervisor.host.hub import download\n"
            "pause = download.pause\n"
            "def interrupted(fruitless, stop):\n"
            "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
            "    pause(9, stop)\n"
            "download.pause = interrupted\n"
        )
        hub.head_errors[WEIGHTS] = [503] * 50
        assert (
            pull("tiny", PYTHONPATH=f"{tmp_path}:{pull.environment()['PYTHONPATH']}").returncode == ExitCode.INTERRUPTED
        )
        assert 50 - len(hub.head_errors[WEIGHTS]) < download.ATTEMPTS


class TestTooLarge:
    """Plain requests don't get files above a size, which is lowered for this."""

    @pytest.fixture
    def large(self, monkeypatch):
        monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 5)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        return File("deep/model.gguf", 10, hashlib.sha256(b"all of it!").hexdigest())

    def copy(self, folder: Path, file: File) -> hub_download.Copy:
        return hub_download.Copy(Listing("acme/large", "a" * 40, False, (file,)), folder)

    def test_the_hubs_own_gets_it_and_its_progress_shows(self, monkeypatch, tmp_path, large):
        copy, asked, there = self.copy(tmp_path, large), [], []

        def download(repo, name, *, local_dir, **others):
            asked.append((repo, name, others))
            path = local_dir / name
            path.parent.mkdir(parents=True)
            for far in (b"all", b"all of it!"):
                path.write_bytes(far)
                there.append(copy.size_there(large))
            return str(path)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        assert copy.size_there(large) == 0
        copy.fetch([large], lambda _line: None)
        assert asked == [("acme/large", "deep/model.gguf", {"repo_type": "model", "revision": "a" * 40})]
        assert there == [3, 10]
        assert copy.size_there(large) == 10
        assert (tmp_path / "deep/model.gguf").read_bytes() == b"all of it!"
        assert self.copy(tmp_path, large).missing() == []

    @pytest.mark.parametrize(
        ("there", "asked"), [(b"all", 1), (b"all of it?", 1), (b"all of it! And more", 1), (b"all of it!", 0)]
    )
    def test_what_is_there_of_it_counts_only_when_whole(self, monkeypatch, tmp_path, large, there, asked):
        copy, names = self.copy(tmp_path, large), []
        part = tmp_path / f"{large.name}.{large.digest[:12]}.part"
        part.parent.mkdir()
        part.write_bytes(there)

        def download(repo, name, *, local_dir, **others):
            names.append(name)
            assert not part.exists()
            path = local_dir / name
            path.parent.mkdir(parents=True)
            path.write_bytes(b"all of it!")
            return str(path)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        copy.fetch([large], lambda _line: None)
        assert len(names) == asked
        assert (tmp_path / large.name).read_bytes() == b"all of it!"
        assert not part.exists()

    def test_what_it_delivers_is_checked(self, monkeypatch, tmp_path, large):
        def download(repo, name, *, local_dir, **others):
            path = local_dir / name
            path.parent.mkdir(parents=True)
            path.write_bytes(b"all of it?")
            return str(path)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        copy = self.copy(tmp_path, large)
        with pytest.raises(HubError, match="twice with another hash"):
            copy.fetch([large], lambda _line: None)
        assert copy.missing() == [large]

    @pytest.mark.parametrize(
        ("variables", "before", "remedy"),
        [
            ({"HF_HUB_DISABLE_XET": "1"}, "", "unset HF_HUB_DISABLE_XET"),
            ({}, "", "set HF_ENDPOINT to a hub that has it as Xet"),
            ({}, "import sys\nsys.modules['hf_xet'] = None\n", "reinstall llmux, hf-xet comes along"),
        ],
    )
    def test_the_real_one_refuses_without_xet(self, pull, tmp_path, variables, before, remedy):
        lowered = "from huggingface_hub import constants\nconstants.MAX_HTTP_DOWNLOAD_SIZE = 1 << 20\n"
        (tmp_path / "sitecustomize.py").write_text(before + lowered)
        done = pull("tiny", PYTHONPATH=f"{tmp_path}:{pull.environment()['PYTHONPATH']}", **variables)
        assert done.returncode == ExitCode.FAILED
        assert "too large" in done.stderr
        assert remedy in done.stderr
        assert "again" not in done.stderr
        assert pull.names("acme/tiny") == TINY - {WEIGHTS}

    @pytest.mark.parametrize(("status", "told"), [(404, "gave up"), (403, "HF_TOKEN")])
    def test_an_answer_that_stays(self, monkeypatch, tmp_path, large, status, told):
        request = httpx2.Request("GET", "http://127.0.0.1:9")

        def download(*_, **__):
            raise HfHubHTTPError("gone", response=httpx2.Response(status, request=request))

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        with pytest.raises(HubError, match=told) as error:
            self.copy(tmp_path, large).fetch([large], lambda _line: None)
        assert "is kept" not in str(error.value)

    def test_a_storage_that_gives_up(self, pull, hub):
        hub.repos["acme/tiny"] = replace(hub.repos["acme/tiny"], xet=frozenset({WEIGHTS}))
        hub.errors[WEIGHTS] = [404] * 50
        done = pull("tiny")
        assert done.returncode == ExitCode.FAILED
        assert "gave up" in done.stderr
        assert "HF_HUB_DISABLE_XET=1" in done.stderr


class TestInterrupted:
    """It begins anew, and leaves nothing behind for long."""

    @pytest.fixture(autouse=True)
    def stored(self, hub):
        hub.repos["acme/tiny"] = replace(hub.repos["acme/tiny"], xet=frozenset({WEIGHTS}))
        hub.hold[WEIGHTS] = threading.Event()
        hub.half_way[WEIGHTS] = threading.Event()

    def test_by_ctrl_c(self, pull, hub):
        with pull.start("tiny") as process:
            assert hub.half_way[WEIGHTS].wait(LIMIT_S)
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == ExitCode.INTERRUPTED
        assert not (pull.models_dir / "acme/tiny" / hub_download.WORK_FOLDER).exists()
        assert pull.names("acme/tiny") == TINY - {WEIGHTS}
        hub.hold.pop(WEIGHTS).set()
        assert pull("tiny").returncode == ExitCode.DONE
        assert (pull.models_dir / "acme/tiny" / WEIGHTS).read_bytes() == content(5 * MIB, 2)

    def test_by_being_killed(self, pull, hub):
        aside = pull.models_dir / "acme/tiny" / hub_download.WORK_FOLDER
        with pull.start("tiny") as process:
            assert hub.half_way[WEIGHTS].wait(LIMIT_S)
            process.kill()
        (left,) = aside.rglob("*.incomplete")
        left.write_bytes(content(2 * MIB))
        hub.hold.pop(WEIGHTS).set()
        assert pull.rows("tiny", "--dry-run")[0]["missing_bytes"] == 5 * MIB
        assert pull("tiny").returncode == ExitCode.DONE
        assert not aside.exists()
        assert pull.names("acme/tiny") == TINY
