"""Parses an image request, and checks it against the abilities of the model."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from PIL import Image

from runtimes.diffusers.worker import pictures
from runtimes.diffusers.worker.pictures import FORMATS, Format
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError, unsupported

MOST_PICTURES: Final = 10
MOST_PARTIAL: Final = 3
MOST_STEPS: Final = 200
MOST_CHARACTERS: Final = 32_000  # of a prompt: while a very long one is read, nothing can be cancelled
LEAST_SIDE: Final = 64
SEEDS: Final = 1 << 32
COMPRESSION: Final = 95
SHARES: Final[Mapping[str, float]] = {"low": 0.5, "auto": 1, "standard": 1, "medium": 1, "high": 1.5, "hd": 1.5}
"""Quality → the share of the usual number of steps."""

Task = Literal["generation", "edit", "variation"]
STRENGTHS: Final[Mapping[Task, float]] = {"generation": 1.0, "edit": 0.8, "variation": 0.6}


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities and defaults of the model."""

    multiple: int  # each side must be a multiple of it
    native: tuple[int, int]
    max_pixels: int
    steps: int
    guidance: float | None  # None: the model has no guidance
    takes_negative: bool
    takes_true_cfg: bool  # then a negative prompt needs it
    previews: bool  # can the model show unfinished pictures?


@dataclass(frozen=True, slots=True)
class Drawing:
    """A parsed request."""

    task: Task
    prompt: str
    negative: str | None
    size: tuple[int, int]
    steps: int
    guidance: float | None
    true_cfg: float
    strength: float
    image: Image.Image | None
    mask: Image.Image | None
    seed: int
    count: int
    quality: str
    format: Format
    compression: int
    stream: bool
    partial: int
    wants_links: bool

    def seed_of(self, place: int) -> int:
        """The seed of the picture with this index."""
        return (self.seed + place) % SEEDS


def drawing(
    body: Body, task: Task, abilities: Abilities, image: Image.Image | None = None, mask: Image.Image | None = None
) -> Drawing:
    """Parse the request with these fields and pictures. Raises WorkerError."""
    count = body.integer("n", 1, 1, MOST_PICTURES)
    wants_links = body.choice("response_format", ("b64_json", "url"), "b64_json") == "url"
    if wants_links and body.flag("stream"):
        raise unsupported("response_format", "a stream brings the pictures along; leave out url, or stream.")
    stream = body.flag("stream")
    partial = body.integer("partial_images", 0, 0, MOST_PARTIAL)
    if partial and not stream:
        raise unsupported("partial_images", "they come in a stream: say stream: true.")
    if partial and not abilities.previews:
        raise unsupported("partial_images", "what this model has between its steps can't be shown.")
    guidance, true_cfg = _parse_guidance(body, abilities)
    steps, strength = _parse_steps(body, task, abilities, is_masked=mask is not None)
    seed = body.integer("seed", -1, -1, SEEDS - 1)
    size = _parse_size(body, abilities, image)
    kind = body.choice("output_format", FORMATS, "png")
    compression = body.integer("output_compression", None, 0, 100)
    if compression not in (None, 100) and kind == "png":
        raise unsupported("output_compression", "PNG loses nothing; it is for jpeg and webp.")
    for name in ("prompt", "negative_prompt"):
        if (length := len(body.text(name, ""))) > MOST_CHARACTERS:
            raise WorkerError(f"{name} has {length} characters; {MOST_CHARACTERS} are the most.", param=name)
    return Drawing(
        task=task,
        prompt=(body.text("prompt") or "") if task == "variation" else body.required_text("prompt"),
        negative=body.text("negative_prompt") or None,
        size=size,
        steps=steps,
        guidance=guidance,
        true_cfg=true_cfg,
        strength=strength,
        image=None if image is None else pictures.without_transparency(image).resize(size, Image.Resampling.LANCZOS),
        mask=None if mask is None else _resize_mask(mask, image, size),
        seed=secrets.randbelow(SEEDS) if seed == -1 else seed,
        count=count,
        quality=body.choice("quality", tuple(SHARES), "auto"),
        format=kind,
        compression=COMPRESSION if compression is None else compression,
        stream=stream,
        partial=partial,
        wants_links=wants_links,
    )


