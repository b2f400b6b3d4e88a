"""Pictures in requests: data URLs only, decoded. Nothing is downloaded. Needs Pillow in the worker's environment."""

from __future__ import annotations

import base64
import io
import re
import struct
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError

from runtimes.sdk.errors import WorkerError

DATA: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
MAX_PIXELS: Final = 50_000_000  # of a request: a small file may decompress to any number of pixels
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow runs programs for some others, such as EPS

# Exceptions of Pillow's readers beside OSError and ValueError.
_BROKEN: Final = (EOFError, OverflowError, LookupError, TypeError, struct.error)


def picture(url: object, pixels: int = MAX_PIXELS, *, field: str = "messages", place: str = "") -> Image.Image:
    """The image of a data URL, of at most `pixels`. `field` of the request holds it, at `place`. Raises WorkerError."""
    found = DATA.match(url) if isinstance(url, str) else None
    if found is None or not isinstance(url, str):
        raise unusable(
            field, "a picture must be a data URL such as data:image/png;base64,…; addresses are not fetched", place
        )
    try:
        opened = Image.open(io.BytesIO(base64.b64decode(url[found.end() :], validate=True)), formats=FORMATS)
        if opened.width * opened.height > pixels:
            size = f"{opened.width} × {opened.height} pixels"
            raise unusable(field, f"the picture has {size}; {MAX_PIXELS} are the most in a request", place)
        return ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError as error:  # its message names an object of ours
        raise unusable(field, f"the picture can't be read: it is none of {', '.join(FORMATS)}", place) from error
    except (OSError, ValueError, SyntaxError, *_BROKEN, Image.DecompressionBombError) as error:
        raise unusable(field, f"the picture can't be read: {error}", place) from error


def unusable(field: str, message: str, place: str = "") -> WorkerError:
    """The error for a picture in this field. `place`: the picture's place in a field with several."""
    return WorkerError(f"{place or field}: {message}.", code="invalid_image", param=field)
