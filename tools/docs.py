"""Write the generated documents: parts of the pages in docs/, the manual page, and the JSON schema of the configuration file.

Two comments enclose a generated part of a page:

    <!-- generated: limits -->
    <!-- end -->

`make docs` writes all parts anew; people write everything outside the comments. A runtime whose settings have no block yet
gets a section for them. Links in the code name a page of docs/ without its folder, such as `runtimes.md#vllm`. A test checks
that all parts are up to date.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import click

from bench.gpu import page as gpu_figures
from runtimes.chatterbox.worker.parameters import SPEECH
from runtimes.comfyui.worker.parameters import PARAMETERS as COMFYUI
from runtimes.ctranslate2.worker import parameters as ctranslate2
from runtimes.diffusers.worker.parameters import EDIT, GENERATION, VARIATION
from runtimes.embeddings.worker.parameters import EMBEDDINGS, RERANK, VISION
from runtimes.exllamav3.worker import parameters as exllamav3
from runtimes.llama_cpp.worker import parameters as llama_cpp
from runtimes.model_config import ModelConfig
from runtimes.registry import REGISTRY, Registry
from runtimes.sdk.audio.parameters import PARAMETERS as TRANSCRIPTION
from runtimes.sdk.chat.parameters import CHAT, COMPLETIONS
from runtimes.sdk.parameters import Table
from supervisor.catalog.schema import json_schema
from supervisor.cli import manual
from supervisor.cli.exit_codes import MEANINGS
from supervisor.cli.main import main
from supervisor.core.workers.lifecycle import TABLE
from supervisor.daemon.observability import metric_table
from tools import api_clients, api_page, field_tables, licences, reliability, runtime_figures
from tools.locks import ROOT
from tools.markdown import table

DOCS: Final = ROOT / "docs"
MANUAL: Final = DOCS / "reference" / "llmux.1"
COMMANDS: Final = ROOT / "supervisor" / "cli" / "operations.py"
DASHBOARD: Final = ROOT / "supervisor" / "server" / "ui" / "js" / "operations.js"
SCHEMA: Final = ROOT / "config" / "llmux.schema.json"

_HEADING: Final = re.compile(r"^#{1,3} ", re.MULTILINE)
_LINK: Final = re.compile(r"(?<=\]\()[\w-]+\.md")
_BLOCK: Final = re.compile(r"(<!-- generated: ([^>\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)

Schema = Mapping[str, Any]


def outputs(registry: Registry = REGISTRY) -> Iterator[tuple[Path, str]]:
    """Every file with a generated part, and its up-to-date text."""
    for path in sorted(DOCS.rglob("*.md")):
        yield path, render(path.read_text(encoding="utf-8"), path.parent, registry)
    yield MANUAL, manual.page(main)
    yield COMMANDS, api_clients.commands()
    yield DASHBOARD, api_clients.dashboard()
    yield SCHEMA, json.dumps(schema_of(registry), indent=2, ensure_ascii=False) + "\n"


def render(page: str, folder: Path, registry: Registry = REGISTRY) -> str:
    """A page of this folder with all blocks written anew, and, for settings, with a section for each runtime.

    Raises LookupError for an unknown block, and for a link to a missing page.
    """
    known = blocks(registry)
    pages = {path.name: os.path.relpath(path, folder) for path in DOCS.rglob("*.md")}

    def written(block: re.Match[str]) -> str:
        if block[2] not in known:
            raise LookupError(
                f"Nothing writes the block {block[2]!r}: take it out of its page, with what belongs to it"
            )
        text = _LINK.sub(lambda link: pages[link[0]], known[block[2]]())
        return f"{block[1]}\n{text}\n\n{block[3]}"

    return _BLOCK.sub(written, with_every_runtime(page, registry))


def with_every_runtime(page: str, registry: Registry) -> str:
    """The page about settings with a section for each runtime; new sections follow the registry's order."""
    before = "every model"
    if before not in blocks_of(page):
        return page
    for name in registry.names():
        block = f"model of {name}"
        if block not in blocks_of(page):
            about = (registry.get(name).config.__doc__ or "").partition("\n")[0]
            section = f"### {name}\n\n{about} Its own keys:\n\n<!-- generated: {block} -->\n<!-- end -->\n\n"
            end = page.index("<!-- end -->", page.index(f"<!-- generated: {before} -->"))
            heading = _HEADING.search(page, end)
            at = heading.start() if heading else len(page)
            page = page[:at] + section + page[at:]
        before = block
    return page


def blocks_of(page: str) -> list[str]:
    """The names of a page's blocks."""
    return [block[2] for block in _BLOCK.finditer(page)]


# ----------------------------------------------------------------------------------------------------------- settings


def section(name: str, registry: Registry = REGISTRY, *, without: Container[str] = ()) -> str:
    """The keys of one section of the configuration file."""
    schema = schema_of(registry)
    return settings(schema, _schema_part(schema, name), without=without)


def model_settings() -> str:
    """The keys that every model has."""
    schema = ModelConfig.model_json_schema()
    return settings(schema, schema)


