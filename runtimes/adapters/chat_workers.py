"""Shared by the adapters of our own chat workers: their paths, and the abilities that a chat template shows."""

from __future__ import annotations

from typing import Final

from runtimes.base import CHAT_TEMPLATE, Endpoint, Thinking

ANSWERS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""The paths whose requests run the model."""

ENDPOINTS: Final = frozenset(map(Endpoint, {*ANSWERS, "/v1/chat/completions/input_tokens"}))
CHANNEL: Final = "<|channel|>"
CALL_MARKS: Final = (CHANNEL, "<tool_call>", "</think>")  # of the formats in sdk/chat/formats
SWITCH: Final = "enable_thinking"


def thinking(template: str | None) -> Thinking | None:
    """Thinking is switched by an argument of the chat template. None if this template has no such argument.

    A missing template (None: the model's files aren't there yet) counts as one that has it.
    """
    return CHAT_TEMPLATE if template is None or SWITCH in template else None


def thinks(template: str) -> bool:
    """Does the template handle reasoning?"""
    return "think" in template or CHANNEL in template


def writes_calls(template: str) -> bool:
    """Does the template belong to a family whose tool calls the workers can parse?"""
    return any(mark in template for mark in CALL_MARKS)
