"""Events that translations read: nothing is lost of what came before one that fails."""

from __future__ import annotations

import sys

import pytest

from supervisor.errors import UpstreamError
from supervisor.gateway.filters.filters import FilteredResponse, Head
from supervisor.gateway.filters.frames import FrameStream
from supervisor.gateway.filters.translation import Repair
from supervisor.host.store.request_buffer import Gathered
from tests.support.cases import cases


class Loud(FrameStream):
    """Says what it gets in capitals, and takes no numbers."""

    def frame(self, data):
        if data.isdigit():
            raise UpstreamError("A number.")
        return data.upper() + b";"


@cases("text", ["a", "a" * 10_000, "ü" * 10_000, "猫" * 10_000, "😀" * 10_000])
def test_what_is_kept_of_a_text_is_counted_as_memory_has_it(text):
    stream = Loud()
    stream.keeps(text)
    assert sys.getsizeof(text) <= stream.gathered <= sys.getsizeof(text) + 16


class Worker:
    """An upstream's response: these pieces."""

    status, headers = 200, ()

    def __init__(self, *pieces):
        self.pieces = [*pieces]

    @property
    def drained(self):
        return not self.pieces

    async def next_chunk(self):
        return self.pieces.pop(0)


def through(stream, *pieces):
    return FilteredResponse(Worker(*pieces), Head(200, []), [Repair(stream)], Gathered())


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_frames_are_read_wherever_they_are_split(end):
    text = b": comment\n\nevent: x\ndata: a\ndata: b\n\ndata:c\n\ndata: d".replace(b"\n", end)
    for at in range(len(text) + 1):
        stream = Loud()
        assert stream.feed(text[:at]) + stream.feed(text[at:]) + stream.end() == b"A\nB;C;D;"


def test_what_came_before_one_that_fails_is_given_first():
    stream = Loud()
    assert stream.feed(b"data: a\n\ndata: b\n\ndata: 1\n\ndata: c\n\n") == b"A;B;"
    with pytest.raises(UpstreamError):
        stream.feed(b"")
    stream = Loud()
    assert stream.feed(b"data: a\n\ndata: 1\n\n") == b"A;"
    with pytest.raises(UpstreamError):
        stream.end()


async def test_a_response_gives_it_to_its_client():
    response = through(Loud(), b"data: a\n\ndata: 1\n\n")
    assert (await response.next_chunk(), response.drained) == (b"A;", False)
    with pytest.raises(UpstreamError):
        await response.next_chunk()


async def test_a_response_ends_with_the_streams_end():
    response = through(Loud(), b"data: a\n\n", b"data: b")
    assert [await response.next_chunk(), await response.next_chunk(), response.drained] == [b"A;", b"B;", True]
