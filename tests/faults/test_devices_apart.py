"""The driver of one device hangs, and the others are read, freed and given as before."""

from __future__ import annotations

from tests.support.daemon import fake, running, wait_until

HANGS_S = 600  # longer than any test


class Test36OneDriverHangs:
    """A driver that hangs costs its own devices, and no others."""

    def test_models_on_host_memory_swap_while_a_gpu_driver_hangs(self, tmp_path, gpu):
        """Each swap of host memory is seen by a reading of host memory alone, and nothing there is late or quarantined."""
        models = {
            "on-gpu": fake(vram_mib=2000, env=gpu.takes(2000), devices=["gpu0"]),
            "one": fake(vram_mib=700, devices=["host"]),
            "other": fake(vram_mib=700, devices=["host"]),
        }
        config = {
            "devices": [{"kind": "cuda", "index": 0}, {"kind": "host", "budget_mib": 1000, "margin_mib": 50}],
            "models": models,
            "limits": {"min_residency_s": 0, "memory_quarantine_s": 5},
        }
        with running(tmp_path, config, env=gpu.env) as daemon:
            try:
                assert daemon.chat("on-gpu").status_code == 200
                assert daemon.chat("one").status_code == 200
                gpu.write(hang={"nvmlDeviceGetMemoryInfo": HANGS_S})
                wait_until(lambda: daemon.events("memory.stale"))
                for model in ("other", "one", "other"):
                    assert daemon.chat(model).status_code == 200
                card, host = daemon.get("/v1/admin/gpu-memory").json()["devices"]
                assert card["blocked"]
                assert host["blocked"] is None
                assert daemon.chat("on-gpu").status_code == 200  # what is loaded there serves on
                wait_until(lambda: any(alert["code"] == "device.lost" for alert in daemon.events("alert.raised")))
                assert daemon.chat("one").status_code == 200
                assert {alert["device"] for alert in daemon.events("alert.raised")} == {"gpu0"}
            finally:
                gpu.write()
