"""A scripted NVML: the `pynvml` boundary, driven by a JSON file, on which a driver can misbehave. Standard library only.

Load it in any process with LLMUX_NVML_MODULE=/path/to/fake_nvml.py and LLMUX_FAKE_NVML=/path/to/script.json; a missing
script is a machine without a driver. The script is read again at every call, so a test changes the world by writing it
(`write_script`). Its keys, all optional:

    driver        version text
    cuda          [major, minor] of the newest CUDA that it runs
    init_error    NVML error number that nvmlInit raises (18: driver and library don't match)
    errors        {function name: error number}, for every device
    hang          {function name: seconds}: block that long
    return_after_s  memory of an ended process is free again so long after its end was first seen; null: never
    gpus          a list of
      uuid, name, total_mib, reserved_mib, mig
      busy          percent; without it the driver can't tell
      capability    [major, minor]; without it the driver can't tell
      pci           address on the bus, as NVML writes it
      errors        as above, this GPU only
      processes     [{pid, mib, graphics}]: strangers (or whoever the test says); mib null: usedGpuMemory None
      list          "ok" | "empty" | "no_sizes" (usedGpuMemory None) | "host_pids" (our pids shifted) | "error"

Real processes take memory too: a process tree whose environment says FAKE_VRAM_MIB=n takes n MiB while it lives, on each
GPU that its CUDA_VISIBLE_DEVICES names by uuid or index (else the first); FAKE_VRAM_MIB=n,m takes n of the first of these
and m of the second. Where several tests run on one machine at
once, FAKE_VRAM_WORLD in that environment and `world` in the script keep them apart.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

MIB = 1024 * 1024
nvmlMemory_v2 = 0x02000028

ERROR_UNINITIALIZED, ERROR_NOT_SUPPORTED, ERROR_NOT_FOUND = 1, 3, 6
ERROR_LIBRARY_NOT_FOUND, ERROR_FUNCTION_NOT_FOUND = 12, 13
_TEXT = {
    1: "Uninitialized",
    3: "Not Supported",
    6: "Not Found",
    10: "Timeout",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(_TEXT.get(value, f"NVML Error with code {value}"))
        self.value = value


_state = SimpleNamespace(initialised=False, attempts=0, seen={}, dead={})


def write_script(path, **script):
    """Replace the script in one step: a reader sees the old one or the new one."""
    Path(f"{path}.new").write_text(json.dumps(script))
    os.replace(f"{path}.new", path)


def _script():
    try:
        return json.loads(Path(os.environ["LLMUX_FAKE_NVML"]).read_text())
    except (KeyError, FileNotFoundError):
        raise NVMLError(ERROR_LIBRARY_NOT_FOUND) from None


def _enter(function, gpu=None):
    script = _script()
    time.sleep(script.get("hang", {}).get(function, 0))
    for errors in (script.get("errors", {}), (gpu or {}).get("errors", {})):
        if function in errors:
            raise NVMLError(errors[function])
    if not _state.initialised:
        raise NVMLError(ERROR_UNINITIALIZED)
    return script


def _gpu(function, index):
    script = _script()
    gpu = script.get("gpus", [])[index] if index < len(script.get("gpus", [])) else None
    _enter(function, gpu)
    if gpu is None:
        raise NVMLError(ERROR_NOT_FOUND)
    return gpu


def nvmlInit():
    _state.attempts += 1
    script = _script()
    time.sleep(script.get("hang", {}).get("nvmlInit", 0))
    if "init_error" in script:
        raise NVMLError(script["init_error"])
    _state.initialised = True


def nvmlShutdown():
    _enter("nvmlShutdown")
    _state.initialised = False


def nvmlSystemGetDriverVersion():
    return _enter("nvmlSystemGetDriverVersion").get("driver", "590.48")


def nvmlSystemGetCudaDriverVersion():
    major, minor = _enter("nvmlSystemGetCudaDriverVersion").get("cuda", [13, 1])
    return major * 1000 + minor * 10


def nvmlDeviceGetCount():
    return len(_enter("nvmlDeviceGetCount").get("gpus", []))


def nvmlDeviceGetHandleByIndex(index):
    _gpu("nvmlDeviceGetHandleByIndex", index)
    return index


def nvmlDeviceGetHandleByUUID(uuid):
    for index, gpu in enumerate(_enter("nvmlDeviceGetHandleByUUID").get("gpus", [])):
        if _uuid(gpu, index) == uuid:
            return index
    raise NVMLError(ERROR_NOT_FOUND)


def nvmlDeviceGetUUID(handle):
    return _uuid(_gpu("nvmlDeviceGetUUID", handle), handle)


def nvmlDeviceGetPciInfo(handle):
    return SimpleNamespace(
        busId=_gpu("nvmlDeviceGetPciInfo", handle).get("pci", f"00000000:{handle + 1:02X}:00.0").encode()
    )


def nvmlDeviceGetName(handle):
    return _gpu("nvmlDeviceGetName", handle).get("name", "NVIDIA Fake 16 GiB").encode()  # old bindings give bytes


def nvmlDeviceGetCudaComputeCapability(handle):
    gpu = _gpu("nvmlDeviceGetCudaComputeCapability", handle)
    if "capability" not in gpu:
        raise NVMLError(ERROR_NOT_SUPPORTED)
    return tuple(gpu["capability"])


def nvmlDeviceGetMigMode(handle):
    gpu = _gpu("nvmlDeviceGetMigMode", handle)
    if "mig" not in gpu:
        raise NVMLError(ERROR_NOT_SUPPORTED)
    return [int(gpu["mig"])] * 2


def nvmlDeviceGetMemoryInfo(handle, version=None):
    gpu = _gpu("nvmlDeviceGetMemoryInfo", handle)
    total, reserved = gpu.get("total_mib", 16384), gpu.get("reserved_mib", 0)
    used = sum(p["mib"] or 0 for p in gpu.get("processes", ()))
    used += sum(_real(handle).values()) + sum(taken.get(handle, 0) for _, taken in _state.dead.values())
    free = max(0, total - reserved - used)
    if version is None:
        return SimpleNamespace(total=total * MIB, free=free * MIB, used=(total - free) * MIB)
    return SimpleNamespace(total=total * MIB, reserved=reserved * MIB, free=free * MIB, used=used * MIB)


def nvmlDeviceGetUtilizationRates(handle):
    gpu = _gpu("nvmlDeviceGetUtilizationRates", handle)
    if "busy" not in gpu:
        raise NVMLError(ERROR_NOT_SUPPORTED)
    return SimpleNamespace(gpu=gpu["busy"], memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle):
    return _processes("nvmlDeviceGetComputeRunningProcesses", handle, graphics=False)


def nvmlDeviceGetGraphicsRunningProcesses(handle):
    return _processes("nvmlDeviceGetGraphicsRunningProcesses", handle, graphics=True)


def _processes(function, handle, *, graphics):
    gpu = _gpu(function, handle)
    how = gpu.get("list", "ok")
    if how == "error":
        raise NVMLError(ERROR_NOT_SUPPORTED)
    if how == "empty":
        return []
    found = [(p["pid"], p["mib"]) for p in gpu.get("processes", ()) if p.get("graphics", False) == graphics]
    if not graphics:
        found += [(pid + (how == "host_pids") * 50_000_000, mib) for pid, mib in _real(handle).items()]
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None or how == "no_sizes" else mib * MIB)
        for pid, mib in found
    ]


def _uuid(gpu, index):
    return gpu.get("uuid", f"GPU-{index:08d}-fake")


def _real(handle):
    """MiB by pid of the living processes on this GPU; remembers the ended ones until their memory is back."""
    script, now = _script(), time.monotonic()
    alive = {}
    environs = {int(name): _environ(name) for name in os.listdir("/proc") if name.isdigit()}
    world = script.get("world", "")
    environs = {pid: environ for pid, environ in environs.items() if environ.get("FAKE_VRAM_WORLD", "") == world}
    for pid, environ in environs.items():
        # One for the whole tree, however many processes inherited the variable: the topmost that has it.
        if "FAKE_VRAM_MIB" in environ and "FAKE_VRAM_MIB" not in environs.get(_parent(pid), {}):
            alive[pid] = _taken(environ["FAKE_VRAM_MIB"], _chosen(script, environ.get("CUDA_VISIBLE_DEVICES", "0")))
    after = script.get("return_after_s", 0)
    for pid in _state.seen.keys() - alive.keys():
        _state.dead[pid] = (now, _state.seen[pid])
    _state.seen = alive
    _state.dead = {pid: d for pid, d in _state.dead.items() if after is None or now - d[0] < after}
    return {pid: taken[handle] for pid, taken in alive.items() if handle in taken}


def _taken(mib, indices):
    """MiB by GPU: as much of each, or one part for each."""
    parts = [int(part) for part in mib.split(",")]
    return dict(zip(indices, parts * len(indices) if len(parts) == 1 else parts, strict=False))


def _chosen(script, visible):
    uuids = [_uuid(gpu, index) for index, gpu in enumerate(script.get("gpus", []))]
    return [uuids.index(one) if one in uuids else int(one) if one.isdigit() else 0 for one in visible.split(",")]


def _environ(name):
    try:
        pairs = Path("/proc", name, "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)


def _parent(pid):
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
