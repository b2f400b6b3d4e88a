"""Jobs as they are kept: one record for everything that runs longer than the request that asked for it, with a kind.

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
from supervisor.schema.job import JobKind, State

KEY: Final = "key"  # where the ASGI scope's state has the request's key
KEPT_HEADERS: Final = (
    *("x-priority", "x-tenant-id", "x-allow-remote", "x-timeout", "x-cache-mode", "x-cache-tag"),
    *("anthropic-version", "anthropic-beta"),
)
"""Headers of the request that makes a job, which its own requests have, too."""
_NUMBER: Final = re.compile("-([0-9]{1,18})$")


class Job(Struct, kw_only=True, eq=False, tag_field="kind"):
    """What jobs of all kinds have."""

    id: str
    created_at: float
    owner: str | None = None  # the id of the key that made it; None: no key was needed, or the daemon made it
    model: str | None = None  # the name that it was asked for with
    state: State = "queued"
    started_at: float | None = None  # the last time
    ended_at: float | None = None
    error: dict[str, Any] | None = None  # as a client gets it; set iff it failed

    @property
    def kind(self) -> JobKind:
        """The name of its kind."""
        return cast("JobKind", self.__struct_config__.tag)

    @property
    def is_over(self) -> bool:
        """Has it ended, one way or the other?"""
        return self.state not in {"queued", "running"}

    @property
    def disk_bytes(self) -> int:
        """Its request and its result on disk."""
        return 0


class Inference(Job, kw_only=True, eq=False, tag="inference"):
    """A request of inference whose client does not wait."""

    endpoint: str  # path
    headers: dict[str, str] = field(default_factory=dict)  # of its request
    tries: int = 0
    deaths: int = 0  # of the daemon, while this was sent; one more while it is
    status: int | None = None  # of the answer
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
        """Does it stay when it is over, with its result? Else the response or the batch that it is for says how it ended."""
        return True


class Response(Inference, kw_only=True, eq=False, tag="response"):
    """The request of a response that is generated in the background."""

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
    """Why a batch was refused after its file was read."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # from 1


class Batch(Job, kw_only=True, eq=False, tag="batch"):
    """A file of requests. `queued`: the file is being checked."""

    endpoint: str
    input_file: str
    output_file: str  # ids of files that begin with the batch; clients find those that aren't empty at its end
    error_file: str
    window: str  # as the client wrote it
    expires_at: float
    headers: dict[str, str] = field(default_factory=dict)  # of each line's request
    metadata: dict[str, str] | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    total: int = 0  # requests in its file
    last_line: int = 0  # number of the last request's line
    completed: int = 0  # at its end; until then `jobs.batches` counts
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    problems: list[Problem] = field(default_factory=list)


class Load(Job, kw_only=True, eq=False, tag="load"):
    """One load of a worker. `queued`: it waits for memory, a turn or a retry."""

    worker: ModelId  # the model, or one of its replicas
    reason: str = ""  # why it waits, was begun, or ended
    generation: int | None = None
    devices: tuple[str, ...] = ()
    lease_mib: int | None = None
    expected_s: float | None = None  # how long the last load took
    took_s: float | None = None  # from the start of the worker to the end of the load
    share: float = 0.0  # of it that is done
    stage: str = ""  # the last line of the worker's log
    bytes_read: int | None = None
    bytes_total: int | None = None
    memory_mib: int | None = None
    decided: int = 0  # number of the last decision when it began, or its worker was started


class Pull(Job, kw_only=True, eq=False, tag="pull"):
    """The files of one model that are fetched."""

    model: ModelId
    done_bytes: int = 0
    first_bytes: int | None = None  # that were there before
    total_bytes: int | None = None
    load: str | None = None  # the id of the load that it began


AnyJob = Inference | Response | Line | Batch | Load | Pull
"""All kinds: what a row of the store is read as."""


def number_of(job: Load | Pull) -> int:
    """What its id ends with; 0 where the id can't be one."""
    found = _NUMBER.search(job.id)
    return int(found[1]) if found else 0


def owner_of(state: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The owner whose jobs a request may see, from its scope's state: the id of its key, and whether it may see all."""
    key: Key | None = state.get(KEY)
    return (None, True) if key is None else (key.id, Scope.ADMIN in key.scopes)


async def former_owners(store: Store, keys: Iterable[Key]) -> Mapping[str, str]:
    """Ids of keys by their names: before keys had ids, stored jobs named their owner by the name of the key.

    The names and ids are those of the first start with ids, and stay so: a later key of such a name is another.
    """
    found = store.get("owners", "ids")
    if isinstance(found, dict):
        return {name: str(key_id) for name, key_id in found.items()}
    ids = {key.name: key.id for key in keys}
    with contextlib.suppress(NotSavedError):
        await store.put("owners", "ids", {**ids})
    return ids
