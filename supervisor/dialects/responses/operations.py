"""The operations of OpenAI's Responses: models answer conversations; the daemon answers requests about stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as HttpResponse

from supervisor.catalog.models.rewrite import Fields
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.responses import background
from supervisor.dialects.responses.stored_response import (
    NULL,
    begin_of,
    id_of,
    is_running,
    item_with_defaults,
    items_of,
)
from supervisor.dialects.responses.types import (
    DeletedResponse,
    InputItems,
    InputItemsQuery,
    Response,
    ResponseQuery,
    ResponseRequest,
    ResponseTokens,
    ResponseTokensRequest,
)
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.gateway.body.condensed_json import CondensedJson
from supervisor.gateway.operation import Group
from supervisor.host.store.response_store import StoredResponse
from supervisor.jobs.job import owner_of
from supervisor.schema.operation import EVENTS, JSON, Example, Parameter, schema_of

INCLUDABLE: Final = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_IMAGES: Final = "message.input_image.image_url"
_PICTURE: Final = msgspec.Raw(b'"input_image"')
_BATCH: Final = 200  # ids computed before other tasks get a turn
_fields: Final = msgspec.json.Decoder(Fields).decode
_parts: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode

_NAME: Final = "resp_0123456789abcdef"
_PATH: Final = f"/v1/responses/{_NAME}"
_NEEDS: Final = "the id of a response"
_KEPT: Final = {
    "id": _NAME,
    "object": "response",
    "created_at": 1790000000,
    "status": "queued",
    "model": "Tiny-Instruct",
    "output": [],
    "background": True,
}
_ITEM: Final = {
    "id": "msg_0123456789abcdef",
    "type": "message",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "Hello"}],
}
_LIST: Final = {
    "object": "list",
    "data": [_ITEM],
    "first_id": _ITEM["id"],
    "last_id": _ITEM["id"],
    "has_more": False,
}
_INCLUDE: Final = Parameter(
    "include[]", "What else to tell of its items, such as `message.input_image.image_url`.", schema_of(list[str])
)
_BODY: Final = {"model": "Tiny-Instruct", "input": "Hello"}

GROUP: Final = Group("Responses", "OpenAI's Responses, for every model that chats.", scope="inference")
GROUP.model_endpoint(
    "/v1/responses",
    "Let a model answer a conversation of items.\n\n"
    "Its stream has OpenAI's events, from `response.created` to `response.completed`.",
    reads=ResponseRequest,
    answer=Response,
    stream_type=EVENTS,
    example=Example(_BODY),
)
GROUP.model_endpoint(
    "/v1/responses/input_tokens",
    "How many tokens such a request has.",
    reads=ResponseTokensRequest,
    answer=ResponseTokens,
    example=Example(_BODY),
)


@GROUP.operation(
    "GET",
    "/v1/responses/{id}",
    parameters=(_INCLUDE,),
    answer=Response,
    stream_type=EVENTS,
    errors=(404,),
    aliases=("/responses/{id}",),
    example=Example(path=_PATH, needs=_NEEDS, answer=_KEPT),
)
async def get_response(daemon: Daemon, id: str, query: ResponseQuery, request: Request) -> HttpResponse:
    """A response as it stands.

    404 `response_not_found` where none of this key is kept by that id.
    """
    kept = await _find_response(daemon, id, request)
    _included_fields(request)
    if query.stream:
        if not kept.is_streamed:
            message = "Only a response in the background that was created with stream=true can be streamed again."
            raise InvalidRequestError(message, param="stream")
        return background.stream(daemon, id, kept, -1 if query.starting_after is None else query.starting_after)
    if query.starting_after is not None:
        raise InvalidRequestError("starting_after needs stream=true.", param="starting_after")
    if is_running(kept):
        return JSONResponse(await background.current(daemon, id, kept))
    return StreamingResponse(kept.response.pieces(), 200, {"content-length": str(kept.response.size)}, JSON)


@GROUP.operation(
    "DELETE",
    "/v1/responses/{id}",
    errors=(404,),
    aliases=("/responses/{id}",),
    example=Example(path=_PATH, needs=_NEEDS, answer={"id": _NAME, "object": "response", "deleted": True}),
)
async def delete_response(daemon: Daemon, id: str, request: Request) -> DeletedResponse:
    """Forget it, and cancel it if it runs.

    Responses that went on from it keep what it said.
    """
    await _find_response(daemon, id, request)
    if (job := daemon.inference.generating(id)) is not None:
        await daemon.jobs.cancel(job)
    await daemon.responses.remove(id)
    return DeletedResponse(id, "response", deleted=True)


@GROUP.operation(
    "POST",
    "/v1/responses/{id}/cancel",
    answer=Response,
    errors=(404,),
    aliases=("/responses/{id}/cancel",),
    example=Example(path=f"{_PATH}/cancel", needs=_NEEDS, answer=_KEPT | {"status": "cancelled"}),
)
async def cancel_response(daemon: Daemon, id: str, request: Request) -> HttpResponse:
    """End a response in the background.

    Any other response, and one that is over, is 400.
    """
    kept = await _find_response(daemon, id, request)
    if not kept.is_background:
        raise InvalidRequestError("Cannot cancel a synchronous response.", param="response_id")
    if (job := daemon.inference.generating(id)) is not None:
        await daemon.jobs.cancel(job)
        kept = await _find_response(daemon, id, request)
    response = await background.current(daemon, id, kept)
    if response["status"] != "cancelled":  # it may have completed before
        raise InvalidRequestError(f"Cannot cancel a {response['status']} response.", param="response_id")
    return JSONResponse(response)


@GROUP.operation(
    "GET",
    "/v1/responses/{id}/input_items",
    parameters=(_INCLUDE,),
    answer=InputItems,
    errors=(404,),
    aliases=("/responses/{id}/input_items",),
    example=Example(path=f"{_PATH}/input_items", needs=_NEEDS, answer=_LIST),
)
async def list_input_items(daemon: Daemon, id: str, query: InputItemsQuery, request: Request) -> HttpResponse:
    """All items that the model was given, those of earlier responses included.

    Images come without their content, unless `include` has `message.input_image.image_url`.
    """
    kept = await _find_response(daemon, id, request)
    condensed = CondensedJson()  # large values stay on disk
    items = await items_of(kept, condensed, kept.items)
    page = await _items_page(id, items, query, has_images=_IMAGES in _included_fields(request))
    return StreamingResponse(condensed.pieces(page), media_type=JSON)


async def _find_response(daemon: Daemon, name: str, request: Request) -> StoredResponse:
    owner, is_admin = owner_of(request.scope["state"])
    kept = await daemon.responses.find(name, owner, is_admin=is_admin)
    if kept is None:
        raise NotFoundError(f"Response with id '{name[:100]}' not found.", code="response_not_found")
    return kept


async def _items_page(name: str, items: Sequence[Fields], query: InputItemsQuery, *, has_images: bool) -> bytes:
    """The requested page of items, as JSON."""
    ids: list[tuple[bytes, int]] = []  # with their places
    for index, item in enumerate(items):
        if index % _BATCH == 0:
            await asyncio.sleep(0)
        if item:
            ids.append((bytes(id_of(item, name, index)), index))
    if query.order == "desc":
        ids.reverse()
    if query.after is not None:
        ids = ids[_position_of(ids, query.after, "after") + 1 :]
    if query.before is not None:
        ids = ids[: _position_of(ids, query.before, "before")]
    page = [item_with_defaults(items[index], name, index) for _, index in ids[: query.limit]]
    found = {
        "object": "list",
        "data": page if has_images else [*map(_without_images, page)],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ids) > len(page),
    }
    return msgspec.json.encode(found)


def _position_of(ids: list[tuple[bytes, int]], wanted: str, param: str) -> int:
    name = msgspec.json.encode(wanted)
    for place, (known, _) in enumerate(ids):
        if known == name:
            return place
    raise InvalidRequestError(f"There is no item {wanted[:100]!r} in the list.", param=param)


def _without_images(item: Fields) -> Fields:
    """The item without the content of its images: OpenAI includes that only on request."""
    content = item.get("content", NULL)
    if begin_of(content) != b"[":
        return item
    parts: list[msgspec.Raw | Fields] = [*_parts(content)]
    for place, part in enumerate(_parts(content)):
        fields = _fields(part) if begin_of(part) == b"{" else {}
        if fields.get("type") == _PICTURE:
            parts[place] = fields | {"image_url": NULL}
    return item | {"content": msgspec.Raw(msgspec.json.encode(parts))}


def _included_fields(request: Request) -> list[str]:
    """The fields that `include` names; SDKs send `include[]`. Raises InvalidRequestError."""
    found = [value for name in ("include", "include[]") for value in request.query_params.getlist(name)]
    if unknown := [one for one in found if one not in INCLUDABLE]:
        message = f"{unknown[0][:50]!r} can't be included; there is {', '.join(INCLUDABLE)}."
        raise InvalidRequestError(message, param="include")
    return found
