"""Each test has an instance name of its own and leaves no process behind; coroutines run on both event loops."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal

import pytest
import uvloop

from tests.support.trees import survivors, until, wait_until, zombies


def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def instance():
    """A fresh instance id; processes with it at the end of the test are killed, and make the test fail."""
    name = f"test-{secrets.token_hex(4)}"
    yield name
    left = survivors(name)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not survivors(name))
    assert left == {}


@pytest.fixture
def subreaper(monkeypatch):
    """Makes this process a subreaper for the test, as the daemon is one, and checks that it leaves no zombie."""
    from supervisor.host.process import process

    monkeypatch.setattr(process, "_is_subreaper", True)
    process.become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    left = zombies()
    for pid in left:
        os.waitpid(pid, os.WNOHANG)
    assert left == []


@pytest.fixture
async def descriptors():
    """Checks that the test gives back every file descriptor it opened."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: None)  # whatever a loop opens once is open now
    before = len(os.listdir("/proc/self/fd"))
    yield
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    loop.remove_signal_handler(signal.SIGUSR1)
