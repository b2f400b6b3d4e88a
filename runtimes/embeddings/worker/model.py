"""The base of the embedding worker's models: a tokenizer, batches of inputs, one thread for the model."""

from __future__ import annotations

import abc
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from runtimes.embeddings.worker.batches import Batches
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.server import Settings, Worker
from runtimes.sdk.worker_pool import WorkerPool

MAX_INPUTS = 2048
Vector = Any  # a numpy array: its type is only there in the worker's environment


class Model(Worker):
    """A model that computes something for each of a request's inputs."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.options = settings.options
        self.limit = 0  # tokens of one input
        self.counting = WorkerPool(1, settings.queue)
        self.tokenizer: Any = None  # a copy, since tokenizers aren't thread-safe
        self.batches: Batches[tuple[Any, int], Any] = Batches(
            lambda batch: self.pool.run(lambda _cancel: self.compute([item for item, _ in batch])),
            lambda sized: sized[1],
            self.options["max_batch_tokens"],
            settings.queue,
        )

    @abc.abstractmethod
    def compute(self, batch: Sequence[Any]) -> Sequence[Any]:
        """The model's result for each item. Blocks."""

    async def count(self, *columns: Sequence[str]) -> list[int]:
        """The number of tokens of each text or pair, special tokens included."""

        def counted() -> list[int]:
            encoded = self.tokenizer(*map(list, columns), truncation=False, return_attention_mask=False, verbose=False)
            return [len(ids) for ids in encoded["input_ids"]]

        return await self.counting.run(lambda _cancel: counted())

    def check_lengths(self, counts: Sequence[int], body: Body, name: str) -> list[int]:
        """The items' token counts in the model. Raises WorkerError for an item that is too long and may not be truncated."""
        cut = body.flag("truncate", self.options["truncate"])
        for place, count in enumerate(counts):
            if count > self.limit and not cut:
                raise WorkerError(
                    f"{name}[{place}] has {count} tokens, and the model takes {self.limit}. "
                    "Split it, or say truncate: true to have the rest ignored.",
                    code="context_length_exceeded",
                    param=name,
                )
        return [min(count, self.limit) for count in counts]

    def load_arguments(self) -> dict[str, Any]:
        """Arguments for loading a model."""
        import torch  # noqa: PLC0415  # seconds: not before the port is open

        dtype = self.options["dtype"]
        return {
            "device": self.options["device"],
            "local_files_only": True,
            "model_kwargs": {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)},
        }


def shorten(vector: Vector, width: int | None) -> Vector:
    """The vector's leading `width` values, scaled to length 1 again; None: the whole vector, unchanged."""
    if width is None or width >= len(vector):
        return vector
    part = vector[:width]
    return part / (np.linalg.norm(part) or 1)


def encode_vector(vector: Vector, encoding: str) -> object:
    """The vector in JSON: numbers, or base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
