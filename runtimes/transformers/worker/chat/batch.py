"""Generates several sequences in one forward pass: one cache, aligned at the right, as wide as the longest sequence.

A sequence's tokens are its last columns; a mask hides the padding to their left. So each step adds one column for all,
sliding-window masks stay valid, and only joining and leaving copy the cache. Recurrent layers have states without columns,
which are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_BATCHABLE = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def can_be_batched(cache: DynamicCache) -> bool:
    """Can `Batch` join this cache with others?"""
    return all(type(layer) in _BATCHABLE for layer in cache.layers)


class Batch:
    """The caches of all sequences under generation. `lengths` are their tokens; rows keep their order."""

    def __init__(self, model: Any) -> None:  # whatever class of transformers
        self._model = model
        self._cache: DynamicCache | None = None
        self.lengths: list[int] = []
        self._shifts: list[int] = []  # positions minus tokens (images)

    def join(self, cache: DynamicCache, length: int, shift: int = 0) -> None:
        """Add a sequence as the last row. `cache` holds its prompt; this object takes ownership of the cache."""
        if self._cache is None:
            self._cache = cache
        else:
            width = max(*self.lengths, length)
            for pair in zip(self._cache.layers, cache.layers, strict=True):
                _combine_layers(pair, width, torch.cat)
        self.lengths.append(length)
        self._shifts.append(shift)

    def leave(self, rows: Sequence[int]) -> None:
        """Remove these rows; the others move up."""
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
            _combine_layers((layer,), max(self.lengths), lambda kept: kept[0][keep])

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Add one token to every row. Returns the scores of the next tokens, one row each."""
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


def _combine_layers(layers: Sequence[Any], width: int, combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    """Replace the tensors of the first of these layers by the result of `combine` on those of all layers.

    The tensors are aligned to `width` columns before that.

    The layers have no common type for this.
    """
    first = layers[0]
    with torch.inference_mode():
        if isinstance(first, DynamicLayer) and first.is_initialized:
            columns = min(width, first.sliding_window - 1) if isinstance(first, DynamicSlidingWindowLayer) else width
            first.keys = combine([_align_columns(layer.keys, columns) for layer in layers])
            first.values = combine([_align_columns(layer.values, columns) for layer in layers])
            if isinstance(first, DynamicSlidingWindowLayer):
                first.cumulative_length = width
        if isinstance(first, LinearAttentionLayer):
            for name in ("conv_states", "recurrent_states"):
                states = getattr(first, name)
                for index, state in states.items():
                    if state is not None:
                        states[index] = combine([getattr(layer, name)[index] for layer in layers])


def _align_columns(values: torch.Tensor, columns: int) -> torch.Tensor:
    """The values with exactly `columns` (the last but one dimension), cut or padded at the left."""
    missing = columns - values.shape[-2]
    if missing <= 0:
        return values[..., -missing:, :]
    return torch.nn.functional.pad(values, (0, 0, missing, 0))
