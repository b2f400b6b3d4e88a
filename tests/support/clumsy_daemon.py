"""`llmux` that makes a mistake when it has just handed over. Run as `python -m`."""

from __future__ import annotations

from supervisor.cli.main import main
from supervisor.fleet.fleet import Fleet


def stumble(_fleet: Fleet) -> None:
    raise RuntimeError("a mistake after the last step")


if __name__ == "__main__":
    Fleet.let_go = stumble
    main()
