"""The lines of a batch: how they are read, and what is written of their answers."""

from __future__ import annotations

import io
import json

import pytest

from supervisor.errors import LlmuxError
from supervisor.jobs.batch_file import Lines, answer_line, done_lines, error_line, open_line, unsent_line
from tests.support.cases import cases

CHAT = "/v1/chat/completions"
GOOD = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}}


def encoded(**changes: object) -> bytes:
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not ...}).encode()


class TestReading:
    """Lines have numbers, blank ones and long ones as well."""

    async def test_blank_lines_count_and_are_left_out(self):
        lines = Lines(io.BytesIO(b"one\n\n  \nfour\r\nfive"), 100)
        assert await lines.read() == [(1, b"one\n"), (4, b"four\r\n"), (5, b"five")]
        assert await lines.read() == []

    async def test_a_long_line_is_skipped_in_pieces(self):
        text = b"x" * 10 + b"\n" + b"y" * 300_000 + b"\n" + b"z" * 11 + b"\n"
        lines = Lines(io.BytesIO(text), 10)
        assert await lines.read() == [(1, b"x" * 10 + b"\n"), (2, None), (3, None)]
        assert await lines.read() == []

    async def test_a_long_last_line_without_an_end(self):
        assert await Lines(io.BytesIO(b"a\n" + b"y" * 99), 10).read() == [(1, b"a\n"), (2, None)]

    async def test_only_so_many_and_only_those_that_are_wanted(self):
        lines = Lines(io.BytesIO(b"1\n2\n3\n4\n5\n"), 10)
        assert [number for number, _ in await lines.read(lambda number: number != 2, 3)] == [1, 3]
        assert [number for number, _ in await lines.read(most=1)] == [4]
        assert [number for number, _ in await lines.read(most=1)] == [5]

    async def test_blank_lines_without_end_are_given_back_in_parts(self):
        """So that whoever reads can be stopped."""
        lines = Lines(io.BytesIO(b"\n" * 1_000_000 + b"x"), 10)
        parts = 0
        while not lines.is_at_end:
            found = await lines.read()
            parts += 1
        assert (parts > 3, found) == (True, [(1_000_001, b"x")])


class TestOpening:
    """A line has four fields, and what it lacks is said."""

    async def test_a_good_one(self):
        assert await open_line(encoded() + b"\r\n", CHAT) == ("a", b'{"model": "m"}')

    async def test_a_large_one(self):
        custom_id, body = await open_line(encoded(body={"model": "m", "picture": "x" * 400_000}), CHAT)
        assert (custom_id, len(json.loads(bytes(body))["picture"])) == ("a", 400_000)

    @cases(
        ("raw", "code", "param"),
        [
            (None, "request_too_large", None),
            (b"{", "invalid_json_line", None),
            (b"\xff", "invalid_json_line", None),
            (b"3", "invalid_json_line", None),
            (b'{"custom_id":"a","custom_id":"b"}', "invalid_json_line", None),
            (encoded(custom_id=...), "invalid_custom_id", "custom_id"),
            (encoded(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
            (encoded().replace(b'"a"', rb'"\ud800"'), "invalid_json_line", None),
            (encoded(method="post"), "invalid_method", "method"),
            (encoded(url=None), "invalid_url", "url"),
            (encoded(url="/v1/embeddings"), "invalid_url", "url"),
            (encoded(body=...), "invalid_request", "body"),
            (encoded(body="text"), "invalid_request", "body"),
            (encoded(priority=3), "invalid_request", "priority"),
        ],
    )
    async def test_what_is_none(self, raw, code, param):
        with pytest.raises(LlmuxError) as told:
            await open_line(raw, CHAT)
        assert (told.value.code, told.value.param) == (code, param)


class TestWriting:
    """Each answer is one line, which tells the line that it is about."""

    def test_an_answer_of_several_lines_becomes_one(self):
        text = b"".join(answer_line("batch_ab", 7, 'quo"te\n', 200, "req_1", b'{\n  "a": "b\\n",\r\n "c": 1}\n'))
        assert text.count(b"\n") == 1
        assert json.loads(text) == {
            "id": "batch_req_ab_7",
            "custom_id": 'quo"te\n',
            "response": {"status_code": 200, "request_id": "req_1", "body": {"a": "b\n", "c": 1}},
            "error": None,
        }

    @pytest.mark.parametrize("body", [b"", b"<html>", b'{"a":1', b"\xff"])
    def test_an_answer_that_is_no_json(self, body):
        with pytest.raises(ValueError, match=r"JSON|truncated|UTF-8"):
            answer_line("batch_ab", 7, "a", 200, "req_1", body)

    def test_an_error(self):
        assert json.loads(error_line("batch_ab", 7, "a", 400, "req_1", {"code": "c"}))["response"] == {
            "status_code": 400,
            "request_id": "req_1",
            "body": {"error": {"code": "c"}},
        }

    def test_no_answer(self):
        told = json.loads(unsent_line("batch_ab", 7, "a", "batch_expired", "Too late."))
        assert (told["response"], told["error"]) == (None, {"code": "batch_expired", "message": "Too late."})


class TestLookingBack:
    """The output itself says which lines are done; what a kill cut short isn't."""

    def whole(self) -> bytes:
        long = b"".join(answer_line("batch_ab", 3, "b", 200, "req_2", json.dumps("x" * 200_000).encode()))
        return error_line("batch_ab", 12, "a", 500, "req_1", {}) + long

    def test_whole_lines(self):
        text = self.whole()
        assert done_lines(io.BytesIO(text)) == ([12, 3], len(text))

    @pytest.mark.parametrize("size", [1, 20, 70_000])
    def test_a_line_that_was_cut_short(self, size):
        text = self.whole()
        torn = b"".join(answer_line("batch_ab", 4, "c", 200, "req_3", json.dumps("y" * 100_000).encode()))[:size]
        assert done_lines(io.BytesIO(text + torn)) == ([12, 3], len(text))

    def test_none(self):
        assert done_lines(io.BytesIO(b"")) == ([], 0)
        assert done_lines(io.BytesIO(b'{"id":"batch_req_a')) == ([], 0)
