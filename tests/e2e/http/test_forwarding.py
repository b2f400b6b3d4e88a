"""What passes between client and worker: bytes and end-to-end headers, and the news that a client left."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest

from tests.support import raw
from tests.support.daemon import fake, running, wait_until
from tests.support.held import held
from tests.support.limits import LIMIT_S

HOST = "Host: 127.0.0.1"
CHAT = "/v1/chat/completions"


def stats(daemon, name):
    """What the worker itself has seen, asked without the daemon in between."""
    port = daemon.model(name)["worker"]["port"]
    return httpx.get(f"http://127.0.0.1:{port}/stats", trust_env=False, verify=False, timeout=LIMIT_S).json()


class TestHeaders:
    """End-to-end fields survive, each as often as it was sent; those of one connection don't."""

    def test_to_the_worker(self, site):
        body = b'{"model": "plain"}'
        answer = raw.request(
            site,
            "POST /echo?a=1&b=%20x HTTP/1.1",
            HOST,
            f"Content-Length: {len(body)}",
            "Content-Type: application/json",
            "Connection: keep-alive, X-Mine",
            "X-Mine: hop",
            "Keep-Alive: timeout=5",
            "TE: trailers",
            "Trailer: X-Sum",
            "Proxy-Authorization: Basic x",
            "Upgrade: h2c",
            "X-Twice: one",
            "X-Twice: two",
            "User-Agent: me",
            body=body,
        )
        assert answer.status == 200
        received = [(name.lower(), value) for name, value in json.loads(answer.header("x-echo-headers"))]
        names = [name for name, _ in received]
        assert [value for name, value in received if name == "x-twice"] == ["one", "two"]
        assert ("user-agent", "me") in received
        hop = {
            "x-mine",
            "keep-alive",
            "te",
            "trailer",
            "proxy-authorization",
            "upgrade",
            "connection",
            "transfer-encoding",
        }
        assert not hop & set(names)
        assert 1 == names.count("host") == names.count("content-length") == names.count("x-request-id")

    def test_from_the_worker(self, site):
        own = [
            ["Set-Cookie", "a=1"],
            ["Set-Cookie", "b=2"],
            ["X-Worker", "yes"],
            ["Connection", "keep-alive, X-Hop"],
            ["X-Hop", "1"],
            ["Keep-Alive", "timeout=5"],
            ["Access-Control-Allow-Origin", "*"],
            ["X-Request-Id", "the worker's"],
            ["Openai-Processing-Ms", "99999"],
        ]
        answer = site.post("/echo", json={"model": "plain", "fake": {"headers": own}}, headers={"x-request-id": "ours"})
        assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert answer.headers["x-worker"] == "yes"
        assert not {"x-hop", "keep-alive", "access-control-allow-origin", "server"} & set(answer.headers)
        assert answer.headers.get_list("x-request-id") == ["ours"]
        assert int(answer.headers["openai-processing-ms"]) < 99999

    def test_bytes_stay_as_they_are(self, site):
        body = b' {"model":\t"plain", "n": 1.0e0, "text": "\\u00e9\xc3\xa9", "n2": 12345678901234567890} '
        assert body == site.post("/echo", content=body).content

    def test_a_chunked_body(self, site):
        pieces = (piece for piece in (b'{"model": ', b'"plain"', b"}"))
        assert site.post("/echo", content=pieces).content == b'{"model": "plain"}'

    def test_a_client_that_waits_to_be_asked(self, site):
        body = b'{"model": "plain"}'
        lines = ("POST /echo HTTP/1.1", HOST, f"Content-Length: {len(body)}", "Expect: 100-continue")
        assert raw.request(site, *lines).status == 100


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """One request at a time; and models that take for ever to load."""
    config = {
        "models": {
            "one": fake(target_inflight=1, endpoints=[CHAT, "/echo"]),
            "slow": fake("--start-delay", "60", grace_s=1),
            "slower": fake("--start-delay", "60", grace_s=1),
        },
        "limits": {"keepalive_s": 0.1, "loads_per_device": 2},
    }
    with running(tmp_path_factory.mktemp("narrow"), config) as daemon:
        yield daemon


