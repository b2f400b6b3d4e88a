"""A client that leaves before its answer has begun, at a moment that is known."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx

from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S


def leave(http: httpx.Client, request: httpx.Request, when: Callable[[], Any]) -> None:
    """Send a request built by `http`, on a connection of its own, and close that once `when()` is truthy."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    head = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n{fields}\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=LIMIT_S) as connection:
        connection.sendall(head.encode() + request.read())
        wait_until(when)
