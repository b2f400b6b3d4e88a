"""A client that disconnects cancels what its request waits for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest

from supervisor.gateway.disconnect import EXTENSION, CancelOnDisconnect, ClientDisconnectedError, Disconnect


def connection() -> tuple[Disconnect, asyncio.Task]:
    """A client's connection that the current task serves."""
    disconnect = Disconnect(lambda: None)
    task = disconnect.task = asyncio.current_task()
    assert task is not None
    return disconnect, task


def scope_of(disconnect: Disconnect):
    return {"extensions": {EXTENSION: disconnect}}


class TestCancelOnDisconnect:
    """Only what the client's leaving cancelled becomes ClientDisconnectedError."""

    async def test_cancels_what_is_awaited(self):
        disconnect, task = connection()
        asyncio.get_running_loop().call_soon(disconnect.happened)
        with pytest.raises(ClientDisconnectedError), CancelOnDisconnect(scope_of(disconnect)):
            await asyncio.Event().wait()
        assert task.cancelling() == 0

    async def test_one_that_left_before_is_gone_at_once(self):
        disconnect, _ = connection()
        disconnect.happened()
        with pytest.raises(ClientDisconnectedError), CancelOnDisconnect(scope_of(disconnect)):
            pytest.fail("entered")

    async def test_foreign_cancellation_stays_one(self):
        async def body():
            disconnect, _ = connection()
            with CancelOnDisconnect(scope_of(disconnect)):
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_errors_pass(self):
        disconnect, _ = connection()
        with pytest.raises(KeyError), CancelOnDisconnect(scope_of(disconnect)):
            raise KeyError

    async def test_nothing_of_the_request_is_kept(self):
        class Body:
            pass

        async def serve(body: object) -> None:
            disconnect, _ = connection()
            cancelling = CancelOnDisconnect(scope_of(disconnect))  # as the gateway: others may interrupt it
            asyncio.get_running_loop().call_soon(disconnect.happened)
            with cancelling:
                await asyncio.Event().wait()

        body = Body()
        kept = weakref.ref(body)
        gc.disable()
        try:
            with contextlib.suppress(ClientDisconnectedError):
                await serve(body)
            del body
            await asyncio.sleep(0)  # this turn of the loop keeps the cancellation that began it
            assert kept() is None
        finally:
            gc.enable()
