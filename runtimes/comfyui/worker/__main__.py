"""The worker program for ComfyUI: OpenAI's images API in front of ComfyUI's own server, which is a child process.

A request's values go into their places in the workflow, which goes into ComfyUI's queue. One workflow runs at a time, so a
running one belongs to the current request. Clients' pictures lie in the worker's own folder only while their request runs.
"""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.comfyui.shared import workflow
from runtimes.comfyui.worker.folder import KINDS, Folder
from runtimes.comfyui.worker.parameters import GENERATION, PARAMETERS
from runtimes.comfyui.worker.server import Comfy
from runtimes.sdk.body import Body
from runtimes.sdk.child import HOST, Child
from runtimes.sdk.errors import WorkerError, unsupported
from runtimes.sdk.form import read_files
from runtimes.sdk.parameters import check
from runtimes.sdk.server import Comment, Endpoint, Settings, Worker, events, serve, wait_first_item
from runtimes.sdk.steps import Steps
from runtimes.sdk.worker_pool import Cancel
from runtimes.shared.pictures import HEADER

MOST_PICTURES: Final = 10
MOST_PARTIAL: Final = 3
SEEDS: Final = 1 << 32
SIZE: Final = re.compile(r"(\d{2,9})x(\d{2,9})", re.ASCII)
FORMATS: Final = ("png", "jpeg", "webp")
SWITCHES: Final = ("--disable-auto-launch", "--disable-metadata", "--disable-api-nodes")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A parsed request. `values` and, once uploaded, `pictures` go into the workflow by name."""

    values: Mapping[str, object]
    pictures: Mapping[str, bytes]
    count: int
    seed: int
    format: str
    compression: int
    stream: bool
    partial: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished picture, or a preview of an unfinished one. `partial` numbers the previews."""

    picture: bytes
    format: str
    seed: int
    partial: int | None = None

    def fields(self) -> dict[str, object]:
        """The picture's fields in answers and events."""
        about = {"seed": self.seed} if self.partial is None else {"partial_image_index": self.partial}
        return {"b64_json": base64.b64encode(self.picture).decode(), **about}


