"""The one thread that runs the library's generator, which batches all jobs. Jobs start and end between two of its steps.

A `Task` is submitted from any thread and gets its tokens through a queue.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from exllamav3 import Generator, Job

from runtimes.sdk.chat.tokens import Ending, Results, Token
from runtimes.sdk.errors import WorkerError


@dataclass(slots=True, eq=False)
class Task:
    """A job. It is `unwanted` once nobody waits for more of its tokens."""

    job: Job
    unwanted: Callable[[], bool]
    out: Results = field(default_factory=Results)


class Runner:
    """Runs jobs for ever."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._new: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._tasks: dict[Job, Task] = {}
        threading.Thread(target=self._run, name="generator", daemon=True).start()

    def submit(self, task: Task) -> None:
        """Start it as soon as there is room. Returns at once."""
        self._new.put(task)

    def _run(self) -> None:
        while True:
            self._take_new_tasks()
            self._drop_unwanted()
            if not self._tasks:
                continue
            try:
                results = self._generator.iterate()
            except Exception as error:  # noqa: BLE001  # whichever job it was: all of them get the error
                self._fail_all(error)
                continue
            for result in results:
                self._deliver_result(result)

    def _take_new_tasks(self) -> None:
        """Take new tasks; wait for one when there is nothing else to do."""
        while not self._new.empty() or not self._tasks:
            task = self._new.get()
            try:
                self._generator.enqueue(task.job)
            except Exception as error:  # noqa: BLE001  # it concerns this job alone
                task.out.put(_client_error(error))
            else:
                self._tasks[task.job] = task

    def _drop_unwanted(self) -> None:
        for job, task in list(self._tasks.items()):
            if task.unwanted():
                self._generator.cancel(job)
                self._end_task(job, "stop")

    def _deliver_result(self, result: dict[str, Any]) -> None:
        task = self._tasks.get(result["job"])
        if task is None:
            return
        if result["stage"] == "error":
            self._end_task(task.job, _client_error(result["error"]))
            return
        if result["stage"] != "streaming":
            return
        if (tokens := result.get("token_ids")) is not None:
            for token in tokens.flatten().tolist():
                task.out.put(Token(token))
        if not result["eos"]:
            return
        if (last := result.get("eos_triggering_token_id")) is not None:
            task.out.put(Token(last))
        self._end_task(task.job, "length" if result["eos_reason"] == "max_new_tokens" else "stop")

    def _end_task(self, job: Job, how: Ending | BaseException) -> None:
        self._tasks.pop(job).out.put(how)

    def _fail_all(self, error: Exception) -> None:
        reported = _client_error(error)
        self._generator.clear_queue()
        for job in list(self._tasks):
            self._end_task(job, reported)


def _client_error(error: Exception) -> WorkerError:
    """The error for the client. The details go to the log."""
    traceback.print_exception(error)
    if "out of memory" in str(error).lower():
        return WorkerError("The model ran out of memory on this request.", code="out_of_memory", status=503)
    return WorkerError("The worker failed on this request; its log says why.", code="worker_failed", status=500)
