"""Workers that are healthy but answer wrongly or never."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.clients import Call, Stream, code, stats
from tests.support.daemon import fake, running

WRONG = """
import socket, sys, threading
ANSWERS = {
    b"garbage": b"this is not HTTP at all\\r\\n\\r\\n",
    b"nothing": b"",
    b"half-a-head": b"HTTP/1.1 200 OK\\r\\nContent-Type: appl",
    b"truncated": b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: 1000\\r\\n\\r\\n{",
    b"plain-500": b"HTTP/1.1 500 Oops\\r\\nContent-Type: text/plain\\r\\nContent-Length: 12\\r\\n\\r\\nI am broken.",
    b"not-sse": b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n5\\r\\ndata:",
}
def answer(connection):
    said = b""
    while b"\\r\\n\\r\\n" not in said or (said.startswith(b"POST") and b"}" not in said):
        part = connection.recv(65536)
        if not part:
            return
        said += part
    if said.startswith(b"GET"):
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    else:
        print("asked", flush=True)
        connection.sendall(next(text for mode, text in ANSWERS.items() if b'"' + mode + b'"' in said))
    connection.close()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    threading.Thread(target=answer, args=(server.accept()[0],)).start()
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upstreams")
    program = folder / "wrong.py"
    program.write_text(WRONG)
    wrong = {"runtime": "command", "cmd": [sys.executable, "-I", str(program), "${port}"], "vram_mib": 50}
    models = {"wrong": wrong, "hanging": fake("--hang"), "liar": fake("--lie")}
    limits = {"first_byte_s": 5, "stream_idle_s": 5}
    with running(folder, {"models": models, "limits": limits}) as daemon:
        yield daemon


class Test14NeverAnswers:
    """A worker that accepts and stays silent costs its deadline, and no more."""

    def test_never_answers(self, daemon, measured):
        """Connected and silent: 504 at `first_byte_s`, also for a stream; the model goes on serving others."""
        call, stream = Call(daemon, "hanging"), Stream(daemon, "hanging")
        assert (call.result().status, code(call.response)) == (504, "upstream_timeout")
        assert stream.result().status == 504
        assert call.elapsed_s < 30
        assert stats(daemon, "hanging")["requests"] == 2, "each was sent once"
        assert daemon.model("hanging")["in_flight"] == 0
        measured(first_byte_s=5, answered_504_after_s=call.elapsed_s)

    def test_silent_in_the_middle(self, daemon):
        """A stream that falls silent for `stream_idle_s` ends with an in-band error."""
        assert daemon.chat("liar").status_code == 500
        stream = Stream(daemon, "liar", fake={"lie": False, "chunk_delay": 60}).result()
        assert stream.chunks == 1
        assert not stream.ended_cleanly
        assert '"upstream_timeout"' in stream.text


class Test16WrongReplies:
    """What is no answer becomes an error in the dialect's shape, and never an answer that seems whole."""

    @pytest.mark.parametrize("mode", ["garbage", "nothing", "half-a-head"])
    def test_no_answer_of_any_sense(self, daemon, mode):
        """What is not an HTTP answer becomes 502 in our envelope, and is asked for once."""
        before = asked(daemon)
        answer = daemon.chat("wrong", text=mode)
        assert (answer.status_code, code(answer)) == (502, "upstream_error")
        assert asked(daemon) == before + 1

    def test_error_in_another_shape(self, daemon):
        """A worker's plain-text error reaches the client in OpenAI's shape."""
        answer = daemon.chat("wrong", text="plain-500")
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "I am broken.")

    def test_truncated(self, daemon):
        """An answer that breaks off never ends cleanly."""
        before = asked(daemon)
        call = Call(daemon, "wrong", text="truncated").result()
        assert call.response is None
        assert "incomplete" in str(call.error) or "without sending complete" in str(call.error)
        assert asked(daemon) == before + 1

    def test_a_truncated_stream(self, daemon):
        """It ends with the error, so that clients show that."""
        before = asked(daemon)
        stream = Stream(daemon, "wrong", text="not-sse").result()
        assert (stream.error, stream.ended_cleanly) == (None, False)
        assert '"upstream_broken"' in stream.text.rpartition("data: ")[2]
        assert asked(daemon) == before + 1

    def test_healthy_liar(self, daemon):
        """A worker that only pretends to be healthy: its errors are passed on, it is not restarted for them."""
        answers = [daemon.chat("liar") for _ in range(5)]
        assert {answer.status_code for answer in answers} == {500}
        assert {answer.json()["error"]["message"] for answer in answers} == {"I only pretend to be healthy"}
        assert daemon.model("liar")["generation"] == 1


def asked(daemon) -> int:
    view = daemon.model("wrong")["worker"]
    return Path(view["log"]).read_text().count("asked") if view else 0
