"""Pictures that clients send, read as they are meant to be seen."""

from __future__ import annotations

import io
import zlib

import pytest
from PIL import Image

from runtimes.diffusers.worker import pictures
from runtimes.sdk.errors import WorkerError


def read(picture: Image.Image) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return pictures.read(file, "image")


@pytest.mark.parametrize(("value", "seen"), [(0, 0), (1 << 14, 64), (65_535, 255)])
def test_a_grey_of_16_bits_is_that_grey(value, seen):
    grey = read(Image.new("I;16", (2, 2), value))
    assert pictures.without_transparency(grey).getpixel((0, 0)) == (seen, seen, seen)
    assert pictures.mask(grey).getpixel((0, 0)) == seen


def test_what_is_transparent_is_drawn_anew_and_seen_white():
    clear = read(Image.new("RGBA", (2, 2), (0, 0, 0, 0)))
    assert pictures.without_transparency(clear).getpixel((0, 0)) == (255, 255, 255)
    assert pictures.mask(clear).getpixel((0, 0)) == 255


def test_a_mask_without_transparency_says_it_in_white():
    """Many editors save an opacity of 255 everywhere."""
    for mode in ("1", "L", "RGB", "RGBA"):
        half = Image.new(mode, (2, 1), "black")
        half.paste("white", (1, 0, 2, 1))
        shown = pictures.mask(read(half))
        assert (shown.getpixel((0, 0)), shown.getpixel((1, 0))) == (0, 255)


@pytest.mark.parametrize("side", [9000, 20_000])
def test_one_that_is_too_large_is_not_decoded(side):
    """Nor is one that Pillow takes for an attack."""
    head = io.BytesIO()
    Image.new("1", (1, 1)).save(head, "PNG")
    data = bytearray(head.getvalue())
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    with pytest.raises(WorkerError, match="at most 67108864 can be read") as refused:
        pictures.read(io.BytesIO(data), "image")
    assert refused.value.code == "image_too_large"
