"""Estimates the tokens that a request needs of a context shared by its worker's requests, from the model's recent requests.

Nothing is requested from a worker: the bytes per token of the model's recent prompts bound the tokens of a prompt. An answer has
at most the tokens that its request allows, and is expected to be as long as the 90th percentile. Memory is bounded; a restart
clears it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from supervisor.core.types import ModelId, base_of
from supervisor.gateway.request import Request
from supervisor.host.store.request_buffer import RequestBuffer

KEPT: Final = 64
"""Most requests kept for one model."""
UNKNOWN: Final = 2.0
"""Bytes per token for a model without earlier requests: few, so that the first requests wait rather than fail."""
USUAL: Final = 512
"""Expected tokens of an answer of a model without earlier answers."""
PICTURE: Final = 1024
"""Tokens of a picture."""
_MIN_PROMPT_TOKENS: Final = 128  # shorter prompts are not measured: they consist mostly of the chat template's own text
_CONTENT_STARTS: Final = (b";base64,", b'"data":"', b'"data": "')  # texts before the base64 of pictures and sounds
_MIN_CONTENT_BYTES: Final = 256  # a shorter text is neither a picture nor a sound


class ContextUse:
    """The recent requests of all models whose requests share a context. Use from the event loop's thread."""

    def __init__(self) -> None:
        self._prompts: dict[ModelId, deque[float]] = {}  # bytes per token
        self._answers: dict[ModelId, deque[int]] = {}  # tokens

    def observe(self, request: Request) -> None:
        """Add a request that ended. See `InFlight.observers`."""
        text_bytes = request.attempt.text_bytes
        if not text_bytes or request.attempt.ticket is None:
            return
        usage = request.counted()
        if usage.prompt is None or usage.completion is None:
            return
        model = base_of(request.attempt.ticket.model)
        self._answers.setdefault(model, deque(maxlen=KEPT)).append(usage.completion)
        if usage.prompt >= _MIN_PROMPT_TOKENS:
            self._prompts.setdefault(model, deque(maxlen=KEPT)).append(text_bytes / usage.prompt)

    def needed(
        self, model: ModelId, shared: int, text_bytes: int, pictures: int, most: int | None, answers: int = 1
    ) -> int:
        """The tokens that a request for `answers` answers, of at most `most` tokens each, needs of a context of `shared` tokens."""
        prompt = int(text_bytes / min(self._prompts.get(model, ()), default=UNKNOWN)) + pictures * PICTURE
        known = sorted(self._answers.get(model, ()))
        usual = known[len(known) * 9 // 10] if known else USUAL
        return min(shared, prompt + answers * min(usual if most is None else min(usual, most), max(0, shared - prompt)))


def measured(body: RequestBuffer) -> tuple[int, int]:
    """The bytes of a request's text, and the number of its pictures and recordings."""
    data, text_bytes, pictures = body.data or b"", body.size, 0
    for begin in _CONTENT_STARTS:
        at = data.find(begin)
        while at >= 0:
            at += len(begin)
            end = data.find(b'"', at)
            if end - at > _MIN_CONTENT_BYTES:
                text_bytes -= end - at
                pictures += 1
            at = data.find(begin, at)
    return text_bytes, pictures
