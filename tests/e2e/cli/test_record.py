"""`llmux record` and `llmux replay`: what a daemon decided is decided again from its recording alone."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.daemon import fake, running, wait_until
from tests.support.shell import LLMUX, heed_ctrl_c, llmux


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    models = {name: fake(vram_mib=3000) for name in ("left", "right")}
    with running(tmp_path_factory.mktemp("recorded"), {"models": models}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def file(site, tmp_path_factory):
    """Of a load, an eviction and a few requests."""
    path = tmp_path_factory.mktemp("recordings") / "swaps.jsonl"
    recorder = subprocess.Popen(
        [*LLMUX, "record", str(path), "--url", site.url, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    wait_until(path.exists, what="the state has come")

    for name in ("left", "right", "left"):
        told = site.post("/v1/chat/completions", json={"model": name, "messages": []})
        assert told.status_code == 200
    wait_until(lambda: path.read_text().count('"RequestFinished"') == 3, what="each line is written as it comes")
    recorder.send_signal(2)
    out, _ = recorder.communicate(timeout=60)
    assert recorder.returncode == 0
    assert len(path.read_text().splitlines()) - 1 == json.loads(out)["events"]
    return path


def replay(path, *words):
    return llmux("replay", str(path), *words)


class TestReplay:
    """Without a daemon, from the file alone."""

    def test_decides_the_same(self, file):
        told = replay(file)
        assert told.returncode == 0
        assert "evicting left" in told.stdout
        assert "every decision came out the same" in told.stdout

    def test_for_programs(self, file):
        told = json.loads(replay(file, "--json", "-n", "1000").stdout)
        kinds = [decision["kind"] for decision in told["decisions"]]
        assert kinds.count("evicted") == 2
        assert told["events"] > 9

    def test_another_outcome_is_shown(self, file, tmp_path):
        changed = tmp_path / "changed.jsonl"
        changed.write_text(file.read_text().replace("evicting left", "evicting nobody"))
        told = replay(changed)
        assert told.returncode == 1
        assert "came out otherwise" in told.stderr
        assert "evicting nobody" in told.stderr

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "it is empty"),
            ("[1]\n", "not a recording"),
            ("{\n", "can't be read"),
            ('{"models": {}}\n', "not a recording"),
            ('{"llmux_recording":1,"at":0,"scheduler":[]}\n', "Another version of llmux made this recording (format 1"),
            ('{"llmux_recording":6,"at":0,"scheduler":["Popen",{"args":["touch","x"]},0]}\n', "no 'Popen'"),
        ],
    )
    def test_what_is_none(self, content, message, tmp_path):
        path = tmp_path / "none.jsonl"
        path.write_text(content)
        told = replay(path)
        assert told.returncode == 1
        assert message in told.stderr
        assert "Traceback" not in told.stderr


class TestRecord:
    """The file is the user's."""

    def test_nothing_is_overwritten(self, site, file):
        before = file.read_text()
        told = llmux("record", str(file), "--url", site.url)
        assert told.returncode == 1
        assert "Name a file that is not there" in told.stderr
        assert file.read_text() == before

    def test_for_a_time(self, site, tmp_path):
        path = tmp_path / "short.jsonl"
        assert llmux("record", str(path), "--seconds", "1", "--url", site.url).returncode == 0
        assert replay(path).returncode == 0

    def test_nobody_records_now(self, site):
        assert site.get("/v1/admin/recording?seconds=0").status_code == 400
