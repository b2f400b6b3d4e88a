"""Two models that don't fit together on one device: real llama.cpp processes, then clients that fight."""

from __future__ import annotations

import threading
import time

from tests.support import tiny
from tests.support.clients import starts
from tests.support.counts import times
from tests.support.daemon import fake, gguf, running, wait_until

BUDGET_MIB = 450


class Ledger(threading.Thread):
    """Watches the books all the time: what is measured, together, and at most."""

    def __init__(self, daemon) -> None:
        super().__init__(daemon=True)
        self.most_mib = 0
        self.readings = 0
        self.most_resident = 0
        self._daemon = daemon
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        with self._daemon.client() as client:
            while not self._over.wait(0.02):
                device = client.get("/v1/admin/gpu-memory").json()["devices"][0]
                self.most_mib = max(self.most_mib, sum(lease["measured_mib"] or 0 for lease in device["leases"]))
                self.most_resident = max(self.most_resident, len(device["leases"]))
                self.readings += 1

    def close(self) -> None:
        self._over.set()
        self.join()


class Test17NoOvercommit:
    """Swapping never takes more memory than there is."""

    def test_alternating(self, tmp_path, measured):
        """Each request is answered by its own model; one is killed for the other, its memory comes back, none is over-committed."""
        path = {name: tiny.model(name=name, size_mib=200) for name in ("left", "right")}
        models = {name: gguf(file, extra_args=["--load-mode", "none"]) for name, file in path.items()}
        devices = [{"kind": "host", "budget_mib": BUDGET_MIB, "margin_mib": 0}]
        with running(tmp_path, {"models": models, "devices": devices}) as daemon:
            free = lambda: daemon.get("/v1/admin/gpu-memory").json()["devices"][0]["free_mib"]
            baseline_mib = wait_until(free)
            ledger = Ledger(daemon)
            swaps, slowest_s, used = times(6, 1000), 0.0, set()
            for number in range(swaps):
                name, other = ("left", "right") if number % 2 else ("right", "left")
                began = time.monotonic()
                answer = daemon.chat(name)
                slowest_s = max(slowest_s, time.monotonic() - began)
                assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, tiny.ANSWER)
                assert daemon.model(other)["state"] == "stopped"
                assert daemon.model(name)["state"] == "ready"
                # The first figures may be from while it loaded.
                taken = lambda name=name: daemon.model(name)["memory"]["measured_mib"] or 0
                wait_until(lambda taken=taken: taken() > 190, what="what the model takes is seen")
                used.add(taken())
            ledger.close()
            assert ledger.most_resident == 1
            assert ledger.most_mib <= BUDGET_MIB
            assert starts(daemon, "left") + starts(daemon, "right") == swaps
            reasons = [decision["reason"] for decision in daemon.decisions("left")]
            assert any(
                reason.startswith("made room for right: needs ") and "evicting left (llm, " in reason
                for reason in reasons
            )
            for name in models:
                assert daemon.post(f"/v1/admin/models/{name}/unload").status_code == 200
            wait_until(lambda: free() >= baseline_mib - 20, what="measured memory returns to its baseline")
            measured(
                swaps=swaps,
                slowest_answer_s=slowest_s,
                model_mib=max(used),
                most_measured_mib=ledger.most_mib,
                budget_mib=BUDGET_MIB,
                readings=ledger.readings,
                baseline_mib=baseline_mib,
                free_at_the_end_mib=free(),
            )


class Test26AlternatingModels:
    """Two models that fight for one device swap at most once a residency, and nobody starves."""

    def test_fight(self, tmp_path, measured):
        """Clients in closed loops on two such models, so that each is always asked for: swaps are bounded by the minimum
        residency, and nobody starves."""
        residency_s, lasting_s, deadline_s = 0.5, times(4, 60), 40
        slow = fake("--take-mib", "120", "--delay", "0.05", vram_mib=250, target_inflight=1)
        models = dict.fromkeys(("left", "right"), slow)
        config = {
            "models": models,
            "devices": [{"kind": "host", "budget_mib": 400, "margin_mib": 0}],
            "limits": {"min_residency_s": residency_s, "queue_wait_s": deadline_s},
        }
        with running(tmp_path, config) as daemon:
            waits: dict[str, list[float]] = {name: [] for name in models}
            statuses: set[int] = set()
            began_at, over = time.monotonic(), threading.Event()

            def loop(name: str) -> None:
                with daemon.client() as client:
                    while not over.is_set():
                        began = time.monotonic()
                        statuses.add(
                            client.post("/v1/chat/completions", json={"model": name, "messages": []}).status_code
                        )
                        waits[name].append(time.monotonic() - began)

            ledger = Ledger(daemon)
            clients = [threading.Thread(target=loop, args=(name,)) for name in models for _ in range(3)]
            for client in clients:
                client.start()
            try:
                over.wait(lasting_s)
                wait_until(
                    lambda: all(starts(daemon, name) >= 2 for name in models), what="both get turns again and again"
                )
            finally:
                over.set()
                for client in clients:
                    client.join()
            lasting_s = time.monotonic() - began_at
            ledger.close()
            started = {name: starts(daemon, name) for name in models}
            assert statuses == {200}
            assert sum(started.values()) <= lasting_s / residency_s + 2, "at most one start per residency"
            assert max(map(max, waits.values())) < deadline_s
            assert ledger.most_resident == 1
            measured(
                lasting_s=lasting_s,
                min_residency_s=residency_s,
                starts=sum(started.values()),
                answered={name: len(times_) for name, times_ in waits.items()},
                longest_wait_s=max(map(max, waits.values())),
            )
