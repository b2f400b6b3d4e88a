"""Records of jobs, one class for each kind, and their states in the words of the APIs.

Times are seconds since the epoch; None: that has not happened yet. A record is a row of the store, so a field keeps its name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from msgspec import Struct, field

from supervisor.catalog.keys import Key, Scope
from supervisor.core.types import ModelId
from supervisor.host.store.store import NotSavedError, Store
from supervisor.schema.job import BatchState, JobKind, State
from supervisor.schema.load import State as LoadState

KEY: Final = "key"  # of the request's API key in the state of the ASGI scope
KEPT_HEADERS: Final = (
    *("x-priority", "x-tenant-id", "x-allow-remote", "x-timeout", "x-cache-mode", "x-cache-tag"),
    *("anthropic-version", "anthropic-beta"),
)
"""Headers that a job's own requests copy from the request that created the job."""
_NUMBER: Final = re.compile("-([0-9]{1,18})$")


_BATCH_STATES: Final[Mapping[State, BatchState]] = {
    "queued": "validating",
    "running": "in_progress",
    "completed": "completed",
    "failed": "failed",
    "expired": "expired",
    "cancelled": "cancelled",
}
"""The states of batches in OpenAI's API; two more depend on other fields: see `Batch.api_state`."""
_LOAD_STATES: Final[Mapping[State, LoadState]] = {
    "queued": "waiting",
    "running": "loading",
    "completed": "ready",
    "failed": "failed",
    "cancelled": "cancelled",
    "interrupted": "interrupted",
}
"""The states of loads in the admin API."""


class Job(Struct, kw_only=True, eq=False, tag_field="kind"):
    """The common fields of all kinds."""

    id: str
    created_at: float
    owner: str | None = None  # the id of the key that created it; None: no key was needed, or the daemon created it
    model: str | None = None  # the requested name
    state: State = "queued"
    started_at: float | None = None  # the last time
    ended_at: float | None = None
    error: dict[str, Any] | None = None  # as clients get it; set iff the job failed

    @property
    def kind(self) -> JobKind:
        """The name of the job's kind."""
        return cast("JobKind", self.__struct_config__.tag)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, in any way."""
        return self.state not in {"queued", "running"}

    @property
    def disk_bytes(self) -> int:
        """The disk space of the request and the result."""
        return 0


class Inference(Job, kw_only=True, eq=False, tag="inference"):
    """An inference request whose client does not wait."""

    endpoint: str  # path
    headers: dict[str, str] = field(default_factory=dict)  # of its request
    tries: int = 0
    deaths: int = 0  # of the daemon while the request was sent; incremented while it is being sent
    status: int | None = None  # HTTP status of the answer
    content_type: str = ""
    result_bytes: int | None = None  # set iff there is a result
    request_bytes: int = 0
    request_id: str = ""  # of its last try

    @property
    def disk_bytes(self) -> int:
        """See `Job`."""
        return self.request_bytes + (self.result_bytes or 0)

    @property
    def keeps_result(self) -> bool:
        """Whether the record and the result are kept after the end. If not, the response or the batch has the outcome."""
        return True


class Response(Inference, kw_only=True, eq=False, tag="response"):
    """The request of a background response."""

    response: str  # the name of the stored response

    @property
    def keeps_result(self) -> bool:
        """See `Inference`."""
        return False


class Line(Inference, kw_only=True, eq=False, tag="line"):
    """The request of one line of a batch."""

    batch: str  # the id of the batch's job
    number: int  # of the line in the batch's file, from 1
    custom_id: str

    @property
    def keeps_result(self) -> bool:
        """See `Inference`."""
        return False


class Problem(Struct, frozen=True):
    """A reason for which a batch was refused after its file was read."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # from 1


class Batch(Job, kw_only=True, eq=False, tag="batch"):
    """A file of requests. `queued`: the file is being checked."""

    endpoint: str
    input_file: str
    output_file: str  # ids of files that are created with the batch; clients find the non-empty ones at its end
    error_file: str
    window: str  # as the client wrote it
    expires_at: float
    headers: dict[str, str] = field(default_factory=dict)  # of each line's request
    metadata: dict[str, str] | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    total: int = 0  # requests in its file
    last_line: int = 0  # number of the last request's line
    completed: int = 0  # set at the end; until then `jobs.batches` counts
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    problems: list[Problem] = field(default_factory=list)

    @property
    def api_state(self) -> BatchState:
        """The state in the words of OpenAI's API."""
        if self.is_over:
            return _BATCH_STATES[self.state]
        if self.cancelling_at is not None:
            return "cancelling"
        return _BATCH_STATES[self.state] if self.finalizing_at is None else "finalizing"


class Load(Job, kw_only=True, eq=False, tag="load"):
    """One load of a worker. `queued`: it waits for memory, for other loads or for a retry."""

    worker: ModelId  # the model, or one of its replicas
    reason: str = ""  # for waiting, for the start, or for the end
    generation: int | None = None
    devices: tuple[str, ...] = ()
    lease_mib: int | None = None
    expected_s: float | None = None  # duration of the last load
    took_s: float | None = None  # from the start of the worker to the end of the load
    share: float = 0.0  # that is done
    stage: str = ""  # the last line of the worker's log
    bytes_read: int | None = None
    bytes_total: int | None = None
    memory_mib: int | None = None
    decided: int = 0  # number of the last decision when the load began, or when its worker was started

    @property
    def api_state(self) -> LoadState:
        """The state in the words of the admin API."""
        return _LOAD_STATES[self.state]


class Pull(Job, kw_only=True, eq=False, tag="pull"):
    """A download of one model's files."""

    model: ModelId
    done_bytes: int = 0
    first_bytes: int | None = None  # present before the pull
    total_bytes: int | None = None
    load: str | None = None  # the id of the load that it started


AnyJob = Inference | Response | Line | Batch | Load | Pull
"""All kinds: the type of a row of the store."""


def number_of(job: Load | Pull) -> int:
    """The number at the end of a job's id; 0 for an id without one."""
    found = _NUMBER.search(job.id)
    return int(found[1]) if found else 0


def owner_of(state: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The owner whose jobs a request may see (the id of its key), and whether it may see all jobs. `state`: its scope's."""
    key: Key | None = state.get(KEY)
    return (None, True) if key is None else (key.id, Scope.ADMIN in key.scopes)


async def former_owners(store: Store, keys: Iterable[Key]) -> Mapping[str, str]:
    """Ids of keys by their names: before keys had ids, stored jobs named their owner by the name of the key.

    The first start with ids stores this table, and it never changes: a later key with such a name is another key.
    """
    found = store.get("owners", "ids")
    if isinstance(found, dict):
        return {name: str(key_id) for name, key_id in found.items()}
    ids = {key.name: key.id for key in keys}
    with contextlib.suppress(NotSavedError):
        await store.put("owners", "ids", {**ids})
    return ids
