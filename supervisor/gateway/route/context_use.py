"""Estimates how much of a context that a worker's requests share a request will need, by the model's recent requests.

No worker is asked: the bytes of a prompt bound its tokens, as far as the model's last prompts show. An answer has at most the
tokens that its request allows, and is expected to be as long as nine of ten were. Memory is bounded; a restart forgets.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from supervisor.core.types import ModelId, base_of
from supervisor.gateway.request import Request
from supervisor.host.store.request_buffer import RequestBuffer

KEPT: Final = 64
"""How many requests of one model are remembered."""
UNKNOWN: Final = 2.0
"""Bytes of a token of a model without earlier requests: few, so that the first requests wait rather than fail."""
USUAL: Final = 512
"""Expected tokens of an answer of a model without earlier answers."""
PICTURE: Final = 1024
"""Tokens of a picture."""
_LEAST: Final = 128  # tokens of a prompt that tells how long they are: of a short one most is its frame
_CONTENT: Final = (b";base64,", b'"data":"', b'"data": "')  # so it begins
_SHORT: Final = 256  # bytes of what is none


class ContextUse:
    """The recent requests of all models whose requests share a context. Use from the event loop's thread."""

    def __init__(self) -> None:
        self._prompts: dict[ModelId, deque[float]] = {}  # bytes of each token
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
        if usage.prompt >= _LEAST:
            self._prompts.setdefault(model, deque(maxlen=KEPT)).append(text_bytes / usage.prompt)

    def needed(
        self, model: ModelId, shared: int, text_bytes: int, pictures: int, most: int | None, answers: int = 1
    ) -> int:
        """The tokens that a request with this many `answers`, of at most `most` tokens each, will need of a context of `shared`."""
        prompt = int(text_bytes / min(self._prompts.get(model, ()), default=UNKNOWN)) + pictures * PICTURE
        known = sorted(self._answers.get(model, ()))
        usual = known[len(known) * 9 // 10] if known else USUAL
        return min(shared, prompt + answers * min(usual if most is None else min(usual, most), max(0, shared - prompt)))


def measured(body: RequestBuffer) -> tuple[int, int]:
    """The bytes of a request's text, and the number of its pictures and recordings."""
    data, text_bytes, pictures = body.data or b"", body.size, 0
    for begin in _CONTENT:
        at = data.find(begin)
        while at >= 0:
            at += len(begin)
            end = data.find(b'"', at)
            if end - at > _SHORT:
                text_bytes -= end - at
                pictures += 1
            at = data.find(begin, at)
    return text_bytes, pictures
