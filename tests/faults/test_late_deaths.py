"""Workers that look dead and aren't, or that nothing can kill: their memory is nobody's until they are gone."""

from __future__ import annotations

import time

import pytest

from tests.support.clients import Call, Gpu, starts
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.trees import state


def devices(daemon: Daemon) -> list[dict]:
    return daemon.get("/v1/admin/gpu-memory").json()["devices"]


class Test06LeaderThreadGone:
    """A process without its first thread is no dead process: its memory is credited when the kernel says that it ended."""

    def test_no_memory_for_the_next(self, tmp_path, gpu, measured):
        """Its /proc is empty and the driver shows its memory as free: the next model waits nevertheless."""
        over = tmp_path / "over"
        models = {
            "undead": fake("--outlive-term", str(over), vram_mib=10000, env=gpu.takes(10000), grace_s=120),
            "next": fake(vram_mib=9000, env=gpu.takes(9000)),
        }
        with running(tmp_path, {"devices": "auto", "models": models}, env=gpu.env) as daemon:
            assert daemon.chat("undead").status_code == 200
            pid = daemon.model("undead")["worker"]["pid"]
            call = Call(daemon, "next")
            wait_until(lambda: state(pid) == "Z", what="only its first thread has ended")
            wait_until(lambda: devices(daemon)[0]["free_mib"] > 16000, what="the driver shows its memory as free")
            watched_until = time.monotonic() + 1.5  # memory is read four times a second meanwhile
            while time.monotonic() < watched_until:
                assert [lease["model"] for lease in devices(daemon)[0]["leases"]] == ["undead"]
                assert daemon.model("next")["queued"] == 1
            assert starts(daemon, "next") == 0
            over.touch()
            over_at = time.monotonic()
            assert call.result().status == 200
            measured(served_after_its_end_s=time.monotonic() - over_at)


class Immortal(Daemon):
    program = ("-m", "tests.support.faulty_daemon", "immortal")


@pytest.fixture
def cards(tmp_path) -> Gpu:
    return Gpu(tmp_path, count=2)


class Test07Unkillable:
    """A process that survives SIGKILL quarantines its device, with an alert; the other devices serve on."""

    def test_quarantined(self, tmp_path, cards, measured):
        models = {
            "immortal": fake(vram_mib=10000, grace_s=0.2),
            "elsewhere": fake(vram_mib=9000, env=cards.takes(9000)),
            "young": fake(vram_mib=4000, env=cards.takes(4000)),
        }
        mortal = tmp_path / "mortal"
        limits = {"memory_warn_s": 0.3, "memory_quarantine_s": 1}
        config = {"devices": "auto", "models": models, "limits": limits}
        daemon = Immortal(tmp_path, config, cards.env | {"LLMUX_TEST_MORTAL": str(mortal)})
        try:
            daemon.start()
            assert daemon.chat("immortal").status_code == 200
            assert daemon.chat("elsewhere").status_code == 200
            stuck, sound = daemon.model("immortal")["device"], daemon.model("elsewhere")["device"]
            assert stuck != sound
            asked_at = time.monotonic()
            unload = Unload(daemon, "immortal")
            card = lambda: next(device for device in devices(daemon) if device["id"] == stuck)
            wait_until(lambda: card()["quarantined"])
            quarantined_s = time.monotonic() - asked_at
            assert daemon.model("immortal")["state"] == "stopping"
            assert "device.quarantined" in {alert["code"] for alert in daemon.events("alert.raised")}
            assert daemon.chat("elsewhere").status_code == 200
            assert daemon.chat("young").status_code == 200
            assert daemon.model("young")["device"] == sound, "on the other one there would be more room"
            assert unload.result().status == 503, "the operator is told"
            mortal.touch()
            wait_until(lambda: not card()["quarantined"])
            assert daemon.chat("immortal").status_code == 200
            measured(sigkill_to_quarantine_s=quarantined_s, memory_quarantine_s=1)
        finally:
            mortal.touch()
            assert daemon.stop() == 0
        wait_until(lambda: not daemon.workers())


class Unload(Call):
    """`unload` in a thread of its own."""

    def run(self) -> None:
        self.response = self._daemon.post(f"/v1/admin/models/{self._model}/unload")
