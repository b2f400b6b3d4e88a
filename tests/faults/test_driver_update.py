"""The GPU's driver is replaced under a running daemon."""

from __future__ import annotations

import time

from tests.support.clients import starts
from tests.support.daemon import fake, running, wait_until


class Test18DriverUpdated:
    """Between the removal of the old driver and the first use of the new one nothing is loaded, and requests are served on."""

    def test_uninitialised_and_another_version(self, tmp_path, gpu, measured):
        models = {name: fake(vram_mib=mib, env=gpu.takes(mib)) for name, mib in {"small": 2000, "big": 9000}.items()}
        with running(tmp_path, {"devices": "auto", "models": models}, env=gpu.env) as daemon:
            card = lambda: daemon.get("/v1/admin/gpu-memory").json()["devices"][0]
            assert daemon.chat("small").status_code == 200
            gpu.write(errors={"nvmlDeviceGetMemoryInfo": 1, "nvmlDeviceGetHandleByUUID": 1}, init_error=18)
            wait_until(lambda: card()["blocked"])
            statuses = [daemon.chat("small").status_code for _ in range(20)]
            assert statuses == [200] * 20
            assert starts(daemon, "big") == 0
            gpu.write(driver="600.10")
            back_at = time.monotonic()
            wait_until(lambda: not card()["blocked"])
            assert daemon.chat("big").status_code == 200
            measured(served_meanwhile=20, loaded_after_return_s=time.monotonic() - back_at)
