"""What OpenAI's API has and some workers pass over: `suffix`, `dimensions`, `return_documents`."""

from __future__ import annotations

import base64
import json
import struct

import msgspec
import pytest

from supervisor.dialects import dialect_of
from supervisor.dialects.openai import OPENAI
from supervisor.errors import InvalidRequestError, UpstreamError
from tests.support.cases import cases


def asked(path, **fields):
    """What the worker is asked, and what its answers become."""
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()}
    request, answers = OPENAI.translation("POST", path).request(raw)
    return {name: json.loads(bytes(value)) for name, value in request.items()}, answers


FILLED = {
    "content": "b",
    "model": "code",
    "stop": True,
    "stop_type": "limit",
    "tokens_evaluated": 5,
    "tokens_predicted": 1,
    "timings": {"prompt_ms": 1.0, "predicted_ms": 2.0},
}


class TestSuffix:
    """A text is filled in between two others."""

    def test_request(self):
        request, answers = asked(
            "/v1/completions", model="m", prompt=["a"], suffix="c", max_tokens=3, echo=True, n=None
        )
        assert request == {"model": "m", "input_prefix": "a", "input_suffix": "c", "n_predict": 3}
        assert answers.ignored == ["echo"]

    @pytest.mark.parametrize("prompt", [["a", "b"], [1, 2], {"a": 1}])
    def test_several_prompts(self, prompt):
        with pytest.raises(InvalidRequestError, match="must be a text") as refused:
            asked("/completions", prompt=prompt, suffix="c")
        assert refused.value.param == "prompt"

    def test_answer(self):
        _, answers = asked("/v1/completions", prompt="a", suffix="c")
        told = json.loads(answers.answer(json.dumps(FILLED).encode()))
        assert told["choices"] == [{"text": "b", "index": 0, "logprobs": None, "finish_reason": "length"}]
        assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        assert (told["object"], told["model"], told["timings"]["predicted_ms"]) == ("text_completion", "code", 2.0)

    def test_stream(self):
        _, answers = asked("/v1/completions", prompt="a", suffix="c", stream=True)
        stream = answers.stream()
        pieces = [{"content": "x", "stop": False}, FILLED]
        out = b"".join(stream.feed(b"data: " + json.dumps(piece).encode() + b"\n\n") for piece in pieces) + stream.end()
        *events, done, rest = out.split(b"\n\n")
        first, last = (json.loads(event.removeprefix(b"data: ")) for event in events)
        assert (first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == ("x", None)
        assert (last["choices"][0]["finish_reason"], last["usage"]["total_tokens"]) == ("length", 6)
        assert (first["id"], done, rest) == (last["id"], b"data: [DONE]", b"")

    def test_what_is_no_answer(self):
        _, answers = asked("/v1/completions", prompt="a", suffix="c")
        with pytest.raises(UpstreamError):
            answers.answer(b"[]")


class TestDimensions:
    """The first numbers of each embedding, with the length 1."""

    ANSWER = json.dumps({"model": "e", "data": [{"index": 0, "embedding": [3.0, 4.0, 12.0]}]}).encode()

    def test_cut(self):
        request, answers = asked("/v1/embeddings", model="e", input="x", dimensions=2)
        assert request == {"model": "e", "input": "x", "encoding_format": "float"}
        assert json.loads(answers.answer(self.ANSWER))["data"] == [{"index": 0, "embedding": [0.6, 0.8]}]

    def test_packed(self):
        _, answers = asked("/embeddings", input="x", dimensions=2, encoding_format="base64")
        (row,) = json.loads(answers.answer(self.ANSWER))["data"]
        assert struct.unpack("<2f", base64.b64decode(row["embedding"])) == pytest.approx((0.6, 0.8))

    def test_more_than_there_are(self):
        _, answers = asked("/v1/embeddings", input="x", dimensions=9)
        with pytest.raises(InvalidRequestError, match="this model has 3"):
            answers.answer(self.ANSWER)

    @cases("size", [0, -1, 1.5, "2", [2]])
    def test_no_size(self, size):
        with pytest.raises(InvalidRequestError, match="above 0"):
            asked("/v1/embeddings", input="x", dimensions=size)

    @cases("body", [b"", b"[]", b"{}", b'{"data":[{}]}', b'{"data":[{"embedding":["x","y","z"]}]}', b"\xff"])
    def test_what_is_no_answer(self, body):
        _, answers = asked("/v1/embeddings", input="x", dimensions=2)
        with pytest.raises(UpstreamError, match="no list of embeddings"):
            answers.answer(body)
        with pytest.raises(UpstreamError):
            answers.stream()


class TestReturnDocuments:
    """Each result has its document."""

    def test_both_kinds(self):
        documents = ["a", {"text": "b", "id": 7}]
        request, answers = asked("/v1/rerank", query="q", documents=documents, return_documents=True)
        assert request == {"query": "q", "documents": documents}
        told = json.loads(answers.answer(b'{"results":[{"index":1},{"index":0}]}'))
        assert told["results"] == [{"index": 1, "document": documents[1]}, {"index": 0, "document": {"text": "a"}}]

    @pytest.mark.parametrize("documents", [None, "a", [1], {"a": 1}])
    def test_no_documents(self, documents):
        with pytest.raises(InvalidRequestError, match="must be a list of texts"):
            asked("/rerank", query="q", documents=documents, return_documents=True)

    def test_a_number_that_no_document_has(self):
        _, answers = asked("/v1/rerank", query="q", documents=["a"], return_documents=True)
        with pytest.raises(UpstreamError, match="no ranking"):
            answers.answer(b'{"results":[{"index":1}]}')


def test_what_is_asked_in_another_dialect_is_not_translated():
    assert dialect_of({"path": "/v1/completions", "headers": ()}) is OPENAI
    assert OPENAI.translation("GET", "/v1/completions") is None
    assert OPENAI.translation("POST", "/v1/chat/completions") is None
