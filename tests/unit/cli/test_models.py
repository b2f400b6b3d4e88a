"""What is shown of models and of their loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervisor.cli import output
from supervisor.cli.commands.models import warnings_of
from tests.support.cases import cases


class TestWarnings:
    """A warning is told once, and never fills the screen; the rest is one command away."""

    @pytest.mark.parametrize(
        ("warnings", "lines"),
        [
            (["too large"] * 3, ["warning: m0, m1, m2: too large"]),
            (["a", "b", "c", "d"], [f"warning: m{n}: {one}" for n, one in enumerate("abcd")]),
            (
                ["a", "b", "c", "d", "e"],
                [
                    "warning: m0: a",
                    "warning: m1: b",
                    "warning: m2: c",
                    "warning: 2 more; all of them: llmux config check",
                ],
            ),
        ],
    )
    def test_lines(self, warnings, lines):
        assert warnings_of([SimpleNamespace(name=f"m{n}", warnings=[one]) for n, one in enumerate(warnings)]) == lines


class TestTimes:
    """A load that took less than a second took some time."""

    @cases(("took_s", "shown"), [(0.31, "0.3 s"), (9.94, "9.9 s"), (9.96, "10 s"), (90, "1 min"), (None, "-")])
    def test_tenths(self, took_s, shown):
        assert output.duration(took_s) == shown
