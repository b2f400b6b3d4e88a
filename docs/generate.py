"""Fills in what the pages of this folder take from the code: settings, commands, endpoints, states, runtimes.

A page says where, between two comments:

    <!-- generated: limits -->
    <!-- end -->

`make docs` writes all of them anew; everything outside the comments is written by hand. A test compares.
"""  # noqa: INP001  # a program, not a package

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from runtimes.base import Endpoint, ModelConfig
from runtimes.chatterbox.parameters import SPEECH
from runtimes.embeddings.parameters import EMBEDDINGS, RERANK
from runtimes.kit.audio.parameters import PARAMETERS as TRANSCRIPTION
from runtimes.kit.parameters import Table
from runtimes.registry import REGISTRY
from runtimes.transformers.parameters import CHAT, COMPLETIONS
from supervisor.catalog.schema import json_schema
from supervisor.cli.exits import MEANINGS
from supervisor.cli.main import main
from supervisor.core.lifecycle import TABLE
from tools import licences

DOCS: Final = Path(__file__).parent

KINDS: Final[Mapping[str, Sequence[Mapping[str, object]]]] = {
    "llama_server": (
        {"path": Path("model.gguf")},
        {"path": Path("model.gguf"), "modalities": ["text", "audio"]},
        {"path": Path("model.gguf"), "type": "embedding"},
        {"path": Path("model.gguf"), "rerank": True},
    ),
    "command": ({"cmd": ["program"]},),
    "transformers": ({"path": Path("model")}, {"path": Path("model"), "type": "asr"}),
    "faster_whisper": ({"path": Path("model")},),
    "embeddings": ({"path": Path("model")}, {"path": Path("model"), "task": "rerank"}),
    "chatterbox": ({"path": Path("model")},),
    "openai_remote": ({"base_url": "https://api.example.com/v1", "upstream_model": "model"},),
    "vllm_serve": (
        {"path": Path("model")},
        {"path": Path("model"), "type": "embedding"},
        {"path": Path("model"), "type": "asr"},
    ),
}
"""Configurations of each runtime that together serve everything it can serve."""

