"""Two models on one device, and a client that holds the one up on which the other waits: by reading slowly, or honestly."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest

from tests.support.clients import Call, Stream, code
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.shell import Shell

URGENT = 300
ENDLESS = {"chunks": 2_000_000}  # more than all buffers take
PATIENCE_S = 300.0  # of requests that wait; the slowest machine has cut the slow client's by then


class Hasty(Daemon):
    """Looks at clients every 3 s."""

    program = ("-m", "tests.support.faulty_daemon", "hasty")


def config(priority: int = 100, limits=None, **slow):
    return {
        "models": {"slow": fake(vram_mib=250, **slow), "other": fake(vram_mib=250, priority=priority)},
        "devices": [{"kind": "host", "budget_mib": 400, "margin_mib": 0}],
        "limits": {"min_residency_s": 0, "queue_wait_s": PATIENCE_S} | (limits or {}),
    }


@contextlib.contextmanager
def hasty(folder, settings):
    daemon = Hasty(folder, settings)
    try:
        yield daemon.start()
    finally:
        daemon.stop()


class Reader(threading.Thread):
    """A streaming chat whose client reads `bps` bytes a second until `hurry` is set, then all the rest."""

    def __init__(self, daemon: Daemon, model: str, bps: int, **fake: object) -> None:
        super().__init__(daemon=True)
        self.received = bytearray()
        self.hurry = threading.Event()
        self._bps = bps
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(LIMIT_S)
        self._socket.connect(("127.0.0.1", daemon.port))
        body = json.dumps({"model": model, "messages": [], "stream": True, "fake": fake}).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        )
        self._socket.sendall(head % len(body) + body)
        self.start()

    def run(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            while piece := self._socket.recv(65536 if self.hurry.is_set() else self._bps // 10):
                self.received += piece
                self.hurry.wait(0.1)

    def rest(self) -> bytes:
        """Read everything; the end of it. What has come then is read at once: only the buffer of a slow reader is small.

        A buffer that stays small is full again and again, the kernel drops what comes, and its timers decide how long the
        rest takes: on a busy machine, minutes.
        """
        with contextlib.suppress(OSError):  # it is over
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024 * 1024)
        self.hurry.set()
        self.join(LIMIT_S)
        assert not self.is_alive(), f"the connection goes on, after {len(self.received)} bytes"
        return bytes(self.received[-2000:])


def cut(daemon: Daemon, model: str = "slow") -> list[str]:
    return [decision["reason"] for decision in daemon.decisions(model) if " cut a" in decision["reason"]]


def drained(daemon: Daemon) -> None:
    wait_until(lambda: daemon.model("slow")["state"] == "draining", what="the other one waits for it")


def assert_told(end: bytes) -> None:
    """The stream ends with the error, and does not look complete."""
    last = end.rpartition(b"data: ")[2]
    assert b'"code":"model_unloaded"' in last
    assert b"The model was stopped before the answer was complete: its memory is needed for other." in last
    assert b"[DONE]" not in end


def test_a_dictation_during_a_long_answer(tmp_path, measured):
    """Both are whole, whatever class the dictation says, and `llmux why` tells what it waited for."""
    models = {"gpt-oss-20b": fake(vram_mib=250), "cohere-transcribe": fake(vram_mib=250, type="asr")}
    with running(tmp_path, config() | {"models": models}) as daemon:
        answer = Stream(daemon, "gpt-oss-20b", fake={"chunks": 100, "chunk_delay": 0.1})
        wait_until(lambda: answer.chunks)
        with daemon.client() as client:
            told = client.post(
                "/v1/audio/transcriptions",
                data={"model": "cohere-transcribe"},
                files={"file": ("words.wav", b"words")},
                headers={"X-Priority": "high"},
            )
        assert told.status_code == 200
        assert b"words" in told.content
        assert answer.result().ended_cleanly
        assert answer.chunks == 100
        assert not cut(daemon, "gpt-oss-20b")
        shell = Shell(tmp_path, daemon.url)
        why = wait_until(lambda: shell("why", "--request", told.headers["x-request-id"]).stdout)
        assert "It waited for gpt-oss-20b to end its requests." in why
        why = shell("why", "gpt-oss-20b").stdout
        assert "drains for cohere-transcribe; 1 request in flight, never cut while clients read" in why
        assert "makes room for cohere-transcribe" in why
        measured(dictation_waited_s=told.elapsed.total_seconds())


def test_a_client_that_has_stopped_reading(tmp_path, measured):
    """Between equals a slow client is noticed at the first look."""
    with hasty(tmp_path, config()) as daemon:
        reader = Reader(daemon, "slow", 600, **ENDLESS)
        wait_until(lambda: reader.received)
        other = Call(daemon, "other").result()
        assert other.status == 200
        assert cut(daemon) == ["drains for other; 1 request cut as the clients have stopped reading"]
        assert_told(reader.rest())
        measured(look_every_s=3, other_answered_s=other.elapsed_s)


def test_honest_long_answers_survive(tmp_path, measured):
    """One that trickles for some looks, and one whose client takes all that it can while there is always more for it."""
    with hasty(tmp_path, config()) as daemon:
        reader = Reader(daemon, "slow", 500_000, chunks=60_000)
        trickle = Stream(daemon, "slow", fake={"chunks": 100, "chunk_delay": 0.1})
        wait_until(lambda: reader.received and trickle.chunks)
        other = Call(daemon, "other")
        drained(daemon)
        assert trickle.result().ended_cleanly
        assert reader.rest().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert other.result().status == 200
        assert not cut(daemon)
        measured(look_every_s=3, answer_lasted_s=other.elapsed_s)


@pytest.mark.parametrize("where", ["limits", "model"])
def test_configured(tmp_path, where):
    """`drain_s` cuts honest answers as well: streams are told in-band, others get an error."""
    drain = {"drain_s": 0.5}
    settings = config(limits=drain) if where == "limits" else config(limits={"drain_s": "never"}, **drain)
    with running(tmp_path, settings) as daemon:
        stream = Stream(daemon, "slow", fake={"chunks": 4000, "chunk_delay": 0.1})
        call = Call(daemon, "slow", fake={"delay": 600})
        wait_until(lambda: stream.chunks and daemon.model("slow")["in_flight"] == 2)
        assert Call(daemon, "other").result().status == 200
        assert call.result().status == 503
        assert code(call.response) == "model_unloaded"
        assert call.response.headers["retry-after"] == "5"
        assert_told(stream.result().text.encode())


def test_never(tmp_path):
    """A person who wants every answer to its end gets that."""
    with running(tmp_path, config(URGENT, limits={"drain_s": 0.1}, drain_s="never")) as daemon:
        stream = Stream(daemon, "slow", fake={"chunks": 70, "chunk_delay": 0.1})
        wait_until(lambda: stream.chunks)
        other = Call(daemon, "other")
        drained(daemon)
        assert daemon.model("slow")["eta_s"] is None
        assert stream.result().ended_cleanly
        assert other.result().status == 200
        assert not cut(daemon)
