"""Runs its one argument as `python -c` does: for the forker, which knows modules alone."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})
