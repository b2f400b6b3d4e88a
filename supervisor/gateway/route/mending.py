"""A request that its worker refused is sent once more, where it can be put right: see `proxy.tolerance`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from supervisor.catalog.rewrite import NO_REWRITE
from supervisor.core.types import ModelId
from supervisor.errors import LlmuxError
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.tolerance import ordered, put_right
from supervisor.gateway.upstream_error import WorkerAnswerError
from supervisor.io.held_body import BodyBudget, HeldBody

if TYPE_CHECKING:
    from supervisor.gateway.route.targets import Target

_REFUSALS: Final = frozenset({400, 422, 500})  # llama.cpp blames itself for much that its clients send
_MOST: Final = 4


class Mending:
    """Of one request that its worker has refused. `end` it."""

    __slots__ = ("_bodies", "_strict", "_talks", "_target", "_tries", "body", "ignored")

    def __init__(self, target: Target, bodies: BodyBudget, strict: set[ModelId]) -> None:
        """`strict`: the models whose chat templates refuse what others take; it is added to."""
        self.body = target.body  # what is sent
        self.ignored = target.ignored
        self._target = target
        self._bodies = bodies
        self._strict = strict
        self._tries = 0
        self._talks = False  # was it the order of who speaks?

    async def mend(self, error: WorkerAnswerError) -> bool:
        """Can what was refused with this be sent again, changed?"""
        target = self._target
        if error.status not in _REFUSALS or self._tries == _MOST or target.endpoint.meaning.role == "other":
            return False
        if not self.body.is_there:  # it was too large to be kept
            return False
        self._tries += 1
        try:
            body = await JsonBody.open(await self.body.whole())
            changes, ignored = put_right(body.fields, target.endpoint.meaning, error.message)
            if not changes:
                return False
            mended = HeldBody(self._bodies)
            mended.keep(await body.changed(changes).rewritten(NO_REWRITE, target.endpoint))
        except LlmuxError:  # it is no JSON, or there is no room for another one
            return False
        self._release()
        self.body, self.ignored = mended, (*self.ignored, *ignored)
        self._talks |= "messages" in changes and bool(ordered(body.fields, target.endpoint.meaning))
        return True

    def end(self, status: int) -> None:
        """Its worker's last answer has this status. Lets go of what was changed."""
        if self._talks and status < 400:
            self._strict.add(self._target.model)
        self._release()

    def _release(self) -> None:
        if self.body is not self._target.body:
            self.body.release()
