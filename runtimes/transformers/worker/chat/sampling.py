"""Chooses the next token from the scores of all tokens: penalties, bias, temperature, truncation, sampling.

transformers' logits processors are used where they exist; they lack OpenAI's presence and frequency penalties. Each request
has its own random generator, so its result depends on its seed and not on other requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtimes.sdk.chat.request import Sampling
from runtimes.sdk.chat.tokens import Token


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], device: torch.device) -> None:
        self._sampling = sampling
        self._counts: Counter[int] = Counter()
        self._device = device
        self._random = torch.Generator(device)
        self._random.manual_seed(sampling.seed) if sampling.seed is not None else self._random.seed()
        penalised = sampling.repetition_penalty != 1.0
        self._penalty = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)) if penalised else None
        self._seen = torch.tensor([list(prompt)], device=device) if penalised else None
        self._warpers = _warpers(sampling)
        self._bias = (
            torch.tensor(list(sampling.logit_bias), device=device),
            torch.tensor(list(sampling.logit_bias.values()), device=device),
        )

    def pick(self, scores: torch.Tensor, allowed: torch.Tensor | None = None) -> Token:
        """Choose the next token from the scores of all tokens. `allowed`: a flag for each token.

        Their lengths may differ, since some models pad the scores; tokens without a flag are not allowed.
        """
        raw = scores.float().to(self._device)  # the output layer may be on another GPU
        scores = self._apply_penalties(raw)
        if allowed is not None:
            allowed = torch.nn.functional.pad(allowed, (0, len(scores) - len(allowed)))
            scores = scores.masked_fill(~allowed.to(self._device), -torch.inf)
        if self._sampling.temperature == 0:
            token = int(scores.argmax())
        else:
            chances = torch.softmax(self._warpers(None, scores[None])[0], -1)
            token = int(torch.multinomial(chances, 1, generator=self._random))
        self._counts[token] += 1
        if self._seen is not None:
            self._seen = torch.cat([self._seen, torch.tensor([[token]], device=self._device)], -1)
        return self._to_token(token, raw)

    def _apply_penalties(self, scores: torch.Tensor) -> torch.Tensor:
        if self._penalty is not None:
            scores = self._penalty(self._seen, scores[None])[0]
        presence, frequency = self._sampling.presence_penalty, self._sampling.frequency_penalty
        if self._counts and (presence or frequency):
            index = torch.tensor(list(self._counts), device=self._device)
            counts = torch.tensor(list(self._counts.values()), device=self._device, dtype=scores.dtype)
            scores = scores.index_add(0, index, -presence - frequency * counts)
        if len(self._bias[0]):
            scores = scores.index_add(0, self._bias[0], self._bias[1].to(scores.dtype))
        return scores

    def _to_token(self, token: int, scores: torch.Tensor) -> Token:
        if self._sampling.logprobs is None:
            return Token(token)
        logprobs = torch.log_softmax(scores, -1)
        best = torch.topk(logprobs, self._sampling.logprobs) if self._sampling.logprobs else None
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best is not None else ()
        return Token(token, float(logprobs[token]), top)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    found: list[LogitsProcessor] = []
    if sampling.temperature not in {0, 1}:
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        found.append(MinPLogitsWarper(float(sampling.min_p)))
    return LogitsProcessorList(found)
