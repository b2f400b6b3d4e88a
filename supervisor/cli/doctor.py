"""`llmux doctor`: check everything that llmux needs on this machine, without changing or starting anything.

Each check reports ok, warn (it works, but could work better) or fail (something won't work), and how to fix it. A check that
depends on a failed one is left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from runtimes.base import LaunchContext, ModelUnusableError, RuntimeNotInstalledError
from runtimes.device_kind import CUDA, HOST, ROCM, VULKAN, DeviceAssignment, DeviceKind
from runtimes.llama_server.adapter import LlamaServerAdapter
from runtimes.llama_server.adapter.config import LlamaServerConfig
from supervisor.catalog import Catalog
from supervisor.catalog.keys import VARIABLE, keyring_of, refuse_exposed
from supervisor.catalog.sections.sections import ServerConfig
from supervisor.cli import configuration, output, service, session
from supervisor.cli.client import Client, url_of
from supervisor.cli.environments import environments
from supervisor.cli.serving import sizes
from supervisor.errors import ConfigError
from supervisor.host import distribution
from supervisor.host.environments import venvs
from supervisor.host.memory.devices import DRIVERS, detect
from supervisor.host.memory.memory import MIB, DriverUnavailableError
from supervisor.host.memory.nvml import NvmlSession
from supervisor.host.process.ports import can_bind, who_listens
from supervisor.host.store import files

Status = Literal["ok", "warn", "fail"]

STATE_MIB: Final = (100, 1024)  # fails below the first, warns below the second
RUNTIMES_MIB: Final = (500, 5 * 1024)
FEW_PORTS: Final = 20
DESCRIPTORS: Final = 4096
ASK_S: Final = 20.0  # a GPU that sleeps takes some seconds
LLAMA_SERVER: Final = LlamaServerAdapter.name
DRIVER_REMEDY: Final = "install NVIDIA's driver and restart the machine; `nvidia-smi` must show the GPU"


@dataclass(frozen=True, slots=True)
class Check:
    """One result of the doctor. `fix`: the remedy."""

    name: str
    status: Status
    message: str
    fix: str | None = None


def examine(config: Path | None) -> list[Check]:
    """Every check, in the order of the fixes. Takes a few seconds where a GPU has to wake up."""
    configured, catalog = _configuration(config)
    server = catalog.server if catalog is not None else _server_config(config)
    found = [
        *_environment(),
        *configured,
        *_gpus(catalog),
        *_kernel_gpus(catalog, ROCM),
        *_kernel_gpus(catalog, VULKAN),
    ]
    if catalog is not None:
        found += _models(catalog)
        found += _llama_servers(catalog)
    found += _runtimes(catalog, server.runtimes_dir)
    found += _programs()
    found += _ports(server)
    found += _disk("state", server.state_dir, STATE_MIB)
    found += _damaged_files(server.state_dir)
    found += _disk("runtimes' disk", server.runtimes_dir, RUNTIMES_MIB)
    found += _descriptors()
    found += _keys(server)
    found += _service(catalog)
    return found


def report(checks: Sequence[Check]) -> list[output.Table | str]:
    rows: list[output.Row] = []
    for check in checks:
        rows.append((output.state(check.status), check.name, check.message))
        if check.fix is not None:
            rows.append(("", "", f"→ {check.fix}"))
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    verdict = f"{failed} to fix, {warned} to think about." if failed or warned else "All is well."
    return [output.Table(rows, head=False, whole=True), "", verdict]


def _environment() -> Iterator[Check]:
    clashes = distribution.name_clashes()
    if not clashes:
        yield Check("environment", "ok", f"llmux {distribution.version()} in {sys.prefix}")
    yield from (Check("environment", "fail", clash, distribution.REMEDY) for clash in clashes)


def _configuration(config: Path | None) -> tuple[list[Check], Catalog | None]:
    name, remedy, source = "configuration", None, None
    try:
        if (source := configuration.found(config)) is None:
            fix = "make one: llmux config init, or llmux run ORG/REPO-GGUF for a first model of the hub"
            none = Check(name, "warn", "there is none: llmux serve would serve the demo", fix)
            return [none], configuration.settings().read()
        if source.foreign is None:
            path, check = str(source.base), f"llmux config check --config {source.base}"
        else:
            files = ", ".join(str(file) for file in source.foreign.files if file.is_file())
            path, check = files or "the variables", "llmux config check"
        remedy = f"edit {path}, then: {check}"
        catalog = source.read()
    except ConfigError as error:
        checks = [Check(name, "fail", problem, remedy) for problem in error.problems]
    else:
        count = f"{len(catalog.models)} models, {len(catalog.listing())} public names"
        missing = (trouble for model in catalog.models.values() for trouble in model.troubles)
        return [
            Check(name, "ok", f"{path}: {count}"),
            *(Check(name, "fail", str(one), remedy) for one in missing),
        ], catalog
    with contextlib.suppress(
        ConfigError
    ):  # a mistake in another file, such as the file of keys: the rest can still be checked
        return checks, source.read(check_files=False) if source is not None else None
    return checks, None


def _server_config(config: Path | None) -> ServerConfig:
    """The section `server`, which can often be read even if other sections have mistakes."""
    try:
        return configuration.settings(config).server()
    except ConfigError:
        return ServerConfig()


def _gpus(catalog: Catalog | None) -> Iterator[Check]:
    configured = catalog.devices if catalog is not None else "auto"
    wanted = configured != "auto" and any(device.wanted.kind == CUDA for device in configured)
    if configured != "auto" and not wanted:
        what = "no NVIDIA GPU" if _uses_gpu(catalog) else "host memory only"
        yield Check("gpu", "ok", f"the configuration uses {what}")
        return
    missing: Status = "fail" if wanted else "warn"
    try:
        session = NvmlSession()
        gpus = session.find()
    except DriverUnavailableError as error:
        so = "" if wanted else "; models run on the processor, in host memory"
        yield Check("gpu", missing, f"no NVIDIA GPU can be used: {error}{so}", DRIVER_REMEDY)
        return
    if not gpus:
        yield Check("gpu", missing, "the NVIDIA driver answers, but shows no GPU", DRIVER_REMEDY)
    for gpu in gpus:
        if gpu.unusable:
            fix = "turn it off: nvidia-smi -mig 0" if "MIG" in gpu.unusable else DRIVER_REMEDY
            yield Check("gpu", missing, f"gpu{gpu.index} {gpu.name} {gpu.unusable}", fix)
        else:
            memory = f"{output.mib(gpu.total_mib)}{' of the main memory' if gpu.unified else ''}"
            yield Check("gpu", "ok", f"gpu{gpu.index} {gpu.name}, {memory}, driver {session.driver}")


def _kernel_gpus(catalog: Catalog | None, kind: DeviceKind) -> Iterator[Check]:
    """The GPUs in the kernel's files; also a failure where the configuration wants one and there is none."""
    configured = catalog.devices if catalog is not None else "auto"
    wanted = [] if configured == "auto" else [one.wanted for one in configured if one.wanted.kind == kind]
    is_amd = kind == ROCM
    fix = (
        "load the kernel's amdgpu driver; `ls /sys/class/kfd/kfd/topology/nodes` must show more than 0"
        if is_amd
        else "load the kernel's driver of the GPU (xe, i915, amdgpu); `ls /sys/class/drm` must show a renderD"
    )
    devices = "--device /dev/kfd --device /dev/dri" if is_amd else "--device /dev/dri"
    opened = f"sudo usermod --append --groups render,video $USER, and log in again; a container needs {devices}"
    try:
        gpus = DRIVERS[kind]().find()
    except DriverUnavailableError as error:
        gpus = ()
        if wanted:
            yield Check("gpu", "fail", f"no {kind.vendor} GPU can be used: {error}", fix)
    for gpu in gpus:
        name = f"{kind.device_id(gpu.index)} {gpu.name}"
        listed = any(one.index == gpu.index or (one.uuid and gpu.uuid.startswith(one.uuid)) for one in wanted)
        if gpu.unusable and (listed or not gpu.only_listed):
            status: Status = "fail" if listed else "warn"
            yield Check("gpu", status, f"{name} {gpu.unusable}", opened if "can't be used" in gpu.unusable else fix)
        else:
            why = f", {gpu.only_listed}" if gpu.only_listed and not listed else ""
            yield Check("gpu", "ok", f"{name}, {output.mib(gpu.total_mib)}{why}")


