"""The table of each runtime's costs, from the measurements of `make runtime-figures` (tests/runtimes.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from runtimes.registry import Registry
from tools.locks import ROOT

HEAD: Final = (
    "Runtime, model",
    "Installed, MiB",
    "Install, s",
    "Load, s",
    "Estimate, MiB",
    "Measured, MiB",
    "Endpoints",
    "Tests",
)
FILE: Final = ROOT / "tests" / "runtimes.json"
SHOWN: Final = 4  # endpoints
NOT_YET: Final = "`make runtime-figures` was not run since it is there"

Row = Sequence[str]


def measured() -> Mapping[str, Any]:
    """The measurements, with their date and machine."""
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def rows(registry: Registry, found: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each model; for a runtime without one, a row with the reason."""
    for name in registry.names():
        runtime = found["runtimes"].get(name, {"tests": [], "models": {}, "why": NOT_YET})
        environment = [_number_text(runtime, "mib"), _number_text(runtime, "install_s")]
        tests = [f"`{place}`" for place in runtime["tests"]]
        for model, figures in (runtime["models"] or {name: runtime}).items():
            memory = [_number_text(figures, key) for key in ("load_s", "estimate_mib", "measured_mib")]
            every = [endpoint.path for endpoint in registry.get(name).all_endpoints]
            notes = [*tests, *([f"not loaded: {figures['why']}"] if "why" in figures else [])]
            yield (
                f"`{model}`",
                *environment,
                *memory,
                _endpoints_text(figures.get("endpoints", every)),
                ", ".join(notes),
            )
            environment, tests = ["", ""], []


def _number_text(figures: Mapping[str, Any], key: str) -> str:
    value = figures.get(key)
    if value is None:
        return "–"
    return f"{value:.1f}" if key.endswith("_s") else f"{value}"


def _endpoints_text(paths: Sequence[str]) -> str:
    """Some endpoints, OpenAI's first, and the number of further ones."""
    ordered = sorted(set(paths), key=lambda path: (not path.startswith("/v1/"), path))
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(f"`{path}`" for path in ordered[:SHOWN]) + more
