"""Reasoning in `<think>` tags and calls in `<tool_call>` tags: Qwen3, Qwen3.5, Qwen3-Coder and similar models.

The prompt may end within reasoning. A `<tool_call>` contains JSON or tags, recognised by how it begins. Blanks around
reasoning and before calls belong to the format, not to the answer.
"""

from __future__ import annotations

from runtimes.transformers.worker.chat.formats.json_call import JsonCall
from runtimes.transformers.worker.chat.formats.pieces import Piece, Schemas, Text, Thought, earliest, partial_marker
from runtimes.transformers.worker.chat.formats.xml_call import XmlCall

THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"


class TaggedParser:
    """`thinking`: the prompt ends within reasoning. `calls`: parse calls; otherwise they are plain text."""

    def __init__(self, *, thinking: bool, calls: bool, schemas: Schemas | None = None) -> None:
        self._schemas: Schemas = schemas or {}
        self._calls = calls
        self._state = "thought" if thinking else "start"  # start, thought, text, call, called
        self._buffer = self._blanks = ""
        self._fresh = True  # only blanks so far in this state
        self._call: JsonCall | XmlCall | None = None
        self._count = 0

    @property
    def thinking(self) -> bool:
        """Within a thought."""
        return self._state == "thought"

    @property
    def answering(self) -> bool:
        """Within the answer, after its first text."""
        return self._state == "text" and not self._fresh

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
        rest, self._buffer = self._buffer, ""
        match self._state:
            case "start" | "text":
                if not self._fresh or rest.strip():
                    self._say(out, rest)
                    out.append(Text(self._blanks))
            case "thought":
                self._say(out, rest)
            case "call":
                if self._call is None:
                    out.append(Text(CALL + rest))
                elif self._call.name is None:
                    out.append(Text(CALL + self._call.raw + rest))
                else:
                    out.extend(self._call.end())
            case _:
                pass
        return out

    def _step(self, out: list[Piece]) -> bool:
        """Parse the buffer up to the next state; False when more text is needed."""
        match self._state:
            case "start":
                return self._start()
            case "thought":
                return self._until(out, (THOUGHT,), "text")
            case "text":
                return self._until(out, (CALL,) if self._calls else (), "call")
            case "call":
                return self._read_call(out)
            case _:
                at = self._buffer.find(CALLED)
                if at < 0:
                    self._buffer = self._buffer[len(self._buffer) - partial_marker(self._buffer, (CALLED,)) :]
                    return False
                self._buffer = self._buffer[at + len(CALLED) :]
                self._enter("text")
                return True

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._enter("thought")
        elif THINK.startswith(text):  # only blanks, or the beginning of the tag
            return False
        else:
            self._state = "text"
            self._fresh = False
        return True

    def _until(self, out: list[Piece], markers: tuple[str, ...], then: str) -> bool:
        found = earliest(self._buffer, markers)
        if found is None:
            keep = partial_marker(self._buffer, markers) if markers else 0
            cut = len(self._buffer) - keep
            said, self._buffer = self._buffer[:cut], self._buffer[cut:]
            self._say(out, said)
            return False
        at, marker = found
        said, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
        self._say(out, said)
        self._enter(then)
        return True

    def _enter(self, place: str) -> None:
        self._state, self._blanks, self._fresh = place, "", True

    def _say(self, out: list[Piece], text: str) -> None:
        """Output text, without blanks at its beginning and end."""
        if self._fresh:
            text = text.lstrip()
        if not text:
            return
        self._fresh = False
        text = self._blanks + text
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if said:
            out.append(Thought(said) if self._state == "thought" else Text(said))

    def _read_call(self, out: list[Piece]) -> bool:
        if self._call is None:
            text = self._buffer.lstrip()
            if not text or ("<function=".startswith(text) and text != "<function="):
                return False
            self._call = (
                JsonCall(self._count) if not text.startswith("<function=") else XmlCall(self._count, self._schemas)
            )
        taken, self._buffer = self._buffer, ""
        if isinstance(self._call, XmlCall):
            out.extend(self._call.feed(taken))
            self._buffer = self._call.rest
        else:
            for at, char in enumerate(taken):
                out.extend(self._call.feed(char))
                broken = self._call.raw.endswith(CALLED) and self._call.name is None
                if self._call.done or broken:
                    self._buffer = taken[at + 1 :]
                    if broken:
                        out.append(Text(CALL + self._call.raw))
                        self._call = None
                        self._enter("text")
                        return True
                    break
        if not self._call.done:
            return False
        if self._call.name is None:
            out.append(Text(CALL + self._call.raw))
            self._state = "text"
            self._fresh = False
        else:
            self._count += 1
            self._enter("called")
        self._call = None
        return True
