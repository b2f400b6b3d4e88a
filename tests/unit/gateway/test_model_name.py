"""The asked name in answers, wherever they are split."""

from __future__ import annotations

import json

import pytest

from supervisor.gateway.filters import model_name
from supervisor.gateway.filters.filters import filtered
from supervisor.gateway.filters.model_name import Rename, renaming
from supervisor.host.store.request_buffer import Gathered

JSON, EVENTS = b"application/json", b"text/event-stream"


class Answer:
    """A worker's response that comes in these pieces; its end comes with the last, or after it."""

    status = 200

    def __init__(self, pieces, *, content_type=JSON, ends_later=False):
        self.headers = [(b"content-type", content_type), (b"content-length", b"9"), (b"x-kept", b"1")]
        self.pieces = [*pieces, *([b""] if ends_later else [])]
        self.drained = False

    async def next_chunk(self):
        piece = self.pieces.pop(0)
        self.drained = not self.pieces
        return piece


async def received(pieces, names, content_type=JSON, **options):
    answer = await filtered(Answer(pieces, content_type=content_type, **options), [Rename(names)], Gathered())
    got = []
    while not answer.drained:
        got.append(await answer.next_chunk())
        assert got[-1] or answer.drained, "an empty piece would mean the end"
    return b"".join(got)


class TestSplit:
    """A worker's name is found across pieces."""

    @pytest.mark.parametrize("ends_later", [False, True])
    @pytest.mark.parametrize("space", ["", " "])
    async def test_anywhere(self, space, ends_later):
        names = renaming("gemma", "my model")
        wire = f'data: {{"id": 1, "model":{space}"gemma", "model":{space}"other"}}\n\n"model":{space}"gem'.encode()
        expected = wire.replace(b'"gemma"', b'"my model"')
        for first in range(len(wire)):
            for second in range(first, len(wire), 3):
                pieces = [piece for piece in (wire[:first], wire[first:second], wire[second:]) if piece]
                assert await received(pieces, names, EVENTS, ends_later=ends_later) == expected

    async def test_whole_events_are_not_held_back(self):
        worker = Answer([b'data: {"model":"a"}\n\n', b"x"], content_type=EVENTS)
        answer = await filtered(worker, [Rename(renaming("a", "b"))], Gathered())
        assert await answer.next_chunk() == b'data: {"model":"b"}\n\n'


class TestWhatStays:
    """Only the name is touched."""

    async def test_text_of_the_model(self):
        said = json.dumps({"content": '{"model":"a"}', "model": "a", "remodel": "a"}).encode()
        assert json.loads(await received([said], renaming("a", "b"))) == {
            "content": '{"model":"a"}',
            "model": "b",
            "remodel": "a",
        }

    @pytest.mark.parametrize("size", [7, 40, 10_000])
    async def test_a_tools_arguments(self, size):
        answer = {"content": [{"type": "tool_use", "input": {"model": "a"}}], "model": "a"}
        wire = json.dumps(answer, separators=(",", ":")).encode()
        pieces = [wire[start : start + size] for start in range(0, len(wire), size)]
        told = await received(pieces, renaming("a", "b"), b"application/json; charset=utf-8")
        assert json.loads(told) == answer | {"model": "b"}

    @pytest.mark.parametrize("ends_later", [False, True])
    async def test_a_large_answer_is_not_kept(self, monkeypatch, ends_later):
        monkeypatch.setattr(model_name, "_WHOLE_BYTES", 10)
        pieces = [b'{"model":', b'"a","x":1,', b'"y":2}']
        assert await received(pieces, renaming("a", "b"), ends_later=ends_later) == b'{"model":"b","x":1,"y":2}'
        assert await received([b"".join(pieces)], renaming("a", "b")) == b'{"model":"b","x":1,"y":2}'

    @pytest.mark.parametrize("body", [b'{"model":"other"}', b"[1]", b'{"x":{"model":"a"}}'])
    async def test_what_has_not_its_name(self, body):
        assert await received([body], renaming("a", "b")) == body

    async def test_headers_but_for_the_length(self):
        answer = await filtered(Answer([]), [Rename(renaming("a", "b"))], Gathered())
        assert answer.headers == [(b"content-type", JSON), (b"x-kept", b"1")]

    async def test_names_are_written_as_json(self):
        assert await received([b'"model":"a"'], renaming("a", 'say "b"')) == b'"model":"say \\"b\\""'

    async def test_other_content(self):
        answer = Answer([], content_type=b"audio/mpeg")
        assert await filtered(answer, [Rename(renaming("a", "b"))], Gathered()) is answer
