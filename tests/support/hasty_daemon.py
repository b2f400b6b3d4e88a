"""`llmux` that looks at slow clients and gives memory back ten times as soon. Run as `python -m`."""

from __future__ import annotations

from supervisor.cli import own_process
from supervisor.cli.main import main
from supervisor.core import admission

if __name__ == "__main__":
    admission.LOOK_S /= 10
    own_process.TRIM_S /= 10
    main()
