"""`llmux` that looks at slow clients, and gives up waiting for long answers, ten times as soon. Run as `python -m`."""

from __future__ import annotations

from supervisor.cli.main import main
from supervisor.core import admission

if __name__ == "__main__":
    admission.LOOK_S /= 10
    admission.LONGEST_DRAIN_S /= 10
    main()
