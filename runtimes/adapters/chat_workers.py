"""What the adapters of our workers that chat share: their paths, and what a chat template shows of a model."""

from __future__ import annotations

from typing import Final

from runtimes.base import CHAT_TEMPLATE, Endpoint, Thinking

ANSWERS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Those of their paths that run the model."""

ENDPOINTS: Final = frozenset(map(Endpoint, {*ANSWERS, "/v1/chat/completions/input_tokens"}))
CHANNEL: Final = "<|channel|>"
CALL_MARKS: Final = (CHANNEL, "<tool_call>", "</think>")  # of the formats in sdk/chat/formats
SWITCH: Final = "enable_thinking"


def thinking(template: str | None) -> Thinking | None:
    """By an argument of the chat template, where it has it; so, too, while there is none, since its files are missing."""
    return CHAT_TEMPLATE if template is None or SWITCH in template else None


def thinks(template: str) -> bool:
    """Does it show thoughts?"""
    return "think" in template or CHANNEL in template


def writes_calls(template: str) -> bool:
    """Is it of a family whose tool calls the workers read?"""
    return any(mark in template for mark in CALL_MARKS)
