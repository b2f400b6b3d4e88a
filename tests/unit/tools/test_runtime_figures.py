"""The table of what each runtime takes: a row for each model, and for each runtime without one here, with the reason."""

from __future__ import annotations

from runtimes.registry import REGISTRY
from tools.runtime_figures import HEAD, NOT_YET, measured, rows

MODEL = {"load_s": 1.25, "estimate_mib": 100, "measured_mib": 90, "endpoints": ["/b", "/v1/a"]}
FOUND = {
    "runtimes": {
        "transformers": {
            "install_s": 30,
            "mib": 1200,
            "tests": ["tests/contract"],
            "models": {"transformers": MODEL, "transformers-asr": {"why": "no library"}},
        },
        "tgi": {"tests": ["tests/contract"], "models": {}, "why": "needs a GPU"},
    }
}


def row(name: str, found: dict = FOUND) -> list[str]:
    (wanted,) = [list(row) for row in rows(REGISTRY, found) if row[0] == f"`{name}`"]
    assert len(wanted) == len(HEAD)
    return wanted


class TestRows:
    def test_a_model(self):
        assert row("transformers")[1:] == ["1200", "30.0", "1.2", "100", "90", "`/v1/a`, `/b`", "`tests/contract`"]

    def test_the_environment_stands_once(self):
        assert row("transformers-asr")[1:6] == ["", "", "–", "–", "–"]
        assert row("transformers-asr")[-1] == "not loaded: no library"

    def test_a_runtime_without_a_model_here(self):
        assert row("tgi")[1:6] == ["–"] * 5
        assert row("tgi")[-1] == "`tests/contract`, not loaded: needs a GPU"

    def test_a_runtime_that_nobody_has_measured(self):
        assert row("command")[-1] == f"not loaded: {NOT_YET}"


def test_the_figures_are_of_runtimes_that_are_there():
    assert measured()["runtimes"].keys() <= set(REGISTRY.names())
