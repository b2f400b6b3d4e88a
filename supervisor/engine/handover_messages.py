"""The messages that an old daemon sends to its successor: one for each worker, and one for the rest of the state.

A message carries plain JSON and open descriptors. Another version of llmux may read it: unknown fields are an error, and the
successor then gives up; missing fields get their default.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from pydantic import JsonValue

from runtimes.base import HealthCheck, LaunchSpec
from supervisor.core.events import WorkerAdopted
from supervisor.core.types import ModelId, TicketId
from supervisor.engine.recording import packed, unpacked
from supervisor.errors import LlmuxError
from supervisor.host.memory.memory import WorkerKey
from supervisor.host.process.fd_channel import Json, Message
from supervisor.host.process.process import AdoptedShim, WorkerProcess
from supervisor.host.process.reap import InstanceLock, Mark

VERSION: Final = 1  # format version of these messages


class TakeoverError(LlmuxError):
    """The handover has failed; the message contains the reason."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "upgrade_failed"


@dataclass(slots=True)
class HandoverState:
    """The predecessor's state that a successor has received so far."""

    lock: InstanceLock
    listener: socket.socket
    pins: Mapping[ModelId, bool]
    unloaded_by_operator: Sequence[ModelId]
    overrides: Mapping[ModelId, Mapping[str, JsonValue]]
    extra: Sequence[socket.socket] = ()  # of extra ports
    workers: dict[WorkerKey, InheritedWorker] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InheritedWorker:
    """A worker whose descriptors we have, while the predecessor still supervises it."""

    adopted: WorkerAdopted
    facts: Json
    descriptors: tuple[int, ...]

    @property
    def spec(self) -> LaunchSpec:
        """The worker's launch spec, without the fields that only a start needs."""
        spec = self.facts["spec"]
        path, then, interval_s = spec["health"]
        return LaunchSpec(
            argv=(),
            health=HealthCheck(path, then, interval_s),
            auth=spec["auth"],
            metrics=spec["metrics"],
            patience_s=spec.get("patience_s", 0.0),
            stop_argv=None if spec["stop_argv"] is None else tuple(spec["stop_argv"]),
            kill_argv=None if spec.get("kill_argv") is None else tuple(spec["kill_argv"]),
            host=spec["host"],
            port=spec["port"],
        )

    def process(self, instance: str, heard: bytes) -> WorkerProcess:
        """Adopt the worker's processes. `heard`: the start of a report that the predecessor has read only in part."""
        name = f"{self.adopted.model}:{self.adopted.generation}"
        stdin, stdout, pidfd = self.descriptors
        group = self.facts["group"]
        return WorkerProcess.adopt(
            name,
            Mark(instance, name, Path(self.facts["log"])),
            None if group is None else Path(group),
            AdoptedShim(self.facts["shim_pid"], stdin, stdout, pidfd),
            self.facts["pid"],
            self.facts["started_at"],
            heard,
        )

    def forget(self) -> None:
        """Close the descriptors of a worker that ended before the handover."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def general_message(
    pins: Mapping[ModelId, bool],
    unloaded_by_operator: Sequence[ModelId],
    overrides: Mapping[ModelId, Any],
    workers: int,
) -> Json:
    """The general message. Its descriptors: the listening socket, the lock, then the sockets of extra ports."""
    values = {model: dict(override.values) for model, override in overrides.items()}
    return {
        "general": {"pins": dict(pins), "dismissed": [*unloaded_by_operator], "overrides": values, "workers": workers}
    }


def read_general(message: Message) -> tuple[HandoverState, int]:
    """The state in a general message, and the number of worker messages that follow."""
    listener, lock, *extra = message.descriptors
    general = message.content["general"]
    inherited = [socket.socket(fileno=descriptor) for descriptor in (listener, *extra)]
    for each in inherited:
        each.setblocking(False)
    return (
        HandoverState(
            InstanceLock.inherited(lock),
            inherited[0],
            general["pins"],
            general.get("dismissed", ()),
            general["overrides"],
            inherited[1:],
        ),
        general["workers"],
    )


def worker_message(adopted: WorkerAdopted, process: WorkerProcess, spec: LaunchSpec) -> Json:
    """A worker's message. Its descriptors: those of the worker's process."""
    return {
        "worker": {
            "adopted": packed(replace(adopted, tickets=(), demands=())),
            "pid": process.pid,
            "shim_pid": process.shim_pid,
            "started_at": process.started_at,
            "group": None if process.group is None else str(process.group),
            "log": str(process.mark.logs),
            "spec": {
                "host": spec.host,
                "port": spec.port,
                "auth": spec.auth,
                "metrics": spec.metrics,
                "patience_s": spec.patience_s,
                "health": [spec.health.path, spec.health.then, spec.health.interval_s],
                "stop_argv": spec.stop_argv,
                "kill_argv": spec.kill_argv,
            },
        }
    }


def read_worker(message: Message) -> InheritedWorker:
    """The worker of a message. Raises InvalidRequestError for fields that this version doesn't know."""
    facts = message.content["worker"]
    return InheritedWorker(_unpack_adopted(facts["adopted"]), facts, message.descriptors)


def last_message(adopted: WorkerAdopted, heard: bytes) -> Json:
    """A worker's final message, with its state at the moment of the handover."""
    return {"last": {"adopted": packed(adopted), "heard": base64.b64encode(heard).decode()}}


def read_last(content: Json, predecessor: int) -> tuple[WorkerAdopted, bytes]:
    """A worker's last message: its adoption, and its `heard` bytes. The predecessor's requests get ids distinct from ours."""
    last = content["last"]
    adopted = _unpack_adopted(last["adopted"])
    tickets = tuple(foreign(predecessor, ticket) for ticket in adopted.tickets)
    return replace(adopted, tickets=tickets), base64.b64decode(last["heard"])


def foreign(predecessor: int, ticket: str) -> TicketId:
    """The id of a predecessor's request in this daemon."""
    return TicketId(f"{predecessor}:{ticket}")


def _unpack_adopted(content: Any) -> WorkerAdopted:
    adopted = unpacked(content)
    assert isinstance(adopted, WorkerAdopted)
    return adopted
