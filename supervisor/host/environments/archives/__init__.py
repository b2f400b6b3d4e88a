"""Programs that come as archives of their project's releases: found, fetched, checked, unpacked."""

from __future__ import annotations

from supervisor.errors import LlmuxError


class ReleaseError(LlmuxError):
    """A release's file can't be fetched; the message has the remedy."""

    code = "runtime_install_failed"
