"""A request that goes on from a kept response: what its worker gets, and what its client is told."""

from __future__ import annotations

import json
import time

import pytest

from supervisor.dialects.responses import RESPONSES
from supervisor.dialects.responses.stored_conversation import conversation_of
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.filters.filters import filtered
from supervisor.gateway.filters.stored_conversation import ConversationStore
from supervisor.host.store.request_buffer import BodyBudget, Gathered
from supervisor.host.store.response_store import Part, ResponseStore, StoredResponse

EVENTS = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"1")]
ANSWER = {"id": "resp_2", "object": "response", "status": "completed", "output": [{"type": "message", "id": "msg_2"}]}
OUTPUT = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "One!"}]}


class Times:
    """Of a request that came half a second before its worker got it."""

    def __init__(self):
        self.admitted_at = time.monotonic()
        self.entered_at = self.arrived_at = self.admitted_at - 0.5


@pytest.fixture
async def store(tmp_path):
    found = ResponseStore()
    found.configure(most_bytes=1 << 24, most=100, keep_s=60.0)
    found.open(tmp_path)
    first = {"id": "resp_1", "status": "completed", "output": [OUTPUT]}
    await found.keep("resp_1", StoredResponse("ann", Part(json.dumps(first).encode()), Part(b'"One"'), "completed"))
    return found


async def asked(store, /, owner="ann", is_counted=False, **fields):
    """A request: its body as it came, and as it goes on, and what becomes of its answer."""
    body = await JsonBody.open(json.dumps({"model": "m", **fields}).encode())
    return body, *await conversation_of(
        body, ConversationStore(store, BodyBudget(), owner, False), is_counted=is_counted
    )


async def got(body):
    """A body that goes on."""
    return json.loads(await body.whole())


class Worker:
    """Its answer, in pieces."""

    status = 200

    def __init__(self, headers, pieces):
        self.headers = headers
        self._pieces = [*pieces]

    @property
    def drained(self):
        return not self._pieces

    async def next_chunk(self):
        return self._pieces.pop(0)


async def told(turn, headers, *pieces):
    """What the client gets."""
    answer = await filtered(Worker(headers, pieces), [turn], Gathered())
    body = b""
    while not answer.drained:
        body += await answer.next_chunk()
    turn.release()
    return answer.headers, body


def framed(*events):
    return [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in events]


class TestRequest:
    async def test_the_earlier_items_come_first(self, store):
        _, body, _ = await asked(store, input="Two", previous_response_id="resp_1", instructions="Be brief.")
        found = await got(body)
        assert [item.get("content") for item in found["input"]] == [
            [{"type": "input_text", "text": "One"}],
            OUTPUT["content"],
            "Two",
        ]
        assert {*found} == {"model", "input", "instructions"}

    async def test_items_that_are_given_follow(self, store):
        own = {"role": "user", "content": "Two"}
        _, body, _ = await asked(store, input=[own], previous_response_id="resp_1")
        assert (await got(body))["input"][1:] == [OUTPUT, own]

    async def test_nothing_needs_to_be_added(self, store):
        for given in ({}, {"input": None}, {"input": []}):
            _, body, _ = await asked(store, previous_response_id="resp_1", **given)
            assert len((await got(body))["input"]) == 2

    async def test_a_large_one_arrives_whole(self, store):
        text, picture = 'Say "a": ' * 20_000, "data:image/png;base64," + "A" * 300_000
        parts = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": picture}]
        own = {"role": "user", "content": parts}
        _, body, _ = await asked(store, input=[own], previous_response_id="resp_1", x_timeout_s=5, store=True)
        found = await got(body)
        assert (found["input"][2], found["x_timeout_s"], "store" in found) == (own, 5, False)

    @pytest.mark.parametrize("fields", [{}, {"store": None}, {"background": False}])
    async def test_one_that_says_nothing_goes_on_as_it_is(self, store, fields):
        given, body, turn = await asked(store, input="Hi", **fields)
        assert (body is given, turn is None) == (True, False)

    async def test_one_that_is_not_kept_costs_nothing(self, store):
        assert (await asked(store, input="Hi", store=False))[2] is None
        other = await JsonBody.open(b'{"model":"m","messages":[{"role":"user","content":"Hi"}]}')
        memory = ConversationStore(store, BodyBudget(), "ann", False)
        assert (await RESPONSES.conversation("/v1/responses", other, memory))[1] is None

    async def test_only_the_tokens_of_one_that_goes_on(self, store):
        assert (await asked(store, input="Hi", is_counted=True))[2] is None
        _, body, turn = await asked(store, input="Two", previous_response_id="resp_1", is_counted=True)
        assert (len((await got(body))["input"]), turn) == (3, None)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"previous_response_id": 5}, "previous_response_id"),
            ({"previous_response_id": "resp_9"}, "previous_response_id"),
            ({"previous_response_id": "resp_1", "input": 5}, "input"),
            ({"store": "yes"}, "store"),
        ],
    )
    async def test_what_is_wrong(self, store, fields, param):
        with pytest.raises(InvalidRequestError) as error:
            await asked(store, **{"input": "Hi", **fields})
        assert error.value.param == param

    async def test_another_keys_is_not_there(self, store):
        with pytest.raises(InvalidRequestError, match="not found"):
            await asked(store, owner="bob", input="Hi", previous_response_id="resp_1")


