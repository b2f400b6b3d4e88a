"""`make tenants`: three clients of different class ask a real daemon for four models, of which two fit at a time.

Writes each client's waits, and the output of `llmux why` for one request, into docs/scheduling.md. The workers are real
llama.cpp servers with tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.targets import free_port, temporary_folder
from supervisor.cli.demo import tiny

PAGE: Final = Path(__file__).parent.parent / "docs" / "scheduling.md"
BEGIN, END = "<!-- tenants -->", "<!-- end tenants -->"
MODELS: Final = ("alpha", "beta", "gamma", "delta")

LATE: Final = 8
"""The number of last requests; the longest wait among them is explained."""

_CONFIG: Final = """
devices: [{kind: host, budget_mib: 4000, margin_mib: 0}]
limits: {min_residency_s: 5}
models:
"""
_MODEL: Final = "  {name}: {{path: {name}.gguf, program: embedded, threads: 1, vram_mib: 1900}}\n"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client: `per_s` requests a second on average, each for one of its models."""

    name: str
    priority: str
    per_s: float
    models: tuple[str, ...]


TENANTS: Final = (
    Tenant("chat", "high", 0.2, ("alpha", "beta")),
    Tenant("agents", "normal", 0.5, ("alpha", "beta", "gamma")),
    Tenant("batch", "low", 3.0, ("gamma", "delta")),
)


async def traffic(client: httpx.AsyncClient, tenant: Tenant, until: float) -> None:
    """Send random requests, without waiting for earlier answers."""
    chance = random.Random(tenant.name)
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < until:
            tasks.create_task(ask(client, tenant, chance.choice(tenant.models)))
            await asyncio.sleep(chance.expovariate(tenant.per_s))


async def ask(client: httpx.AsyncClient, tenant: Tenant, model: str) -> None:
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    head = {"X-Tenant-ID": tenant.name, "X-Priority": tenant.priority}
    answer = await client.post("/v1/chat/completions", json=body, headers=head)
    answer.raise_for_status()


async def run(url: str, seconds: float) -> str:
    """Send the traffic; returns the table and the explanation of one request."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as client:
        await asyncio.gather(*(traffic(client, tenant, time.monotonic() + seconds) for tenant in TENANTS))
        ended = (await client.get("/v1/admin/requests/ended", params={"limit": 1000})).json()["data"]
    late = [each for each in ended if each["tenant"] == "chat"][:LATE]  # newest first
    longest = max(late, key=waited)
    why = [sys.executable, "-m", "supervisor.cli", "why", "--url", url, "--request", str(longest["id"])]
    output = subprocess.run(why, check=True, capture_output=True, text=True).stdout
    return "\n".join([*table(ended, seconds), "", *story(output)])


def waited(ended: dict[str, Any]) -> float:
    wait_ms: float = ended["queue_ms"]
    return wait_ms / 1000


def table(ended: list[dict[str, Any]], seconds: float) -> list[str]:
    lines = [
        f"{seconds:.0f} seconds, {len(ended)} requests, {len({each['worker'] for each in ended})} loads.",
        "Waits are seconds from arrival to a worker: median, 95th percentile, worst.",
        "",
        "| Tenant | Class | Requests a second | Models | Requests | Waits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for tenant in TENANTS:
        waits = sorted(waited(each) for each in ended if each["tenant"] == tenant.name)
        shown = ", ".join(f"{waits[int((len(waits) - 1) * share)]:.2f}" for share in (0.5, 0.95, 1.0))
        models = ", ".join(tenant.models)
        lines.append(f"| {tenant.name} | {tenant.priority} | {tenant.per_s:g} | {models} | {len(waits)} | {shown} |")
    return lines


def story(output: str) -> list[str]:
    return [
        "The longest of the last waits of the tenant `chat`, as `llmux why --request` tells it:",
        "",
        "```",
        output.rstrip(),
        "```",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--write", action="store_true", help="into docs/scheduling.md")
    options = parser.parse_args()
    with temporary_folder() as name:
        folder = Path(name)
        for seed, model in enumerate(MODELS):
            tiny.write(folder / f"{model}.gguf", tiny.Tiny(name=model, seed=seed, size_mib=500))
        config = folder / "llmux.yaml"
        config.write_text(_CONFIG + "".join(_MODEL.format(name=model) for model in MODELS))
        port = free_port()
        argv = [sys.executable, "-m", "supervisor.cli", "serve", "--config", str(config), "--port", str(port)]
        with (folder / "log").open("wb") as log:
            daemon = subprocess.Popen([*argv, "--state-dir", str(folder / "state")], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            until_ready(url)
            text = asyncio.run(run(url, options.seconds))
        finally:
            daemon.terminate()
            daemon.wait()
    print(text)
    if options.write:
        before, rest = PAGE.read_text().split(BEGIN, 1)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")


def until_ready(url: str) -> None:
    for _ in range(600):
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return
        time.sleep(0.1)
    sys.exit("the daemon doesn't answer")


if __name__ == "__main__":
    main()
