"""The worker that draws: a pipeline of diffusers behind OpenAI's images API.

The worker makes one picture at a time. After each step it records the request's progress and checks for cancellation.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.diffusers.worker import parameters, pictures
from runtimes.diffusers.worker.pipelines import Pipelines
from runtimes.diffusers.worker.request import Drawing, Task, drawing
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.form import FilesForm, read_files
from runtimes.sdk.parameters import Table, check
from runtimes.sdk.server import Comment, Endpoint, Settings, Worker, events, serve, wait_first_item
from runtimes.sdk.steps import Steps
from runtimes.sdk.worker_pool import Cancel
from runtimes.shared.pictures import HEADER

TOKEN_SIDE: Final = 16  # pixels of the side of a square that counts as one token
PREFIXES: Final[Mapping[Task, str]] = {
    "generation": "image_generation",
    "edit": "image_edit",
    "variation": "image_edit",
}
"""Task → the prefix of event names in a stream."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished picture, or a preview of an unfinished one. `partial` numbers the previews."""

    data: str  # base64
    seed: int
    read: tuple[int, str]  # tokens of the prompt, and the part of its text that the model read
    partial: int | None = None


class Painter(Worker):
    """The worker that makes pictures from prompts and from other pictures."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.steps = Steps(self.meters.registry)
        self._drawn = Counter("llmux_worker_pictures", "Pictures made.", registry=self.meters.registry)

    def load(self) -> None:
        self.model = Pipelines(self.settings.options)
        self.model.try_out()

    def routes(self) -> Mapping[str, Endpoint]:
        return {
            "POST /v1/images/generations": self._generations,
            "POST /v1/images/edits": self._edits,
            "POST /v1/images/variations": self._variations,
            "GET /progress": self.steps.report,
        }

    async def _generations(self, request: Request) -> Response:
        body = await Body.parse(request)
        check(parameters.GENERATION, body.values)
        return await self._respond(request, drawing(body, "generation", self.model.abilities))

    async def _edits(self, request: Request) -> Response:
        return await self._change_picture(request, "edit", parameters.EDIT)

    async def _variations(self, request: Request) -> Response:
        return await self._change_picture(request, "variation", parameters.VARIATION)

    async def _change_picture(self, request: Request, task: Task, table: Table) -> Response:
        form = await read_files(request, {"image": 16, "mask": 1})
        try:
            wanted = await asyncio.to_thread(self._parse_form, form, task, table)
        finally:
            form.close()
        return await self._respond(request, wanted)

    def _parse_form(self, form: FilesForm, task: Task, table: Table) -> Drawing:
        images, masks = form.files.get("image", ()), form.files.get("mask", ())
        check(table, {**form.fields.values, **dict.fromkeys(form.files, "a file")})
        if not images:
            raise WorkerError(
                "image is needed: the picture, as a part with a filename.", param="image", code="missing_file"
            )
        if len(images) > 1:
            raise WorkerError(
                f"image: {len(images)} pictures, but this model changes one; send one.",
                param="image",
                code="unsupported_parameter",
            )
        mask = pictures.read(masks[0], "mask") if masks else None
        return drawing(form.fields, task, self.model.abilities, pictures.read(images[0], "image"), mask)

    # ---------------------------------------------------------------------------------------------------------- answers

    async def _respond(self, request: Request, wanted: Drawing) -> Response:
        name = request.headers.get("x-request-id", "")
        made: AsyncGenerator[Picture | Comment] = self.pool.stream_pushed(
            lambda cancel, put: self._draw_all(name, wanted, cancel, put)
        )
        if wanted.stream:
            return events(await wait_first_item(self._stream_events(wanted, made)), are_named=True)
        async with aclosing(made):
            found = [item async for item in made if isinstance(item, Picture)]
        data = [{"b64_json": item.data, "seed": item.seed, **_revised_prompt(item, wanted)} for item in found]
        headers = {HEADER: "url"} if wanted.wants_links else {}
        return JSONResponse({"data": data, **_response_fields(wanted, found[0], len(found))}, headers=headers)

    async def _stream_events(self, wanted: Drawing, made: AsyncIterator[Picture | Comment]) -> AsyncIterator[object]:
        """OpenAI's events: the partial pictures, then the picture, for each one. Between them a comment for each step."""
        prefix = PREFIXES[wanted.task]
        async for item in made:
            if isinstance(item, Comment):
                yield item
                continue
            about = _response_fields(wanted, item, 1)
            common: dict[str, Any] = {"created_at": about.pop("created"), "b64_json": item.data}
            if item.partial is None:
                yield {
                    "type": f"{prefix}.completed",
                    **common,
                    "seed": item.seed,
                    **_revised_prompt(item, wanted),
                    **about,
                }
            else:
                del about["usage"]
                yield {"type": f"{prefix}.partial_image", **common, "partial_image_index": item.partial, **about}

    # ---------------------------------------------------------------------------------------------------------- drawing

    def _draw_all(
        self, request_id: str, wanted: Drawing, cancel: Cancel, put: Callable[[Picture | Comment], None]
    ) -> None:
        """Draw all pictures of a request. Blocks. Raises CancelledWorkError after the step in which the client disconnected."""
        steps_each = max(1, int(wanted.steps * wanted.strength))
        self.steps.begin(request_id, steps_each * wanted.count)
        try:
            read = self.model.read(wanted.prompt)
            for place in range(wanted.count):
                cancel.check()
                seed, shown = wanted.seed_of(place), 0

                def on_step(
                    step: int, steps: int, preview: Callable[[], Image.Image], *, place: int = place, seed: int = seed
                ) -> None:
                    nonlocal shown
                    cancel.check()
                    done, of = place * steps + step, wanted.count * steps
                    self.steps.finish_step(request_id, done, of)
                    if wanted.stream:  # proxies close connections without traffic
                        put(Comment(f"step {done} of {of}"))
                    if shown < wanted.partial and step < steps and step >= (shown + 1) * steps / (wanted.partial + 1):
                        put(Picture(_encode_picture(preview(), wanted), seed, read, shown))
                        shown += 1

                picture = self.model.draw(wanted, seed, on_step)
                put(Picture(_encode_picture(picture, wanted), seed, read))
                self._drawn.inc()
        finally:
            self.steps.end(request_id)


def _revised_prompt(made: Picture, wanted: Drawing) -> dict[str, str]:
    """The part of the prompt that the model read, if it didn't read all of it; else nothing."""
    _, read = made.read
    return {} if read == wanted.prompt else {"revised_prompt": read}


def _response_fields(wanted: Drawing, made: Picture, count: int) -> dict[str, Any]:
    """The fields of an answer with this many pictures. The usage comes last, where the supervisor looks for it."""
    width, height = wanted.size
    read, _ = made.read
    shown = _picture_tokens(wanted.size) if wanted.image is not None else 0
    drawn = _picture_tokens(wanted.size) * count
    return {
        "created": int(time.time()),
        "background": "opaque",
        "output_format": wanted.format,
        "quality": wanted.quality,
        "size": f"{width}x{height}",
        "usage": {
            "total_tokens": read + shown + drawn,
            "input_tokens": read + shown,
            "output_tokens": drawn,
            "input_tokens_details": {"text_tokens": read, "image_tokens": shown},
        },
    }


def _encode_picture(picture: Image.Image, wanted: Drawing) -> str:
    return base64.b64encode(pictures.encode(picture, wanted.format, wanted.compression)).decode()


def _picture_tokens(size: tuple[int, int]) -> int:
    return -(-size[0] // TOKEN_SIDE) * -(-size[1] // TOKEN_SIDE)


if __name__ == "__main__":
    serve(Painter)
