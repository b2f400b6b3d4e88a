"""One temporary worker on one device: started and watched like the daemon's workers, and always stopped.

Its processes carry their own instance mark and its log has its own folder, so no daemon takes the worker for a leftover.
The kernel picks the port, outside the range of a daemon's workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from supervisor.catalog import Catalog, CatalogModel
from supervisor.cli.bench.devices import BenchError
from supervisor.core.events import Event, WorkerReady
from supervisor.core.types import Crash, Generation
from supervisor.errors import UpstreamError
from supervisor.fleet.local import LocalLauncher
from supervisor.fleet.worker import LOG_TAIL_LINES, Worker
from supervisor.host.environments import venvs
from supervisor.host.memory.memory import DeviceInfo, MemorySampler, WorkerKey
from supervisor.host.process.logs import tail
from supervisor.host.process.ports import PortRange
from supervisor.host.upstream.upstream import UpstreamPool

HOST = "127.0.0.1"
END_S = 10.0  # from a dying worker's broken connections to the end of its process


@dataclass(slots=True)
class TemporaryWorker:
    key: WorkerKey
    worker: Worker
    upstream: UpstreamPool
    load_s: float
    sampler: MemorySampler
    log: Path
    measured_mib: int | None = None  # the highest measurement

    async def measure(self) -> None:
        sampled = await self.sampler.sample({self.key: self.worker.holder()})
        for sample in sampled.workers:
            if sample.used_mib is not None:
                self.measured_mib = max(sample.used_mib, self.measured_mib or 0)


@contextlib.asynccontextmanager
async def running(
    model: CatalogModel, device: DeviceInfo, catalog: Catalog, sampler: MemorySampler
) -> AsyncIterator[TemporaryWorker]:
    """Run the model on this device until the block ends, also by cancellation; then its whole process tree ends.

    Yields the ready worker. Raises BenchError when the worker can't be started, doesn't become ready, or ends in a request.
    """
    _check_environment(model, device, catalog.server.runtimes_dir)
    ready = asyncio.Event()

    def post(event: Event) -> None:
        if isinstance(event, WorkerReady):
            ready.set()

    with tempfile.TemporaryDirectory(prefix="llmux-bench-") as logs:
        port = _free_port()
        launcher = LocalLauncher(
            ports=PortRange(port, port, HOST),
            runtimes_dir=catalog.server.runtimes_dir,
            log_dir=Path(logs),
            instance=f"bench-{secrets.token_hex(8)}",
            devices={device.id: device.assignment},
        )
        key = (model.id, Generation(1))
        worker = Worker(key, model, (device.id,), launcher, catalog.limits, post)
        began = time.monotonic()
        life = asyncio.create_task(worker.run())
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({life, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if life.done() or worker.upstream is None:
                raise _exit_error(life.result(), device)
            log = launcher.log_path(model.id)
            ready_worker = TemporaryWorker(key, worker, worker.upstream, time.monotonic() - began, sampler, log)
            try:
                yield ready_worker
            except UpstreamError as error:
                await asyncio.wait({life}, timeout=END_S)
                if life.done():
                    raise _exit_error(life.result(), device) from error
                lines = await asyncio.to_thread(tail, log, LOG_TAIL_LINES)
                raise BenchError(f"On {device.id}: {error.message}", detail=tuple(lines)) from error
        except asyncio.CancelledError:
            worker.stop(force=True)
            raise
        finally:
            waiting.cancel()
            worker.stop(force=False)
            await asyncio.wait({life})


def _exit_error(crash: Crash | None, device: DeviceInfo) -> BenchError:
    summary = crash.operator_summary if crash is not None else "it ended"
    return BenchError(f"On {device.id}: {summary}", detail=crash.log_tail if crash is not None else ())


def _check_environment(model: CatalogModel, device: DeviceInfo, runtimes_dir: Path) -> None:
    """Raises BenchError for a build for the processor, which would silently ignore the GPU."""
    name = model.adapter.name
    environment = venvs.installed(name, runtimes_dir) if model.adapter.requirements is not None else None
    if device.kind.accelerates and environment is not None and environment.device == "cpu":
        raise BenchError(
            f"The runtime {name} was installed for the processor. Install it for the GPU: "
            f"llmux runtimes install {name} --accelerator {device.kind.build}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
