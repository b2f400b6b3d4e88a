"""What of an address in a prompt is understood, and which are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.gateway.media.media_address import Address, Allowlist, is_public, read_address, read_file_address
from tests.support.cases import cases

LISTED = ("images.example.com", "*.example.org", "other.example:8443", "10.0.0.5", "[fd00::5]:8443")


class TestReading:
    """Strictly: what is asked for is put together from what was understood."""

    @cases(
        ("text", "address"),
        [
            ("https://images.example.com", ("images.example.com", 443, "/")),
            ("HTTPS://IMAGES.Example.COM./A.png?x=%20#f", ("images.example.com", 443, "/A.png?x=%20")),
            ("https://h:8443?q", ("h", 8443, "/?q")),
            ("https://xn--bcher-kva.example/", ("xn--bcher-kva.example", 443, "/")),
            ("https://10.0.0.5/a", ("10.0.0.5", 443, "/a")),
            ("https://[FD00:0::5]:443/a", ("fd00::5", 443, "/a")),
            ("https://h/@a:b@c", ("h", 443, "/@a:b@c")),
        ],
    )
    def test_read(self, text, address):
        assert read_address(text) == Address(*address)

    @cases(
        "text",
        [
            "http://images.example.com/",
            "https:images.example.com",
            "https:///a.png",
            "https://user@images.example.com/",
            "https://user:word@images.example.com/",
            "https://images.example.com:443@127.0.0.1/",
            "https://images.example.com\\@127.0.0.1/",
            "https://images.example.com#@127.0.0.1/\n",
            "https://images.example.com/\r\nHost: x",
            "https://images.example.com/a b",
            "https://images.example.com/\0",
            "https://images.example.com/\u00e9",
            " https://images.example.com/",
            "https://images.example.com\u3002/",
            "https://b\u00fccher.example/",
            "https://%31%32%37.0.0.1/",
            "https://images.example.com../",
            "https://.images.example.com/",
            "https://a..b/",
            f"https://{'a' * 64}.b/",
            "https://images.example.com:0/",
            "https://images.example.com:65536/",
            "https://images.example.com:/",
            "https://images.example.com:\u0664\u0664\u0663/",
            "https://2130706433/",
            "https://0x7f000001/",
            "https://0x7f.0.0.1/",
            "https://127.1/",
            "https://0177.0.0.1/",
            "https://127.0.0.01/",
            "https://1.2.3.4.5/",
            "https://a.0x10/",
            "https://[::ffff:127.0.0.1/",
            "https://[fe80::1%25eth0]/",
            f"https://h/{'a' * 5000}",
            "",
        ],
    )
    def test_not_read(self, text):
        assert read_address(text) is None

    @pytest.mark.parametrize(
        ("location", "address"),
        [
            ("/b", ("h", 8443, "/b")),
            ("b?c", ("h", 8443, "/x/b?c")),
            ("//other/b", ("other", 443, "/b")),
            ("https://other:1/b", ("other", 1, "/b")),
        ],
    )
    def test_redirected(self, location, address):
        assert Address("h", 8443, "/x/a?q").redirected(location) == Address(*address)

    @cases("location", ["http://h/b", "file:///etc/passwd", "data:,a", "https://[", "https://u@h/"])
    def test_redirected_elsewhere(self, location):
        assert Address("h", 443, "/").redirected(location) is None

    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("file:///srv/a.png", "/srv/a.png"),
            ("FILE://localhost/srv/a%20b.png", "/srv/a b.png"),
            ("file:///srv/%2e%2e/a", "/srv/../a"),
        ],
    )
    def test_file(self, text, path):
        assert read_file_address(text) == Path(path)

    @cases(
        "text",
        [
            "file:/srv/a",
            "file://host/srv/a",
            "file:///srv/a?b",
            "file:///srv/a#b",
            "file:///srv/%00",
            "file:///srv/\0",
            "file:///srv/a b",
            "file:srv/a",
            "file:///srv\\a",
        ],
    )
    def test_no_file(self, text):
        assert read_file_address(text) is None


class TestAllowlist:
    """Names and ports as they are listed; IP addresses only so."""

    @cases(
        "text",
        [
            "https://images.example.com/",
            "https://IMAGES.EXAMPLE.COM.:443/",
            "https://a.example.org/",
            "https://a.b.example.org/",
            "https://other.example:8443/",
            "https://10.0.0.5/",
            "https://[fd00:0:0::5]:8443/",
        ],
    )
    def test_allowed(self, text):
        assert Allowlist(LISTED).allows(read_address(text))

    @cases(
        "text",
        [
            "https://images.example.com:8443/",
            "https://a.images.example.com/",
            "https://example.com/",
            "https://example.org/",
            "https://aexample.org/",
            "https://images.example.com.evil.example/",
            "https://other.example/",
            "https://10.0.0.5:8443/",
            "https://10.0.0.6/",
            "https://[fd00::5]/",
            "https://[::ffff:10.0.0.5]/",
        ],
    )
    def test_not_allowed(self, text):
        assert not Allowlist(LISTED).allows(read_address(text))

    @pytest.mark.parametrize(
        ("text", "allowed"),
        [("https://any.example/", True), ("https://8.8.8.8/", False), ("https://[2606:4700::1]/", False)],
    )
    def test_every_name(self, text, allowed):
        assert Allowlist(["*"]).allows(read_address(text)) is allowed


class TestPublic:
    """An address that leads to one machine of the internet, and to nothing else by another way."""

    @cases("address", ["93.184.216.34", "8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::1"])
    def test_public(self, address):
        assert is_public(address)

    @cases(
        "address",
        [
            *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9"),
            *("169.254.169.254", "172.16.0.1", "192.0.0.192", "192.0.0.9", "192.0.2.1", "192.88.99.1", "192.168.1.1"),
            *("198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1"),
            *("255.255.255.255", "168.63.129.16"),
            *("::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b::808:808"),
            *("64:ff9b:1::1", "100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:20::1", "2001:db8::1"),
            *("2002:7f00:1::", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1"),
            *("fe80::1%eth0", "fec0::1", "ff02::1", "4000::1"),
        ],
    )
    def test_not_public(self, address):
        assert not is_public(address)
