"""State directories as a kill or a bad disk leaves them."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.support.counts import times
from tests.support.daemon import Daemon, fake, wait_until

SEED = int(os.environ.get("LLMUX_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)


def damage(path: Path, chance: random.Random) -> str:
    """What was done to it."""
    size = path.stat().st_size
    match chance.choice(("cut", "garbled", "emptied", "removed")):
        case "cut":
            os.truncate(path, chance.randrange(size + 1))
            return f"{path.name} cut"
        case "garbled":
            with path.open("r+b") as file:
                file.seek(chance.randrange(size + 1))
                file.write(chance.randbytes(chance.randrange(1, 4096)))
            return f"{path.name} garbled"
        case "emptied":
            os.truncate(path, 0)
            return f"{path.name} emptied"
        case _:
            path.unlink()
            return f"{path.name} removed"


class Test22TornState:
    """Killed at any moment, and with any file of its state torn, the daemon starts and serves."""

    def test_starts_again(self, tmp_path, measured):
        chance, done = random.Random(SEED), []
        daemon = Daemon(tmp_path, {"models": {"m": fake("--take-mib", "20")}})
        rounds = times(3, 100)
        for _ in range(rounds):
            daemon.start()
            assert daemon.chat("m").status_code == 200, f"LLMUX_SEED={SEED}: {done}"
            if chance.random() < 0.5:
                daemon.post("/v1/admin/models/m/unload")  # what was measured is being stored
            daemon.kill()
            wait_until(lambda: not daemon.workers())
            files = [path for path in sorted(daemon.state_dir.iterdir()) if path.is_file() and "lock" not in path.name]
            assert files
            done += [damage(path, chance) for path in files if chance.random() < 0.5]
        daemon.start()
        assert daemon.chat("m").status_code == 200
        assert daemon.stop() == 0
        measured(starts=rounds + 1, damaged=len(done), seed=SEED)
