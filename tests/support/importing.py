"""Imported configurations, and what was told of them."""

from __future__ import annotations

from typing import Any

from supervisor.cli.importers import llama_swap, presets
from supervisor.cli.importers.draft import Draft


def swap(text_or_models: dict[str, Any], **sections: Any) -> Draft:
    draft = llama_swap.convert({"models": text_or_models, **sections}, {"HOME": "/home/me"})
    draft.settle()
    return draft


def ini(text: str) -> Draft:
    draft = presets.convert(text)
    draft.settle()
    return draft


def notes(draft: Draft) -> list[str]:
    return [f"{note.where}: {note.message}" for note in draft.notes]
