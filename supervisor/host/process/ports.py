"""Ports for workers: from a configured range, checked before each lease, and each leased to one worker alone.

A leased port was free a moment ago, which is no promise: the worker binds it later, and with SO_REUSEPORT two processes
can share it. So `owner_check` asks the kernel whether every listening socket of the port belongs to the worker's own
process tree. Before that no request may go to the port.

The kernel is asked by netlink (sock_diag(7): 60 µs for the listening sockets alone), or where that isn't available through
/proc/net/tcp, for which the kernel walks its whole table of connections (milliseconds).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from enum import StrEnum

from supervisor.errors import UnavailableError
from supervisor.host.process import procfs
from supervisor.host.process.procfs import Listening

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_AND_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_TCP_LISTEN = 10
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
_QUESTION = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2: family, protocol, extensions, states, any socket
# In struct inet_diag_msg; port and address are in network order.
_PORT_AT, _ADDRESS_AT, _INODE_AT, _ANSWER_BYTES = 4, 8, 68, 72
_ADDRESS_BYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}


class Ownership(StrEnum):
    """The owner of a port, seen from one process tree. The values are for people."""

    NO_LISTENER = "nobody listens on it"
    OURS = "only the worker listens on it"
    SHARED = "another process listens on it beside the worker and would get a part of its requests"
    FOREIGN = "another process listens on it, not the worker"


class PortRange:
    """Leases ports `first`..`last` on `host` to named holders. A released port is reused last."""

    def __init__(self, first: int, last: int, host: str = "127.0.0.1") -> None:
        if not 0 < first <= last < 65536:
            raise ValueError(f"not a range of ports: {first}-{last}")
        self.first, self.last, self.host = first, last, host
        self._free = deque(range(first, last + 1))
        self._leased: dict[Hashable, int] = {}

    def lease(self, holder: Hashable) -> int:
        """Lease a port that nobody listens on, until `release(holder)`. A holder has at most one port.

        Raises UnavailableError when every port of the range is leased or in use. About 100 µs.
        """
        assert holder not in self._leased, f"{holder} already holds port {self._leased[holder]}"
        busy = {listening.port for listening in _listening_sockets()}
        # Connections in TIME_WAIT don't keep a worker from binding, but a port without any is the better choice.
        for clean in (True, False):
            for port in self._free:
                if port not in busy and can_bind(self.host, port, clean=clean):
                    self._free.remove(port)
                    self._leased[holder] = port
                    return port
        raise UnavailableError(
            f"no free port in {self.first}-{self.last} on {self.host}: {len(self._leased)} are leased, others use the rest. "
            "Widen the range of worker ports or stop what listens there.",
            code="no_free_port",
        )

    def adopt(self, holder: Hashable, port: int) -> None:
        """Note that the holder, a worker handed over to us, has this port already, in the range or not."""
        assert holder not in self._leased, f"{holder} already holds port {self._leased[holder]}"
        if port in self._free:
            self._free.remove(port)
        self._leased[holder] = port

    def release(self, holder: Hashable) -> None:
        """Free the holder's port. Harmless if it has none."""
        port = self._leased.pop(holder, None)
        if port is not None and self.first <= port <= self.last:
            self._free.append(port)


def can_bind(host: str, port: int, *, clean: bool = False) -> bool:
    """Could a process listen on this port now? `clean`: without even old connections in TIME_WAIT."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if not clean:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _listening_sockets() -> list[Listening]:
    """Every listening TCP socket in our network namespace."""
    try:
        return [*_ask_kernel(socket.AF_INET), *_ask_kernel(socket.AF_INET6)]
    except OSError:
        return [*procfs.listening("tcp"), *procfs.listening("tcp6")]


def _ask_kernel(family: socket.AddressFamily) -> Iterator[Listening]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
        kernel.sendto(
            _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + question, (0, 0)
        )
        while True:
            answer = kernel.recv(65536)
            at = 0
            while at < len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, at)
                body = at + _HEADER.size
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR or length < _HEADER.size + _ANSWER_BYTES:
                    raise OSError("sock_diag is not available")
                (port,) = struct.unpack_from(">H", answer, body + _PORT_AT)
                (inode,) = struct.unpack_from("=I", answer, body + _INODE_AT)
                address = answer[body + _ADDRESS_AT :][: _ADDRESS_BYTES[family]]
                yield Listening(port, inode, address)
                at += (length + 3) & ~3


def listeners(port: int) -> frozenset[int]:
    """The inodes of the sockets that listen on this port, on any address."""
    return frozenset(listening.inode for listening in _listening_sockets() if listening.port == port)


def exposed(port: int) -> tuple[str, ...]:
    """The addresses, beyond loopback, with a listener on this port. Raises OSError as `owner_check` does."""
    found = {ipaddress.ip_address(listening.address) for listening in _listening_sockets() if listening.port == port}
    return tuple(sorted(str(address) for address in found if not _is_loopback(address)))


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback  # Python 3.13 does this itself


def who_listens(port: int) -> str | None:
    """The program that listens on this port, for a message: `pid 12 (nginx)`; None: unknown."""
    import psutil  # noqa: PLC0415  # imported only for error messages

    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return None


def listens_on(pids: Iterable[int]) -> tuple[int, ...]:
    """The ports on which these processes listen."""
    ports = {f"socket:[{listening.inode}]": listening.port for listening in _listening_sockets()}
    return tuple(sorted({ports[target] for pid in pids for target in procfs.open_files(pid) if target in ports}))


def owner_check(port: int, pids: Iterable[int]) -> Ownership:
    """Do all sockets that listen on the port belong to these processes?

    Stops once all are found: some 100 µs for a worker that is the first of `pids`. Raises OSError only when we are out of
    descriptors or memory.
    """
    sockets = {f"socket:[{inode}]" for inode in listeners(port)}
    if not sockets:
        return Ownership.NO_LISTENER
    missing = set(sockets)
    for pid in pids:
        for target in procfs.open_files(pid):
            missing.discard(target)
            if not missing:
                return Ownership.OURS
    return Ownership.FOREIGN if missing == sockets else Ownership.SHARED
