"""Harmony, the format of gpt-oss: messages with a header each, `<|channel|>analysis<|message|>…<|end|>`.

The channel `analysis` is reasoning, `final` the answer, `commentary` a call if addressed `to=functions.name`, otherwise a
preamble to the answer. The prompt ends with `<|start|>assistant`, so the generated text begins in a header.
"""

from __future__ import annotations

import re

from runtimes.transformers.worker.chat.formats.pieces import (
    CallArguments,
    CallStart,
    Piece,
    Text,
    Thought,
    earliest,
    partial_marker,
)

MESSAGE, START = "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
MARKERS = (MESSAGE, "<|channel|>", "<|constrain|>", *ENDS)


class HarmonyParser:
    """`calls`: functions were offered; otherwise calls count as reasoning, since nobody could execute them."""

    def __init__(self, *, calls: bool) -> None:
        self._calls = calls
        self._state = "header"  # header, body, between
        self._kind = "header"  # text, thought, call
        self._buffer = ""
        self._count = -1
        self._said = self._pause = False
        self._fresh = True  # nothing of this message so far

    @property
    def thinking(self) -> bool:
        """Within a thought."""
        return self._kind == "thought"

    @property
    def answering(self) -> bool:
        """Within the answer, after its first text."""
        return self._kind == "text" and not self._fresh

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        self._buffer += text
        out: list[Piece] = []
        while self._step(out):
            pass
        return out

    def end(self) -> list[Piece]:
        """The text that was held back."""
        out: list[Piece] = []
        if self._state == "body":
            self._say(out, self._buffer)
        self._buffer = ""
        return out

    def _step(self, out: list[Piece]) -> bool:
        if self._state == "header":
            at = self._buffer.find(MESSAGE)
            if at < 0:
                return False
            header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
            self._state = "body"
            self._open(out, header)
            return True
        markers = ENDS if self._state == "body" else (START,)
        found = earliest(self._buffer, markers)
        cut = len(self._buffer) - partial_marker(self._buffer, markers) if found is None else found[0]
        said, self._buffer = self._buffer[:cut], self._buffer[cut:]
        if self._state == "body":
            self._say(out, said)
        if found is None:
            return False
        self._buffer = self._buffer[len(found[1]) :]
        self._state, self._kind = ("header", "header") if found[1] == START else ("between", "header")
        return True

    def _open(self, out: list[Piece], header: str) -> None:
        self._fresh = True
        channel, recipient = _CHANNEL.search(header), _TO.search(header)
        to = recipient[1] if recipient else ""
        if to and self._calls:
            self._kind = "call"
            self._count += 1
            out.append(CallStart(self._count, to.removeprefix("functions.")))
        elif to or (channel and channel[1] == "analysis"):
            self._kind = "thought"
        else:
            self._kind = "text"
            self._pause = self._said  # between preamble and answer

    def _say(self, out: list[Piece], text: str) -> None:
        if not text:
            return
        self._fresh = False
        if self._kind == "call":
            out.append(CallArguments(self._count, text))
        elif self._kind == "thought":
            out.append(Thought(text))
        else:
            out.append(Text("\n\n" + text if self._pause else text))
            self._said, self._pause = True, False
