"""Settings that operators change while the daemon runs, kept over restarts: `GET` and `PUT /api/v1/config`, and the active set.

Files and variables only set the initial values. A change that can't be saved isn't made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from supervisor.errors import ConfigError
from supervisor.host.store.store import Store

VARIABLE: Final = "MODEL_BOSS_ALLOW_CLOUD_FALLBACK"
_COLLECTION, _CLOUD_FALLBACK, _ACTIVE_SET = "runtime_config", "allow_cloud_fallback", "active_set"
_WORDS: Final[Mapping[str, bool]] = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class RuntimeConfig:
    """The runtime settings of a daemon. Without a store they last only for this run."""

    def __init__(self, store: Store | None = None, *, allow_cloud_fallback: bool = True) -> None:
        """`allow_cloud_fallback`: the initial value."""
        self._store = store
        self._changed: bool | None = None  # by an operator
        self._first = allow_cloud_fallback
        self._active_set: str | None = None

    @property
    def allow_cloud_fallback(self) -> bool:
        """Whether tasks may fall back to remote models."""
        kept = self._changed if self._store is None else self._store.get(_COLLECTION, _CLOUD_FALLBACK)
        return kept if isinstance(kept, bool) else self._first

    async def allow(self, *, cloud_fallback: bool) -> None:
        """Change the value, and save it over restarts. Raises NotSavedError; then nothing has changed."""
        if self._store is None:
            self._changed = cloud_fallback
        else:
            await self._store.put(_COLLECTION, _CLOUD_FALLBACK, cloud_fallback)

    @property
    def active_set(self) -> str | None:
        """The set that an operator switched on; None: no set. The configuration may no longer have it."""
        kept = self._active_set if self._store is None else self._store.get(_COLLECTION, _ACTIVE_SET)
        return kept if isinstance(kept, str) else None

    async def activate(self, name: str | None) -> None:
        """Change the value, and save it over restarts. Raises NotSavedError; then nothing has changed."""
        if self._store is None:
            self._active_set = name
        else:
            await self._store.put(_COLLECTION, _ACTIVE_SET, name)


def from_environment() -> bool:
    """The value of VARIABLE; True if it isn't set. Raises ConfigError."""
    text = os.environ.get(VARIABLE) or "true"
    if text.strip().lower() not in _WORDS:
        raise ConfigError((f"{VARIABLE}: expected true or false, got {text!r}",))
    return _WORDS[text.strip().lower()]
