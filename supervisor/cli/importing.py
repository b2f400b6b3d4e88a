"""`llmux config import`: another program's configuration read, ours written, and what didn't come along told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import JsonValue

from supervisor.cli import importers
from supervisor.cli.importers.draft import Draft
from supervisor.errors import InvalidRequestError


def run(paths: Sequence[Path], form: str | None, out: Path | None) -> tuple[Draft, str]:
    """The draft and the text of the file, which is written to `out` if that is given.

    Raises ConfigError for files that can't be imported, InvalidRequestError where `out` exists or no file is meant.
    """
    paths = list(paths)
    if not paths and (form == importers.Format.LLM_POOL or (form is None and importers.has_settings(os.environ))):
        form, paths = importers.Format.LLM_POOL, importers.sources(os.environ)
    if not paths:
        raise click.UsageError("Name the file to import.")
    kind = importers.Format(form) if form is not None else importers.format_of(paths[0])
    if kind is importers.Format.LLM_POOL and len(paths) == 1:
        paths = importers.sources(os.environ, paths[0])
    if len(paths) > 1 and kind is not importers.Format.LLM_POOL:
        raise click.UsageError(f"{kind} has one file, not {len(paths)}.")
    if out is not None and out.exists():
        raise InvalidRequestError(f"{out} is there already: name another file with -o, or move it away.")
    draft = importers.read(paths, kind)
    names = " and ".join(path.name for path in paths)
    text = draft.text((f"Imported from {names} ({kind}) by llmux config import.",))
    importers.check(text, Path.cwd())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    return draft, text


def told(draft: Draft, out: Path | None) -> str:
    """The report, for people."""
    count = f"{len(draft.models)} models, {len(draft.virtual_models)} virtual models"
    where = f" written to {out}; check it with: llmux config check --config {out}" if out is not None else ""
    return "\n".join((f"Imported {count}{where}.", *draft.told()))


def as_json(draft: Draft, text: str, out: Path | None) -> dict[str, JsonValue]:
    """The same for machines; with the text, where no file has it."""
    about: dict[str, JsonValue] = {
        "models": list(draft.models),
        "virtual_models": list(draft.virtual_models),
        "notes": list(draft.report()),
        "out": str(out) if out is not None else None,
    }
    return about if out is not None else about | {"text": text}
