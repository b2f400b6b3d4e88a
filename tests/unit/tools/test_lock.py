"""`make lock` keeps what is pinned, `make upgrade` takes the newest. Wheels lie in a folder; no index is asked."""

from __future__ import annotations

import pytest

from runtimes.pins import pins
from tests.support.wheels import wheel
from tools import lock_runtimes as lock


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A runtime's folder, locked when there was only 1.0 of everything; now there is 2.0."""
    links, runtime = tmp_path / "wheels", tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))  # knows of nothing else by these names
    monkeypatch.setenv("UV_FIND_LINKS", str(links))
    for version in ("1.0", "2.0"):
        wheel(links, "torch", version)
        wheel(links, "worker", version, requires=("torch",))
        if version == "1.0":
            (runtime / "requirements.in").write_text("worker\n")
            lock.write(runtime, upgrade=False)
    return runtime


def locked(folder):
    return pins(folder.glob("*.lock"))


class TestLock:
    """Of a runtime, with torch, which has a lock of its own."""

    def test_keeps(self, folder):
        before = {path: path.read_text() for path in folder.glob("*.lock")}
        assert locked(folder) == {"torch==1.0", "worker==1.0"}
        lock.write(folder, upgrade=False)
        assert {path: path.read_text() for path in folder.glob("*.lock")} == before

    def test_takes_what_is_wanted_now(self, folder):
        (folder / "requirements.in").write_text("worker>=2\n")
        lock.write(folder, upgrade=False)
        assert locked(folder) == {"torch==1.0", "worker==2.0"}

    def test_upgrades(self, folder):
        lock.write(folder, upgrade=True)
        assert locked(folder) == {"torch==2.0", "worker==2.0"}
        assert "torch===2.0" in (folder / "requirements-torch.lock").read_text()

    def test_ours_agree_with_each_other(self):
        """A version that differs between them would be put in place of the other."""
        common, *others = (
            dict(pin.split("==") for pin in pins([lock.ROOT / name]))
            for name in ("requirements.lock", "requirements-tools.lock", "requirements-dev.lock")
        )
        for other in others:
            assert {name: version for name, version in other.items() if common.get(name, version) != version} == {}
