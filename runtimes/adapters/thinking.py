"""How most chat templates switch reasoning on and off."""

from __future__ import annotations

from typing import Final

from runtimes.base import Thinking

CHAT_TEMPLATE: Final = Thinking(
    enabled={"chat_template_kwargs": {"enable_thinking": True}},
    disabled={"chat_template_kwargs": {"enable_thinking": False}},
)
