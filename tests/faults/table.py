"""What llmux promises for each fault, and what keeps the promise.

A test belongs to fault 7 if its class is called `Test07…` and stands in tests/faults; `also` names the tests elsewhere.
`make docs` writes docs/reliability.md from this table and from the figures that the tests recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """`mechanism` begins with the modules that have it; `also`: path::Class or path::Class::test."""

    number: int
    what: str
    promise: str
    mechanism: str
    also: tuple[str, ...] = ()
    missing: str = ""  # why it has no test


TABLE: Final = (
    Fault(
        1,
        "kill -9 of the daemon at any moment",
        "No process of its workers lives 2 s later, not even a detached grandchild. A new daemon with ten models serves within 2 s.",
        "`host/process/shim`: each worker runs below a subreaper that gets a parent-death signal, ends on end of input, and kills its tree.",
        (
            "tests/faults/test_identity.py::TestHiddenChildren",
            "tests/faults/test_takeover.py::TestAfterwards",
        ),
    ),
    Fault(
        2,
        "kill -9 of the daemon and of its shims",
        "The next start has ended what is left within 1 s, before it takes its port.",
        "`host/process/reap`: leftovers are found by the instance's mark in their environment, and by their start time.",
        (
            "tests/faults/test_identity.py::TestCopiedDirectory",
            "tests/faults/test_identity.py::TestLivingDaemon",
        ),
    ),
    Fault(
        3,
        "A worker ends; its grandchild holds the output open",
        "The stop is over at most 1 s after the grace.",
        "`host/process/process`: pidfds say when a tree is gone; output goes to a file, never to a pipe.",
    ),
    Fault(
        4,
        "A worker ignores SIGTERM",
        "SIGKILL follows when `grace_s` is over, within half a second.",
        "`host/process/process`: grace, then SIGKILL to the whole tree.",
    ),
    Fault(
        5,
        "SIGSTOP of a ready worker",
        "It gets no requests after three failed probes, and is replaced only after six patient ones.",
        "`fleet/worker`: readiness and liveness are probed apart.",
        ("tests/faults/test_inference_probe.py",),
    ),
    Fault(
        6,
        "A worker's first thread ended, its others live",
        "Its memory is not given to anybody before the process ended.",
        "`host/process/process`: only the pidfd tells an end, never the state in /proc.",
    ),
    Fault(
        7,
        "A process that SIGKILL does not end",
        "Its device is quarantined with an alert; the other devices serve on.",
        "`host/process/process` says so after a bounded wait, `core/memory/ledger` keeps the lease and blocks the device.",
        ("tests/unit/core/test_scheduler_memory.py",),
    ),
    Fault(
        8,
        "A pid is used again",
        "A stranger is never signalled.",
        "`host/process/reap`: pid, start time and mark are compared, and signals go to a pidfd.",
        ("tests/faults/test_identity.py::TestStrangers",),
    ),
    Fault(
        9,
        "A worker never becomes ready",
        "After five failures in ten minutes the model is given up with its cause; callers hear it within 1 s. It is tried again every `failed_retry_s`, unless its arguments are wrong.",
        "`core/workers/termination`: backoff with jitter, then FAILED; the classified cause is in each answer.",
        (
            "tests/faults/test_host_trouble.py::TestFailed",
            "tests/faults/test_host_trouble.py::TestRefused",
        ),
    ),
    Fault(
        10,
        "A worker dies in the middle of a stream",
        "The stream says so in its own format and never ends as if whole; nothing is sent again.",
        "`gateway/forward`, `gateway/dialect`: the stream's last event is the error; any other answer is cut.",
        (
            "tests/unit/gateway/test_forward.py::TestBroken",
            "tests/e2e/dialects/test_anthropic.py",
            "tests/security/test_worker_logs.py::TestInBand",
        ),
    ),
    Fault(
        11,
        "A start is cancelled",
        "No process is left.",
        "`host/process/spawn`: the spawn runs in a shielded task, which ends what it started.",
    ),
    Fault(
        12,
        "A worker logs without end",
        "The disk use is bounded, and the worker never blocks.",
        "`host/process/shim`: the log is a file, which the shim shortens while it is written.",
    ),
    Fault(
        13,
        "Somebody takes, shares or answers on a worker's port",
        "It is detected, and no request goes astray.",
        "`host/process/ports`: the kernel is asked whose process listens, at the start and with each probe.",
    ),
    Fault(
        14,
        "A worker accepts a request and never answers",
        "504 at `first_byte_s`; a silent stream ends at `stream_idle_s`.",
        "`gateway/forward`: a deadline for the first byte, and one for each silence.",
        ("tests/unit/gateway/test_forward.py::TestBroken::test_first_byte_deadline",),
    ),
    Fault(
        15,
        "The connection is reset before an answer",
        "The request is sent again, once, only if no byte of it was written.",
        "`gateway/forward`: the upstream error says whether anything was sent.",
        ("tests/unit/gateway/test_forward.py::TestBroken::test_before_anything_was_sent",),
    ),
    Fault(
        16,
        "A worker's answer is cut, or is no HTTP",
        "502 with an error response in the client's dialect; if the answer had begun, an event with the error, or a cut connection where it is no stream.",
        "`host/upstream/upstream`, `gateway/upstream_error`.",
        ("tests/unit/gateway/test_forward.py::TestErrorAnswers",),
    ),
    Fault(
        17,
        "GPU memory comes back late, or never",
        "A load starts only on measured free memory; it is never over-committed.",
        "`core/memory/device_ledger`: free memory is the lesser of what is measured and what leases leave.",
        ("tests/unit/host/test_nvml.py::TestMemoryThatReturnsLate",),
    ),
    Fault(
        18,
        "The GPU's driver is lost, hangs or changed its version",
        "The last values stay, marked as stale; nothing new is loaded; requests are served on.",
        "`host/memory/nvml`, `host/memory/memory`: read in a thread, opened anew with growing pauses.",
        (
            "tests/unit/host/test_nvml.py::TestALostDriver",
            "tests/faults/test_lost_card.py",
            "tests/faults/test_amd.py",
        ),
    ),
    Fault(
        19,
        "A stranger takes GPU memory while a model loads",
        "The crash is classified as out of memory: more room from then on, one eviction and one more try; then it has failed.",
        "`core/workers/termination`: the exit code and the last lines of the log tell the class; the raised footprint is stored.",
    ),
    Fault(
        20,
        "The driver's process list is empty, foreign or without sizes",
        "Leases and measurements are right nevertheless.",
        "`host/memory/free_delta`: the fall of free memory stands in for the list.",
        ("tests/unit/host/test_nvml.py::TestWithoutAProcessList",),
    ),
    Fault(
        21,
        "The disk is full",
        "What was stored stays, and what is loaded serves on.",
        "`host/store/store`: SQLite with a backup; what can't be saved is a warning.",
        (
            "tests/unit/host/test_store.py::TestAFullDisk",
            "tests/faults/test_host_trouble.py::TestDisk",
            "tests/faults/test_host_trouble.py::TestFolders",
        ),
    ),
    Fault(
        22,
        "Killed while it writes; files torn",
        "Each start succeeds, from the state, from its backup, or empty.",
        "`host/store/store`: transactions, a backup, and damaged files are put aside.",
        (
            "tests/unit/host/test_store.py::TestKilled",
            "tests/unit/host/test_store.py::TestADamagedState",
            "tests/unit/host/test_store.py::TestADamagedCache",
        ),
    ),
    Fault(
        23,
        "A configuration with mistakes is reloaded",
        "The old one serves on, and all mistakes are listed. A missing file is its model's trouble, not the configuration's: the "
        "others are served, and it comes back when the file does.",
        "`daemon/configuration/reload`: read and checked as a whole before anything changes; `daemon/configuration/rechecking` looks again at models that "
        "can't run.",
        (
            "tests/e2e/daemon/test_missing_files.py",
            "tests/e2e/daemon/test_reload.py::TestMistakes",
            "tests/faults/test_reload.py",
        ),
    ),
    Fault(
        24,
        "A client leaves",
        "Its request is removed, or its worker's connection closed, within 100 ms; nothing is loaded for nobody.",
        "`gateway/disconnect`: the client is listened to while anything is awaited.",
        (
            "tests/unit/gateway/test_disconnect.py",
            "tests/unit/gateway/test_forward.py::TestLeaving",
            "tests/faults/test_bodies_memory.py",
            "tests/security/test_slow_and_many.py::TestHalfClosed",
        ),
    ),
    Fault(
        25,
        "500 requests at once for a cold model",
        "One worker is started; who finds the queue full is refused within 50 ms.",
        "`core/admission/admission`, `core/admission/queue`: a load is a task of its own, and queues are bounded.",
    ),
    Fault(
        26,
        "Two models take turns on one device",
        "At most one swap per `min_residency_s` while both are in demand, nobody waits past `queue_wait_s`, and no answer is cut.",
        "`core/admission/admission`: minimum residency and aging; `core/planning/eviction`: answers run to their end while clients read.",
        ("tests/faults/test_slow_reader_drain.py",),
    ),
    Fault(
        27,
        "A client reads slowly, or not at all",
        "Each costs at most 1 MiB.",
        "`host/upstream/upstream`: nothing more is read of the worker while 128 KiB wait.",
        (
            "tests/unit/gateway/test_forward.py::TestSlowReader",
            "tests/faults/test_slow_reader_drain.py",
            "tests/security/test_slow_and_many.py::TestSlowReaders",
        ),
    ),
    Fault(
        28,
        "200 connections that never finish their head; no descriptors left",
        "The admin API answers within 1 s of their release; no worker is killed for a probe that had no descriptor.",
        "`server/protocol`: `header_s`; `fleet/worker`: our own want of descriptors is no failure of a worker.",
        (
            "tests/faults/test_host_trouble.py::TestRefused",
            "tests/security/test_slow_and_many.py",
        ),
    ),
    Fault(
        29,
        "A signed token is replayed, stale or altered",
        "It is refused, also after a restart, after a clock that was wrong for a while, and where the state was lost.",
        "`daemon/op_tokens`: nonces are kept, and of forgotten ones the times until which they were good; `host/store/store` says since "
        "when nothing was lost.",
        (
            "tests/unit/daemon/test_op_tokens.py::TestOnce",
            "tests/e2e/dialects/test_governance.py",
        ),
    ),
    Fault(
        30,
        "SIGTERM under load; a wall clock that is set; a loop that stands still",
        "Who waits for a model gets 503 with `Retry-After` at once; the drain is bounded. Nothing is started or stopped for the "
        "clock; the watchdog fires.",
        "`engine/engine` drains; deadlines are monotonic; `cli/serving/daemon` feeds systemd's watchdog from the loop.",
        (
            "tests/installation/test_restart.py",
            "tests/installation/test_service.py::TestNotify",
            "tests/faults/test_signals.py",
            "tests/faults/test_stuck_log_reader.py",
        ),
    ),
    Fault(
        31,
        "The daemon is replaced by a successor, or either is killed or hangs meanwhile",
        "No request fails, no stream breaks, no model loads again. After a kill one of the two serves, or every tree is gone within 2 s. "
        "A successor that hangs holds loads back for at most 10 s.",
        "`daemon/handover/handover`, `daemon/handover/takeover`: descriptors are passed on, and each step has its time; `host/process/shim` confirms whose death counts.",
        (
            "tests/faults/test_takeover.py",
            "tests/faults/test_hung_successor.py",
            "tests/faults/host/test_shim_handover.py",
        ),
    ),
    Fault(
        32,
        "Nobody reads the log",
        "Requests are answered, and SIGTERM ends the daemon in its usual time. Lost lines are counted and said.",
        "`cli/serving/log_lines`: lines are written without waiting; a thread waits for the reader.",
        ("tests/faults/test_stuck_log_reader.py",),
    ),
    Fault(
        33,
        "Requests with large bodies end, whatever way they went",
        "The daemon's memory is within 10 MiB of what it was, also where the collector never ran.",
        "`host/store/request_buffer`: a body is let go once its worker has it, or its request has failed; one budget bounds all of them. "
        "What serves a request refers to its context, which refers to none of it: nothing of size is in a cycle. "
        "`cli/serving/own_process` has the C library give back what it keeps.",
        ("tests/faults/test_bodies_memory.py", "tests/faults/test_endless_answers.py"),
    ),
    Fault(
        34,
        "Handling an event raises: a bug of llmux, or data that nobody checked",
        "Its model has failed and its requests are answered, or nothing has happened. The others are served; the daemon ends when told.",
        "`core/recovery`: the state is made again as it was, by a copy and the events since; then the event is handled without "
        "that model. `catalog`, `host/memory/memory`, `host/store/store` check what adapters, drivers and files say.",
        (
            "tests/unit/core/test_recovery.py",
            "tests/unit/engine/test_engine.py::TestMistakes",
        ),
    ),
    Fault(
        35,
        "SIGTERM while a worker, a driver, a successor or llmux itself is stuck",
        "The daemon ends within drain, grace and ten seconds, and no worker is left. A second signal takes the drain off.",
        "`cli/serving/own_process`: a thread without Python and an alarm end the process; `host/process/shim` ends its workers.",
    ),
    Fault(
        36,
        "The driver of one device hangs",
        "The memory of the others is read, given back and given as before.",
        "`engine/sampling`: each source of readings has a loop and events of its own.",
    ),
    Fault(
        37,
        "kill -9 between an answer and its place on disk; a disk that is full then",
        "Each job, batch and response in the background is found after the restart. What was told as over stays as it was told, "
        "and no line of a batch that was answered is sent again.",
        "`jobs/inference`, `jobs/batches`, `dialects/responses/background`: a job is over, and its response or its line is told, "
        "when that is on disk; only then its request is forgotten.",
        (
            "tests/unit/jobs/test_inference.py::TestDurable",
            "tests/unit/jobs/test_batches.py::TestRestart",
            "tests/e2e/http/test_batches.py::TestRestart",
        ),
    ),
)
