"""The interface of a family of models, and shared functions for generation."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtimes.sdk.audio.parameters import PARAMETERS
from runtimes.sdk.audio.samples import Samples
from runtimes.sdk.parameters import Table
from runtimes.sdk.transcription import SegmentStream, TranscriptionOptions
from runtimes.sdk.worker_pool import Cancel


class Family(abc.ABC):
    """A loaded model and its processor. Thread-safe: the worker uses it for several requests at once."""

    parameters: Table = PARAMETERS
    translates: bool = False

    @abc.abstractmethod
    def languages(self) -> frozenset[str]:
        """The codes of the languages that the model knows."""

    @abc.abstractmethod
    def transcribe(self, samples: Samples, wanted: TranscriptionOptions, cancel: Cancel) -> SegmentStream:
        """See `TranscriptionWorker.transcribe`."""


def stopping(cancel: Cancel) -> list[Callable[..., torch.Tensor]]:
    """Stopping criteria that end a generation when it is cancelled."""

    def is_cancelled(ids: torch.Tensor, _scores: torch.Tensor, **_others: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), cancel.is_set, dtype=torch.bool, device=ids.device)

    return [is_cancelled]


def mean_logprob(scores: Sequence[torch.Tensor], tokens: Sequence[int], temperature: float) -> float:
    """The mean log probability of generated tokens, from the scores of each step (1, vocabulary); 0 without tokens."""
    total = 0.0
    for score, token in zip(scores, tokens, strict=False):
        # the scores were divided by the temperature
        total += float(torch.log_softmax(score[0].float() * (temperature or 1.0), dim=-1)[token])
    return total / max(1, len(tokens))
