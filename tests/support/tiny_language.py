"""Tiny language models for the transformers runtime, written once per machine by tests/support/generators/language.py."""

from __future__ import annotations

from pathlib import Path

from tests.support import made_once

ANSWER = "Hello from a tiny model 🙂"
THOUGHT = "pondering"


def python() -> Path:
    """The Python that has torch and transformers."""
    return made_once.python("transformers")


def model(kind: str = "qwen3", **options: object) -> Path:
    """A model folder; `options` are those of the generator's `write`."""
    return made_once.generated(kind, "language", "transformers", kind=kind, **options)
