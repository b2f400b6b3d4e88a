"""What is told of fields without effect."""

from __future__ import annotations

from supervisor.proxy.translation import ignored_header, shown


class TestShown:
    """Clients make the names up, and they go into headers and logs."""

    def test_some_of_many(self):
        assert shown([f"x{number}" for number in range(50)]) == [f"x{number}" for number in range(20)]

    def test_plain_characters(self):
        assert shown(["a\r\nb: c" + "d" * 100, "messages[0].näme"]) == [f"a??b??c{'d' * 57}", "messages[0].n?me"]

    def test_header(self):
        assert ignored_header(["top_k", "a,b"]) == "top_k, a?b"
