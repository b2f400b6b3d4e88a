"""The daemon's own process, as far as it can be tried in another."""

from __future__ import annotations

import subprocess
import sys

SETTLE = """
import gc
gc.disable()
from supervisor.cli.serving.own_process import settle_garbage_collector
settle_garbage_collector()
print(gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_after_its_start_it_collects_but_not_what_was_made_before():
    told = subprocess.run([sys.executable, "-c", SETTLE], capture_output=True, text=True, check=True)
    assert told.stdout == "True True\n"
