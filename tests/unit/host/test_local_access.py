"""The file by which a daemon gives access to its own user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from supervisor.host.store import local_access
from tests.support.limits import LIMIT_S


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "llmux"


def offered(port=8081):
    return local_access.offered(f"http://127.0.0.1:{port}", ["127.0.0.1"], port)


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

    def test_at_each_of_its_addresses(self, runtime):
        with local_access.offered("http://127.0.0.1:8081", ["127.0.0.1", "::1"], 8081) as access:
            for host in ("127.0.0.1", "::1", "localhost"):
                assert local_access.answering_at(host, 8081).key == access.key
            assert access.host == "127.0.0.1"
            assert local_access.answering_at("127.0.0.2", 8081) is None

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
        with offered():
            (path,) = runtime.iterdir()
        os.mkfifo(path, 0o600)
        runtime.chmod(0o777)
        assert local_access.of_process(os.getpid()) is None, "and it didn't wait for the pipe"
        assert local_access.answering_at("127.0.0.1", 8081) is None

    def test_what_a_killed_daemon_left_is_removed(self, runtime):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        with offered():
            (path,) = runtime.iterdir()
            left = path.with_name(path.name.replace(str(os.getpid()), str(ended.pid), 1))
            left.write_bytes(path.read_bytes())
            left.chmod(0o600)
            assert local_access.of_process(ended.pid) is None
        with offered():
            assert not left.exists()

    @pytest.mark.parametrize("text", ["", "{}", "[]", "\xff", '{"pid": 1}'])
    def test_damaged_ones_are_none(self, runtime, text):
        with offered():
            (path,) = runtime.iterdir()
            path.write_text(text)
            assert local_access.answering_at("127.0.0.1", 8081) is None


IN_A_CONTAINER = """
import sys
from supervisor.host.store import local_access
from tests.support.limits import LIMIT_S
seen = local_access.answering_at("127.0.0.1", 8081)
with local_access.offered("http://127.0.0.1:8081", ["127.0.0.1"], 8081) as access:
    print(seen, local_access.answering_at("127.0.0.1", 8081) == access, flush=True)
    sys.stdin.read()
"""


class TestNamespaces:
    """Another container's 127.0.0.1 is another machine's: its daemon is neither found nor disturbed, whatever they share."""

    @pytest.mark.parametrize("kinds", [["--net"], ["--pid", "--fork", "--mount-proc"]], ids=["addresses", "processes"])
    def test_each_finds_its_own(self, runtime, kinds):
        unshare = ["unshare", "--user", "--map-root-user", *kinds]
        if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
            pytest.skip("no namespaces here")
        with offered() as access:
            inside = [*unshare, sys.executable, "-c", IN_A_CONTAINER]
            other = subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert other.stdout.readline() == "None True\n"
            assert local_access.answering_at("127.0.0.1", 8081) == access
            other.communicate(timeout=LIMIT_S)
            assert local_access.answering_at("127.0.0.1", 8081) == access
        assert not list(runtime.iterdir())