class TestAnswer:
    async def test_a_whole_one_passes_as_it_is_and_is_kept(self, store):
        _, _, turn = await asked(store, input="Hi")
        answer = json.dumps(ANSWER, indent=1).encode()
        headers, body = await told(turn, JSON, answer[:20], answer[20:])
        assert (body, dict(headers)[b"content-length"]) == (answer, b"%d" % len(answer))
        kept = await store.find("resp_2", "ann")
        assert (await kept.response.whole(), await kept.items.whole()) == (answer, b'"Hi"')

    async def test_one_of_more_values_than_a_request_may_have(self, store):
        _, _, turn = await asked(store, input="Hi", previous_response_id="resp_1")
        answer = ANSWER | {"output": [{"type": "message", "logprobs": [{}] * 110_000}]}
        _, body = await told(turn, JSON, json.dumps(answer).encode())
        assert json.loads(body) | answer == json.loads(body)
        assert json.loads(await (await store.find("resp_2", "ann")).response.whole()) == json.loads(body)

    async def test_a_long_name_is_none_that_is_kept(self, store):
        _, _, turn = await asked(store, input="Hi", previous_response_id="resp_1")
        _, body = await told(turn, JSON, json.dumps(ANSWER | {"id": "r" * 500}).encode())
        assert json.loads(body)["id"] == "r" * 500
        assert len([*store._folder.iterdir()]) == 1

    async def test_it_is_told_what_only_llmux_knows(self, store):
        _, _, turn = await asked(store, input="Hi", previous_response_id="resp_1")
        headers, body = await told(turn, JSON, json.dumps(ANSWER).encode())
        expected = ANSWER | {"background": False, "previous_response_id": "resp_1", "store": True}
        assert (json.loads(body), dict(headers)[b"content-length"]) == (expected, b"%d" % len(body))

    async def test_a_translations_store_is_set_right(self, store):
        _, _, turn = await asked(store, input="Hi")
        _, body = await told(turn, JSON, json.dumps(ANSWER | {"store": False}).encode())
        assert json.loads(body) == ANSWER | {"store": True}

    @pytest.mark.parametrize("size", [1, 30, 10_000])
    async def test_a_stream_wherever_it_is_split(self, store, size):
        begun = ANSWER | {"status": "in_progress", "output": []}
        delta = {"type": "response.output_text.delta", "delta": 'say "response" "type":"response.completed"'}
        events = [
            {"type": "response.created", "response": begun},
            delta,
            {"type": "response.completed", "response": ANSWER},
        ]
        stream = b": keepalive\n\n" + b"".join(framed(*events))
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        _, _, turn = await asked(store, input="Hi")
        assert (await told(turn, EVENTS, *pieces))[1] == stream
        assert json.loads(await (await store.find("resp_2", "ann")).response.whole()) == ANSWER
        _, _, turn = await asked(store, input="Hi", previous_response_id="resp_1", store=False)
        found = [
            json.loads(frame.partition(b"data: ")[2])
            for frame in (await told(turn, EVENTS, *pieces))[1].split(b"\n\n")
            if b"data: " in frame
        ]
        assert [each.get("response", {}).get("previous_response_id") for each in found] == ["resp_1", None, "resp_1"]
        assert (found[1], found[2]["response"]["store"]) == (delta, False)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_metrics_stand_beside_a_workers_own_fields(self, store, stream):
        body = await JsonBody.open(b'{"model":"m","input":"Hi"}')
        memory = ConversationStore(store, BodyBudget(), "ann", False, times=Times())
        _, turn = await conversation_of(body, memory, is_counted=False)
        answer = ANSWER | {"usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}}
        begun = {"type": "response.created", "response": answer}
        delta = {"type": "response.output_text.delta", "delta": "Hi"}
        pieces = framed(begun, delta, {"type": "response.completed", "response": answer})
        _, got = await told(turn, EVENTS, *pieces) if stream else await told(turn, JSON, json.dumps(answer).encode())
        found = json.loads(got.split(b"\n\n")[-2].partition(b"data: ")[2])["response"] if stream else json.loads(got)
        metrics = found.pop("metrics")
        assert found == answer
        assert (metrics["engine_prompt_tokens"], metrics["engine_output_tokens"]) == (3, 4)
        assert metrics["engine_total_wall_ms"] >= 500
        assert (metrics["gpu_time_to_first_token_ms"] is None) is not stream
        assert b"metrics" in await (await store.find("resp_2", "ann")).response.whole()
        assert not stream or b"metrics" not in got[: len(pieces[0] + pieces[1])]

    @pytest.mark.parametrize("size", [1, 30, 10_000])
    async def test_a_stream_with_other_ends_of_lines(self, store, size):
        """Python servers send such."""
        events = framed(
            {"type": "response.created", "response": ANSWER}, {"type": "response.completed", "response": ANSWER}
        )
        stream = b"".join(events).replace(b"\n", b"\r\n")
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        _, _, turn = await asked(store, input="Hi")
        assert (await told(turn, EVENTS, *pieces))[1] == b"".join(events)
        assert json.loads(await (await store.find("resp_2", "ann")).response.whole()) == ANSWER

    @pytest.mark.parametrize("usage", [None, {"input_tokens": None}, {"input_tokens": 1.5}, []])
    async def test_an_odd_usage_loses_nothing_else(self, store, usage):
        body = await JsonBody.open(b'{"model":"m","input":"Hi"}')
        memory = ConversationStore(store, BodyBudget(), "ann", False, times=Times())
        _, turn = await conversation_of(body, memory, is_counted=False)
        answer = ANSWER | {"usage": usage}
        _, got = await told(turn, JSON, json.dumps(answer).encode())
        assert json.loads(got).pop("metrics")["engine_prompt_tokens"] is None
        assert await store.find("resp_2", "ann") is not None

    async def test_one_that_broke_off_is_not_kept(self, store):
        _, _, turn = await asked(store, input="Hi")
        stream = framed({"type": "response.created", "response": ANSWER}, {"type": "error", "message": "Broken."})
        assert (await told(turn, EVENTS, *stream))[1] == b"".join(stream)
        assert await store.find("resp_2", "ann") is None

    @pytest.mark.parametrize(
        ("headers", "body"),
        [
            (EVENTS, b'data: {"type":"response.completed","response":5}\n\n'),
            (EVENTS, b'data: {"type":"response.completed"\n\nrest'),
            (EVENTS, b'data: {"type":"response.completed","response":{"id":"resp_2"}}\r\r'),
            (JSON, b"no JSON"),
            (JSON, b'{"object": "list"}'),
            (JSON, b'{"object": "response"}'),
            (JSON, b'{"object": "response", "id": "resp_2"}'),
            ([(b"content-type", b"text/html")], b"<html>"),
        ],
    )
    async def test_what_is_no_response_passes(self, store, headers, body):
        _, _, turn = await asked(store, input="Hi")
        assert (await told(turn, headers, body))[1] == body
        assert await store.find("resp_2", "ann") is None

    @pytest.mark.parametrize("stream", [False, True])
    async def test_one_in_the_background_that_does_not_say_how_it_ended_is_still_to_come(self, store, stream):
        begun = Part(b'{"id":"resp_2","status":"queued","output":[]}')
        kept = StoredResponse("ann", begun, Part(b"[]"), "queued", is_background=True, is_streamed=stream)
        await store.keep("resp_2", kept)
        body = await JsonBody.open(b'{"model":"m","input":"Hi"}')
        memory = ConversationStore(store, BodyBudget(), "ann", False, response="resp_2")
        _, turn = await conversation_of(body, memory, is_counted=False)
        answer = {"object": "response", "output": []}
        pieces = framed({"type": "response.completed", "response": answer})
        await told(turn, EVENTS, *pieces) if stream else await told(turn, JSON, json.dumps(answer).encode())
        assert await (await store.find("resp_2", "ann")).response.whole() == await begun.whole()
