"""Images in messages: data URLs only, decoded. Nothing is downloaded."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Final

from PIL import Image, ImageOps

from runtimes.sdk.chat.messages import TakePicture
from runtimes.sdk.errors import WorkerError

DATA: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
MAX_PIXELS: Final = 50_000_000  # of a request: a small file may decompress to any number of pixels
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow runs programs for some others, such as EPS


def picture(url: object, pixels: int = MAX_PIXELS) -> Image.Image:
    """The image of a data URL, of at most `pixels`. Raises WorkerError."""
    found = DATA.match(url) if isinstance(url, str) else None
    if found is None or not isinstance(url, str):
        raise wrong("a picture must be a data URL such as data:image/png;base64,…; addresses are not fetched")
    try:
        opened = Image.open(io.BytesIO(base64.b64decode(url[found.end() :], validate=True)), formats=FORMATS)
        if opened.width * opened.height > pixels:
            raise wrong(
                f"the picture has {opened.width} × {opened.height} pixels; {MAX_PIXELS} are the most in a request"
            )
        return ImageOps.exif_transpose(opened).convert("RGB")
    except (binascii.Error, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise wrong(f"the picture can't be read: {error}") from error


def taker(images: list[Image.Image]) -> TakePicture:
    """What adds a request's pictures to `images`, one after the other; all together have at most MAX_PIXELS."""

    def take(url: object) -> None:
        images.append(picture(url, MAX_PIXELS - sum(image.width * image.height for image in images)))

    return take


def wrong(message: str) -> WorkerError:
    """The error for a picture that can't be used."""
    return WorkerError(f"messages: {message}.", code="invalid_image", param="messages")
