"""The engine's part for operators: to have a model loaded or unloaded, and to wait for it."""

from __future__ import annotations

from supervisor.core.events import LoadAsked, UnloadAsked
from supervisor.core.types import Crash, CrashClass, ModelId, WorkerState
from supervisor.core.waiting import first_to_serve
from supervisor.engine.leasing import Leasing
from supervisor.errors import NotFoundError, UnavailableError


class Operating(Leasing):
    """Of a model with replicas: load until the first answers, unload until the last has ended."""

    async def load(self, model: ModelId, asked: str | None = None) -> None:
        """Load `model` and return when it is ready. Raises UnavailableError when it can't be. Cancelling stops waiting only.

        Errors name the model as it was `asked` for.
        """
        name = asked or model
        self.post(LoadAsked(model))
        while True:
            self._check_handed_over()
            known = self._scheduler.state.models.get(model)
            if known is None:
                raise NotFoundError(f"There is no model {name!r}.", code="model_not_found", param="model")
            found = first_to_serve(self._scheduler.state, known)
            if found.state is WorkerState.READY:
                if found.answering:
                    return
                if found.spec.is_elsewhere:
                    raise UnavailableError(f"{name}: {found.life.reason}", code="remote_unavailable")
            self._check_quarantine(found, name)
            if found.state is WorkerState.FAILED or (
                found.state in {WorkerState.STOPPED, WorkerState.BACKOFF} and found.asked_at is None
            ):
                crash = found.crash or Crash(CrashClass.UNKNOWN, "")
                code = "runtime_not_installed" if crash.kind is CrashClass.NOT_INSTALLED else "load_failed"
                message = f"{name} was not loaded: {found.life.reason}"
                raise UnavailableError(message, code=code, detail=crash.log_tail)
            await self._change()

    async def unload(self, model: ModelId, asked: str | None = None, order: UnloadAsked | None = None) -> None:
        """Unload `model` and return when its memory is back. Requests may load it again. Cancelling stops waiting only.

        Raises UnavailableError when it can't be killed, or its memory has not come back for too long. Errors name the model
        as it was `asked` for.
        """
        state = self._scheduler.state
        replicas = state.replicas(state.models[model]) if model in state.models else []
        before = {each.id: each.generation for each in replicas if each.has_worker}
        self.post(order or UnloadAsked(model))
        while True:
            self._check_handed_over()
            found = [each for name, start in before.items() if (each := state.current(name, start)) is not None]
            left = [each for each in found if each.state is not WorkerState.READY]
            if not left:
                return
            for each in left:
                self._check_quarantine(each, asked or model)
            await self._change()
