from __future__ import annotations

import socket
from contextlib import closing

import pytest

from supervisor.cli.serving.server import reached_at
from tests.support.limits import LIMIT_S


@pytest.mark.parametrize(
    ("host", "only_ipv6", "addresses"),
    [
        ("127.0.0.1", None, ("127.0.0.1",)),
        ("127.0.0.2", None, ("127.0.0.2",)),
        ("0.0.0.0", None, ("127.0.0.1",)),
        ("::1", False, ("::1",)),
        ("::", False, ("127.0.0.1", "::1")),
        ("::", True, ("::1",)),
    ],
)
def test_commands_reach_it_at(host, only_ipv6, addresses):
    """The addresses at which it answers, and no others: on those another program may listen."""
    with closing(socket.socket(socket.AF_INET if only_ipv6 is None else socket.AF_INET6)) as listener:
        try:
            if only_ipv6 is not None:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
            listener.bind((host, 0))
            listener.listen()
        except OSError:
            pytest.skip("no IPv6 here")
        assert reached_at(listener) == addresses
        for address in addresses:
            socket.create_connection((address, listener.getsockname()[1]), LIMIT_S).close()
