"""`llmux bench --gpu-report`: which GPU computed with which driver and build, as one block to paste into an issue.

The report names no machine, user, folder or model.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from runtimes import installed
from runtimes.machine import Gpu, Machine
from runtimes.registry import REGISTRY
from supervisor.cli.environments import environments, proof
from supervisor.errors import LlmuxError
from supervisor.host import distribution
from supervisor.host.environments.installer import InstallError
from supervisor.host.memory.machine import look

NAME: Final = "llama_server"
COLUMNS: Final = ("GPU", "Driver", "Build", "Computes", "llmux", "System")


@dataclass(frozen=True, slots=True)
class Report:
    """One row for each GPU. `details`: further facts that explain why a GPU computes, or why not."""

    rows: tuple[tuple[str, ...], ...]
    details: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether any GPU doesn't compute."""
        return any(not row[COLUMNS.index("Computes")].startswith("yes") for row in self.rows)

    def lines(self) -> list[str]:
        """In Markdown, as docs/hardware.md has it."""
        table = [COLUMNS, ("---",) * len(COLUMNS), *self.rows]
        return [*(f"| {' | '.join(row)} |" for row in table), "", *(f"- {line}" for line in self.details)]

    def as_json(self) -> dict[str, JsonValue]:
        rows: list[JsonValue] = [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]
        return {"gpus": rows, "details": list(self.details)}


def report(echo: Callable[[str], None]) -> Report:
    """Let the installed llama.cpp answer once on each GPU. Blocks, up to ten minutes. Raises InstallError without a GPU."""
    machine = look()
    if not machine.gpus:
        raise InstallError("There is no GPU to report on; llmux doctor says what was looked for.")
    environment = (environments.resolve(None) / NAME).resolve()
    made = installed.program(environment)
    archives = REGISTRY.get(NAME).archives
    details = list(archives.choose(machine).reasons) if archives is not None else []
    names: Mapping[str, object] = {}
    began = time.monotonic()
    if made is None or made.device in (None, "cpu"):
        details.append(f"no build for a GPU is installed: llmux runtimes install {NAME}")
    else:
        try:
            names = proof.prove(environment, echo).names
            details.append(f"the answers took {time.monotonic() - began:.0f} s")
        except LlmuxError as error:
            details.append(error.message)
    build = " ".join(filter(None, (made.build, made.kind or made.device))) if made is not None else ""
    system = f"{platform.system()} {platform.release()}, {machine.processor}"
    rows = tuple(
        (
            gpu.name,
            driver_of(gpu, machine),
            build or "none",
            f"yes, as {names[gpu.pci]}" if gpu.pci in names else "no",
            distribution.version(),
            system,
        )
        for gpu in machine.gpus
    )
    home = str(Path.home())
    return Report(rows, tuple(line.replace(home, "~") for line in details))


def driver_of(gpu: Gpu, machine: Machine) -> str:
    """The driver of a GPU; with the newest CUDA that NVIDIA's driver supports, or with the Vulkan drivers for other GPUs."""
    if gpu.vendor == "nvidia":
        cuda = f", CUDA {machine.cuda[0]}.{machine.cuda[1]}" if machine.cuda is not None else ""
        return f"{machine.driver or 'none'}{cuda}"
    return ", ".join((gpu.driver or "none", *machine.vulkan.drivers))
