"""When a client has to pause: after failures in a row, or after too many requests at once.

A burst is measured by a bucket that runs empty at `burst` requests per `window_s`. So a client that never sends more than
`burst` within any window never pauses, and one that sends more than twice as many within one surely does. A pause has one
length: what is refused meanwhile counts for nothing. After it everything is counted anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class CooldownRule:
    """What is too much. 0 failures, or a burst of 0: nothing is."""

    errors: int = 0
    burst: int = 0
    window_s: float = 60.0
    pause_s: float = 30.0


class Cooldown:
    """One client's. Times are seconds on any one clock."""

    __slots__ = ("_at", "_errors", "_level", "reason", "until")

    def __init__(self) -> None:
        self.until = 0.0  # the end of its last pause
        self.reason = ""  # of that
        self._errors = 0  # in a row
        self._level = 0.0  # requests in the bucket
        self._at = 0.0  # when that was so

    def left_s(self, now: float) -> float:
        """How much of its pause is left."""
        return max(0.0, self.until - now)

    def arrived(self, rule: CooldownRule, now: float) -> float:
        """A request arrived: seconds until it may come again; 0 where it may go on."""
        if now < self.until:
            return self.until - now
        if rule.burst:
            self._level = max(0.0, self._level - (now - self._at) * rule.burst / rule.window_s) + 1
            self._at = now
            if self._level > rule.burst + _ROUNDING:
                self.pause(now, rule.pause_s, f"it sent more than {rule.burst} requests within {rule.window_s:g} s")
        return self.left_s(now)

    def ended(self, rule: CooldownRule, now: float, *, failed: bool) -> None:
        """A request ended that was let through."""
        if now < self.until:
            return
        self._errors = self._errors + 1 if failed else 0
        if rule.errors and self._errors >= rule.errors:
            self.pause(now, rule.pause_s, f"{self._errors} of its requests failed in a row")

    def pause(self, now: float, for_s: float, reason: str) -> None:
        """Begin a pause, or end it with 0 seconds. It is counted anew after it."""
        self.until, self.reason = now + for_s, reason
        self._errors, self._level = 0, 0.0
