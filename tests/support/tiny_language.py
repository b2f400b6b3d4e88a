"""Tiny language models for the transformers runtime, written once per machine by tests/support/generators/language.py.

Writing one takes torch, so the generator is run by the Python of the runtime's own environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.support import environments, tiny
from tests.support.limits import LIMIT_S

GENERATOR = Path(__file__).parent / "generators" / "language.py"
ANSWER = "Hello from a tiny model 🙂"
THOUGHT = "pondering"


def python() -> Path:
    """The Python that has torch and transformers."""
    return environments.installed("transformers") / "transformers" / "bin" / "python"


def model(kind: str = "qwen3", **options: object) -> Path:
    """A model folder; `options` are those of the generator's `write`."""
    wanted = json.dumps({"kind": kind, **options}, sort_keys=True)
    digest = hashlib.sha256(wanted.encode() + GENERATOR.read_bytes()).hexdigest()[:16]
    folder = tiny.CACHE / "models" / f"{kind}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = folder.with_name(f"{folder.name}.{os.getpid()}")
        done = subprocess.run(
            [python(), "-I", GENERATOR, draft, wanted], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        try:
            draft.rename(folder)
        except OSError:  # another run was quicker
            shutil.rmtree(draft)
    return folder
