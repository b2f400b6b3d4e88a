"""The end of a pipe in the loop."""

from __future__ import annotations

import asyncio
import os

import pytest
import uvloop

from supervisor.io.program_output import ProgramOutput


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    return request.param


def test_pieces_and_the_end(run):
    async def main():
        out, into = os.pipe()
        output = ProgramOutput(out)
        reading = asyncio.create_task(output.read())
        await asyncio.sleep(0)
        os.write(into, b"one")
        assert await reading == b"one"
        os.write(into, b"two")
        os.close(into)
        assert [await output.read(), await output.read()] == [b"two", b""]
        output.close()

    run(main())


def test_others_have_their_turns(run):
    """Also while there is always something to read."""

    async def main():
        out, into = os.pipe()
        output, turns = ProgramOutput(out), []
        other = asyncio.create_task(_count(turns))
        for _ in range(10):
            os.write(into, b"x" * 4096)
            await output.read()
        other.cancel()
        assert len(turns) >= 10
        os.close(into)
        output.close()

    run(main())


async def _count(turns: list[int]) -> None:
    while True:
        turns.append(1)
        await asyncio.sleep(0)


def test_closing_touches_nothing_of_others(run):
    """The number of the descriptor is another pipe's at once."""

    async def main():
        (out, into), (other, other_into) = os.pipe(), os.pipe()
        output = ProgramOutput(out)
        waiting = asyncio.create_task(output.read())
        await asyncio.sleep(0)
        output.close()
        os.dup2(other, out)
        os.close(other)
        theirs = ProgramOutput(out)
        reading = asyncio.create_task(theirs.read())
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.write(other_into, b"y" * 10)
        assert await reading == b"y" * 10
        theirs.close()
        for descriptor in (into, other_into):
            os.close(descriptor)

    run(main())
