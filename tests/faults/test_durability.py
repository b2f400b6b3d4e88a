"""The daemon is killed with -9 just when something is answered: it is found again, as it was told."""

from __future__ import annotations

import random
import time

from tests.support.counts import times
from tests.support.daemon import Daemon, fake, wait_until

CHAT = "/v1/chat/completions"
ANSWER_BYTES = 3 << 20
RUNNING = {"queued", "in_progress"}


class Test37AnsweredAndKept:
    """Whatever was answered when the daemon is killed is on disk."""

    def test_a_response_in_the_background(self, tmp_path, measured):
        """Killed in the moment that its job is forgotten, or at random: the answer is there, and was made once if it was told."""
        seen = tmp_path / "ids"
        flags = ("--chunks", "1", "--chunk-bytes", str(ANSWER_BYTES), "--delay", "0.1", "--ids-to", str(seen))
        daemon = Daemon(tmp_path, {"models": {"slow": fake(*flags, endpoints=[CHAT])}})
        again = 0
        for number in range(times(4, 60)):
            daemon.start()
            daemon.chat("slow")
            seen.unlink()
            made = daemon.post("/v1/responses", json={"model": "slow", "input": "Hi", "background": True}).json()
            jobs = daemon.state_dir / "jobs"
            if is_at_random := number % 2 == 1:
                time.sleep(random.uniform(0.05, 0.3))
            else:
                wait_until(lambda jobs=jobs: not [*jobs.glob("*.request")])
            status = daemon.get(f"/v1/responses/{made['id']}").json()["status"] if is_at_random else "completed"
            daemon.kill()
            told = len(seen.read_text().split()) if seen.exists() else 0
            daemon.start()

            def over(name: str = made["id"]) -> dict[str, object] | None:
                found = daemon.get(f"/v1/responses/{name}").json()
                return None if found["status"] in RUNNING else found

            found = wait_until(over)
            assert found["status"] == "completed", found.get("error")
            assert len(found["output"][0]["content"][0]["text"]) == ANSWER_BYTES
            if status == "completed":
                assert len(seen.read_text().split()) == told == 1
            again += len(seen.read_text().split()) - 1
            daemon.stop()
        measured(kills=times(4, 60), answered_again=again)
