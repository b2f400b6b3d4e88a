"""Tiny pipelines for the diffusers runtime, written once per machine by tests/support/generators/diffusion.py.

Writing one takes diffusers, so the generator is run by the Python of the runtime's own environment.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

from PIL import Image

from tests.support import environments, tiny
from tests.support.limits import LIMIT_S

GENERATOR = Path(__file__).parent / "generators" / "diffusion.py"


def model(kind: str = "sd") -> Path:
    """A pipeline's folder: sd, sdxl, sd3, flux or schnell; or lora, the folder of a LoRA for sd."""
    digest = hashlib.sha256(GENERATOR.read_bytes()).hexdigest()[:16]
    folder = tiny.CACHE / "models" / f"pictures-{kind}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        python = environments.installed("diffusers") / "diffusers" / "bin" / "python"
        draft = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [python, "-I", GENERATOR, draft, json.dumps({"kind": kind})]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        try:
            draft.rename(folder)
        except OSError:  # another run was quicker
            shutil.rmtree(draft)
    return folder


def png(size: tuple[int, int] = (64, 64), color: str | tuple[int, ...] = "teal") -> bytes:
    """A picture of one colour; a colour of four numbers has an opacity."""
    file = io.BytesIO()
    Image.new("RGBA" if isinstance(color, tuple) and len(color) == 4 else "RGB", size, color).save(file, "PNG")
    return file.getvalue()


def opened(data: str | bytes) -> Image.Image:
    """A picture, also one in base64."""
    return Image.open(io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data))
