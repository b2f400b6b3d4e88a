"""Tiny pipelines for the diffusers runtime, written once per machine by tests/support/generators/diffusion.py."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from tests.support import made_once


def model(kind: str = "sd") -> Path:
    """A pipeline's folder: sd, sdxl, sd3, flux or schnell; or lora, the folder of a LoRA for sd."""
    return made_once.generated(f"pictures-{kind}", "diffusion", "diffusers", kind=kind)


def png(size: tuple[int, int] = (64, 64), color: str | tuple[int, ...] = "teal") -> bytes:
    """A picture of one colour; a colour of four numbers has an opacity."""
    file = io.BytesIO()
    Image.new("RGBA" if isinstance(color, tuple) and len(color) == 4 else "RGB", size, color).save(file, "PNG")
    return file.getvalue()


def opened(data: str | bytes) -> Image.Image:
    """A picture, also one in base64."""
    return Image.open(io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data))
