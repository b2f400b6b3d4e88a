"""Stop strings: the answer ends before the first of them, and no part of one is output."""

from __future__ import annotations

from collections.abc import Sequence

from runtimes.sdk.chat.formats.pieces import partial_marker


class Stops:
    """Passes text until a stop string, however the text is cut. `hit` is the stop string that was found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tail = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that can be output now."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._tail + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)  # the one that is complete first, as if read letter by letter
            self._tail = ""
            return text[:at]
        keep = partial_marker(text, self._stops)
        self._tail = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """The text held back as the possible beginning of a stop string."""
        tail, self._tail = self._tail, ""
        return tail
