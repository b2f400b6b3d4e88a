"""CONTRIBUTING.md: its commands exist, its runtime works as it stands there, and a new runtime is told what it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runtimes.registry import REGISTRY, Registry
from tests.contract import conftest, test_footprints
from tests.support import contributing
from tests.support.cases import cases
from tests.support.contributing import NAME
from tests.unit.docs.test_docs import DOCS, PAGES, ROOT, part, rows, text

REFERENCE = DOCS / "reference"
SETTINGS = "reference/configuration.md"


def make_targets() -> set[str]:
    """Those that `make help` lists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


def make_mentions(page: str) -> set[str]:
    """The targets that a page names, in code."""
    return set(re.findall(r"(?:`|^)make ([a-z-]+)", page, re.MULTILINE))


def lacks(registry: Registry) -> Iterator[str]:
    """What a runtime needs that nobody can derive, and where it goes."""
    contract = {*conftest.SUBJECTS, *conftest.ELSEWHERE}
    measured = {name.partition("-")[0] for name in test_footprints.SUBJECTS} | {*test_footprints.ELSEWHERE}
    for name in registry.names():
        if f"\n## {name}\n" not in text("runtimes.md"):
            yield f"runtimes/{name}: no section `## {name}` in docs/runtimes.md"
        if name not in contract:
            yield f"runtimes/{name}: no subject of the contract; add one to SUBJECTS in tests/contract/conftest.py"
        if name not in measured:
            yield f"runtimes/{name}: no measured footprint; add a worker to SUBJECTS in tests/contract/test_footprints.py"


class TestCommands:
    """What `make help` lists is what the pages name."""

    @cases("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
    def test_make_targets(self, page):
        mentions = make_mentions(page.read_text(encoding="utf-8"))
        assert set() == mentions - make_targets(), "`make help` shows no such target"

    def test_every_make_target_is_here(self):
        page = contributing.PAGE.read_text(encoding="utf-8")
        assert set() == make_targets() - make_mentions(page), "CONTRIBUTING.md names each target of `make help`"


class TestRuntimes:
    """Every runtime is described, tested and measured."""

    def test_none_lacks_anything(self):
        lacking = list(lacks(REGISTRY))
        assert not lacking, "\n".join(lacking)

    def test_none_is_made_up(self):
        named = {*conftest.SUBJECTS, *conftest.ELSEWHERE, *test_footprints.ELSEWHERE}
        assert named | {name.partition("-")[0] for name in test_footprints.SUBJECTS} <= set(REGISTRY.names())

    def test_a_new_one_is_told_everything_at_once(self):
        assert [line for line in lacks(contributing.registry()) if f"runtimes/{NAME}" in line] == [
            f"runtimes/{NAME}: no section `## {NAME}` in docs/runtimes.md",
            f"runtimes/{NAME}: no subject of the contract; add one to SUBJECTS in tests/contract/conftest.py",
            f"runtimes/{NAME}: no measured footprint; add a worker to SUBJECTS in tests/contract/test_footprints.py",
        ]


class TestAddARuntime:
    """The page's adapter and its line are all that `make docs` needs. The contract suite runs that adapter, too."""

    @pytest.mark.parametrize("words", [("check", "--extend-ignore=INP001"), ("format", "--diff")])
    def test_it_passes_lint(self, words):
        """But for its `__init__.py`, which is not on the page."""
        adapter, _ = contributing.code()
        told = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--stdin-filename", f"runtimes/{NAME}/adapter.py", "-"],
            input=adapter,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert told.returncode == 0, told.stdout + told.stderr

    def test_its_settings_get_a_section_after_those_of_the_runtime_before_it(self, generator):
        pages = {path.name: page for path, page in generator.outputs(contributing.registry())}
        page = pages["configuration.md"]
        own = f"### {NAME}"
        assert set(rows(part(page, own))) == {"path", "binary", "batch_size", "extra_args"}
        headings = [line for line in page.splitlines() if line.startswith(("## ", "### "))]
        assert headings[headings.index(own) - 1] == f"### {REGISTRY.names()[-1]}"
        assert page.replace(own + part(page, own), "") == generator.render(text(SETTINGS), REFERENCE)

    def test_it_is_in_the_tables_and_in_the_schema(self, generator):
        pages = {path.name: page for path, page in generator.outputs(contributing.registry())}
        assert NAME in rows(pages["runtimes.md"].partition("<!-- end -->")[0])
        assert f"`{NAME}`" in rows(part(pages["api.md"], "## Inference"))["POST /v1/chat/completions"]
        assert f"{NAME.title()}Config" in pages["llmux.schema.json"]

    def test_writing_again_changes_nothing(self, generator):
        registry = contributing.registry()
        for path in DOCS.rglob("*.md"):
            once = generator.render(path.read_text(encoding="utf-8"), path.parent, registry)
            assert generator.render(once, path.parent, registry) == once

    def test_what_was_written_for_a_runtime_that_is_gone_is_named(self, generator):
        page = generator.render(text(SETTINGS), REFERENCE, contributing.registry())
        with pytest.raises(LookupError, match=f"'model of {NAME}'"):
            generator.render(page, REFERENCE)
