"""Word timestamps from the cross-attention of Whisper's decoder.

Some of its cross-attention heads follow the speech; the generation configuration names them. The decoder reads the text once
more, the attention of those heads is smoothed, and dynamic time warping aligns tokens with frames. transformers' own method
keeps the attention of all heads during generation, and works with its slowest attention implementation only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from runtimes.sdk.audio.transcript import Word
from runtimes.shared.languages import NAMES

FRAME_S: Final = 0.02
NO_SPACES: Final = {"my": "myanmar"}  # as transformers names it


class Aligner:
    """The alignment heads of one model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
        named = getattr(model.generation_config, "alignment_heads", None)
        upper = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
        self._heads = [(int(layer), int(head)) for layer, head in named] if named else upper

    def words(
        self,
        states: torch.Tensor,
        prefix: Sequence[int],
        texts: Sequence[Sequence[int]],
        duration_s: float,
        begin_s: float,
        language: str | None,
    ) -> list[list[Word]]:
        """The words of each text. `prefix` are the tokens before them, `states` the encoder's output for the window."""
        flat = [token for text in texts for token in text]
        if not flat:
            return [[] for _ in texts]
        times = self._token_times(states, prefix, flat, max(1, round(duration_s / FRAME_S)))
        found: list[list[Word]] = []
        position = 0
        name = NO_SPACES.get(language or "", NAMES.get(language or "", "english"))
        for text in texts:
            words: list[Word] = []
            for word, tokens, _places in zip(
                *_combine_tokens_into_words(self._tokenizer, list(text), name), strict=True
            ):
                start, position = position, position + len(tokens)
                if word.strip():
                    words.append(Word(begin_s + times[start], begin_s + times[position], word.strip()))
            found.append(words)
        return found

    def _token_times(
        self, states: torch.Tensor, prefix: Sequence[int], text: Sequence[int], frames: int
    ) -> list[float]:
        """The begin time of each token, and the end time of the last."""
        with torch.inference_mode():
            ids = torch.tensor([[*prefix, *text]], device=states.device)
            with self._recording_inputs() as queries:
                self._model.model.decoder(input_ids=ids, encoder_hidden_states=states, use_cache=False)
            scores = torch.stack(
                [self._attention_scores(queries[layer], states, layer, head) for layer, head in self._heads]
            )
            scores = scores[:, :, :frames].softmax(-1)
            scores = (scores - scores.mean(-2, keepdim=True)) / scores.std(-2, keepdim=True, unbiased=False).clamp(
                min=1e-9
            )
            scores = _median_filter(scores[:, None], self._model.config.median_filter_width)[:, 0]
            path = scores.mean(0)[len(prefix) - 1 :]
            rows, columns = _dynamic_time_warping(-path.double().cpu().numpy())
            first = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
            return [float(frame) * FRAME_S for frame in columns[first]]

    def _attention_scores(self, hidden: torch.Tensor, states: torch.Tensor, layer: int, head: int) -> torch.Tensor:
        """Attention scores (tokens, frames) of one head, before the softmax."""
        attention = self._model.model.decoder.layers[layer].encoder_attn
        size = attention.head_dim
        part = slice(head * size, (head + 1) * size)
        query = (attention.q_proj(hidden) * attention.scaling)[0, :, part].float()
        return query @ attention.k_proj(states)[0, :, part].float().T

    @contextmanager
    def _recording_inputs(self) -> Iterator[dict[int, torch.Tensor]]:
        """A context that collects the input of each layer's cross-attention in this thread."""
        own, found = threading.get_ident(), dict[int, torch.Tensor]()
        hooks = []
        for layer in {layer for layer, _head in self._heads}:

            def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = layer) -> None:
                if threading.get_ident() == own:
                    found[layer] = args[0] if args else kwargs["hidden_states"]

            attention = self._model.model.decoder.layers[layer].encoder_attn
            hooks.append(attention.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
