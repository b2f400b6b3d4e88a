"""Harmony, the format of gpt-oss: messages with a header each, `<|channel|>analysis<|message|>…<|end|>`.

The channel `analysis` is reasoning, `final` the answer, `commentary` a call if addressed `to=functions.name`, otherwise a
preamble to the answer. The prompt ends with `<|start|>assistant`, so the generated text begins in a header.
"""

from __future__ import annotations

import re
from functools import partial

from runtimes.sdk.chat.formats.pieces import CallArguments, CallStart, Text, Thought
from runtimes.sdk.chat.formats.reader import Reader, Reading, ignore

MESSAGE, START = "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
MARKERS = (MESSAGE, "<|channel|>", "<|constrain|>", *ENDS)


class HarmonyParser(Reader):
    """`calls`: the request offered functions. Otherwise calls count as reasoning, because nobody could execute them."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self._calls = calls
        self._has_answered = False  # an answer, or a preamble to it
        self.thinking = False  # within a thought
        self.answering = False  # within the answer, after its first text

    def read(self) -> Reading[None]:
        """Read message after message."""
        count = 0
        while (header := (yield from self.read_before(MESSAGE))) is not None:
            channel, recipient = _CHANNEL.search(header), _TO.search(header)
            if recipient and self._calls:
                self.out.append(CallStart(count, recipient[1].removeprefix("functions.")))
                ended = yield from self.read_until(ENDS, partial(self._output_arguments, count))
                count += 1
            elif recipient or (channel and channel[1] == "analysis"):
                self.thinking = True
                ended = yield from self.read_until(ENDS, lambda text: self.out.append(Thought(text)))
            else:
                ended = yield from self.read_until(ENDS, self._output_answer)
            self.thinking = self.answering = False
            if ended != START:
                yield from self.read_until((START,), ignore)

    def _output_arguments(self, index: int, text: str) -> None:
        self.out.append(CallArguments(index, text))

    def _output_answer(self, text: str) -> None:
        pause = "\n\n" if self._has_answered and not self.answering else ""  # between preamble and answer
        self.out.append(Text(pause + text))
        self._has_answered = self.answering = True
