"""The last decisions and their reasons, overall and by model, for `llmux why`. Memory is bounded by counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from supervisor.core.effects import Decided, Effect
from supervisor.core.types import ModelId, base_of

DECISIONS = 2000
DECISIONS_PER_MODEL = 50


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. `at` is on the core's clock; `seq` is 1 for the first and grows by one."""

    seq: int
    at: float
    kind: str
    model: ModelId | None
    reason: str


class DecisionLog:
    """The last decisions, of all models and of each."""

    def __init__(self) -> None:
        self.last_seq = 0  # the number of the newest decision; 0 before the first
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self._by_model: dict[ModelId, deque[Decision]] = {}

    def note(self, effects: Iterable[Effect], now: float) -> None:
        """Keep the decisions among the effects of one event."""
        for effect in effects:
            if type(effect) is Decided:
                self.last_seq += 1
                decision = Decision(self.last_seq, now, effect.kind, effect.model, effect.reason)
                self._decisions.append(decision)
                if decision.model is not None:
                    self._by_model.setdefault(base_of(decision.model), deque(maxlen=DECISIONS_PER_MODEL)).append(
                        decision
                    )

    def last(self, model: ModelId | None = None, *, limit: int = DECISIONS) -> list[Decision]:
        """The last decisions, oldest first: all, or those about one model and its replicas (kept even if others had many)."""
        kept = self._decisions if model is None else self._by_model.get(base_of(model), deque())
        return list(kept)[-limit:]

    def since(self, seq: int) -> list[Decision]:
        """All kept decisions after number `seq`, oldest first. The cost grows only with their number."""
        newest_first = takewhile(lambda decision: decision.seq > seq, reversed(self._decisions))
        return list(newest_first)[::-1]
