"""Several sequences in one forward pass: their caches lie in one, aligned at the right, each as long as the longest.

A sequence's own tokens are its last columns; what is left of them is padding, which a mask hides. So every step adds one
column for all, masks of windows hold as they are, and what joins or leaves costs a copy then, and nothing in between.
States of recurrent layers have no columns and are only stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_KNOWN = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def can_be_batched(cache: DynamicCache) -> bool:
    """Whether this is a cache that `Batch` can put together with others."""
    return all(type(layer) in _KNOWN for layer in cache.layers)


class Batch:
    """The caches of all sequences that are being continued. `lengths` are their tokens; rows keep their order."""

    def __init__(self, model: Any) -> None:  # whatever class of transformers
        self._model = model
        self._cache: DynamicCache | None = None
        self.lengths: list[int] = []
        self._shifts: list[int] = []  # what positions are more than the count of tokens (pictures)

    def join(self, cache: DynamicCache, length: int, shift: int = 0) -> None:
        """Add a sequence whose prompt is in `cache`, which is taken over. It is the last row."""
        if self._cache is None:
            self._cache = cache
        else:
            width = max(*self.lengths, length)
            for mine, other in zip(self._cache.layers, cache.layers, strict=True):
                _stack(mine, other, width)
        self.lengths.append(length)
        self._shifts.append(shift)

    def leave(self, rows: Sequence[int]) -> None:
        """Take these rows out; the others close up."""
        keep = [row for row in range(len(self.lengths)) if row not in rows]
        if len(keep) == len(self.lengths):
            return
        self.lengths = [self.lengths[row] for row in keep]
        self._shifts = [self._shifts[row] for row in keep]
        if not keep:
            self._cache = None
            return
        assert self._cache is not None
        for layer in self._cache.layers:
            _select(layer, keep, max(self.lengths))

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """One token further in every row. Returns the scores of the next ones, a row each."""
        assert self._cache is not None
        device = self._model.device
        width = max(self.lengths)
        positions = [length + shift for length, shift in zip(self.lengths, self._shifts, strict=True)]
        mask = None
        if min(self.lengths) < width:
            columns = torch.arange(width + 1, device=device)
            padding = torch.tensor([width - length for length in self.lengths], device=device)
            mask = (columns[None] >= padding[:, None]).long()
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor(tokens, device=device)[:, None],
                position_ids=torch.tensor(positions, device=device)[:, None],
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
            )
        self.lengths = [length + 1 for length in self.lengths]
        scores: torch.Tensor = output.logits[:, -1]
        return scores


def _stack(mine: Any, other: Any, width: int) -> None:  # layers have no common type that says this
    with torch.inference_mode():
        if isinstance(mine, DynamicLayer) and mine.is_initialized:
            columns = min(width, mine.sliding_window - 1) if isinstance(mine, DynamicSlidingWindowLayer) else width
            mine.keys = torch.cat([_aligned(mine.keys, columns), _aligned(other.keys, columns)])
            mine.values = torch.cat([_aligned(mine.values, columns), _aligned(other.values, columns)])
            if isinstance(mine, DynamicSlidingWindowLayer):
                mine.cumulative_length = width
        if isinstance(mine, LinearAttentionLayer):
            for states, others in (
                (mine.conv_states, other.conv_states),
                (mine.recurrent_states, other.recurrent_states),
            ):
                for index, state in states.items():
                    if state is not None:
                        states[index] = torch.cat([state, others[index]])


def _select(layer: Any, keep: Sequence[int], width: int) -> None:
    with torch.inference_mode():
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            columns = min(width, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else width
            layer.keys = _aligned(layer.keys[list(keep)], columns)
            layer.values = _aligned(layer.values[list(keep)], columns)
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = width
        if isinstance(layer, LinearAttentionLayer):
            for states in (layer.conv_states, layer.recurrent_states):
                for index, state in states.items():
                    if state is not None:
                        states[index] = state[list(keep)]


def _aligned(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Exactly so many columns (the last but one dimension): cut off or padded at the left."""
    missing = columns - values.shape[-2]
    if missing <= 0:
        return values[..., -missing:, :]
    return torch.nn.functional.pad(values, (0, 0, missing, 0))
