"""Prove that a new build of llama.cpp computes on this machine's GPU: by one answer, not by its list of devices.

Old drivers list a card and die at the first kernel, and some write garbage. So the demo's tiny model gives one answer with all
layers on the device: the answer must equal the processor's, the log must name the device, and the use of its memory must rise,
where the driver reports it. Kernels that are compiled at the first start can take minutes; the driver keeps them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from runtimes import installed
from supervisor.catalog import Catalog, load_text
from supervisor.cli.bench import temporary_worker
from supervisor.cli.bench.devices import BenchError
from supervisor.cli.demo import MODELS, tiny
from supervisor.core.events import DeviceSample
from supervisor.core.types import ModelId
from supervisor.errors import LlmuxError
from supervisor.host.environments.installer import InstallError
from supervisor.host.memory.devices import every_gpu
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import DeviceInfo, MemorySampler, ThreadedSampler

MODEL: Final = ModelId("proof")
QUESTION: Final = b'{"prompt": "Hello", "n_predict": 24, "temperature": 0}'
ANSWER_BYTES: Final = 1 << 20
LIMIT_S: Final = 600.0
PROGRESS_INTERVAL_S: Final = 15.0
LIST_S: Final = 60.0
ROOM_MIB: Final = 600
"""The memory for an answer on a GPU: context and kernels, and a model of some MiB."""
PREFIX: Final = {"cuda": "CUDA", "rocm": "ROCm", "vulkan": "Vulkan"}
"""The prefixes of llama.cpp's names of devices."""
NO_VARIABLES: Final[Mapping[str, str]] = {}
NO_F16: Final = {"GGML_VK_DISABLE_F16": "1"}
"""Without this variable, some of Intel's Arc cards write garbage."""
_LISTED: Final = re.compile(r"^ +((?:CUDA|ROCm|Vulkan)\d+): (.*?) \(", re.MULTILINE)
_USED: Final = re.compile(r"using device (\w+) \((.*)\) \(([0-9a-fA-F:.]+)\)")

Echo = Callable[[str], None]


class NoRoomError(InstallError):
    """The GPU is full, so the proof is impossible."""


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    pci: str | None  # the address of the device in use, by the log
    used_mib: int


@dataclass(frozen=True, slots=True)
class Proven:
    """The proof in an environment's record: the program's names of the GPUs that compute, by PCI address, and its variables."""

    names: Mapping[str, str]
    variables: Mapping[str, str]


def prove(environment: Path, echo: Echo) -> Proven:
    """Find the GPUs on which the program computes. Blocks, up to ten minutes. Raises InstallError if there are none."""
    made = installed.program(environment)
    assert made is not None
    names = _list_gpus(environment / "bin" / "llama-server", made)
    if not names:
        raise InstallError("it shows no GPU that it could compute on")
    proof = _Proof(environment, echo)
    processor = HostMemory()
    expected = proof.ask(ThreadedSampler(processor), processor.devices()[0]).text
    found: dict[str, str] = {}
    variables: dict[str, str] = {}
    problems = []
    for name, gpu in _device_candidates(names, made, every_gpu().devices):
        title = f"{name} ({names.get(name, gpu.name)})"
        echo(f"asking {title} for one answer")
        try:
            proof.check_room(gpu)
            variables |= proof.check(name, gpu, expected, variables)
            found |= proof.addresses
        except LlmuxError as error:
            problems.append(f"{title}: {error.message}")
            echo(problems[-1])
    if not found and proof.full:
        raise NoRoomError(
            f"{proof.full}, and a try takes about {ROOM_MIB}: end what holds its memory, and say it again. Or take the "
            "processor's build: llmux runtimes install llama_server --accelerator cpu"
        )
    if not found:
        raise InstallError("; ".join(problems) or "it computes on none of the GPUs that llmux can measure")
    echo(f"{', '.join(found.values())} gave the processor's answer")
    return Proven(found, variables)


def _device_candidates(
    names: Mapping[str, str], made: installed.Program, gpus: Sequence[DeviceInfo]
) -> Iterator[tuple[str, DeviceInfo]]:
    """Each device of the program with the GPU that it may be. A worker for CUDA or ROCm sees only its own GPU, as number 0."""
    if made.device == "vulkan":
        yield from ((name, gpus[min(at, len(gpus) - 1)]) for at, name in enumerate(names) if gpus)
    else:
        yield from ((f"{PREFIX[made.device or '']}0", gpu) for gpu in gpus if gpu.kind.name == made.device)


