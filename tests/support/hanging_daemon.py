"""`llmux` whose successors stop themselves at the step that `$HANGS_AT` names, and that waits for none of them for long. Run as `python -m`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from supervisor.cli.main import main
from supervisor.daemon import handover
from supervisor.daemon.takeover import Takeover

STEPS = {"met": "__init__", "half": "_receive", "prepared": "check", "serving": "adopt"}
"""What a successor begins, and never ends, by the step that the old daemon waits for."""


def _hanging(method: Callable[..., Any]) -> Callable[..., Any]:
    def hang(*words: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return method(*words)

    return hang


if __name__ == "__main__":
    step = os.environ["HANGS_AT"]
    if handover.OPTION in sys.argv:
        if step == "start":
            os.kill(os.getpid(), signal.SIGSTOP)
        name = STEPS[step]
        setattr(Takeover, name, _hanging(getattr(Takeover, name)))
    elif step == "start":
        handover.START_S = 2.0
    elif "HURRIES" in os.environ:
        handover.MEET_S = handover.ANSWER_S = 2.0
    main()
