"""Programs that are run for each request: what a cancellation at any moment leaves, and what is swept."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.registry import REGISTRY
from supervisor.errors import UpstreamError
from supervisor.io.program import ProgramPool
from tests.support.limits import LIMIT_S

ADAPTER = REGISTRY.get("claude_cli")
BODY = b'{"messages": [{"role": "user", "content": "Hello"}]}'


def pool(folder: Path, code: str, **keys: object) -> ProgramPool:
    command = [sys.executable, "-I", "-S", "-c", code]
    about = {"runtime": "claude_cli", "upstream_model": "m", "output": "text", "parallel": 1, "command": command}
    spec = ADAPTER.connect(ADAPTER.config(**about, **keys), {})
    return ProgramPool(spec, "m", "test-program", {"PATH": os.environ["PATH"]}, folder / "m.log")


async def ask(programs: ProgramPool) -> bytes:
    response = await programs.request("POST", b"/v1/chat/completions", [], BODY)
    try:
        return await response.read(1 << 20)
    finally:
        response.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def left(programs: ProgramPool, folder: Path) -> tuple[int, list[Path], int]:
    return programs.open_responses, list((folder / "m.requests").glob("*")), len(os.listdir("/proc/self/fd"))


def nothing_more(programs: ProgramPool, folder: Path, before: tuple[int, list[Path], int]) -> bool:
    """Than before: the folder of the request before that may have gone meanwhile, and its descriptors."""
    responses, folders, descriptors = left(programs, folder)
    return responses == before[0] and set(folders) <= set(before[1]) and descriptors <= before[2]


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 100, 1000])
async def test_a_cancelled_request_leaves_nothing(tmp_path, turns):
    programs = pool(tmp_path, "print('Hello')")
    await ask(programs)
    await programs.close()
    before = left(programs, tmp_path)
    asking = asyncio.create_task(ask(programs))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    await until(lambda: nothing_more(programs, tmp_path, before))


async def test_out_of_memory_a_program_dies_before_the_daemon(tmp_path):
    programs = pool(tmp_path, "print('adj', open('/proc/self/oom_score_adj').read())")
    (score,) = re.findall(rb"adj (-?\d+)", await ask(programs))
    assert int(score) >= 500
    await programs.close()


async def test_the_turn_of_a_cancelled_request_is_the_next_ones(tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    programs = pool(tmp_path, f"import os, time; open(f'{begun}/{{os.getpid()}}', 'w'); time.sleep(3600)")
    asking = [asyncio.create_task(ask(programs)) for _ in range(3)]
    for number, each in enumerate(asking, 1):
        await until(lambda number=number: len(list(begun.iterdir())) == number and programs.open_responses == 1)
        each.cancel()
    await asyncio.wait(asking)
    await programs.close()


async def test_closing_breaks_answers_off(tmp_path):
    programs = pool(tmp_path, "import time; time.sleep(3600)")
    asking = asyncio.create_task(ask(programs))
    await until(lambda: programs.open_responses)
    await programs.close()
    with pytest.raises(UpstreamError) as caught:
        await asking
    assert caught.value.code == "upstream_broken"


@pytest.mark.parametrize("what", ["supervisor.io.program.Proc.read", "os.memfd_create", "os.pipe2"])
async def test_without_descriptors_nothing_is_left(tmp_path, monkeypatch, what):
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    programs = pool(tmp_path, "print('Hello')")
    await ask(programs)
    await until(lambda: not programs.open_responses)
    before = left(programs, tmp_path)
    with monkeypatch.context() as full:
        full.setattr(what, refuse)
        with pytest.raises(UpstreamError):
            await programs.request("POST", b"/v1/chat/completions", [], BODY)
    await until(lambda: nothing_more(programs, tmp_path, before))
    await ask(programs)  # the only turn was given back
    await programs.close()


async def test_only_folders_of_dead_daemons_are_swept(tmp_path):
    programs = pool(tmp_path, "print('Hello')")
    folders = tmp_path / "m.requests"
    for name in (f"{os.getpid()}-0-1", "4194999-5-1", "strange", "x-y-z-1"):
        (folders / name / "work").mkdir(parents=True)
    response = await programs.request("POST", b"/v1/chat/completions", [], BODY)
    await programs.sweep()
    assert len(list(folders.iterdir())) == 1
    response.close()
    await programs.close()