def runtime_settings(registry: Registry, name: str) -> str:
    """The further keys of models of this runtime, and common keys with a special description there."""
    config = registry.get(name).config
    same = {
        key
        for key, field in ModelConfig.model_fields.items()
        if key == "runtime" or config.model_fields[key].annotation == field.annotation
    }
    return section(config.__name__, registry, without=same)


def former_keys(registry: Registry) -> str:
    """The former keys of each runtime: those that are options now, then the others."""
    rows = []
    for name in registry.names():
        config = registry.get(name).config
        for key, option in sorted(config.former_keys.items()):
            words = filter(None, (option,) if isinstance(option, str) else option)
            rows.append((f"`{key}`", name, ", ".join(f"`{word}`" for word in words)))
        rows += [(f"`{key}`", name, instead) for key, instead in sorted(config.removed_keys.items())]
    return table(("Key", "Runtime", "In `extra_args`, or instead"), rows)


def settings(schema: Schema, part: Schema, *, without: Container[str] = ()) -> str:
    """One part of a schema as a table."""
    required = {*part.get("required", ())} - {"runtime"}  # mostly inferred from the other keys
    rows = [
        (f"`{key}`", kind(field, schema), default(field, required=key in required), field["description"])
        for key, field in part["properties"].items()
        if key not in without
    ]
    return table(("Key", "Value", "Default", "Meaning"), rows)


@cache
def schema_of(registry: Registry) -> Schema:
    """The configuration file's schema, made once for all sections."""
    return json_schema(registry)


def _schema_part(schema: Schema, name: str) -> Schema:
    part: Schema = schema["$defs"][name]
    return part


def kind(field: Schema, schema: Schema) -> str:
    """The allowed values of a field, in words."""
    if "$ref" in field:
        return kind(_schema_part(schema, field["$ref"].rpartition("/")[2]), schema)
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
    """The default, or a word for none."""
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
    return "\n\n".join(about(path, command) for path, command in manual.commands(main, ("llmux",)))


def about(path: tuple[str, ...], command: click.Command) -> str:
    """One command."""
    arguments = [manual.argument_name(found) for found in command.params if isinstance(found, click.Argument)]
    rows = [
        (f"`{' '.join(found.opts)}`{option_value(found)}", found.help or "")
        for found in command.params
        if isinstance(found, click.Option)
    ]
    parts = [f"### `{' '.join((*path, *arguments))}`", command.help or ""]
    return "\n\n".join([*parts, table(("Option", "Meaning"), rows)] if rows else parts)


def option_value(option: click.Option) -> str:
    """The option's value, after a blank."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {', '.join(f'`{choice}`' for choice in option.type.choices)}"
    return f" *{option.type.name.removesuffix(' range')}*"


def exit_codes() -> str:
    """The table of exit codes."""
    return table(("Code", "Meaning"), [(str(int(code)), meaning) for code, meaning in MEANINGS.items()])


# ----------------------------------------------------------------------------------------------------------- the rest


def transitions() -> str:
    """The table of a worker's states."""
    rows = [(f"`{start}`", f"`{trigger}`", f"`{transition.to}`") for (start, trigger), transition in TABLE.items()]
    return table(("From", "What happens", "To"), rows)


def rooms() -> str:
    """The imports among the supervisor's packages, from the source."""
    order = (
        "cli",
        "server",
        "api",
        "dialects",
        "daemon",
        "jobs",
        "gateway",
        "engine",
        "fleet",
        "catalog",
        "host",
        "core",
    )
    rows = []
    for room in order:
        text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "supervisor" / room).rglob("*.py"))
        found = set(re.findall(r"^\s*(?:from|import) supervisor\.(\w+)", text, re.MULTILINE)) - {room}
        rows.append((f"`{room}`", *("●" if other in found else "" for other in order[1:])))
    return table(("imports →", *order[1:]), rows)


def metrics(beginnings: tuple[str, ...]) -> str:
    """The metrics whose names begin so."""
    rows = [
        (f"`{metric.sample_name}`", metric.type, ", ".join(f"`{label}`" for label in metric.labels) or "–", metric.help)
        for metric in metric_table.ALL
        if metric.name.startswith(beginnings)
    ]
    return table(("Metric", "Type", "Labels", "Meaning"), rows)


def endpoints(registry: Registry) -> str:
    """Inference paths, and the runtimes that serve them."""
    serving: dict[tuple[str, str], list[str]] = {}
    for name in registry.names():
        for endpoint in registry.get(name).all_endpoints:
            serving.setdefault((endpoint.path, endpoint.method), []).append(name)
    ordered = sorted(serving, key=lambda place: (not place[0].startswith("/v1/"), place))
    rows = [
        (f"`{method} {path}`", ", ".join(f"`{name}`" for name in serving[path, method])) for path, method in ordered
    ]
    return table(("Endpoint", "Served by"), rows)


@cache
def api_blocks() -> Mapping[str, str]:
    """The blocks of docs/reference/api.md, made once for all dialects."""
    return api_page.blocks()


