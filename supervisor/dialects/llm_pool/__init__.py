"""llm-pool's requests to `/v1/responses`, as chat completions.

llm-pool's API has the path of OpenAI's Responses, but other fields: `messages`, `decoding`, `thinking`, and others for the
content of `input`. Workers that serve the path leave out what they don't know, so a request that says "think not" would
think. Therefore such a request is told by its fields, and translated whatever its worker serves.

`request` maps what is asked, `answer` what comes back, `metrics` reckons the times that each answer has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.llm_pool.answer import Answers
from supervisor.dialects.llm_pool.request import Request, given
from supervisor.gateway.filters.translation import AnswerTranslation, TargetModel, Times

_OWN: Final = frozenset({"messages", "decoding", "thinking", "source_lang_code", "target_lang_code"})
_UNKNOWN: Final = TargetModel()
_PARTS: Final = frozenset({"text", "image_url"})


class _Item(msgspec.Struct):
    type: str = ""


_items: Final = msgspec.json.Decoder(list[_Item]).decode


def is_llm_pool(fields: Fields) -> bool:
    """Are these the top-level fields of a request that OpenAI's Responses don't have?

    That is one with a field of llm-pool's, unless it is null, or whose `input` consists of parts that only llm-pool has.
    """
    return any(given(fields, name) is not None for name in _OWN & fields.keys()) or _has_parts(fields.get("input"))


def _has_parts(content: msgspec.Raw | None) -> bool:
    if content is None or bytes(memoryview(content)[:1]) != b"[":
        return False
    try:
        items = _items(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):  # whoever gets it will say what is wrong
        return False
    return bool(items) and all(item.type in _PARTS for item in items)


@dataclass(frozen=True, slots=True)
class LlmPool:
    """A `TargetedTranslation`, and the translation for a model of which nothing is known."""

    target: TargetModel = _UNKNOWN
    times: Times | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def path(self) -> str:
        """Chat completions."""
        return chat.PATH

    def of(self, target: TargetModel, times: Times) -> LlmPool:
        """See TargetedTranslation."""
        return LlmPool(target, times, self.clock)

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        read = Request(fields, self.target)
        return read.canonical, Answers(read.model, tuple(read.ignored), self.times, self.clock, read.names)


LLM_POOL: Final = LlmPool()
