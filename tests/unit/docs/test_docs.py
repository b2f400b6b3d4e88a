"""What the documents say is there, and what is there is in the documents."""

from __future__ import annotations

import ast
import gc
import importlib
import pkgutil
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

import click
import pytest
import yaml

import supervisor
from runtimes.registry import REGISTRY
from supervisor.api.openapi import sections
from supervisor.catalog import load
from supervisor.catalog.keys import _KeyConfig, load_keys
from supervisor.catalog.schema import json_schema
from supervisor.cli.demo import write_demo
from supervisor.cli.main import main
from supervisor.cli.serving.serve import welcome
from supervisor.core.effects import Reject
from supervisor.core.types import CrashClass, FootprintSource, RejectCode, TicketId
from supervisor.engine.ticket import rejection
from supervisor.errors import LlmuxError
from supervisor.schema.memory import Device
from supervisor.schema.model import ModelView
from tests.support.cases import cases

ROOT = Path(supervisor.__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
        *DOCS.rglob("*.md"),
        *(ROOT / "deploy").glob("*/README.md"),
        *(ROOT / "config" / "examples").glob("*/README.md"),
    ]
)
SOURCES = sorted(path for top in ("supervisor", "runtimes") for path in (ROOT / top).rglob("*.py"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ROW = re.compile(r"^\| (`.*?) \| (.*) \|$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def part(page: str, heading: str) -> str:
    """A section of a page with all that is below it."""
    level = heading.partition(" ")[0]
    found = re.search(rf"^{re.escape(heading)}$(.*?)(?=^#{{1,{len(level)}}} |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"no section {heading!r}"
    return found[1]


def rows(section: str) -> dict[str, str]:
    """First cells that are code, one entry for each code in them, and what stands beside."""
    return {name: row[2] for row in _ROW.finditer(section) for name in re.findall(r"`([^`]+)`", row[1])}


def anchors(page: str) -> set[str]:
    """How GitHub calls the headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def nodes() -> tuple[ast.AST, ...]:
    """Everything in all sources that is a call or a constant."""
    gc.disable()  # it would look through all of it again and again
    try:
        every = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        return tuple(node for node in every if isinstance(node, ast.Call | ast.Constant))
    finally:
        gc.freeze()
        gc.enable()


@cache
def calls() -> tuple[ast.Call, ...]:
    return tuple(node for node in nodes() if isinstance(node, ast.Call))


@cache
def schema() -> dict[str, Any]:
    return cast("dict[str, Any]", json_schema())


def named(call: ast.Call) -> str:
    """What is called, without what it belongs to."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def constant(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def constants(node: ast.AST) -> set[str]:
    """All texts it may be."""
    branches = ast.walk(node) if isinstance(node, ast.IfExp) else [node]
    return {value for branch in branches if (value := constant(branch))}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("demo")
    return load(write_demo(folder), flags={"server.state_dir": str(folder)})


class TestGenerated:
    """What comes from the code is as the code has it now: `make docs` writes it anew."""

    def test_is_current(self, generator):
        stale = [
            path.relative_to(ROOT).as_posix()
            for path, written in generator.outputs()
            if written != path.read_text(encoding="utf-8")
        ]
        assert not stale, f"`make docs` writes anew: {', '.join(stale)}"

    def test_every_block_stands_on_one_page(self, generator):
        used = [name for _, page in generator.outputs() for name in generator.blocks_of(page)]
        assert sorted(generator.blocks()) == sorted(used)

    def test_endpoints_are_all_that_an_adapter_knows(self):
        """`all_endpoints` has every path of an endpoint that stands in an adapter's source."""
        missing = {}
        for name in REGISTRY.names():
            adapter = REGISTRY.get(name)
            source = Path(sys.modules[type(adapter).__module__].__file__ or "").read_text(encoding="utf-8")
            written = {
                path
                for statement in ast.walk(ast.parse(source))
                if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return)
                and "Endpoint(" in ast.unparse(statement)
                for node in ast.walk(statement)
                if (path := constant(node)) and path.startswith("/")
            }
            if lacking := written - {endpoint.path for endpoint in adapter.all_endpoints}:
                missing[name] = lacking
        assert missing == {}


class TestConfiguration:
    """Every setting is in docs/reference/configuration.md."""

    def test_settings(self, generator):
        known = set(rows(generator.render(text("reference/configuration.md"), DOCS / "reference")))
        keys = {key for definition in schema()["$defs"].values() for key in definition.get("properties", {})}
        assert set() == keys - known - {"params", "physical"}

    def test_fields_of_keys(self):
        assert set(_KeyConfig.model_fields) == set(rows(part(text("reference/configuration.md"), "## API keys")))

    def test_environment_variables(self):
        written = {name for path in SOURCES for name in re.findall(r"LLMUX_[A-Z_]*[A-Z]", path.read_text())}
        known = set(rows(part(text("reference/configuration.md"), "## Environment variables")))
        assert set() == {name for name in written if name not in known and "__" not in name}

    @cases("page", PAGES, ids=lambda page: page.stem)
    def test_examples_are_valid(self, page, tmp_path):
        for language, block in _FENCE.findall(page.read_text(encoding="utf-8")):
            if language != "yaml":
                continue
            path = tmp_path / "llmux.yaml"
            path.write_text(block, encoding="utf-8")
            if isinstance(yaml.safe_load(block), list):
                assert len(load_keys(path).keys) == len(yaml.safe_load(block))
            else:
                load(path, check_files=False)

    def test_minimal_example_has_three_lines(self):
        block = next(block for language, block in _FENCE.findall(README.read_text()) if language == "yaml")
        assert len(block.splitlines()) == 3


class TestApi:
    """Every endpoint and every field of the admin API is in docs/reference/api.md."""

    def test_operations(self):
        """Those of the OpenAPI document, of which tests/unit/server/test_openapi.py knows that it is complete."""
        told = [operation for section in sections() for operation in section.operations]
        names = {f"{each.method} {path}" for each in told for path in (each.path, *each.aliases)}
        headings = "".join(re.findall(r"^### .*$", text("reference/api.md"), re.MULTILINE))
        assert names == set(re.findall(r"`([A-Z]+ \S+)`", headings))

    def test_fields(self):
        keys = {*ModelView.__struct_encode_fields__, *Device.__struct_encode_fields__}
        administration = part(text("reference/api.md"), "## Administration")
        assert set() == {key for key in keys if not re.search(rf"`{key}(\[\])?`", administration)}

    def test_footprint_sources(self):
        assert set() == {
            source.value for source in FootprintSource if f"`{source.value}`" not in text("reference/api.md")
        }

    def test_response_headers(self):
        written = {
            match
            for path in (ROOT / "supervisor").rglob("*.py")
            for match in re.findall(r'\(b"(x-[a-z-]+|openai-[a-z-]+)", ', path.read_text(encoding="utf-8"))
        }
        assert set() == written - {"x-accel-buffering"} - set(rows(text("reference/api.md")))


class TestErrorCodes:
    """Every code is in docs/reference/errors.md, with the status it comes with."""

    @staticmethod
    def documented() -> dict[str, str]:
        return rows(part(text("reference/errors.md"), "## Error codes"))

    @staticmethod
    def classes() -> dict[str, type[LlmuxError]]:
        for module in pkgutil.walk_packages(supervisor.__path__, "supervisor."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        found, seen = [LlmuxError], {"LlmuxError": LlmuxError}
        while found:
            for child in found.pop().__subclasses__():
                if child.__module__.startswith("supervisor."):
                    seen[child.__name__] = child
                    found.append(child)
        return seen

    def statuses(self) -> dict[str, set[int]]:
        """Every code with the statuses it may come with."""
        classes = self.classes()
        found: dict[str, set[int]] = {}
        for error in classes.values():
            found.setdefault(error.code, set()).add(int(error.status))
        for call in calls():
            error = classes.get(named(call))
            for keyword in call.keywords:
                if error is not None and keyword.arg == "code" and (code := constant(keyword.value)):
                    first = getattr(call.args[0], "value", None)  # a worker's error names its status itself
                    found.setdefault(code, set()).add(first if isinstance(first, int) else int(error.status))
        for code in RejectCode:
            found.setdefault(code.value, set()).add(int(rejection(Reject(TicketId("1"), code, ""), "a").status))
        return found

    def test_all_are_documented(self):
        assert set() == set(self.statuses()) - set(self.documented())

    def test_none_is_made_up(self):
        literals = {value for node in nodes() if (value := constant(node))}
        assert set() == {code for code in self.documented() if code not in literals and code not in set(RejectCode)}

    def test_statuses(self):
        documented = self.documented()
        wrong = {
            code: (status, statuses)
            for code, statuses in self.statuses().items()
            if (status := documented[code].partition(" ")[0]) != "–" and {status} != {str(s) for s in statuses}
        }
        assert wrong == {}


class TestOperations:
    """Kinds of decisions, classes of crashes, alerts and log events are in docs/reference/."""

    def test_decisions(self):
        kinds = {"admit", "evict", "wait", "refuse"}  # the planner's answers
        for call in calls():
            if named(call) in {"decide", "Decided"} and call.args:
                kinds |= constants(call.args[0])
        assert kinds | self.alerts() - {"model.failed"} == set(rows(part(text("reference/log.md"), "## Decisions")))

    def test_crashes(self):
        assert {kind.value for kind in CrashClass} == set(rows(part(text("reference/errors.md"), "## Crashes")))

    def test_log_events(self):
        events = {"log.dropped"}  # not logged, but put where lines are missing
        for call in calls():
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            is_log = isinstance(owner, ast.Name) and owner.id == "log"
            if is_log and named(call) in {"info", "warning", "error", "exception"} and call.args:
                events.add(constant(call.args[0]))
        assert events == set(rows(part(text("reference/log.md"), "## Log")))

    def test_alerts(self):
        line = rows(part(text("reference/log.md"), "## Log"))["alert.raised"]
        assert set() == {code for code in self.alerts() if f"`{code}`" not in line}

    @staticmethod
    def alerts() -> set[str]:
        return {code for call in calls() if named(call) == "Alert" and call.args for code in constants(call.args[0])}


class TestReadme:
    """The README's steps are those that work."""

    def test_first_request_is_the_one_that_is_printed(self, demo):
        printed = welcome(demo, "http://127.0.0.1:8081", 0)
        line = next(line.strip() for line in printed.splitlines() if line.strip().startswith("curl "))
        assert f"\n{line}\n" in README.read_text(encoding="utf-8")

    def test_names_of_the_demo(self, demo):
        page = README.read_text(encoding="utf-8")
        assert set() == {entry.name for entry in demo.listing() if f"`{entry.name}`" not in page.replace('"', "`")}
        assert set() == set(re.findall(r"`([Tt]iny-[A-Za-z]+)`", page)) - {entry.name for entry in demo.listing()}

    def test_settings_for_open_webui(self, demo):
        printed = welcome(demo, "http://127.0.0.1:8081", 0)
        page = part(README.read_text(encoding="utf-8"), "## Open WebUI")
        url = next(line.split()[-1] for line in printed.splitlines() if line.strip().startswith("URL:"))
        assert f"`{url}`" in page


class TestMentions:
    """Whatever a document names is there."""

    @cases("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
    def test_links(self, page):
        missing = []
        for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
                missing.append(link)
        assert missing == []

    def test_commands(self):
        """In code, and where a message names a remedy."""
        wrong = {}
        for page in [*PAGES, *SOURCES]:
            content = page.read_text(encoding="utf-8")
            mentions = re.findall(r"(?:`|[a-z]: )llmux((?: [a-z]+)+)", content)
            for language, block in _FENCE.findall(content):
                mentions += re.findall(r"^\S*\bllmux((?: [a-z]+)+)", block, re.MULTILINE) if language == "sh" else []
            if unknown := [words for words in mentions if not self._is_command(words.split())]:
                wrong[page.name] = unknown
        assert wrong == {}

    @staticmethod
    def _is_command(words: list[str]) -> bool:
        command: click.Command = main
        for word in words:
            if not isinstance(command, click.Group):
                return True  # the rest are arguments, or prose
            if word not in command.commands:
                return False
            command = command.commands[word]
        return True

    @cases("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
    def test_settings_by_their_full_name(self, page):
        parts = schema()["$defs"]
        known = {"limits": parts["LimitsConfig"], "server": parts["ServerConfig"]}
        mentions = re.findall(r"`(limits|server)\.(\w+)`", page.read_text(encoding="utf-8"))
        assert [(where, key) for where, key in mentions if key not in known[where]["properties"]] == []

    def test_every_page_is_in_the_index(self):
        linked = {link.partition("#")[0] for link in _LINK.findall(text("README.md"))}
        pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
        assert {page for page in pages - linked if not page.startswith("adr/")} == {"README.md"}

    def test_pages_named_in_sources(self):
        named_pages = {page for path in SOURCES for page in re.findall(r"\bdocs/[\w/.-]+\.md", path.read_text())}
        upstream = {"docs/gguf.md"}  # of ggml, by its address
        assert set() == {page for page in named_pages - upstream if not (ROOT / page).exists()}

    def test_module_map(self):
        """Every path in it exists, and every package and top-level module is in it."""
        section = part(text("architecture.md"), "## Rooms")
        paths = {path.rstrip("/") for path in re.findall(r"`((?:supervisor|runtimes|deploy)[\w/.]*)`", section)}
        assert set() == {path for path in paths if not (ROOT / path).exists()}
        there = {p.relative_to(ROOT).as_posix() for p in (ROOT / "supervisor").iterdir() if not p.name.startswith("_")}
        assert set() == {path for path in there - {"supervisor/py.typed"} if path not in paths}

    def test_modules_of_the_map(self):
        section = part(text("architecture.md"), "## Rooms")
        for folder, line in re.findall(r"^\| `(supervisor/\w+)/` \| (.*) \|$", section, re.MULTILINE):
            modules = {path.stem for path in (ROOT / folder).iterdir()}
            assert set() == set(re.findall(r"`(\w+)`", line)) - modules - {"llmux"}, folder
