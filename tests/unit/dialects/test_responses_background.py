"""How responses end that are generated in the background."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from supervisor.dialects.responses import background
from supervisor.dialects.responses.stored_conversation import event, event_log_of
from supervisor.dialects.responses.stored_response import response_of
from supervisor.host.store import response_store
from supervisor.host.store.response_store import Part, ResponseStore, StoredResponse

NAME = "resp_1"
BEGUN = Part(b'{"id":"resp_1","status":"queued","output":[]}')


@pytest.fixture
async def store(tmp_path):
    found = ResponseStore()
    found.open(tmp_path)
    found.configure(most_bytes=1 << 20, most=10, keep_s=60)
    yield found
    await found.close()


async def told_of(store: ResponseStore) -> list[dict]:
    frames = (await (await store.events(NAME)).whole()).split(b"\n\n")[:-1]
    return [msgspec.json.decode(frame.partition(b"data: ")[2]) for frame in frames]


async def test_a_stream_whose_end_could_not_be_kept_has_one_end(store):
    """What its worker said last was told to nobody."""
    kept = StoredResponse(None, BEGUN, Part(b"[]"), "queued", is_background=True, is_streamed=True)
    store.keep(NAME, kept)
    log = event_log_of(store.logs, NAME, await response_of(kept))
    log.add(event("response.output_text.delta", 2, delta="Hi"))
    log.add(event("response.completed", 3, response={"status": "completed"}))
    job = SimpleNamespace(response=NAME, owner=None, state="completed", error=None)
    await background.end(SimpleNamespace(responses=store), job, None)
    told = await told_of(store)
    assert [each["type"] for each in told][2:] == ["response.output_text.delta", "response.failed"]
    assert [each["sequence_number"] for each in told] == [0, 1, 2, 3]


@pytest.mark.parametrize("state", ["cancelled", "failed"])
async def test_a_stream_that_nobody_has_read_since_a_restart_has_an_end(store, state):
    store.keep(NAME, StoredResponse(None, BEGUN, Part(b"[]"), "queued", is_background=True, is_streamed=True))
    job = SimpleNamespace(response=NAME, owner=None, state=state, error=None)
    await background.end(SimpleNamespace(responses=store), job, None)
    told = await told_of(store)
    assert [each["type"] for each in told] == ["response.created", "response.queued", "response.failed"]
    assert [each["sequence_number"] for each in told] == [0, 1, 2]
    assert told[-1]["response"]["status"] == state
    assert store.logs == {}


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 18])
async def test_a_stream_is_read_again_from_where_its_client_was(tmp_path, monkeypatch, size):
    monkeypatch.setattr(response_store, "PIECE", size)
    frames = [b"event: a\ndata: %d\n\n" % number for number in range(9)]
    for count in (0, 1, 5, 8, 9, 20):
        told = [piece async for piece in background._skip_events(count, Part(b"".join(frames)))]
        assert b"".join(told) == b"".join(frames[count:])
