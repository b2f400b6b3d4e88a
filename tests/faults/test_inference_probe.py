"""A worker with a good health check that doesn't compute is found by `probe: inference`; one that works is left alone."""

from __future__ import annotations

from tests.support.clients import Call, stats
from tests.support.daemon import fake, gguf, running, wait_until

LIMITS = {
    "readiness_interval_s": 0.1,
    "liveness_interval_s": 0.2,
    "backoff_first_s": 0.1,
    "backoff_max_s": 0.1,
}


def replaced(daemon, model: str) -> bool:
    return any(
        decision["kind"] == "crash" and "does not compute" in decision["reason"] for decision in daemon.decisions(model)
    )


class TestHung:
    def test_replaced(self, tmp_path, measured):
        """It computes for a while, then no more: six probes fail. Without the probe nobody finds out."""
        hung = tmp_path / "hung"
        models = {
            "watched": fake("--hang-while", str(hung), probe="inference"),
            "trusted": fake("--hang-while", str(hung)),
        }
        with running(tmp_path, {"models": models, "limits": LIMITS}) as daemon:
            for model in models:
                assert daemon.chat(model).status_code == 200
            pid = daemon.model("watched")["worker"]["pid"]
            hung.touch()
            wait_until(lambda: replaced(daemon, "watched"))
            hung.unlink()
            daemon.wait_gone("watched", pid)
            assert daemon.chat("watched").status_code == 200
            assert daemon.model("watched")["generation"] == 2
            assert daemon.model("trusted")["generation"] == 1
            assert daemon.chat("trusted").status_code == 200
            crash = next(decision for decision in daemon.decisions("watched") if decision["kind"] == "crash")
            assert crash["reason"].startswith("unresponsive")

    def test_while_clients_ask(self, tmp_path):
        """Requests that hang keep it busy, but for no longer than a request gets for its first byte."""
        hung = tmp_path / "hung"
        models = {"m": fake("--hang-while", str(hung), probe="inference")}
        limits = LIMITS | {"first_byte_s": 1.5}
        with running(tmp_path, {"models": models, "limits": limits}) as daemon:
            assert daemon.chat("m").status_code == 200
            hung.touch()
            calls = [Call(daemon, "m")]
            while not replaced(daemon, "m"):  # there is always one under way
                if not calls[-1].is_alive():
                    calls.append(Call(daemon, "m"))
                calls[-1].join(0.05)
            hung.unlink()
            assert {call.result().status for call in calls} <= {200, 502, 504}
            assert daemon.chat("m").status_code == 200


class TestHonest:
    def test_busy(self, tmp_path):
        """It takes one request at a time, and one takes longer than six probes would: it isn't asked meanwhile."""
        models = {"m": fake("--one-at-a-time", probe="inference")}
        with running(tmp_path, {"models": models, "limits": LIMITS}) as daemon:
            assert daemon.chat("m").status_code == 200
            wait_until(lambda: stats(daemon, "m")["requests"] >= 3, what="it was probed")
            call = Call(daemon, "m", fake={"delay": 9.0})  # six probes of 0.2 s, each with 0.6 s for its answer: 4.8 s
            assert call.result().status == 200
            assert call.elapsed_s >= 9.0
            assert daemon.model("m")["generation"] == 1
            assert not replaced(daemon, "m")

    def test_llama_server(self, tmp_path):
        """The real thing answers each probe, and its client is not disturbed."""
        limits = LIMITS | {"liveness_interval_s": 1.0}
        with running(tmp_path, {"models": {"m": gguf(probe="inference")}, "limits": limits}) as daemon:
            before = daemon.chat("m", max_tokens=8).json()["choices"][0]["message"]
            log = daemon.state_dir / "logs" / "m.log"
            wait_until(lambda: log.read_text().count("stop processing") >= 9, what="more than six probes")
            assert daemon.chat("m", max_tokens=8).json()["choices"][0]["message"] == before
            assert daemon.model("m")["generation"] == 1
