"""What a daemon offers to its own user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from supervisor.io import local_access


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "llmux"


def offered(port=8081):
    return local_access.offered(f"http://127.0.0.1:{port}", "127.0.0.1", port)


class TestOffered:
    """A key is found by its address or process while the daemon runs, by nobody else."""

    def test_is_found_until_the_end(self, runtime):
        with offered() as access:
            found = local_access.of_process(os.getpid())
            assert (found, found.url) == (access, "http://127.0.0.1:8081")
            for host in ("127.0.0.1", "localhost"):
                assert local_access.answering_at(host, 8081) == found
            assert local_access.answering_at("127.0.0.1", 8082) is None
            assert local_access.answering_at("192.168.1.2", 8081) is None
        assert local_access.answering_at("127.0.0.1", 8081) is None

    def test_is_fresh_each_time(self, runtime):
        with offered() as first:
            pass
        with offered() as second:
            assert first.key != second.key

    def test_again_when_its_folder_was_emptied(self, runtime):
        with offered() as access:
            shutil.rmtree(runtime)
            assert local_access.answering_at("127.0.0.1", 8081) is None
            local_access.offer_again(access)
            assert local_access.answering_at("127.0.0.1", 8081) == access
        assert not list(runtime.iterdir())

    def test_others_may_not_read_it(self, runtime):
        with offered():
            (path,) = runtime.iterdir()
            assert (path.stat().st_mode & 0o777, runtime.stat().st_mode & 0o777) == (0o600, 0o700)
            path.chmod(0o644)
            assert local_access.of_process(os.getpid()) is None, "somebody else may have written it"

    def test_not_in_a_folder_that_others_may_enter(self, runtime):
        runtime.mkdir(mode=0o755)
        with pytest.raises(PermissionError, match="others may enter it"), offered():
            pass

    def test_nothing_is_opened_in_a_folder_of_somebody_else(self, runtime):
        runtime.mkdir(mode=0o700)
        os.mkfifo(runtime / f"{os.getpid()}.json", 0o600)
        runtime.chmod(0o777)
        assert local_access.of_process(os.getpid()) is None, "and it didn't wait for the pipe"
        assert local_access.answering_at("127.0.0.1", 8081) is None

    def test_what_a_killed_daemon_left_is_removed(self, runtime):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        with offered():
            left = runtime / f"{ended.pid}.json"
            left.write_bytes((runtime / f"{os.getpid()}.json").read_bytes())
            left.chmod(0o600)
            assert local_access.of_process(ended.pid) is None
        with offered():
            assert not left.exists()

    @pytest.mark.parametrize("text", ["", "{}", "[]", "\xff", '{"pid": 1}'])
    def test_damaged_ones_are_none(self, runtime, text):
        with offered():
            (runtime / f"{os.getpid()}.json").write_text(text)
            assert local_access.answering_at("127.0.0.1", 8081) is None
