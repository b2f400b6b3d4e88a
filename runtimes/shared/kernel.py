"""A kernel: compiled GPU code from a repository of the hub (runtimes/adapters/hub_kernels.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Kernel:
    """Branch `v<version>` of a repository. Its publisher promises to break nothing within a version."""

    repo: str
    version: int

    @property
    def branch(self) -> str:
        """The branch's name on the hub."""
        return f"v{self.version}"
