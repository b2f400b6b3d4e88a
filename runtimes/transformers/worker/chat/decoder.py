"""The one thread that runs the model: it reads new prompts in chunks and generates for all other requests in between.

A `Job` is submitted from any thread and gets its tokens through a queue. Cancellation is checked before every step, so a
job whose client disconnected ends one token later.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from runtimes.sdk.chat.request import Sampling
from runtimes.sdk.chat.tokens import Ending, Results
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.worker_pool import Cancel
from runtimes.transformers.worker.chat.batch import Batch, can_be_batched
from runtimes.transformers.worker.chat.guide import Guide
from runtimes.transformers.worker.chat.sampling import Sampler


@dataclass(slots=True, eq=False)
class Job:
    """A prompt to continue. `pictures`: model inputs beside the tokens; `max_tokens`: limit of generated tokens.

    It ends early when its client disconnects (`cancel`) or its reader has `enough`.
    """

    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    cancel: Cancel
    ends: frozenset[int]
    pictures: Mapping[str, Any] | None = None
    guide: Guide | None = None
    enough: Cancel = field(default_factory=Cancel)
    out: Results = field(default_factory=Results)

    @property
    def unwanted(self) -> bool:
        """Does nobody wait for more tokens?"""
        return self.cancel.is_set or self.enough.is_set

    def end(self, how: Ending | BaseException) -> None:
        """Report the end to the reader."""
        if self.guide is not None:
            self.guide.close()
        self.out.put(how)


@dataclass(slots=True, eq=False)
class _Run:
    """A job under way: its cache and counters. `last`: the newest token; `made`: the number of generated tokens."""

    job: Job
    sampler: Sampler
    cache: DynamicCache
    read: int = 0  # tokens of the prompt that are in the cache
    shift: int = 0
    last: int = -1
    made: int = 0


class Decoder:
    """At most `width` jobs at once; others wait. `chunk`: tokens of a prompt read in one step."""

    def __init__(self, model: Any, *, width: int, chunk: int) -> None:  # whatever class of transformers
        self._model, self._width, self._chunk = model, width, chunk
        self._new: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._reading: deque[_Run] = deque()
        self._generating: list[_Run] = []
        self._batch = Batch(model)
        if not can_be_batched(self._new_cache()):
            sys.stderr.write("This model's cache can't be batched: one request at a time.\n")
            self._width = 1
        threading.Thread(target=self._run, name="decoder", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Start it as soon as there is room. Returns at once."""
        self._new.put(job)

    def _run(self) -> None:
        while True:
            self._take_new_jobs()
            try:
                self._drop_unwanted()
                if self._reading:
                    self._read_chunk()
                if self._generating:
                    self._generate_step()
            except Exception as error:  # noqa: BLE001  # a failed step must not end the worker: its jobs get the error
                self._fail_all(error)

    def _take_new_jobs(self) -> None:
        """Take new jobs; wait for one when there is nothing else to do."""
        while not self._new.empty() or not (self._waiting or self._reading or self._generating):
            self._waiting.append(self._new.get())
        while self._waiting and len(self._reading) + len(self._generating) < self._width:
            job = self._waiting.popleft()
            try:
                sampler = Sampler(job.sampling, job.tokens, self._model.device)
            except Exception as error:  # noqa: BLE001  # it concerns this job alone
                job.end(error)
                continue
            self._reading.append(_Run(job, sampler, self._new_cache()))

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _drop_unwanted(self) -> None:
        for job in [job for job in self._waiting if job.unwanted]:
            self._waiting.remove(job)
            job.end("stop")
        for run in [run for run in self._reading if run.job.unwanted]:
            self._reading.remove(run)
            run.job.end("stop")
        unwanted = [row for row, run in enumerate(self._generating) if run.job.unwanted]
        for row in unwanted:
            self._generating[row].job.end("stop")
        self._remove_rows(unwanted)

    def _remove_rows(self, rows: list[int]) -> None:
        if rows:
            self._batch.leave(rows)
            self._generating = [run for row, run in enumerate(self._generating) if row not in rows]

    def _read_chunk(self) -> None:
        """Read a chunk of the first unread prompt; choose its first token after the last chunk."""
        run = self._reading[0]
        job = run.job
        stop = len(job.tokens) if job.pictures else min(run.read + self._chunk, len(job.tokens))
        piece = torch.tensor([job.tokens[run.read : stop]], device=self._model.device)
        further: dict[str, Any] = dict(job.pictures or {})
        if not job.pictures:
            further["position_ids"] = torch.arange(run.read, stop, device=self._model.device)[None]
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=piece, past_key_values=run.cache, use_cache=True, logits_to_keep=1, **further
                )
        except BaseException as error:
            self._reading.popleft()
            job.end(_client_error(error))
            if isinstance(error, Exception):
                return
            raise
        run.read = stop
        if job.pictures:
            deltas = getattr(self._model.model, "rope_deltas", None)
            run.shift = 0 if deltas is None else int(deltas[0])
        if stop < len(job.tokens):
            return
        if self._advance(run, output.logits[0, -1]):
            self._batch.join(run.cache, stop, run.shift)
            self._generating.append(run)
        self._reading.popleft()  # last: if joining fails, this job gets the error too

    def _generate_step(self) -> None:
        scores = self._batch.step([run.last for run in self._generating])
        self._remove_rows([row for row, run in enumerate(self._generating) if not self._advance(run, scores[row])])

    def _advance(self, run: _Run, scores: torch.Tensor) -> bool:
        """Choose the next token and deliver it; False if it was the last, or none is possible."""
        job, guide = run.job, run.job.guide
        try:
            token = run.sampler.pick(scores, None if guide is None else guide.allowed())
            if guide is not None:
                guide.advance(token.id)
        except Exception as error:  # noqa: BLE001  # it concerns this job alone
            job.end(_client_error(error))
            return False
        run.last = token.id
        run.made += 1
        job.out.put(token)
        if token.id in job.ends:
            job.end("stop")
            return False
        if run.made >= job.max_tokens:
            job.end("length")
            return False
        return True

    def _fail_all(self, error: Exception) -> None:
        reported = _client_error(error)
        for run in (*self._reading, *self._generating):
            run.job.end(reported)
        self._reading.clear()
        self._generating.clear()
        self._batch = Batch(self._model)


def _client_error(error: BaseException) -> BaseException:
    """The error for the client. A client can act on an out-of-memory error. Any other error is a bug, and goes to the log."""
    if isinstance(error, torch.OutOfMemoryError):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return WorkerError("The model ran out of memory on this request.", code="out_of_memory", status=503)
    if not isinstance(error, WorkerError):
        traceback.print_exception(error)
    return error