class TestDeparture:
    """A client that leaves takes its request with it, wherever that is."""

    @pytest.mark.parametrize("model", ["plain", "fake"])
    def test_in_the_middle_of_a_stream(self, site, model):
        site.chat(model).raise_for_status()
        before = stats(site, model)["aborted"]
        body = {"model": model, "messages": [], "stream": True, "fake": {"chunks": 100_000, "chunk_delay": 0.01}}
        with site.client() as client, client.stream("POST", CHAT, json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            assert site.model(model)["in_flight"] == 1
        wait_until(lambda: stats(site, model)["aborted"] == before + 1, what="the worker's write fails")
        wait_until(lambda: site.model(model)["in_flight"] == 0)

    def test_before_the_answer(self, site):
        site.chat("plain").raise_for_status()
        with raw.pending(site, CHAT, {"model": "plain", "fake": {"delay": 600}}):
            wait_until(lambda: site.model("plain")["in_flight"] == 1)
        wait_until(lambda: site.model("plain")["in_flight"] == 0, what="long before the worker would have answered")
        wait_until(lambda: site.model("plain")["worker"]["connections"] == 0, what="its connection is closed")

    def test_in_the_queue(self, narrow):
        narrow.chat("one").raise_for_status()
        seen = stats(narrow, "one")["requests"]
        with raw.pending(narrow, CHAT, {"model": "one", "fake": {"delay": 600}}):
            wait_until(lambda: stats(narrow, "one")["requests"] == seen + 1)
            for fields in ({}, {"stream": True}):
                with raw.pending(narrow, CHAT, {"model": "one", **fields}):
                    wait_until(lambda: narrow.model("one")["queued"] == 1)
                wait_until(lambda: narrow.model("one")["queued"] == 0)
            assert narrow.model("one")["in_flight"] == 1, "the first is still being answered"
        wait_until(lambda: narrow.model("one")["in_flight"] == 0)
        narrow.chat("one").raise_for_status()
        assert seen + 2 == stats(narrow, "one")["requests"], "those that left never reached it"

    def test_a_load_for_nobody_is_cancelled(self, narrow):
        with raw.pending(narrow, CHAT, {"model": "slow"}):
            pid = wait_until(lambda: (narrow.model("slow")["worker"] or {}).get("pid"))
            assert narrow.model("slow")["state"] == "starting"
        narrow.wait_state("slow", "stopped")
        assert pid not in narrow.workers()
        assert [decision for decision in narrow.decisions("slow") if "crash" in decision["kind"]] == []

    def test_a_load_goes_on_while_anybody_waits(self, narrow):
        with raw.pending(narrow, CHAT, {"model": "slower"}) as last:
            narrow.wait_state("slower", "starting")
            with raw.pending(narrow, CHAT, {"model": "slower", "stream": True}):
                wait_until(lambda: narrow.model("slower")["queued"] == 2)
            wait_until(lambda: narrow.model("slower")["queued"] == 1)
            assert narrow.model("slower")["state"] == "starting"
            last.close()
            narrow.wait_state("slower", "stopped")

    def test_the_log_tells(self, narrow):
        wait_until(
            lambda: [line for line in narrow.events("request.finished") if line["error"] == "client_gone"],
            what="a canonical line for a client that left",
        )


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """Models that load until the file of their name is there."""
    folder = tmp_path_factory.mktemp("patient")
    config = {
        "models": {
            "late": held(folder / "late"),
            "failing": held(folder / "failing", "--exit-code", "1", "--log-text", "no such file: w.bin"),
            "refusing": held(folder / "refusing", "--status", "429"),
            "dying": held(folder / "dying", "--die-after", "2"),
            "strange": fake("--start-delay", "0.5", endpoints=["/echo"]),
        },
        "limits": {"keepalive_s": 0.1, "loads_per_device": 4, "crash_limit": 1},
    }
    with running(folder, config) as daemon:
        yield daemon


class TestWaiting:
    """A stream whose model is loading is kept alive by comments; what fails after the first is told within it, once."""

    @staticmethod
    def events(text: str) -> list[dict]:
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @staticmethod
    @contextlib.contextmanager
    def answered(daemon, model):
        """An answer to be streamed, and its pieces; the model comes up once two comments are there."""

        def pieces():
            seen = ""
            for piece in answer.iter_text():
                seen += piece
                if seen.count(": keepalive") >= 2:
                    (daemon.folder / model).touch()
                yield piece

        body = {"model": model, "messages": [], "stream": True}
        with daemon.client() as client, client.stream("POST", CHAT, json=body) as answer:
            yield answer, pieces()

    def test_comments_then_the_answer(self, patient):
        with self.answered(patient, "late") as (answer, pieces):
            text = "".join(pieces)
        assert answer.status_code == 200
        assert text.startswith(": keepalive\n\n: keepalive\n\n")
        head, _, rest = text.rpartition(": keepalive\n\n")
        assert "data:" not in head
        assert rest.endswith("data: [DONE]\n\n")
        assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        assert int(answer.headers["openai-processing-ms"]) >= 100
        assert answer.headers["x-request-id"].startswith("req_")

    def test_no_comments_where_the_stream_may_have_another_form(self, patient):
        body = {"model": "strange", "stream": True}
        told = patient.post("/echo", json=body)
        assert (told.status_code, told.headers["content-type"], told.json()) == (200, "application/json", body)
        assert int(told.headers["x-queue-wait-ms"]) >= 100

    def test_no_comments_once_it_is_there(self, patient):
        (patient.folder / "late").touch()
        patient.chat("late").raise_for_status()
        assert "keepalive" not in patient.chat("late", stream=True, fake={"delay": 0.3}).text

    def test_a_failure_after_comments(self, patient):
        with self.answered(patient, "failing") as (answer, pieces):
            text = "".join(pieces)
        assert answer.status_code == 200
        assert ": keepalive" in text
        (event,) = self.events(text)
        assert event["error"]["code"] == "load_failed" or event["error"]["code"] == "model_failed"
        assert "exited with code 1" in event["error"]["message"]
        assert text.endswith("\n\n")

    def test_the_same_failure_before_any(self, patient):
        (patient.folder / "failing").touch()
        assert patient.chat("failing").status_code == 503
        patient.wait_state("failing", "failed")
        told = patient.chat("failing", stream=True)
        assert told.status_code == 503
        assert "exited with code 1" in told.json()["error"]["message"]

    def test_a_refusal_of_the_worker_after_comments(self, patient):
        with self.answered(patient, "refusing") as (answer, pieces):
            text = "".join(pieces)
        assert answer.status_code == 200
        (event,) = self.events(text)
        assert event["error"]["message"] == "as told"

    def test_a_death_after_comments(self, patient):
        with self.answered(patient, "dying") as (_, pieces):
            text = "".join(pieces)
        events = self.events(text)
        assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["Hello", " from"]
        assert events[-1]["error"]["code"] == "upstream_broken"
        assert "[DONE]" not in text
