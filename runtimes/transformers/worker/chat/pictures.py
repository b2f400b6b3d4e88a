"""Images in messages: data URLs only, decoded and prepared for the model. Nothing is downloaded."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any, Final

from PIL import Image, ImageOps

from runtimes.sdk.errors import WorkerError

DATA: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
MAX_PIXELS: Final = 50_000_000  # of a request: a small file may decompress to any number of pixels
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow runs programs for some others, such as EPS


def picture(url: object, pixels: int = MAX_PIXELS) -> Image.Image:
    """The image of a data URL, of at most `pixels`. Raises WorkerError."""
    found = DATA.match(url) if isinstance(url, str) else None
    if found is None or not isinstance(url, str):
        raise _wrong("a picture must be a data URL such as data:image/png;base64,…; addresses are not fetched")
    try:
        opened = Image.open(io.BytesIO(base64.b64decode(url[found.end() :], validate=True)), formats=FORMATS)
        if opened.width * opened.height > pixels:
            raise _wrong(
                f"the picture has {opened.width} × {opened.height} pixels; {MAX_PIXELS} are the most in a request"
            )
        return ImageOps.exif_transpose(opened).convert("RGB")
    except (binascii.Error, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _wrong(f"the picture can't be read: {error}") from error


def prepared(processor: Any, pictures: list[Image.Image]) -> tuple[dict[str, Any], list[int]]:
    """The model's inputs, and the number of tokens of each image. Raises WorkerError."""
    try:
        features = dict(processor(pictures, return_tensors="pt"))
    except ValueError as error:  # unsupported shapes
        raise _wrong(f"the picture can't be used: {error}") from error
    return features, [int(grid.prod()) // processor.merge_size**2 for grid in features["image_grid_thw"]]


def _wrong(message: str) -> WorkerError:
    return WorkerError(f"messages: {message}.", code="invalid_image", param="messages")