def _models(catalog: Catalog) -> Iterator[Check]:
    launchable = 0
    here = sizes.on_this_machine(catalog)
    yield from (Check("memory", "warn", warning, "llmux config check shows the sizes") for warning in here.warnings)
    for model in catalog.models.values():
        try:
            model.adapter.launch(model.config, _host_launch_context(catalog, model.id))
        except RuntimeNotInstalledError as error:
            yield Check(f"model {model.id}", "fail", str(error).partition(" Remedy: ")[0], error.remedy)
        except ModelUnusableError as error:
            yield Check(f"model {model.id}", "fail", str(error), "fix the file or its entry in the configuration")
        else:
            launchable += 1
    if launchable:
        yield Check("models", "ok", f"{launchable} of {len(catalog.models)} can be started")


def _llama_servers(catalog: Catalog) -> Iterator[Check]:
    """Check that the llama.cpp servers in use see this machine's GPU. Runs each server, which takes a second."""
    models: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for model in catalog.models.values():
        if isinstance(model.config, LlamaServerConfig) and model.config.n_gpu_layers != 0:
            with contextlib.suppress(RuntimeNotInstalledError, ModelUnusableError):  # `_models` reports it
                spec = model.adapter.launch(model.config, _host_launch_context(catalog, model.id))
                models.setdefault((spec.argv[0], spec.library_path), []).append(model.id)
    if not models or not _uses_gpu(catalog) or (gpu := detect()) == "cpu":
        return
    own = venvs.installed(LLAMA_SERVER, catalog.server.runtimes_dir)
    command = f"llmux runtimes install {LLAMA_SERVER} --accelerator"
    for (program, libraries), names in models.items():
        seen, why = _visible_devices(program, libraries)
        if seen:
            yield Check("llama-server", "ok", f"{program} sees {', '.join(seen)}")
            continue
        fix = f"{command} {gpu}, or, without {gpu}'s toolkit: {command} vulkan"
        if own is not None and own.device != "cpu" and Path(program).resolve().is_relative_to(own.path):
            anew = f"llmux runtimes remove {LLAMA_SERVER} && {command} {own.device}"
            fix = f"mend what it says (a driver as new as its toolkit; libraries on library_path), or compile it anew: {anew}"
        message = f"{', '.join(names)}: there is a GPU ({gpu}), but {program} {why}"
        yield Check("llama-server", "warn", message, fix)


