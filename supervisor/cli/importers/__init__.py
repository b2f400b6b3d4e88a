"""`llmux config import`: read another program's configuration, write ours, and report what didn't come along.

Each format is a module of pure functions from its parsed document to a `Draft`. The result is always a valid configuration;
whatever did not come along, or works differently from now on, is in the report and beside the model in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Final

import click
from pydantic import JsonValue

from runtimes.registry import REGISTRY
from supervisor.catalog.assembly import Assembly, config_error
from supervisor.catalog.document import Layer, Source, Table, parse, plain
from supervisor.cli.importers import llama_swap, llm_pool, presets
from supervisor.cli.importers.draft import Draft
from supervisor.errors import ConfigError, InvalidRequestError

DEFAULT_SETTINGS: Final = Path("config/settings.json")  # of llm-pool
_SUFFIXES: Final = {".ini": "llama.cpp", ".json": "llm-pool"}


def run(paths: Sequence[Path], form: str | None, out: Path | None) -> tuple[Draft, str]:
    """The draft and the text of the file, which is written to `out` if that is given.

    Raises ConfigError for files that can't be imported, InvalidRequestError where `out` exists, UsageError for the wrong
    number of files.
    """
    if not paths and form is None and (os.environ.get(llm_pool.SETTINGS_VARIABLE) or DEFAULT_SETTINGS.is_file()):
        form = "llm-pool"
    if not paths and form != "llm-pool":
        raise click.UsageError("Name the file to import.")
    form = form or _SUFFIXES.get(paths[0].suffix.lower(), "llama-swap")
    if form == "llm-pool" and len(paths) < 2:
        paths = _settings_files(*paths)
    elif len(paths) > 1 and form != "llm-pool":
        raise click.UsageError(f"{form} has one file, not {len(paths)}.")
    if out is not None and out.exists():
        raise InvalidRequestError(f"{out} is there already: name another file with -o, or move it away.")
    draft = read(paths, form)
    names = " and ".join(path.name for path in paths)
    text = draft.text((f"Imported from {names} ({form}) by llmux config import.",))
    _check(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    return draft, text


def report(draft: Draft, out: Path | None) -> str:
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


def _settings_files(settings: Path | None = None) -> list[Path]:
    """The files that llm-pool itself would read: `settings`, or where it looks for it, and what goes over it.

    Raises ConfigError when one that a variable names isn't there.
    """
    settings = settings or _named_by(llm_pool.SETTINGS_VARIABLE) or DEFAULT_SETTINGS
    local = _named_by(llm_pool.LOCAL_VARIABLE) or settings.with_name("local.json")
    return [settings] if local == settings or not local.is_file() else [settings, local]


def _named_by(variable: str) -> Path | None:
    path = Path(os.environ[variable]) if os.environ.get(variable) else None
    if path is not None and not path.is_file():
        raise ConfigError((f"{variable}: {path}: there is no such file",))
    return path


def read(paths: Sequence[Path], form: str) -> Draft:
    """What the files say, settled. Raises ConfigError for files that can't be read, or that their program would refuse."""
    path = paths[0]
    match form:
        case "llama-swap":
            convert = partial(llama_swap.convert, _yaml(path), os.environ)
        case "llama.cpp":
            convert = partial(presets.convert, _text(path))
        case _:
            convert = partial(llm_pool.convert, reduce(llm_pool.merged, map(_json, paths)))
    try:
        draft = convert()
    except ConfigError as error:
        raise ConfigError(tuple(f"{path}: {problem}" for problem in error.problems)) from error
    draft.settle()
    return draft


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError((f"{path}: there is no such file",)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError((f"{path}: can't be read: {error}",)) from error


def _yaml(path: Path) -> Mapping[str, JsonValue]:
    root, problems = parse(_text(path), Source(Layer.FILE, str(path), path.parent))
    if problems or not isinstance(root, Table):
        raise config_error(problems) if problems else ConfigError((f"{path}: expected a mapping",))
    value = plain(root)
    assert isinstance(value, dict)
    return value


def _json(path: Path) -> Mapping[str, JsonValue]:
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError((f"{path}: no valid JSON: {error}",)) from error
    if not isinstance(value, dict):
        raise ConfigError((f"{path}: expected an object",))
    return value


def _check(text: str) -> None:
    """Read the written file, without the files that it names. Raises ConfigError."""
    root, problems = parse(text, Source(Layer.FILE, "imported", Path.cwd()))
    if not isinstance(root, Table):
        raise config_error(problems)
    Assembly(root, Path("llmux.yaml").absolute(), REGISTRY, check_files=False).catalog(problems)
