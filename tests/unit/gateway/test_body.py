"""Reading bodies within limits."""

from __future__ import annotations

import pytest

from supervisor.errors import TooLargeError
from supervisor.gateway.body.body import read_body
from supervisor.gateway.disconnect import ClientDisconnectedError
from tests.support.wire import receiving


class TestReadBody:
    """Whole, and never more than allowed."""

    async def test_whole(self):
        assert await read_body({"headers": []}, receiving(b""), 10) == b""
        assert await read_body({"headers": []}, receiving(b"ab"), 2) == b"ab"
        assert await read_body({"headers": []}, receiving(b"ab", b"", b"c"), 3) == b"abc"

    async def test_limit(self):
        with pytest.raises(TooLargeError):
            await read_body({"headers": [(b"content-length", b"11")]}, receiving(), 10)
        for pieces in ((b"abc",), (b"ab", b"c"), (b"ab", b"c", b"d")):
            with pytest.raises(TooLargeError):
                await read_body({"headers": []}, receiving(*pieces), 2)

    async def test_client_gone(self):
        with pytest.raises(ClientDisconnectedError):
            await read_body({"headers": []}, receiving(), 10)