_BLOCK: Final = re.compile(r"(<!-- generated: ([a-z_ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Schema = Mapping[str, Any]


def render(page: str) -> str:
    """The page with all of its blocks written anew. Raises KeyError for a block that nothing here writes."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]()}\n\n{block[3]}", page)


def blocks_of(page: str) -> list[str]:
    """The names of a page's blocks."""
    return [block[2] for block in _BLOCK.finditer(page)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ----------------------------------------------------------------------------------------------------------- settings


def section(name: str, *, without: Container[str] = ()) -> str:
    """The keys of one section of the configuration file."""
    schema = json_schema()
    return settings(schema, _part(schema, name), without=without)


def model_settings() -> str:
    """The keys every model has."""
    schema = ModelConfig.model_json_schema()
    return settings(schema, schema)


def runtime_settings(name: str) -> str:
    """The keys that models of this runtime have besides, or that say more there."""
    config = REGISTRY.get(name).config
    same = {
        key
        for key, field in ModelConfig.model_fields.items()
        if key == "runtime" or config.model_fields[key].annotation == field.annotation
    }
    return section(config.__name__, without=same)


def settings(schema: Schema, part: Schema, *, without: Container[str] = ()) -> str:
    """One part of a schema as a table."""
    required = {*part.get("required", ())} - {"runtime"}  # which mostly follows from the other keys
    rows = [
        (f"`{key}`", kind(field, schema), default(field, required=key in required), field["description"])
        for key, field in part["properties"].items()
        if key not in without
    ]
    return table(("Key", "Value", "Default", "Meaning"), rows)


def _part(schema: Schema, name: str) -> Schema:
    part: Schema = schema["$defs"][name]
    return part


def kind(field: Schema, schema: Schema) -> str:
    """What may stand there, in words."""
    if "$ref" in field:
        return kind(_part(schema, field["$ref"].rpartition("/")[2]), schema)
    if "anyOf" in field:
        return " or ".join(kind(branch, schema) for branch in field["anyOf"] if branch.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    match field.get("const", ...), field.get("type"):
        case (str(value), _):
            return f"`{value}`"
        case (_, "integer"):
            return f"whole number{bounds(field)}"
        case (_, "number"):
            return f"number{bounds(field)}"
        case (_, "boolean"):
            return "`true`, `false`"
        case (_, "array"):
            return f"list of {kind(field['items'], schema)}"
        case (_, "object"):
            inner = field.get("additionalProperties")
            return f"mapping to {kind(inner, schema)}" if inner else "mapping"
        case (_, "string"):
            return "path" if field.get("format") == "path" else "text"
        case _:
            return "any value"


def bounds(field: Schema) -> str:
    """The range of a number, after a blank."""
    words = [
        f"{word} {field[key]:.10g}"
        for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
        if key in field
    ]
    return "".join(f" {word}" for word in words)


def default(field: Schema, *, required: bool) -> str:
    """The default, or that there is none."""
    if required:
        return "required"
    match field.get("default"):
        case None | [] | {}:
            return "–"
        case bool(value):
            return f"`{value}`".lower()
        case [*items]:
            return f"`[{', '.join(map(str, items))}]`"
        case float(value):
            return f"`{value:g}`"
        case value:
            return f"`{value}`"


# ----------------------------------------------------------------------------------------------------------- commands


def commands() -> str:
    """Every command with its arguments and options."""
    return "\n\n".join(about(path, command) for path, command in walk(main, ("llmux",)))


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that call it."""
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from walk(child, (*path, name))
    elif not command.hidden:
        yield path, command


def about(path: tuple[str, ...], command: click.Command) -> str:
    """One command."""
    arguments = [argument_name(found) for found in command.params if isinstance(found, click.Argument)]
    rows = [
        (f"`{' '.join(found.opts)}`{option_value(found)}", found.help or "")
        for found in command.params
        if isinstance(found, click.Option)
    ]
    parts = [f"### `{' '.join((*path, *arguments))}`", command.help or ""]
    return "\n\n".join([*parts, table(("Option", "Meaning"), rows)] if rows else parts)


def argument_name(argument: click.Argument) -> str:
    """How it is written in a call."""
    assert argument.name is not None
    if argument.metavar is not None:
        return argument.metavar
    name = argument.name.upper() if argument.required else f"[{argument.name.upper()}]"
    return f"{name}..." if argument.nargs == -1 else name


def option_value(option: click.Option) -> str:
    """What it takes, after a blank."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {', '.join(f'`{choice}`' for choice in option.type.choices)}"
    return f" *{option.type.name.removesuffix(' range')}*"


def exit_codes() -> str:
    """How commands end."""
    return table(("Code", "Meaning"), [(str(int(code)), meaning) for code, meaning in MEANINGS.items()])


# ----------------------------------------------------------------------------------------------------------- the rest


def transitions() -> str:
    """The table of a worker's life."""
    rows = [(f"`{start}`", f"`{step}`", f"`{finish}`") for (start, step), finish in TABLE.items()]
    return table(("From", "What happens", "To"), rows)


def endpoints() -> str:
    """Inference paths, and which runtimes serve them."""
    serving: dict[tuple[str, str], list[str]] = {}
    for name in REGISTRY.names():
        for path, method in {(endpoint.path, endpoint.method) for endpoint in endpoints_of(name)}:
            serving.setdefault((path, method), []).append(name)
    ordered = sorted(serving, key=lambda place: (not place[0].startswith("/v1/"), place))
    rows = [
        (f"`{method} {path}`", ", ".join(f"`{name}`" for name in serving[path, method])) for path, method in ordered
    ]
    return table(("Endpoint", "Served by"), rows)


def endpoints_of(name: str) -> set[Endpoint]:
    """Everything that some worker of a runtime serves."""
    adapter = REGISTRY.get(name)
    return {e for keys in KINDS[name] for e in adapter.endpoints(adapter.config(runtime=name, **keys))}


def parameters(known: Table) -> str:
    """What happens to each parameter of a request."""
    rows = [(f"`{name}`", found.fate, found.note or "–") for name, found in known.items()]
    return table(("Parameter", "Fate", "Meaning"), rows)


def speech_parameters() -> str:
    """The same, in each variant."""
    names = dict.fromkeys(name for known in SPEECH.values() for name in known)
    rows = [(f"`{name}`", *(_told(known, name) for known in SPEECH.values())) for name in names]
    return table(("Parameter", *SPEECH), rows)


def _told(known: Table, name: str) -> str:
    return f"{known[name].fate}: {known[name].note}"


def runtimes() -> str:
    """A row a runtime."""
    rows = []
    for name in REGISTRY.names():
        adapter = REGISTRY.get(name)
        own = f"`llmux runtimes install {name}`" if adapter.requirements is not None else "none"
        rows.append((f"`{name}`", adapter.summary, own))
    return table(("Runtime", "What it runs", "Environment of its own"), rows)


BLOCKS: Final[Mapping[str, Callable[[], str]]] = {
    "server": partial(section, "ServerConfig"),
    "limits": partial(section, "LimitsConfig"),
    "devices": partial(section, "DeviceConfig"),
    "virtual models": partial(section, "VirtualModelConfig", without=("physical", "params")),
    "every model": model_settings,
    **{f"model of {name}": partial(runtime_settings, name) for name in REGISTRY.names()},
    "commands": commands,
    "exit codes": exit_codes,
    "transitions": transitions,
    "endpoints": endpoints,
    "runtimes": runtimes,
    "licences": licences.tables,
    "parameters of chat": partial(parameters, CHAT),
    "parameters of completions": partial(parameters, COMPLETIONS),
    "parameters of speech recognition": partial(parameters, TRANSCRIPTION),
    "parameters of speech": speech_parameters,
    "parameters of embeddings": partial(parameters, EMBEDDINGS),
    "parameters of reranking": partial(parameters, RERANK),
}

if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        written = render(page)
        if written != page:
            path.write_text(written, encoding="utf-8")
            sys.stdout.write(f"{path.name}: written\n")
