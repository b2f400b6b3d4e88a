"""Addresses from which a prompt's media may be loaded: strict parsing, and the hosts that the configuration allows.

llmux requests an address rebuilt from the parsed parts, so no other program can parse it differently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes, urljoin

LONGEST: Final = 4096
"""Characters of an address."""
HTTPS_PORT: Final = 443

_HTTPS: Final = re.compile(
    r"https://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?(?P<target>[/?][!\"$-\[\]-~]*)?(?:#[!-~]*)?",
    re.IGNORECASE | re.ASCII,
)
_FILE: Final = re.compile(r"file://(?:localhost)?(?P<path>/[!\"$->@-\[\]-~]*)", re.IGNORECASE | re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PUBLIC_V6: Final = ip_network("2000::/3")  # all assigned addresses; only two parts of it contain IPv4 addresses
_NOT_PUBLIC: Final = tuple(
    map(
        ip_network,
        (
            "192.0.0.0/24",  # protocols, and some clouds' metadata
            "192.88.99.0/24",  # relays to 6to4
            "168.63.129.16/32",  # Azure's host
            "2001::/23",  # protocols, Teredo
            "2002::/16",  # 6to4
            "2001:db8::/32",
            "3fff::/20",
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Address:
    """An https address. `host` is in lower case; an IPv6 address without its brackets."""

    host: str
    port: int
    target: str  # path and query

    @property
    def authority(self) -> str:
        """The authority, in the form of a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == HTTPS_PORT else f"{host}:{self.port}"

    def redirected(self, location: str) -> Address | None:
        """The address of a redirect to this Location; None for an address that may not be requested."""
        try:
            return read_address(urljoin(f"https://{self.authority}{self.target}", location))
        except ValueError:
            return None


def read_address(text: str) -> Address | None:
    """An https address; None for any other text: with a user or password, an unusual form of an IP address, or non-ASCII names."""
    found = _HTTPS.fullmatch(text) if len(text) <= LONGEST else None
    if found is None:
        return None
    host = _normalize_host(found["host"].lower())
    port = int(found["port"] or HTTPS_PORT)
    target = found["target"] or "/"
    if host is None or not 0 < port < 65536:
        return None
    return Address(host, port, target if target.startswith("/") else f"/{target}")


def read_file_address(text: str) -> Path | None:
    """The path of a file: address; None for any other text."""
    found = _FILE.fullmatch(text) if len(text) <= LONGEST else None
    if found is None:
        return None
    path = os.fsdecode(unquote_to_bytes(found["path"]))
    return None if "\0" in path else Path(path)


class Allowlist:
    """The hosts that the configuration allows."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._listed = set[tuple[str, int]]()
        for listed in hosts:
            name, _, port = listed.lower().rpartition(":") if re.search(r":\d+$", listed) else (listed.lower(), "", "")
            self._listed.add((_normalize_host(name) or name, int(port or HTTPS_PORT)))

    def __bool__(self) -> bool:
        return bool(self._listed)

    def allows(self, address: Address) -> bool:
        """May this address be requested? An IP address only if the list has that address."""
        if (address.host, address.port) in self._listed:
            return True
        if is_literal(address.host):
            return False
        labels = address.host.split(".")
        names = ("*", *("*." + ".".join(labels[at:]) for at in range(1, len(labels))))
        return any((name, address.port) in self._listed for name in names)


def is_literal(host: str) -> bool:
    """Is the host of an `Address` an IP address?"""
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def is_public(address: str) -> bool:
    """Is this a public IP address of one machine, without another address embedded?"""
    found = ip_address(address)
    if isinstance(found, IPv6Address) and found not in _PUBLIC_V6:
        return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _NOT_PUBLIC)


def _normalize_host(text: str) -> str | None:
    """A host in normalised form, for comparisons; None for a host that can't be requested."""
    try:
        if text.startswith("["):
            return str(IPv6Address(text[1:-1]))
        host = text.removesuffix(".")
        if is_literal(host):
            return str(IPv4Address(host))  # accepts only four decimal numbers without leading zeros
    except ValueError:
        return None
    labels = host.split(".")
    return host if len(host) <= 253 and all(0 < len(label) <= 63 for label in labels) else None
