"""A model whose load runs out of memory: it gets more room and one more try, also after a restart, and then has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.clients import starts
from tests.support.daemon import REPOSITORY, Daemon, fake, running, wait_until

FAIL_ONCE = 'if [ -e "$0" ]; then rm "$0"; echo "CUDA error: out of memory" >&2; exit 1; fi; exec "$@"'


def short_of_memory(mark: Path, **keys: Any) -> dict[str, Any]:
    """A fake worker that runs out of memory at the next start if there is a file `mark`."""
    model = fake(**keys)
    return {**model, "cmd": ["sh", "-c", FAIL_ONCE, str(mark), *model["cmd"]]}


def reasons(daemon: Daemon, kind: str) -> list[str]:
    return [decision["reason"] for decision in daemon.decisions("short") if decision["kind"] == kind]


class Test19LoadRunsOutOfMemory:
    """It raises the model's footprint, which is remembered, makes room once more and tries once more."""

    def test_one_more_try_with_more_room(self, tmp_path):
        """The second try gets a quarter more, for which another model goes; a later daemon begins with as much."""
        mark = tmp_path / "runs-out"
        models = {"short": short_of_memory(mark), "other": fake(vram_mib=300)}
        devices = [{"kind": "host", "budget_mib": 410, "margin_mib": 0}]
        with running(tmp_path, {"models": models, "devices": devices, "limits": {"min_residency_s": 0}}) as daemon:
            assert daemon.chat("other").status_code == 200
            mark.touch()
            assert daemon.chat("short").status_code == 200
            assert starts(daemon, "short") == 2
            wait_until(lambda: daemon.model("other")["state"] == "stopped")
            assert reasons(daemon, "raise") == [
                "ran out of memory while loading; tried once more, with 125 MiB on processor and RAM (host) instead of 100"
            ]
            need = {
                "mib": 125,
                "source": "raised",
                "detail": "a load with less ran out of memory on processor and RAM (host)",
            }
            memory = daemon.model("short")["memory"]
            assert (memory["raised"], memory["need"]["host"], memory["lease_mib"]) == ({"host": 125}, need, 125)
            assert daemon.model("short")["warnings"] == [
                "vram_mib is 100, but a load with less than 125 MiB ran out of memory on processor and RAM (host); raise or remove it"
            ]
            command = [sys.executable, "-m", "supervisor.cli", "ps", "--wide", "--url", daemon.url]
            table = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
            assert "125 MiB raised" in table
            daemon.stop()
            daemon.start()
            assert daemon.model("short")["memory"]["need"]["host"] == need
            assert daemon.chat("short").status_code == 200
            shown = daemon.model("short")
            assert (shown["generation"], shown["memory"]["lease_mib"]) == (1, 125)

    def test_then_it_has_failed_with_its_cause(self, tmp_path):
        """Nothing is tried a third time, and whoever waits is told at once."""
        model = fake("--exit-code", "1", "--log-text", "CUDA error: out of memory")
        with running(tmp_path, {"models": {"short": model}}) as daemon:
            refused = daemon.chat("short")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
            assert "it ran out of memory" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 60
            shown = daemon.model("short")
            assert (shown["state"], shown["crash"]["class"], shown["generation"]) == ("failed", "out_of_memory", 2)
            assert shown["reason"].startswith("failed again with more memory: ")
            daemon.stop()
            daemon.start()
            assert daemon.model("short")["memory"]["raised"] == {"host": 125}
