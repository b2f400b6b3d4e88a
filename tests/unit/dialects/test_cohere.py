"""Cohere's rerank: an answer has what its clients look for, whoever wrote it."""

from __future__ import annotations

import json
import uuid

import pytest

from supervisor.dialects import buffered_response, dialect_of
from supervisor.dialects.cohere import COHERE

RESULTS = [{"index": 1, "relevance_score": 0.5}]


def completed(*pieces):
    completion = COHERE.repair("rank", {}, stream=False)
    return b"".join([*(completion.feed(piece) for piece in pieces), completion.end()])


class TestCompletion:
    """`id` and `meta` are put in where they are missing."""

    def test_what_a_worker_leaves_out(self):
        body = json.dumps({"model": "rank", "results": RESULTS, "usage": {"prompt_tokens": 3}}).encode()
        told = json.loads(completed(body[:7], body[7:]))
        assert uuid.UUID(told.pop("id"))
        assert told.pop("meta") == {
            "api_version": {"version": "2", "is_experimental": False},
            "billed_units": {"search_units": 1},
        }
        assert told == json.loads(body)

    def test_a_worker_that_speaks_it(self):
        body = json.dumps({"id": "own", "results": RESULTS, "meta": {"tokens": {"input_tokens": 3}}}).encode()
        assert completed(body) == body
        told = json.loads(completed(b'{"id":"own","results":[]}'))
        assert (told["id"], told["meta"]["billed_units"]) == ("own", {"search_units": 1})

    @pytest.mark.parametrize("body", [b"", b"[1]", b'{"id":', b"\xff"])
    def test_what_is_no_answer(self, body):
        assert completed(body) == body

    def test_a_long_one(self, monkeypatch):
        monkeypatch.setattr(buffered_response, "ANSWER_LIMIT", 10)
        body = b'{"results":[%b]}' % (b"1," * 20 + b"1")
        assert completed(*(body[start : start + 4] for start in range(0, len(body), 4))) == body


def test_its_path():
    assert dialect_of({"path": "/v2/rerank", "headers": ()}) is COHERE
    assert dialect_of({"path": "/v1/rerank", "headers": ()}) is not COHERE
