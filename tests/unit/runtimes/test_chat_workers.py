"""What a chat template shows of a model."""

from __future__ import annotations

from runtimes.adapters import chat_workers
from runtimes.base import CHAT_TEMPLATE


def test_thinking_is_switched_where_the_template_can_or_is_not_there_yet():
    assert chat_workers.thinking("{% if enable_thinking %}") is CHAT_TEMPLATE
    assert chat_workers.thinking(None) is CHAT_TEMPLATE
    assert chat_workers.thinking("{{ messages }}") is None


def test_thoughts_and_calls_by_the_marks_of_their_formats():
    assert chat_workers.thinks("<|channel|>analysis")
    assert chat_workers.writes_calls("<|channel|>analysis")
    assert chat_workers.writes_calls("<tool_call>")
    assert not chat_workers.writes_calls("{{ tools }}")
    assert not chat_workers.thinks("{{ messages }}")
