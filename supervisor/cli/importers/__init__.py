"""Configurations of other programs, turned into ours: `importing.read` → a `Draft` → a file and a report.

Each format is a module of pure functions from its parsed document to a draft. The result is always a valid configuration;
whatever did not come along, or works otherwise from now on, is in the report and beside the model in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial, reduce
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes.registry import REGISTRY
from supervisor.catalog.assembly import Assembly, fail
from supervisor.catalog.catalog import Catalog
from supervisor.catalog.document import Layer, Source, Table, parse, plain
from supervisor.cli.importers import llama_swap, llm_pool, presets
from supervisor.cli.importers.draft import Draft
from supervisor.errors import ConfigError


class Format(StrEnum):
    """What can be imported."""

    LLAMA_SWAP = "llama-swap"
    LLAMA_CPP = "llama.cpp"
    LLM_POOL = "llm-pool"


DEFAULT_SETTINGS: Final = Path("config/settings.json")
_SUFFIXES: Final = {".ini": Format.LLAMA_CPP, ".json": Format.LLM_POOL}


def has_settings(environ: Mapping[str, str]) -> bool:
    """Is there a settings.json of llm-pool to be found without its name?"""
    return bool(environ.get(llm_pool.SETTINGS_VARIABLE)) or DEFAULT_SETTINGS.is_file()


def sources(environ: Mapping[str, str], settings: Path | None = None) -> list[Path]:
    """The files that llm-pool itself would read: `settings`, or where it looks for it, and what goes over it.

    Raises ConfigError when one that a variable names isn't there.
    """
    settings = settings or _named(environ, llm_pool.SETTINGS_VARIABLE) or DEFAULT_SETTINGS
    local = _named(environ, llm_pool.LOCAL_VARIABLE) or settings.with_name("local.json")
    if local == settings or not local.is_file():
        return [settings]
    return [settings, local]


def _named(environ: Mapping[str, str], variable: str) -> Path | None:
    path = Path(environ[variable]) if environ.get(variable) else None
    if path is not None and not path.is_file():
        raise ConfigError((f"{variable}: {path}: there is no such file",))
    return path


def format_of(path: Path) -> Format:
    """By its name."""
    return _SUFFIXES.get(path.suffix.lower(), Format.LLAMA_SWAP)


def read(paths: Sequence[Path], form: Format) -> Draft:
    """What the files say, settled. llm-pool has two, the others one. Blocks on them.

    Raises ConfigError for files that can't be read, or that their own program would refuse.
    """
    path = paths[0]
    match form:
        case Format.LLAMA_SWAP:
            convert = partial(llama_swap.convert, _yaml(path), os.environ)
        case Format.LLAMA_CPP:
            text = _text(path)
            convert = partial(_presets, text)
        case Format.LLM_POOL:
            convert = partial(llm_pool.convert, reduce(llm_pool.merged, map(_json, paths)))
    try:
        draft = convert()
    except ConfigError as error:
        raise ConfigError(tuple(f"{path}: {problem}" for problem in error.problems)) from error
    draft.settle()
    return draft


def _presets(text: str) -> Draft:
    return presets.convert(presets.parse(text))


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
        raise fail(problems) if problems else ConfigError((f"{path}: expected a mapping",))
    value = plain(root)
    assert isinstance(value, dict)
    return value


def _json(path: Path) -> Mapping[str, JsonValue]:
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError((f"{path}: no valid JSON: {error}",)) from error
    if not isinstance(value, dict):
        raise ConfigError((f"{path}: expected an object",))
    return value


def check(text: str, directory: Path) -> Catalog:
    """The catalog of a written file, files not looked at. Raises ConfigError."""
    source = Source(Layer.FILE, "imported", directory)
    root, problems = parse(text, source)
    if not isinstance(root, Table):
        raise fail(problems)
    return Assembly(root, directory / "llmux.yaml", REGISTRY, check_files=False).catalog(problems)