def _visible_devices(program: str, libraries: Sequence[str]) -> tuple[list[str], str]:
    """The GPUs that a llama.cpp server sees, and, for a server without any, the reason in words."""
    if Path(program).name.startswith("python"):
        return [], "is built for the processor alone"  # the embedded llama.cpp
    path = os.pathsep.join(filter(None, (*libraries, os.environ.get("LD_LIBRARY_PATH"))))
    environ = {**os.environ, **({"LD_LIBRARY_PATH": path} if path else {})}  # as for its workers
    command = [program, "--list-devices"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"can't be asked: {error}"
    output = done.stdout + done.stderr
    if done.returncode != 0:
        return [], f"doesn't start: {(output.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}"
    lines = output.partition("Available devices:")[2].splitlines()
    seen = [line.split(":")[0].strip() for line in lines if line.startswith("  ") and ":" in line]
    failed = next((line.strip() for line in output.splitlines() if "failed to initialize" in line), None)
    return seen, f"sees no GPU{f': {failed}' if failed is not None else ''}"


def _host_launch_context(catalog: Catalog, model: str) -> LaunchContext:
    """A launch context on the host, to check whether a model could be started."""
    return LaunchContext(
        model=model,
        host="127.0.0.1",
        port=catalog.server.worker_port_first,
        key="none",
        devices=(DeviceAssignment(HOST.device_id(), HOST),),
        runtimes_dir=catalog.server.runtimes_dir,
    )


def _runtimes(catalog: Catalog | None, folder: Path) -> Iterator[Check]:
    used = {model.config.runtime for model in catalog.models.values()} if catalog is not None else set()
    for name in environments.installable():
        recipe = environments.recipe_of(name)
        environment = venvs.installed(name, folder)
        command = f"llmux runtimes install {name}"
        if environment is None:
            # The models' own checks say whether they need it.
            needed = " (its models say above whether they need it)" if name in used else ""
            yield Check(f"runtime {name}", "ok", f"not installed{needed}; when you want it: {command}")
        elif environment.lock_digest != recipe.digest():
            yield Check(f"runtime {name}", "warn", "is older than this llmux", command)
        elif (
            environment.device == "cpu"
            and name != LLAMA_SERVER  # models may have other programs, which `_llama_servers` checks
            and name in used
            and _uses_gpu(catalog)
            and (gpu := detect()) != "cpu"
            and gpu in recipe.devices
        ):
            message = f"was installed for the processor, but there is a GPU ({gpu}) that it could use"
            yield Check(f"runtime {name}", "warn", message, f"{command} --accelerator {gpu}")
        else:
            kind = f" for {environment.device}" if environment.device is not None else ""
            versions = ", ".join(environments.versions(recipe, environment))
            yield Check(f"runtime {name}", "ok", f"installed{kind}: {versions}")


def _uses_gpu(catalog: Catalog | None) -> bool:
    configured = catalog.devices if catalog is not None else "auto"
    return configured == "auto" or any(device.wanted.kind.accelerates for device in configured)


def _programs() -> Iterator[Check]:
    for name, purpose in (("llama-server", "a llama.cpp of your own"), ("nvidia-smi", "NVIDIA's tools")):
        path = shutil.which(name)
        yield Check("program", "ok", f"{name}: {path or f'not on PATH; only needed for {purpose}'}")


def _ports(server: ServerConfig) -> Iterator[Check]:
    for key, port in {"port": server.port, **server.extra_ports}.items():
        url, name = url_of(server.host, port), key.replace("_", " ")
        if port == 0 or can_bind(server.host, port):
            yield Check(name, "ok", f"{server.host}:{port} is free")
        elif session.is_daemon(Client(url)):
            yield Check(name, "ok", f"llmux is running at {url}")
        else:
            holder = who_listens(port) or "another program, or is not an address of this machine"
            message = f"{server.host}:{port} is taken by {holder}"
            yield Check(name, "fail", message, f"end that program, or set server.host and server.{key}")
    first, last = server.worker_port_first, server.worker_port_last
    free, count = sum(can_bind("127.0.0.1", port) for port in range(first, last + 1)), last - first + 1
    fix = "set server.worker_port_first and server.worker_port_last"
    yield _threshold_check(
        "workers' ports", free, (1, min(FEW_PORTS, count)), f"{free} of {count} from {first} to {last} are free", fix
    )


def _threshold_check(name: str, there: int, wanted: tuple[int, int], message: str, fix: str) -> Check:
    """Fails below the first amount, warns below the second."""
    least, good = wanted
    status: Status = "fail" if there < least else "warn" if there < good else "ok"
    return Check(name, status, message, None if status == "ok" else fix)


def _disk(name: str, folder: Path, amounts: tuple[int, int]) -> Iterator[Check]:
    if (refusal := files.refusal(folder)) is not None:
        place, why = refusal.filename, refusal.strerror
        fix = f"make it yours: sudo chown $USER {place}" if refusal.errno == errno.EACCES else "name another place"
        yield Check(name, "fail", f"{folder}: {place} can't be written: {why}", fix)
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free // MIB
    yield _threshold_check(
        name, free, amounts, f"{folder}: {output.mib(free)} free", f"make room on the disk of {there}"
    )


def _damaged_files(state_dir: Path) -> Iterator[Check]:
    for path in sorted(state_dir.glob("*.broken-*")):
        message = f"{path} was damaged and put aside; llmux went on with its backup, where it had one"
        yield Check("state", "warn", message, f"when nobody needs it any more: rm {path}")


def _descriptors() -> Iterator[Check]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS
    amount = "no limit" if hard == resource.RLIM_INFINITY else f"{hard}"
    fix = None if enough else "raise it: LimitNOFILE= in the unit, or nofile in /etc/security/limits.conf"
    yield Check("open files", "ok" if enough else "warn", f"{amount}; a request takes two", fix)


def _keys(server: ServerConfig) -> Iterator[Check]:
    path = server.api_keys
    try:
        keyring = keyring_of(path)
    except ConfigError as error:
        yield from (Check("keys", "fail", problem, f"edit {path or VARIABLE}") for problem in error.problems)
        return
    if refused := refuse_exposed(server.host, keyring):
        yield Check("keys", "fail", refused, "llmux keys add NAME")
        return
    for warning in keyring.warnings:
        yield Check("keys", "warn", warning, f"chmod 600 {path}")
    expired = [key.name for key in keyring.keys if key.expires is not None and key.expires <= time.time()]
    if expired:
        yield Check("keys", "warn", f"expired: {', '.join(expired)}", f"llmux keys revoke {expired[0]}")
    if keyring and not any("admin" in key.scopes for key in keyring.keys):
        yield Check("keys", "warn", "no key opens the admin API", "llmux keys add admin --scope admin")
    if not keyring:
        yield Check("keys", "ok", "none: only this machine is served")
    elif not keyring.warnings and not expired:
        yield Check("keys", "ok", f"{path or VARIABLE}: {len(keyring.keys)} keys")


def _service(catalog: Catalog | None) -> Iterator[Check]:
    unit = service.folder() / service.UNIT
    if not unit.exists():
        yield Check("service", "ok", "not installed; when you want it: llmux service install")
        return
    models = service.unsealed(catalog) if catalog is not None else []
    if models and service.SEAL.search(unit.read_text(encoding="utf-8")):
        message = f"{unit} forbids what podman needs to start {', '.join(models)} after a boot"
        yield Check("service", "warn", message, "llmux service install")
    else:
        yield Check("service", "ok", f"{unit}")
    try:
        linger = service.run(["loginctl", "show-user", str(os.getuid()), "--property=Linger", "--value"])
    except service.ServiceError:
        yield Check("linger", "warn", "systemd can't be asked whether it is on", "loginctl enable-linger")
    else:
        if linger.strip() == "yes":
            yield Check("linger", "ok", "on: it starts at boot and outlives your logout")
        else:
            yield Check("linger", "warn", "off: it ends when you log out", "llmux service install --linger")
