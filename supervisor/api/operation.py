"""The object that the operations of the daemon's API get."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from supervisor.daemon.configuration.editing import Editor
from supervisor.daemon.configuration.reload import Reloader
from supervisor.daemon.configuration.sets import Sets
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.handover.handover import Handover


@dataclass(frozen=True, slots=True)
class Api:
    """The daemon, and the objects that change its configuration or replace it."""

    daemon: Daemon
    reloader: Reloader
    editor: Editor
    sets: Sets
    handover: Handover | None = None  # None: this daemon can't be replaced
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """Identifies this run of the daemon in the ids of log lines."""
