"""The worker SDK, run as the real process that every worker of ours is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from runtimes.adapters.worker_adapter import BOOTSTRAP
from tests.support.daemon import wait_until
from tests.support.leaving import leave
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

TOY = Path(__file__).parents[2] / "support" / "toy_worker.py"
KEY = "k" * 32

START = f"""
import gc, runpy, sys
gc.disable()
sys.path.append({str(Path(__file__).parents[3])!r})
sys.argv = sys.argv[1:]
runpy.run_path({str(TOY)!r}, run_name="__main__")
"""
"""What bootstrap.py does, for the toy isn't part of the package that it opens."""


class Toy:
    def __init__(self, **options: object) -> None:
        settings = {"model": "toy", "host": "127.0.0.1", "port": quiet_ports(), "parallel": 2, "queue": 3, **options}
        self.port = settings["port"]
        command = [sys.executable, "-I", "-c", START, "toy.py", json.dumps(settings)]
        self.process = subprocess.Popen(command, env={"LLMUX_WORKER_KEY": KEY}, stderr=subprocess.PIPE, text=True)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=LIMIT_S,
            trust_env=False,
        )

    def health(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return 0

    def seen(self) -> dict:
        return self.http.get("/seen").json()

    def ask(self, answers: list[httpx.Response], **body: object) -> threading.Thread:
        """In a thread of its own, which has begun."""
        asking = threading.Thread(target=lambda: answers.append(self.http.post("/count", json=body)))
        asking.start()
        return asking

    def end(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def start():
    toys: list[Toy] = []

    def one(**options: object) -> Toy:
        toys.append(Toy(**options))
        return toys[-1]

    yield one
    for toy in toys:
        toy.end()


@pytest.fixture
def toy(start):
    toy = start()
    wait_until(lambda: toy.health() == 200)
    return toy


@pytest.fixture(scope="module")
def shared():
    """For tests that leave it as it was."""
    toy = Toy()
    try:
        wait_until(lambda: toy.health() == 200)
        yield toy
    finally:
        toy.end()


class TestHealth:
    """/health means that the model answers."""

    def test_loading(self, start, tmp_path):
        gate = tmp_path / "gate"
        toy = start(gate=str(gate))
        wait_until(lambda: toy.health() == 503)
        refused = toy.http.post("/count", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert refused.headers["retry-after"] == "1"
        gate.touch()
        wait_until(lambda: toy.health() == 200)

    def test_a_model_that_fails_to_load(self, start):
        toy = start(broken=True)
        _, text = toy.process.communicate(timeout=LIMIT_S)
        assert toy.process.returncode == 1
        assert "CUDA out of memory" in text
        assert "exiting" in text

    def test_a_taken_port(self, toy, start):
        """It is told at once: nothing is loaded for it."""
        other = start(port=toy.port, broken=True)
        _, text = other.process.communicate(timeout=LIMIT_S)
        assert other.process.returncode == 1
        assert "couldn't bind HTTP server socket" in text
        assert "CUDA out of memory" not in text

    def test_sigterm_while_loading(self, start, tmp_path):
        toy = start(gate=str(tmp_path / "never"))
        wait_until(lambda: toy.health() == 503)
        toy.process.send_signal(signal.SIGTERM)
        assert toy.process.wait(LIMIT_S) == 0

    def test_sigterm_lets_a_request_end(self, toy, tmp_path):
        answers: list[httpx.Response] = []
        gate = tmp_path / "gate"
        asking = toy.ask(answers, gate=str(gate))
        wait_until(lambda: toy.seen()["running"] == 1)
        toy.process.send_signal(signal.SIGTERM)
        wait_until(lambda: toy.health() == 0)  # it listens no more
        gate.touch()
        asking.join()
        assert answers[0].json() == [{"step": 0}, {"step": 1}, {"step": 2}]
        assert toy.process.wait(LIMIT_S) == 0


class TestKey:
    """Only who knows the key is answered, and the model's own code can't see it."""

    @pytest.fixture
    def toy(self, shared):
        return shared

    @pytest.mark.parametrize("given", [None, "Bearer nonsense", KEY, "Bearer"])
    def test_others(self, toy, given):
        headers = {} if given is None else {"Authorization": given}
        for path in ("/seen", "/metrics", "/v1/models", "/nothing"):
            refused = httpx.get(f"http://127.0.0.1:{toy.port}{path}", headers=headers, trust_env=False)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")

    def test_it_is_taken_from_the_environment(self, toy):
        assert KEY not in json.dumps(toy.http.get("/path").json()["env"])


class TestRequests:
    @pytest.fixture
    def toy(self, shared):
        return shared

    def test_garbage_is_collected_again(self, toy):
        assert toy.http.get("/path").json()["collects"]

    def test_it_runs_on_uvloop_and_httptools(self, toy):
        told = toy.http.get("/path").json()
        assert told["loop"] == "uvloop"
        protocols = {name.rpartition(".")[2] for name in told["modules"] if name.startswith("uvicorn.protocols.http.")}
        assert "httptools_impl" in protocols
        assert "h11_impl" not in protocols

    def test_answer_and_stream(self, toy):
        assert toy.http.post("/count", json={"number": 2}).json() == [{"step": 0}, {"step": 1}]
        streamed = toy.http.post("/count", json={"number": 2, "stream": True})
        assert streamed.text == 'data: {"step":0}\n\ndata: {"step":1}\n\ndata: [DONE]\n\n'
        assert streamed.headers["content-type"].startswith("text/event-stream")

    def test_nothing_to_stream(self, toy):
        assert toy.http.post("/count", json={"number": 0, "stream": True}).text == "data: [DONE]\n\n"

    def test_an_error_before_the_first_item_is_an_answer(self, toy):
        for stream in (False, True):
            failed = toy.http.post("/count", json={"fail_at": 0, "stream": stream})
            assert (failed.status_code, failed.json()["error"]["code"]) == (400, "on_purpose")

    def test_an_error_later_is_in_the_stream_and_ends_it(self, toy):
        text = toy.http.post("/count", json={"fail_at": 1, "stream": True}).text
        assert '"code": "on_purpose"' in text
        assert "[DONE]" not in text

    @pytest.mark.parametrize(
        ("body", "clue"),
        [
            (b"", "not JSON"),
            (b"[1]", "must be a JSON object"),
            (b'{"number": "many"}', "number is 'many', but must be a number"),
            (b'{"number": true}', "number is True, but must be a number"),
            (b'{"number": 1.5}', "a whole number"),
            (b'{"number": 5000}', "from 0 to 1000"),
            (b'{"fail_at": -2}', "fail_at is -2, but must be at least -1"),
            (b'{"delay": NaN}', "a number"),
            (b'{"delay": -Infinity}', "a number"),
            (b'{"number": 1%s}' % (b"0" * 400), "a number"),
            (b'{"stream": "yes"}', "true or false"),
            (b"[" * 100000, "not JSON"),
        ],
    )
    def test_bad_bodies(self, toy, body, clue):
        refused = toy.http.post("/count", content=body)
        assert refused.status_code == 400, refused.text
        assert clue in refused.json()["error"]["message"]

    def test_a_bug_is_answered_and_the_connection_serves_on(self, toy):
        def ask(**body: object) -> tuple[int, object]:
            with toy.http.stream("POST", "/count", json=body) as answer:
                answer.read()
                return answer.status_code, answer.extensions["network_stream"].get_extra_info("client_addr")

        failed, then = ask(bug=True), ask()
        assert (failed[0], then[0]) == (500, 200)
        assert failed[1] == then[1]

    def test_null_is_not_there(self, toy):
        assert len(toy.http.post("/count", json={"number": None}).json()) == 3

    def test_no_such_path(self, toy):
        assert toy.http.get("/nothing").json()["error"]["code"] == "not_found"
        assert toy.http.get("/count").status_code == 405


class TestTurns:
    """So many at once, so many waiting, and no more."""

    def test_full(self, toy, tmp_path):
        answers: list[httpx.Response] = []
        gate = tmp_path / "gate"
        threads = [toy.ask(answers, number=1, gate=str(gate)) for _ in range(5)]
        wait_until(lambda: (toy.seen()["running"], toy.seen()["waiting"]) == (2, 3))
        refused = toy.http.post("/count", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        gate.touch()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 5

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_ends_the_work(self, toy, stream):
        body = {"number": 1000, "delay": 0.1, "stream": stream}
        if stream:
            with toy.http.stream("POST", "/count", json=body) as response:
                next(response.iter_raw())
        else:
            request = toy.http.build_request("POST", "/count", json=body)
            leave(toy.http, request, lambda: toy.seen()["steps"] > 0)
        wait_until(lambda: toy.seen()["cancelled"] == 1 and toy.seen()["running"] == 0)
        assert toy.seen()["steps"] < 1000

    def test_a_client_that_closes_its_half_has_left(self, toy, tmp_path):
        body = json.dumps({"gate": str(tmp_path / "never")})
        request = (
            f"POST /count HTTP/1.1\r\nHost: toy\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", toy.port), timeout=LIMIT_S) as client:
            client.sendall((request + body).encode())
            wait_until(lambda: toy.seen()["running"] == 1)
            client.shutdown(socket.SHUT_WR)
            wait_until(lambda: toy.seen()["cancelled"] == 1)

    def test_a_client_that_leaves_while_it_waits(self, toy, tmp_path):
        gate = tmp_path / "gate"
        busy = [toy.ask([], number=1, gate=str(gate)) for _ in range(2)]
        wait_until(lambda: toy.seen()["running"] == 2)
        leave(
            toy.http,
            toy.http.build_request("POST", "/count", json={"number": 7}),
            lambda: toy.seen()["waiting"] == 1,
        )
        wait_until(lambda: toy.seen()["waiting"] == 0)
        gate.touch()
        for thread in busy:
            thread.join()
        assert toy.seen()["steps"] == 2


class TestMetrics:
    def test_counts(self, toy):
        toy.http.post("/count", json={})
        toy.http.post("/count", json={"fail_at": 0})
        text = toy.http.get("/metrics").text
        assert 'llmux_worker_requests_total{path="/count",status="200"} 1.0' in text
        assert 'llmux_worker_requests_total{path="/count",status="400"} 1.0' in text
        assert "llmux_worker_running 0.0" in text


class TestBootstrap:
    """A worker sees its environment's packages and `runtimes`, not the folder that `runtimes` lies in."""

    def test_path(self, tmp_path):
        (tmp_path / "runtimes" / "sdk").mkdir(parents=True)
        (tmp_path / "secret_of_the_supervisor.py").write_text("")
        (tmp_path / "runtimes" / "sdk" / "bootstrap.py").write_text(BOOTSTRAP.read_text())
        (tmp_path / "runtimes" / "sdk" / "__init__.py").write_text("")
        (tmp_path / "runtimes" / "sdk" / "probe.py").write_text(
            "import importlib.util, runtimes.sdk, sys\n"
            "print(importlib.util.find_spec('secret_of_the_supervisor'), sys.argv, runtimes.sdk.__name__, __name__)\n"
        )
        script = tmp_path / "runtimes" / "sdk" / "bootstrap.py"
        command = [sys.executable, "-I", str(script), "runtimes.sdk.probe", "word"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
        assert done.stdout == "None ['runtimes.sdk.probe', 'word'] runtimes.sdk __main__\n", done.stderr
