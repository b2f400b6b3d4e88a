"""Work that ends when its client has left."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.proxy.disconnect import CancelOnDisconnect, ClientDisconnectedError
from tests.support.wire import receiving


class TestUntilGone:
    """Only what the client's leaving cancelled becomes ClientDisconnectedError."""

    async def test_cancels_what_is_awaited(self):
        with pytest.raises(ClientDisconnectedError), CancelOnDisconnect({}, receiving()):
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    async def test_foreign_cancellation_stays_one(self):
        async def receive():
            await asyncio.Event().wait()

        async def body():
            with CancelOnDisconnect({}, receive):
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_errors_pass(self):
        with pytest.raises(KeyError), CancelOnDisconnect({}, receiving(b"")):
            raise KeyError
