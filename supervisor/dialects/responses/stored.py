"""Responses that are kept: `GET` and `DELETE /v1/responses/{id}`, `…/input_items`, `…/cancel`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from supervisor.catalog.rewrite import Fields
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.job import owner_of
from supervisor.dialects.responses import background
from supervisor.dialects.responses.kept import NULL, begin_of, full, id_of, is_running, items_of
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.gateway.body.outline import Outline
from supervisor.io.response_store import Kept

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
_fields: Final = msgspec.json.Decoder(Fields).decode
_parts: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_FLAGS: Final = {"true": True, "false": False}
_MOST: Final = 100
_JSON: Final = "application/json"
_BATCH: Final = 200  # ids that are worked out in one turn of the loop


def routes(daemon: Daemon) -> list[Route]:
    """With and without a version, as all of OpenAI's paths."""
    daemon.jobs.on_end.append(partial(background.end, daemon))

    async def retrieve(request: Request) -> Response:
        name, kept = await _found(daemon, request)
        _included(request)
        after = request.query_params.get("starting_after")
        if not _flag(request, "stream"):
            if after is not None:
                raise InvalidRequestError("starting_after needs stream=true.", param="starting_after")
            if not is_running(kept):
                size = {"content-length": str(kept.response.size)}
                return StreamingResponse(kept.response.pieces(), 200, size, _JSON)
            return JSONResponse(await background.current(daemon, name, kept))
        if not kept.is_streamed:
            message = "Only a response in the background that was created with stream=true can be streamed again."
            raise InvalidRequestError(message, param="stream")
        behind = -1 if after is None else _number(after, "starting_after")
        return background.stream(daemon, name, kept, behind)

    async def remove(request: Request) -> Response:
        name, _ = await _found(daemon, request)
        if (job := daemon.jobs.generating(name)) is not None:
            await daemon.jobs.cancel(job)
        await daemon.responses.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        name, kept = await _found(daemon, request)
        if not kept.is_background:
            raise InvalidRequestError("Cannot cancel a synchronous response.", param="response_id")
        if (job := daemon.jobs.generating(name)) is not None:
            await daemon.jobs.cancel(job)
            name, kept = await _found(daemon, request)
        if not is_running(kept) and kept.status != "cancelled":  # it may have been completed already
            raise InvalidRequestError(f"Cannot cancel a {kept.status} response.", param="response_id")
        told = await background.current(daemon, name, kept)
        if told["status"] != "cancelled":
            raise InvalidRequestError(f"Cannot cancel a {told['status']} response.", param="response_id")
        return JSONResponse(told)

    async def input_items(request: Request) -> Response:
        name, kept = await _found(daemon, request)
        outline = Outline()  # what is cut out stays on disk
        items = await items_of(kept, outline, kept.items)
        return StreamingResponse(outline.pieces(await _page(request, name, items)), media_type=_JSON)

    found = []
    for path in ("/v1/responses/{id}", "/responses/{id}"):
        found += [
            Route(path, retrieve, methods=["GET"]),
            Route(path, remove, methods=["DELETE"]),
            Route(f"{path}/cancel", cancel, methods=["POST"]),
            Route(f"{path}/input_items", input_items, methods=["GET"]),
        ]
    return found


async def _found(daemon: Daemon, request: Request) -> tuple[str, Kept]:
    name, (owner, is_admin) = request.path_params["id"], owner_of(request.scope["state"])
    kept = await daemon.responses.find(name, owner, is_admin=is_admin)
    if kept is None:
        raise NotFoundError(f"Response with id '{name[:100]}' not found.", code="response_not_found")
    return name, kept


async def _page(request: Request, name: str, items: Sequence[Fields]) -> bytes:
    """The items that are asked for, as JSON."""
    params, included = request.query_params, _included(request)
    order = params.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise InvalidRequestError("order must be asc or desc.", param="order")
    limit = _number(params.get("limit", "20"), "limit")
    if not 1 <= limit <= _MOST:
        raise InvalidRequestError(f"limit must be between 1 and {_MOST}.", param="limit")
    ids: list[tuple[bytes, int]] = []  # with their places
    for index, item in enumerate(items):
        if index % _BATCH == 0:
            await asyncio.sleep(0)
        if item:
            ids.append((bytes(id_of(item, name, index)), index))
    if order == "desc":
        ids.reverse()
    if (after := params.get("after")) is not None:
        ids = ids[_place(ids, after, "after") + 1 :]
    if (before := params.get("before")) is not None:
        ids = ids[: _place(ids, before, "before")]
    page = [full(items[index], name, index) for _, index in ids[:limit]]
    found = {
        "object": "list",
        "data": [item if _IMAGES in included else _without_images(item) for item in page],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ids) > len(page),
    }
    return msgspec.json.encode(found)


def _place(ids: list[tuple[bytes, int]], wanted: str, param: str) -> int:
    name = msgspec.json.encode(wanted)
    for place, (known, _) in enumerate(ids):
        if known == name:
            return place
    raise InvalidRequestError(f"There is no item {wanted[:100]!r} in the list.", param=param)


def _without_images(item: Fields) -> Fields:
    """OpenAI tells the content of images only if it is asked to."""
    content = item.get("content", NULL)
    if begin_of(content) != b"[":
        return item
    parts: list[msgspec.Raw | Fields] = [*_parts(content)]
    for place, part in enumerate(_parts(content)):
        fields = _fields(part) if begin_of(part) == b"{" else {}
        if fields.get("type") == _PICTURE:
            parts[place] = fields | {"image_url": NULL}
    return item | {"content": msgspec.Raw(msgspec.json.encode(parts))}


def _included(request: Request) -> list[str]:
    """What `include` names. The SDKs write `include[]`."""
    params = request.query_params
    found = [*params.getlist("include"), *params.getlist("include[]")]
    if unknown := [one for one in found if one not in INCLUDABLE]:
        message = f"{unknown[0][:50]!r} can't be included; there is {', '.join(INCLUDABLE)}."
        raise InvalidRequestError(message, param="include")
    return found


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in _FLAGS:
        raise InvalidRequestError(f"{name} must be true or false.", param=name)
    return _FLAGS[value]


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequestError(f"{name} must be a whole number.", param=name)
    return int(text)
