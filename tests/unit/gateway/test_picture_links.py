"""Addresses instead of pictures, in answers whose workers say that their client wants these."""

from __future__ import annotations

import base64
import json
from http import HTTPStatus

import httpx
import pytest

from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.filters.filters import filtered
from supervisor.gateway.filters.picture_links import PictureLinks, base_url, refuse_links
from supervisor.host.store.picture_store import PictureStore
from supervisor.host.store.request_buffer import Gathered
from supervisor.host.store.store import NotSavedError

PNG = b"\x89PNG and so on"
WANTED = (b"x-llmux-pictures", b"url")
SCOPE = {"scheme": "http", "headers": [(b"host", b"llmux.local:8081")]}


class Answer:
    """A worker's answer, complete."""

    status = HTTPStatus.OK
    drained = False

    def __init__(self, body: object, *headers: tuple[bytes, bytes]) -> None:
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body)), *headers]

    async def next_chunk(self) -> bytes:
        self.drained = True
        return self.body

    async def read(self, limit: int) -> bytes:
        return self.body[:limit]

    def close(self) -> None:
        pass


@pytest.fixture
def store(tmp_path) -> PictureStore:
    store = PictureStore()
    store.configure(most_bytes=1000, keep_s=60)
    store.open(tmp_path)
    return store


def answer_of(*pictures: bytes) -> dict[str, object]:
    items = [{"b64_json": base64.b64encode(picture).decode(), "seed": 1} for picture in pictures]
    return {"data": items, "created": 1, "usage": {"output_tokens": 5}}


async def linked(store: PictureStore, body: object, url: str | None = None) -> dict:
    found = await filtered(Answer(body, WANTED), [PictureLinks(store, SCOPE, url)], Gathered())
    assert WANTED not in found.headers
    assert not any(name == b"content-length" for name, _ in found.headers)
    return json.loads(await found.next_chunk())


async def test_each_picture_becomes_an_address_and_all_else_stays(store):
    answer = await linked(store, answer_of(PNG, PNG))
    assert (answer["created"], answer["usage"]) == (1, {"output_tokens": 5})
    for item in answer["data"]:
        assert item.keys() == {"seed", "url"}
        address = httpx.URL(item["url"])
        assert (address.host, address.port) == ("llmux.local", 8081)
        assert store.find(address.path.rpartition("/")[2]).path.read_bytes() == PNG


async def test_addresses_begin_as_configured(store):
    answer = await linked(store, answer_of(PNG), "https://llm.example.org/ai/")
    assert answer["data"][0]["url"].startswith("https://llm.example.org/ai/v1/images/files/")


async def test_an_answer_that_wants_none_passes_as_it_is(store, tmp_path):
    plain = Answer(answer_of(PNG))
    assert await filtered(plain, [PictureLinks(store, SCOPE, None)], Gathered()) is plain
    assert not [*(tmp_path / "pictures").iterdir()]


@pytest.mark.parametrize("body", [b"no JSON", {"data": [{}]}, {"data": [{"b64_json": "?"}]}, answer_of(b"GIF"), [1]])
async def test_what_has_no_pictures_is_a_workers_fault(store, body):
    with pytest.raises(UpstreamError, match="no pictures"):
        await linked(store, body)


async def test_where_none_is_kept_the_request_is_refused():
    with pytest.raises(InvalidRequestError, match="pictures_mib"):
        await linked(PictureStore(), answer_of(PNG))


@pytest.mark.parametrize("said", [None, b'"b64_json"', b"null", b"0"], ids=["nothing", "pictures", "null", "a number"])
def test_where_none_is_kept_the_wish_is_refused_before_anything_is_drawn(said):
    """What is no format at all is for the worker to refuse."""
    refuse_links(said)
    with pytest.raises(InvalidRequestError, match="pictures_mib") as refused:
        refuse_links(b'"url"')
    assert refused.value.param == "response_format"


async def test_a_picture_larger_than_the_budget_is_told(store):
    with pytest.raises(NotSavedError, match="pictures_mib"):
        await linked(store, answer_of(PNG + bytes(1000)))


@pytest.mark.parametrize(
    ("scope", "base"),
    [
        (SCOPE, "http://llmux.local:8081"),
        ({**SCOPE, "scheme": "https"}, "https://llmux.local:8081"),
        ({"headers": []}, ""),
    ],
    ids=["http", "https", "a job"],
)
def test_where_a_client_reaches_the_daemon(scope, base):
    assert base_url(scope) == base
