"""Picture files: reading those of clients, and writing the results."""

from __future__ import annotations

import io
from typing import BinaryIO, Final, Literal

from PIL import Image, ImageOps

from runtimes.sdk.errors import WorkerError

Format = Literal["png", "jpeg", "webp"]
FORMATS: Final[tuple[Format, ...]] = ("png", "jpeg", "webp")
MOST_PIXELS: Final = 64 * 1024 * 1024  # of a file: more could take all memory
OPAQUE: Final = 255
_READABLE: Final = ("PNG", "JPEG", "WEBP")


def read(file: BinaryIO, name: str) -> Image.Image:
    """The picture in a file, turned upright. Raises WorkerError for a file that is no picture or too large."""
    try:
        picture = Image.open(file, formats=_READABLE)
        is_readable = picture.width * picture.height <= MOST_PIXELS
        turned = _to_8_bit(ImageOps.exif_transpose(picture)) if is_readable else picture
    except Image.DecompressionBombError as error:  # of a size that Pillow alone refuses
        raise WorkerError(
            f"{name} has too many points; at most {MOST_PIXELS} can be read.", param=name, code="image_too_large"
        ) from error
    except Exception as error:  # Pillow's readers raise whatever a broken file makes them raise
        raise WorkerError(f"{name} can't be read as PNG, JPEG or WebP.", param=name, code="invalid_image") from error
    if not is_readable:
        size = f"{picture.width}x{picture.height}"
        raise WorkerError(
            f"{name} has {size} points; at most {MOST_PIXELS} can be read.", param=name, code="image_too_large"
        )
    return turned


def _to_8_bit(picture: Image.Image) -> Image.Image:
    """The picture with one byte for each value. Pillow's own conversion turns any 16-bit grey above 255 into white."""
    return picture.point(lambda value: value / 256).convert("L") if picture.mode.startswith("I") else picture


def without_transparency(picture: Image.Image) -> Image.Image:
    """The picture without transparency: transparent parts become white."""
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def mask(picture: Image.Image) -> Image.Image:
    """The mask, white where the model shall draw: the transparent part or, in an opaque picture, the white part."""
    opacity = picture.convert("RGBA").getchannel("A")
    least, _ = opacity.getextrema()
    return picture.convert("L") if least == OPAQUE else ImageOps.invert(opacity)


def encode(picture: Image.Image, kind: Format, compression: int) -> bytes:
    """The picture as a file of this format. `compression`: see the parameter `output_compression`."""
    file = io.BytesIO()
    if kind == "png":
        picture.save(file, "PNG", compress_level=6)
    else:
        picture.save(file, kind.upper(), quality=compression)
    return file.getvalue()
