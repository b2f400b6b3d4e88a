"""The last versions of a file."""

from __future__ import annotations

import stat

from supervisor.host.store.versions import MOST, Versions, digest


class TestVersions:
    """Each version of the text, the newest first."""

    def test_none_yet(self, tmp_path):
        versions = Versions(tmp_path / "none")
        assert versions.listing() == []
        assert versions.read("1795500000000-0a1b2c3d4e5f6071") is None

    def test_come_back_as_they_were(self, tmp_path):
        versions = Versions(tmp_path / "new")
        for text in ("a: 1\n", "ä: 2\r\n", "ä: 2\r\n", "a: 1\n"):
            versions.keep(text)
        found = versions.listing()
        assert [versions.read(version.id) for version in found] == ["a: 1\n", "ä: 2\r\n", "a: 1\n"]
        assert [version.bytes for version in found] == [5, 7, 5]
        assert found[0].id.endswith(digest("a: 1\n"))
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o600}

    def test_the_oldest_go(self, tmp_path):
        versions = Versions(tmp_path)
        for number in range(MOST + 5):
            versions.keep(f"{number}\n")
        assert [versions.read(one.id) for one in versions.listing()] == [f"{n}\n" for n in range(MOST + 4, 4, -1)]

    def test_nothing_else_is_read(self, tmp_path):
        (tmp_path / "secret").write_text("x")
        versions = Versions(tmp_path / "new")
        versions.keep("a")
        (tmp_path / "new" / "notes.txt").write_text("x")
        assert [versions.read(name) for name in ("../secret", "notes.txt", "", ".")] == [None] * 4
