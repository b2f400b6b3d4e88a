"""`llmux` that makes a mistake over the model `cursed` each time that it is to be loaded, and over `hexed` when it gets ready. Run as `python -m`."""

from __future__ import annotations

from supervisor.cli.main import main
from supervisor.core import reports
from supervisor.core.device_ledger import Holder
from supervisor.core.events import WorkerReady
from supervisor.core.ledger import Ledger
from supervisor.core.state import SchedulerState, Step

_begin, _ready = Ledger.begin, reports.ready


def begin(ledger: Ledger, holder: Holder, *more: object, **named: object) -> None:
    assert holder[0] != "cursed", "the stars are wrong"
    _begin(ledger, holder, *more, **named)  # type: ignore[arg-type]


def ready(state: SchedulerState, step: Step, event: WorkerReady) -> None:
    _ready(state, step, event)
    assert event.model != "hexed", "too late to be well"


if __name__ == "__main__":
    Ledger.begin = begin  # type: ignore[method-assign]
    reports.ready = ready
    main()
