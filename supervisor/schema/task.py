"""Tasks: ladders of candidates."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from supervisor.schema.operation import doc

_CHOICE = "The candidate that a request would go to first; `primary` or `warm`; the same in a sentence."


class Candidate(Struct, gc=False):
    """A model that may answer for a task."""

    model: str
    physical: str
    state: str | None
    warm: bool
    remote: bool
    allowed: bool


class Task(Struct, gc=False):
    """A task, and whom a request would go to now."""

    name: Annotated[str, doc("As configured.")]
    description: Annotated[str | None, doc("As configured.")]
    pin_primary: Annotated[bool, doc("As configured.")]
    keep_alive_s: Annotated[float | None, doc("As configured.")]
    budget_s: Annotated[float | None, doc("As configured.")]
    allow_remote: Annotated[bool, doc("As configured.")]
    candidates: Annotated[
        list[Candidate],
        doc(
            "In order: `model` as the task names it, `physical` the model behind that, its `state`, whether it is `warm` or "
            "`remote`, and whether the guard against cloud fallbacks has it `allowed`."
        ),
    ]
    chosen: Annotated[str, doc(_CHOICE)]
    reason: Annotated[Literal["primary", "warm"], doc(_CHOICE)]
    why: Annotated[str, doc(_CHOICE)]


class TaskList(Struct):
    """All tasks, in the order of the configuration."""

    object: Literal["list"]
    data: list[Task]
