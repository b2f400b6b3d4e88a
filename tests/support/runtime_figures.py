"""What each runtime takes on this machine: its environment, a load of its tiny model, its memory before and after. For the page.

    python -m tests.support.runtime_figures              # all of them, into tests/runtimes.json: minutes
    python -m tests.support.runtime_figures NAME…        # these runtimes anew

Environments are installed by the code that users run, into a folder of their own, from packages that were downloaded before.
Models are those of tests/contract/test_footprints.py: a new runtime with a subject there appears by itself. A daemon loads
each, and answers the largest request that it serves.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtimes.registry import REGISTRY
from supervisor.cli.environments import environments as products
from supervisor.host.environments import venvs
from supervisor.host.environments.recipe import Device, pinned
from tests.contract import conftest, test_footprints
from tests.support import build_vllm, environments, tiny_language
from tests.support.build_llama_server import CACHE
from tests.support.daemon import REPOSITORY, running
from tests.support.limits import LIMIT_S

FILE = REPOSITORY / "tests" / "runtimes.json"
BUDGET_MIB = 12_000
VLLM: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 << 20,
}

Json = dict[str, Any]


class Folders:
    """What subjects need of pytest's factory of folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def mktemp(self, name: str) -> Path:
        """A new one."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))


def vllm(folders: pytest.TempPathFactory) -> conftest.Subject:
    """The real one, where `make test-vllm` has installed it. Raises pytest's Skipped."""
    program = build_vllm.find()
    if program is None:
        pytest.skip("make test-vllm installs it")
    keys = {"path": str(tiny_language.model()), "binary": str(program), **VLLM, "extra_args": ["--enforce-eager"]}
    return conftest.Subject("vllm_serve", REGISTRY.get("vllm_serve"), keys, {}, "")


def vllm_worker(_folders: pytest.TempPathFactory) -> conftest.Subject:
    """Its engine in our worker, where `make test-vllm` has installed that. Raises pytest's Skipped."""
    if not build_vllm.python().exists():
        pytest.skip("make test-vllm installs it")
    return conftest.Subject(
        "vllm",
        REGISTRY.get("vllm"),
        {"path": str(tiny_language.model()), **VLLM, "extra_args": ["--enforce-eager"]},
        {},
        "",
    )


def long_prompt() -> conftest.Question:
    """Nearly all of the context."""
    return test_footprints.told("/v1/completions", {"prompt": "x" * 400, "max_tokens": 64})


SUBJECTS = {
    **test_footprints.SUBJECTS,
    "vllm_serve": test_footprints.Measured(vllm, long_prompt),
    "vllm": test_footprints.Measured(vllm_worker, long_prompt),
}


def environment(name: str) -> Json:
    """A fresh install, for the processor where it has one: its seconds, and its size in MiB. Empty for one without."""
    if REGISTRY.get(name).requirements is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="figures-", dir=CACHE) as folder:
        began = time.monotonic()
        recipe = products.recipe_of(name)
        device: Device = "cpu" if any(map(pinned, recipe.locks("cpu"))) else "cuda"
        made = venvs.install(recipe, Path(folder), lambda _line: None, device=device)
        return {"install_s": round(time.monotonic() - began, 1), "mib": made.size_bytes() >> 20}


def model(found: test_footprints.Measured, folder: Path) -> Json:
    """A load by a daemon, and the memory after the largest request. Raises pytest's Skipped where something is missing."""
    subject, largest = found.subject(Folders(folder)), found.largest()  # type: ignore[arg-type]
    keys = {"runtime": subject.adapter.name, **subject.keys}
    config = {
        "models": {"the-model": keys},
        "devices": [{"kind": "host", "budget_mib": BUDGET_MIB, "margin_mib": 0}],
        "server": {"runtimes_dir": str(environments.FOLDER)},
    }
    with running(Folders(folder).mktemp("daemon"), config) as daemon:
        for _ in range(2):
            asked = httpx.post(daemon.url + largest.path, timeout=LIMIT_S, trust_env=False, **largest.keys(False))
            assert asked.status_code == 200, asked.text
        memory = daemon.wait_foretold("the-model")
        (load,) = daemon.get("/v1/admin/loads").json()["data"]
    endpoints = sorted(endpoint.path for endpoint in subject.adapter.endpoints(subject.config()))
    return {
        "load_s": load["took_s"],
        "estimate_mib": memory["estimate"]["mib"],
        "measured_mib": memory["measured_mib"],
        "endpoints": list(dict.fromkeys(endpoints)),
    }


def tests_of(name: str) -> Iterator[str]:
    """Where a runtime's tests stand."""
    yield from (
        ["tests/contract"] if name in conftest.SUBJECTS else re.findall(r"tests/[\w/.]+", conftest.ELSEWHERE[name])
    )
    unit = f"tests/unit/runtimes/{name}"
    if (REPOSITORY / unit).is_dir():
        yield unit
    for path in sorted((REPOSITORY / "tests" / "e2e").rglob(f"test_{name}*.py")):
        yield path.relative_to(REPOSITORY).as_posix()


def figures(name: str, folder: Path) -> Json:
    """All of one runtime."""
    models: Json = {}
    out: Json = {**environment(name), "tests": [*dict.fromkeys(tests_of(name))], "models": models}
    for subject, found in SUBJECTS.items():
        if subject.partition("-")[0] != name:
            continue
        try:
            models[subject] = model(found, folder)
        except pytest.skip.Exception as missing:
            models[subject] = {"why": str(missing)}
    if not models:
        out["why"] = test_footprints.ELSEWHERE[name]
    return out


def main() -> None:
    names = sys.argv[1:] or REGISTRY.names()
    kept: Json = json.loads(FILE.read_text())["runtimes"] if FILE.exists() else {}
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        for name in names:
            sys.stderr.write(f"{name}: ")
            kept[name] = figures(name, Path(folder))
            sys.stderr.write(f"{json.dumps(kept[name])}\n")
            told = {
                "date": dt.datetime.now(dt.UTC).date().isoformat(),
                "machine": f"{os.cpu_count()} cores, no GPU, load {os.getloadavg()[1]:.0f}",
                "runtimes": {known: kept[known] for known in REGISTRY.names() if known in kept},
            }
            FILE.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