def _parse_guidance(body: Body, abilities: Abilities) -> tuple[float | None, float]:
    guidance = body.number("guidance", body.number("guidance_scale", None, 0, 50), 0, 50)
    true_cfg = body.number("true_cfg", None, 1, 50)
    if guidance is not None and abilities.guidance is None:
        raise unsupported("guidance", "this model was distilled without; leave it out.")
    if true_cfg is not None and not abilities.takes_true_cfg:
        raise unsupported("true_cfg", "this model is guided by guidance.")
    effective = abilities.guidance if guidance is None else guidance
    if body.text("negative_prompt"):
        if not abilities.takes_negative:
            raise unsupported("negative_prompt", "this model has none.")
        if abilities.takes_true_cfg and (true_cfg or 1) <= 1:
            raise unsupported("negative_prompt", "this model heeds it only with a true_cfg above 1, such as 4.")
        if not abilities.takes_true_cfg and effective is not None and effective <= 1:
            raise unsupported(
                "negative_prompt", f"it has no effect with a guidance of {effective:g}; more than 1 is needed."
            )
    return effective, 1.0 if true_cfg is None else true_cfg


def _parse_steps(body: Body, task: Task, abilities: Abilities, *, is_masked: bool) -> tuple[int, float]:
    given = body.integer("steps", body.integer("num_inference_steps", None, 1, MOST_STEPS), 1, MOST_STEPS)
    share = SHARES[body.choice("quality", tuple(SHARES), "auto")]
    steps = math.ceil(abilities.steps * share) if given is None else given
    strength = body.number("strength", 1.0 if is_masked else STRENGTHS[task], 0, 1)
    if int(steps * strength) < 1:
        raise WorkerError(
            f"A strength of {strength:g} makes none of {steps} steps: raise strength, or steps.", param="strength"
        )
    return steps, strength


def _parse_size(body: Body, abilities: Abilities, image: Image.Image | None) -> tuple[int, int]:
    given = body.text("size", "auto") or "auto"
    if given == "auto":
        return abilities.native if image is None else _nearest_size(image.size, abilities)
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", given)
    width, height = (int(found[1]), int(found[2])) if found else (0, 0)
    step = abilities.multiple
    if found is None or width % step or height % step or min(width, height) < LEAST_SIDE:
        raise body.wrong_value("size", f"WIDTHxHEIGHT, both multiples of {step} and at least {LEAST_SIDE}, or auto")
    if width * height > abilities.max_pixels:
        raise body.wrong_value("size", f"at most {abilities.max_pixels} points in all (the model's max_pixels)")
    return width, height


def _nearest_size(size: tuple[int, int], abilities: Abilities) -> tuple[int, int]:
    """The size nearest to a picture's own that the model can draw."""
    shrunk = min(1.0, math.sqrt(abilities.max_pixels / (size[0] * size[1])))
    width, height = (max(LEAST_SIDE, int(side * shrunk) // abilities.multiple * abilities.multiple) for side in size)
    if width * height > abilities.max_pixels:
        raise WorkerError(f"image is {size[0]}x{size[1]}: too long to be drawn. Say a size.", param="image")
    return width, height


def _resize_mask(mask: Image.Image, image: Image.Image | None, size: tuple[int, int]) -> Image.Image:
    if image is None or mask.size != image.size:
        its = "missing" if image is None else f"{image.width}x{image.height}"
        raise WorkerError(f"mask is {mask.width}x{mask.height}, and image {its}; make them the same.", param="mask")
    return pictures.mask(mask).resize(size, Image.Resampling.NEAREST)