class ComfyWorker(Worker):
    """Options: `argv` (ComfyUI and its options, without address and folders), `workflow`, `inputs`, `max_pixels`."""

    _child: Child | None = None
    _folder: Folder | None = None

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.steps = Steps(self.meters.registry)
        self._drawn = Counter("llmux_worker_pictures", "Pictures made.", registry=self.meters.registry)

    def load(self) -> None:
        """Start ComfyUI, and check that it has the workflow's nodes. ComfyUI loads models with the first request."""
        self.workflow = workflow.read(Path(self.settings.options["workflow"]), self.settings.options["inputs"])
        self._folder = Folder()
        words = [*self.settings.options["argv"], *SWITCHES, "--listen", HOST]
        for kind in KINDS:
            words += [f"--{kind}-directory", str(self._folder.path / kind)]
        self._child = Child(lambda port: [*words, "--port", str(port)], "/system_stats")
        self._child.wait_ready()
        self.comfy = Comfy(self._child)
        known = self.comfy.nodes()
        if missing := sorted({node["class_type"] for node in self.workflow.nodes.values()} - known.keys()):
            raise ValueError(
                f"ComfyUI has no node {', '.join(missing)}: install what the workflow needs (custom nodes)"
            )

    def close(self) -> None:
        """End ComfyUI, and delete its folders."""
        if self._child is not None:
            self._child.close()
        if self._folder is not None:
            self._folder.close()

    def routes(self) -> Mapping[str, Endpoint]:
        """The endpoint that makes pictures, or the one that changes them, depending on the workflow."""
        return {
            "POST /v1/images/generations": self._generations,
            "POST /v1/images/edits": self._edits,
            "GET /progress": self.steps.report,
        }

    async def _generations(self, request: Request) -> Response:
        body = await Body.parse(request)
        check(GENERATION, body.values)
        return await self._respond(request, body, {})

    async def _edits(self, request: Request) -> Response:
        form = await read_files(request, {"image": 1, "mask": 1})
        try:
            pictures = {name: files[0].read() for name, files in form.files.items()}
        finally:
            form.close()
        check(PARAMETERS, form.fields.values)
        if "image" not in pictures:
            raise WorkerError(
                "image is needed: the picture, as a part with a filename.", param="image", code="missing_file"
            )
        return await self._respond(request, form.fields, pictures)

    async def _respond(self, request: Request, fields: Body, pictures: Mapping[str, bytes]) -> Response:
        wanted = self._parse_request(fields, pictures)
        links = fields.choice("response_format", ("b64_json", "url"), "b64_json") == "url"
        if links and wanted.stream:
            raise unsupported("response_format", "a stream brings the pictures along; leave out url, or stream.")
        name = request.headers.get("x-request-id", "")
        made: AsyncGenerator[Picture | Comment] = self.pool.stream_pushed(
            lambda cancel, put: self._draw_all(name, wanted, cancel, put)
        )
        if wanted.stream:
            prefix = "image_edit" if pictures else "image_generation"
            return events(await wait_first_item(self._stream_events(prefix, made)), are_named=True)
        async with aclosing(made):
            data = [picture.fields() async for picture in made if isinstance(picture, Picture)]
        about = {"created": int(time.time()), "output_format": wanted.format}
        return JSONResponse({**about, "data": data}, headers={HEADER: "url"} if links else None)

    @staticmethod
    async def _stream_events(prefix: str, made: AsyncIterator[Picture | Comment]) -> AsyncIterator[object]:
        async for picture in made:
            if isinstance(picture, Comment):
                yield picture
                continue
            kind = "completed" if picture.partial is None else "partial_image"
            about = {"created_at": int(time.time()), "output_format": picture.format}
            yield {"type": f"{prefix}.{kind}", **about, **picture.fields()}

    # ----------------------------------------------------------------------------------------------------------- parsing

    def _parse_request(self, fields: Body, pictures: Mapping[str, bytes]) -> Drawing:
        values: dict[str, object] = {"prompt": fields.required_text("prompt")}
        width, height = self._parse_size(fields)
        seed = fields.integer("seed", -1, -1, SEEDS - 1)
        given = {
            "negative_prompt": fields.text("negative_prompt"),
            "width": width,
            "height": height,
            "steps": fields.integer("steps", fields.integer("num_inference_steps", None, 1, 1000), 1, 1000),
            "guidance": fields.number("guidance", fields.number("guidance_scale", None, 0, 100), 0, 100),
            "strength": fields.number("strength", None, 0, 1),
            "checkpoint": fields.text("checkpoint"),
        }
        values |= {name: value for name, value in given.items() if value is not None}
        for name in [*values, *pictures]:
            if name not in self.workflow.places:
                shown = "size" if name in {"width", "height"} else name
                raise unsupported(shown, "this model's workflow has no place for it (inputs, in the configuration).")
        stream, partial = fields.flag("stream"), fields.integer("partial_images", 0, 0, MOST_PARTIAL)
        if partial and not stream:
            raise unsupported("partial_images", "they come in a stream: say stream: true.")
        return Drawing(
            values=values,
            pictures=pictures,
            count=fields.integer("n", 1, 1, MOST_PICTURES),
            seed=seed if seed >= 0 else secrets.randbelow(SEEDS),
            format=fields.choice("output_format", FORMATS, "png"),
            compression=fields.integer("output_compression", 95, 0, 100),
            stream=stream,
            partial=partial,
        )

    def _parse_size(self, fields: Body) -> tuple[int | None, int | None]:
        text = fields.text("size", "auto")
        if text == "auto":
            return None, None
        if (found := SIZE.fullmatch(text)) is None:
            raise fields.wrong_value("size", "auto, or as 1024x768")
        width, height = int(found[1]), int(found[2])
        most = self.settings.options["max_pixels"]
        if width * height > most:
            raise fields.wrong_value("size", f"at most {most} points in all (the model's max_pixels)")
        return width, height

    # ---------------------------------------------------------------------------------------------------------- drawing

    def _draw_all(self, name: str, wanted: Drawing, cancel: Cancel, put: Callable[[Picture | Comment], None]) -> None:
        """Draw all pictures of a request. Blocks. Raises WorkerError, CancelledWorkError."""
        try:
            values = {**wanted.values, **{key: self._upload(key, data) for key, data in wanted.pictures.items()}}
            turns = wanted.count
            if "n" in self.workflow.places:
                values["n"], turns = wanted.count, 1
            for at in range(turns):
                cancel.check()
                self._run_workflow(name, values, wanted, (at, turns), cancel, put)
        finally:
            self.steps.end(name)
            assert self._folder is not None, "it is loaded"
            self._folder.clear()

    def _run_workflow(
        self,
        name: str,
        values: Mapping[str, object],
        wanted: Drawing,
        turn: tuple[int, int],
        cancel: Cancel,
        put: Callable[[Picture | Comment], None],
    ) -> None:
        at, turns = turn
        seed, step, steps, shown = (wanted.seed + at) % SEEDS, 0, 0, 0

        def on_step(done: int, of: int) -> None:
            nonlocal step, steps
            step, steps = done, of
            self.steps.finish_step(name, at * steps + step, turns * steps)
            if wanted.stream:
                put(Comment(f"step {at * steps + step} of {turns * steps}"))

        def on_preview(picture: bytes, kind: str) -> None:
            nonlocal shown
            if shown < wanted.partial and step < steps and step >= (shown + 1) * steps / (wanted.partial + 1):
                put(Picture(picture, kind, seed, shown))
                shown += 1

        seeded = {"seed": seed} if "seed" in self.workflow.places else {}
        filled = self.workflow.fill({**values, **seeded}, secrets.token_hex(8))
        loaders = {self.workflow.places[key][0]: key for key in wanted.pictures}
        places = self.comfy.run(filled, loaders, cancel, on_step, on_preview)
        if not places:
            raise WorkerError(
                "The workflow made no picture: it needs a node that saves one.", code="worker_failed", status=500
            )
        converted = None if wanted.format == "png" else f"{wanted.format};{wanted.compression}"
        for place in places:
            put(Picture(self.comfy.picture(place, converted), wanted.format, seed))
        self._drawn.inc(len(places))

    def _upload(self, key: str, picture: bytes) -> str:
        return self.comfy.upload(f"{key}-{secrets.token_hex(8)}", picture)


if __name__ == "__main__":
    serve(ComfyWorker)
