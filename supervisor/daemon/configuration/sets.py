"""The active set. Its pins and default models replace those of the models and of the limits.

A switch is a reload with another set, so it ends no worker and loads nothing by itself: default models load as usual. It
removes pins that operators set by hand.
"""

from __future__ import annotations

import asyncio

import structlog

from supervisor.core.events import PinRequested
from supervisor.daemon.configuration.reload import Reloader
from supervisor.daemon.daemon import Daemon
from supervisor.errors import LlmuxError, NotFoundError
from supervisor.schema.daemon import SetList, SetView

log = structlog.get_logger("llmux.sets")


class Sets:
    """A daemon's sets. Use from the event loop's thread."""

    def __init__(self, daemon: Daemon, reloader: Reloader) -> None:
        self._daemon = daemon
        self._reloader = reloader
        self._lock = asyncio.Lock()

    def listing(self) -> SetList:
        """All configured sets."""
        catalog = self._daemon.catalog
        return SetList(
            [
                SetView(name, one.description, [*one.default_models], one.pin, name == catalog.active_set)
                for name, one in catalog.sets.items()
            ]
        )

    async def switch(self, name: str | None) -> None:
        """Make this the active set; None: no set. If this raises, nothing has changed.

        Raises NotFoundError for a set that isn't configured, NotSavedError where it can't be kept, ConfigError where the files have mistakes.
        """
        if name is not None and name not in self._daemon.catalog.sets:
            there = ", ".join(self._daemon.catalog.sets) or "none"
            raise NotFoundError(
                f"There is no set {name[:200]!r}; there is: {there}.", code="set_not_found", param="active"
            )
        async with self._lock:
            await asyncio.shield(self._switch(name))

    async def _switch(self, name: str | None) -> None:
        daemon, before = self._daemon, self._daemon.runtime.active_set
        await daemon.runtime.activate(name)
        try:
            await self._reloader.reload(f"switch to {name or 'what is configured'}")
        except LlmuxError:
            await daemon.runtime.activate(before)
            raise
        for model in daemon.catalog.models:
            daemon.engine.post(PinRequested(model, None))
        log.info("set.switched", active=name, before=before)
