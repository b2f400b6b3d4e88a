"""Programs that come as archives of their project's releases: found, fetched, checked, unpacked."""

from __future__ import annotations

from supervisor.errors import LlmuxError


class ReleaseError(LlmuxError):
    """A release's file can't be had; the message says what to do."""

    code = "runtime_install_failed"
