"""`llmux config import`: read another program's configuration, write ours, and report the losses.

Each format is a module of pure functions from its parsed document to a `Draft`. The result is always a valid configuration;
the report, and comments at the models in the file, list settings that are lost or work differently from now on.
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
from supervisor.catalog.assembly import KEYS_NAME, Assembly, config_error
from supervisor.catalog.catalog import troubles_text
from supervisor.catalog.document.document import Layer, Place, Source, Table, dotted, parse, plain, tree_of
from supervisor.catalog.document.yaml_writer import to_yaml
from supervisor.catalog.loading.loader import FILE_NAME
from supervisor.cli.configuration import LOCAL_VARIABLE, SETTINGS_VARIABLE
from supervisor.cli.importers import first_llmux, llama_swap, llm_pool, model_boss, presets
from supervisor.cli.importers.draft import Draft, Values
from supervisor.errors import ConfigError, InvalidRequestError
from supervisor.host.store import files

OTHER_KEYS_NAME: Final = "llmux_keys.yaml"  # used where a file of keys exists already
DEFAULT_SETTINGS: Final = Path("config/settings.json")  # of llm-pool
_SUFFIXES: Final = {".ini": "llama.cpp", ".json": "llm-pool"}
_MOST_FILES: Final = {"llm-pool": 2, "first-llmux": 2, "model-boss": 2}


def run(paths: Sequence[Path], form: str | None, out: Path | None) -> tuple[Draft, str]:
    """The draft and the text of the configuration, which is written to `out`, if given.

    Raises ConfigError for files that can't be imported, InvalidRequestError where `out` exists, UsageError for the wrong
    number of files.
    """
    if not paths and form is None and (os.environ.get(SETTINGS_VARIABLE) or DEFAULT_SETTINGS.is_file()):
        form = "llm-pool"
    if not paths and form != "llm-pool":
        raise click.UsageError("Name the file to import.")
    form = form or _detect_format(paths[0])
    if form == "llm-pool" and len(paths) < 2:
        paths = _settings_files(*paths)
    elif len(paths) > _MOST_FILES.get(form, 1):
        raise click.UsageError(f"{form} has {_MOST_FILES.get(form, 1)} file(s), not {len(paths)}.")
    draft = read(paths, form, Path.cwd() if out is None else out.absolute().parent)
    keys = None if out is None or not draft.keys else out.with_name(KEYS_NAME)
    if keys is not None and keys.exists():  # such as the first llmux's own file
        draft.look(
            KEYS_NAME,
            f"is there already and stays as it is: the keys are in {OTHER_KEYS_NAME}, which server.api_keys names",
        )
        keys = keys.with_name(OTHER_KEYS_NAME)
        draft.server["api_keys"] = OTHER_KEYS_NAME
    written = [path for path in (out, keys) if path is not None]
    if there := [str(path) for path in written if path.exists()]:
        raise InvalidRequestError(f"{', '.join(there)} is there already: name another file with -o, or move it away.")
    names = " and ".join(path.name for path in paths)
    text = draft.text((f"Imported from {names} ({form}) by llmux config import.",))
    _validate_text(text)
    if out is not None:
        files.create(out, text)
        if keys is not None:
            files.create(keys, to_yaml({"keys": list[JsonValue](draft.keys)}))
    return draft, text


def report(draft: Draft, out: Path | None) -> str:
    count = f"{len(draft.models)} models, {len(draft.virtual_models)} virtual models"
    count += f", {len(draft.tasks)} tasks" if draft.tasks else ""
    keys = f", {len(draft.keys)} keys" if draft.keys else ""
    where = f" written to {out}; check it with: llmux config check --config {out}" if out is not None else ""
    if draft.keys and out is None:
        keys += " (written only with -o FILE, to the file of keys beside it)"
    return "\n".join((f"Imported {count}{keys}{where}.", *draft.report_lines()))


def as_json(draft: Draft, text: str, out: Path | None) -> dict[str, JsonValue]:
    """The report for machines, with the text where no file was written."""
    about: dict[str, JsonValue] = {
        "models": list(draft.models),
        "virtual_models": list(draft.virtual_models),
        "tasks": list(draft.tasks),
        "keys": [key["name"] for key in draft.keys],
        "notes": list(draft.report()),
        "out": str(out) if out is not None else None,
    }
    return about if out is not None else about | {"text": text}


def _settings_files(settings: Path | None = None) -> list[Path]:
    """The files that llm-pool itself would read: `settings`, else its usual file, and the file that overrides it.

    Raises ConfigError when a file that a variable names is missing.
    """
    settings = settings or _path_in_variable(SETTINGS_VARIABLE) or DEFAULT_SETTINGS
    local = _path_in_variable(LOCAL_VARIABLE) or settings.with_name("local.json")
    return [settings] if local == settings or not local.is_file() else [settings, local]


def llm_pool_files() -> list[Path]:
    """The settings file that llm-pool's variable names, and the local one, which may be missing.

    Raises ConfigError when a named file is missing.
    """
    settings, local = _path_in_variable(SETTINGS_VARIABLE) or DEFAULT_SETTINGS, _path_in_variable(LOCAL_VARIABLE)
    if not settings.is_file():
        raise ConfigError((f"{LOCAL_VARIABLE} goes over {settings}, and there is no such file",))
    return [settings.absolute(), (local or settings.with_name("local.json")).absolute()]


def _path_in_variable(variable: str) -> Path | None:
    path = Path(os.environ[variable]) if os.environ.get(variable) else None
    if path is not None and not path.is_file():
        raise ConfigError((f"{variable}: {path}: there is no such file",))
    return path


def read(paths: Sequence[Path], form: str, folder: Path) -> Draft:
    """The settled draft of these files, as for a configuration file in `folder`. Blocks on the files of models at rest.

    Raises ConfigError for unreadable files, and for files that their program would refuse.
    """
    path = paths[0]
    match form:
        case "llama-swap":
            convert = partial(llama_swap.convert, _read_yaml(path), os.environ)
        case "llama.cpp":
            convert = partial(presets.convert, _read_text(path))
        case "first-llmux":
            beside = path.with_name(first_llmux.KEYS_FILE)
            keys = paths[1] if len(paths) > 1 else beside if beside.is_file() else None
            found = first_llmux.models_folder(path.parent)
            convert = partial(first_llmux.convert, _read_yaml(path), {} if keys is None else _read_yaml(keys), found)
        case "model-boss":
            beside = path.with_name(model_boss.TASKS_FILE)
            tasks = paths[1] if len(paths) > 1 else beside if beside.is_file() else None
            convert = partial(model_boss.convert, _read_yaml(path), {} if tasks is None else _read_yaml(tasks))
        case _:
            convert = partial(llm_pool.convert, reduce(llm_pool.merged, map(_read_json, paths)))
    try:
        draft = convert()
    except ConfigError as error:
        raise ConfigError(tuple(f"{path}: {problem}" for problem in error.problems)) from error
    draft.settle()
    _switch_off_unusable(draft, folder)
    return draft


def _switch_off_unusable(draft: Draft, folder: Path) -> None:
    """Switch off unloaded models that this machine can't run: they didn't run here before, either."""
    for name in list(draft.at_rest):
        if name in draft.models and (why := _first_trouble(name, draft.models[name], folder)) is not None:
            draft.switch_off(name, why)


def _first_trouble(name: str, values: Values, folder: Path) -> str | None:
    """The first problem of a model or its files, in a configuration in `folder`; None: there is none."""
    root = tree_of({"models": {name: values}}, Place(Source(Layer.FILE, "imported", folder)))
    assert isinstance(root, Table)
    assembly = Assembly(root, folder / FILE_NAME, REGISTRY, check_files=True)
    try:
        return next(
            (troubles_text(one.troubles[:1]) for one in assembly.catalog([]).models.values() if one.troubles), None
        )
    except ConfigError:
        problem = assembly.problems[0]
        key = dotted(problem.trail[2:])
        return f"{key}: {problem.message}" if key else problem.message


def _detect_format(path: Path) -> str:
    """The format, by the file's suffix, or by the sections of a YAML file."""
    form = _SUFFIXES.get(path.suffix.lower())
    if form is not None:
        return form
    root = _read_yaml(path)
    return (
        "first-llmux" if "physical_models" in root else "model-boss" if model_boss.is_manifest(root) else "llama-swap"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError((f"{path}: there is no such file",)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError((f"{path}: can't be read: {error}",)) from error


def _read_yaml(path: Path) -> Mapping[str, JsonValue]:
    root, problems = parse(_read_text(path), Source(Layer.FILE, str(path), path.parent))
    if problems or not isinstance(root, Table):
        raise config_error(problems) if problems else ConfigError((f"{path}: expected a mapping",))
    value = plain(root)
    assert isinstance(value, dict)
    return value


def _read_json(path: Path) -> Mapping[str, JsonValue]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError((f"{path}: no valid JSON: {error}",)) from error
    if not isinstance(value, dict):
        raise ConfigError((f"{path}: expected an object",))
    return value


def _validate_text(text: str) -> None:
    """Validate the written configuration, without the files that it names. Raises ConfigError."""
    root, problems = parse(text, Source(Layer.FILE, "imported", Path.cwd()))
    if not isinstance(root, Table):
        raise config_error(problems)
    Assembly(root, Path("llmux.yaml").absolute(), REGISTRY, check_files=False).catalog(problems)