def _list_gpus(program: Path, made: installed.Program) -> dict[str, str]:
    """The program's names of its GPUs, with their titles."""
    try:
        done = subprocess.run(
            [str(program), "--list-devices"],
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(made.library_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIST_S,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"it can't be started: {error}") from error
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise InstallError(f"it can't be started: {last[0]}")
    prefix = PREFIX[made.device or ""]
    return {name: title for name, title in _LISTED.findall(done.stdout) if name.startswith(prefix)}


async def _sample_device(sampler: MemorySampler, device: DeviceInfo) -> DeviceSample:
    return next(sample for sample in (await sampler.sample({})).devices if sample.id == device.id)


class _Proof:
    """Answers of one environment's program. `addresses`: PCI address → name of the device in the last check."""

    def __init__(self, environment: Path, echo: Echo) -> None:
        self._environment, self._echo = environment, echo
        self._gpus = every_gpu()
        self.addresses: dict[str, str] = {}
        self.full = ""  # a sentence about a full GPU; empty: none is

    def check_room(self, gpu: DeviceInfo) -> None:
        """Raises BenchError where the GPU has less than ROOM_MIB free."""
        seen = asyncio.run(_sample_device(self._gpus.sampler, gpu))
        if seen.stale:
            raise BenchError("its memory can't be read now")
        if seen.free_mib < ROOM_MIB:
            self.full = f"{gpu.label} has only {seen.free_mib} MiB free"
            raise BenchError(self.full)

    def check(self, name: str, gpu: DeviceInfo, expected: str, variables: Mapping[str, str]) -> Mapping[str, str]:
        """The further variables that the device needs. Raises LlmuxError where it doesn't compute."""
        self.addresses = {}
        needed: Mapping[str, str] = {}
        measured = self.ask(self._gpus.sampler, gpu, name, variables)
        others = [one for one in self._gpus.devices if one.pci == measured.pci]
        if (
            measured.pci is not None and measured.pci != gpu.pci and others
        ):  # the program used another GPU: measure that one
            measured = self.ask(self._gpus.sampler, others[0], name, variables)
        if measured.text != expected and name.startswith("Vulkan"):
            self._echo(f"{name} answers {measured.text!r}; once more, without 16-bit floats")
            needed = NO_F16
            measured = self.ask(self._gpus.sampler, gpu, name, {**variables, **needed})
        if measured.text != expected:
            raise BenchError(f"it answers {measured.text!r}, and the processor {expected!r}")
        if measured.pci is None:
            raise BenchError("its log doesn't say that it used the device")
        if measured.used_mib == 0:
            raise BenchError("it took none of the GPU's memory, so it computed on the processor")
        self.addresses = {measured.pci: name}
        return needed

    def ask(
        self, sampler: MemorySampler, device: DeviceInfo, name: str = "", variables: Mapping[str, str] = NO_VARIABLES
    ) -> _Answer:
        """One answer on this device. Raises LlmuxError."""
        return asyncio.run(self._request_answer(sampler, device, name, variables))

    async def _request_answer(
        self, sampler: MemorySampler, device: DeviceInfo, name: str, variables: Mapping[str, str]
    ) -> _Answer:
        with tempfile.TemporaryDirectory(prefix="llmux-proof-") as folder:
            catalog = await asyncio.to_thread(self._tiny_catalog, Path(folder), name, variables)
            progress = asyncio.create_task(self._report_progress(name))
            before_mib = (await _sample_device(sampler, device)).free_mib
            try:
                async with temporary_worker.running(catalog.models[MODEL], device, catalog, sampler) as worker:
                    head = [(b"content-type", b"application/json")]
                    response = await worker.upstream.request("POST", b"/completion", head, QUESTION)
                    answer = (await response.read(ANSWER_BYTES)).decode(errors="replace")
                    response.close()
                    if response.status != HTTPStatus.OK:
                        raise BenchError(f"it answers with {response.status}: {answer[:200]}")
                    await worker.measure()
                    fall_mib = max(0, before_mib - (await _sample_device(sampler, device)).free_mib)
                    log = await asyncio.to_thread(worker.log.read_text, errors="replace")
            finally:
                progress.cancel()
        used = [line[3].lower() for line in _USED.finditer(log)]
        used_mib = fall_mib if worker.measured_mib is None else worker.measured_mib  # some drivers list no processes
        return _Answer(json.loads(answer)["content"], used[0] if used else None, used_mib)

    def _tiny_catalog(self, folder: Path, name: str, variables: Mapping[str, str]) -> Catalog:
        """A configuration with the tiny model alone. For Vulkan, which shows every GPU, it also selects the device."""
        tiny.write(folder / "proof.gguf", MODELS[0])
        runtimes = folder / "runtimes"
        runtimes.mkdir()
        (runtimes / "llama_server").symlink_to(self._environment)
        place = ["--device", name] if name.startswith("Vulkan") else []
        model = {
            "path": str(folder / "proof.gguf"),
            "n_ctx": 512,
            "parallel": 1,
            "gpus": 1,
            "startup_timeout_s": LIMIT_S,
            "startup_limit_s": LIMIT_S,
            "extra_args": [*place, "--log-verbosity", "4"],
            "env": dict(variables),
        }
        catalog = load_text(json.dumps({"models": {MODEL: model}}), folder / "llmux.yaml")
        own = {
            "runtimes_dir": runtimes,
            "state_dir": folder / "state",
        }  # set here, since variables override a file
        return replace(catalog, server=catalog.server.model_copy(update=own))

    async def _report_progress(self, name: str) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            self._echo(f"{name}: {time.monotonic() - began:.0f} s so far; a first start may compile for minutes")