def parameters(known: Table) -> str:
    """The treatment of each parameter of a request."""
    rows = [(f"`{name}`", found.fate, found.note or "–") for name, found in known.items()]
    return table(("Parameter", "Fate", "Meaning"), rows)


def differences(table_of_runtime: Table, common: Table) -> str:
    """A runtime's differences from the common table of language models."""
    return parameters({name: text for name, text in table_of_runtime.items() if text != common.get(name)})


def speech_parameters() -> str:
    """The treatment of each parameter of speech, in each variant."""
    names = dict.fromkeys(name for known in SPEECH.values() for name in known)
    rows = [(f"`{name}`", *(_parameter_text(known, name) for known in SPEECH.values())) for name in names]
    return table(("Parameter", *SPEECH), rows)


def _parameter_text(known: Table, name: str) -> str:
    return f"{known[name].fate}: {known[name].note}"


def runtimes(registry: Registry) -> str:
    """A table with a row for each runtime."""
    rows = []
    for name in registry.names():
        adapter = registry.get(name)
        own = f"`llmux runtimes install {name}`" if adapter.requirements is not None else "none"
        rows.append((f"`{name}`", adapter.summary, own))
    return table(("Runtime", "What it runs", "Environment of its own"), rows)


def figures_of_runtimes(registry: Registry) -> str:
    """The measurements of `make runtime-figures`."""
    found = runtime_figures.measured()
    return (
        f"{found['date']}, {found['machine']}.\n\n{table(runtime_figures.HEAD, runtime_figures.rows(registry, found))}"
    )


def costs_of_tests() -> str:
    """The costs of each folder of tests, from `make costs`."""
    folders = json.loads((ROOT / "tests" / "costs.json").read_text(encoding="utf-8"))["folders"]
    rows = [(f"`tests/{name}`", *(f"{figure:.0f}" for figure in figures)) for name, figures in folders.items()]
    total = [f"{sum(column):.0f}" for column in zip(*folders.values(), strict=True)]
    return table(("Folder", "Tests", "Seconds", "CPU seconds"), [*rows, ("all", *total)])


def faults() -> str:
    """The promise of llmux for each fault, and its evidence."""
    rows = table(("Fault", "Promise", "Mechanism, in `supervisor/`", "Tests", "Last measured"), reliability.faults())
    return f"{reliability.measured_on()}\n\n{rows}"


def attacks() -> str:
    """The table of attacks."""
    return table(("Attack", "Tests"), reliability.attacks())


def blocks(registry: Registry = REGISTRY) -> Mapping[str, Callable[[], str]]:
    """Name of a block → the function that writes it."""
    return {
        "server": partial(section, "ServerConfig"),
        "media": partial(section, "MediaConfig"),
        "alerts": partial(section, "AlertsConfig"),
        "governance": partial(section, "GovernanceConfig"),
        "limits": partial(section, "LimitsConfig"),
        "devices": partial(section, "DeviceConfig"),
        "virtual models": partial(section, "VirtualModelConfig", without=("physical", "params")),
        "clients": partial(section, "ClientConfig"),
        "tasks": partial(section, "TaskConfig"),
        "sets": partial(section, "SetConfig"),
        "candidates": partial(section, "CandidateConfig", without=("physical", "params")),
        "every model": model_settings,
        **{f"model of {name}": partial(runtime_settings, registry, name) for name in registry.names()},
        "commands": commands,
        "exit codes": exit_codes,
        "transitions": transitions,
        "rooms": rooms,
        "former keys": partial(former_keys, registry),
        "endpoints": partial(endpoints, registry),
        **{name: partial(api_blocks().__getitem__, name) for name in api_blocks()},
        "metrics": partial(metrics, ("llmux_", "gen_ai_", "asyncio_")),
        "metrics of a runner": partial(metrics, ("vllm_",)),
        "costs of tests": costs_of_tests,
        "gpu figures": gpu_figures.tables,
        "request fields": field_tables.tables,
        "faults": faults,
        "soak": reliability.soak,
        "attacks": attacks,
        "licences": licences.tables,
        "runtimes": partial(runtimes, registry),
        "figures of runtimes": partial(figures_of_runtimes, registry),
        "parameters of chat": partial(parameters, CHAT),
        "parameters of completions": partial(parameters, COMPLETIONS),
        "parameters of llama_cpp": partial(differences, llama_cpp.CHAT, CHAT),
        "parameters of exllamav3": partial(differences, exllamav3.CHAT, CHAT),
        "parameters of ctranslate2": partial(differences, ctranslate2.CHAT, CHAT),
        "parameters of speech recognition": partial(parameters, TRANSCRIPTION),
        "parameters of speech": speech_parameters,
        "parameters of comfyui": partial(parameters, COMFYUI),
        "parameters of drawing": partial(parameters, GENERATION),
        "parameters of changed pictures": partial(parameters, {**VARIATION, **EDIT}),
        "parameters of embeddings": partial(parameters, EMBEDDINGS),
        "parameters of pictures": partial(parameters, VISION),
        "parameters of reranking": partial(parameters, RERANK),
    }


if __name__ == "__main__":
    for path, text in outputs():
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}: written\n")
