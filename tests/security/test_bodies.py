"""What a client may send after it was refused, and beside its body: bounded, and never taken for what it is not."""

from __future__ import annotations

import json
import socket
import time

import pytest

from supervisor.server.protocol import GuardedProtocol
from tests.support import raw
from tests.support.cases import cases
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S

HOST = "Host: 127.0.0.1"
MIB = 1024 * 1024


def connect(target):
    return socket.create_connection(("127.0.0.1", target.port), timeout=LIMIT_S)


def read_all(connection):
    said = b""
    while piece := connection.recv(65536):
        said += piece
    return said


def sent_until_cut(connection, piece):
    """How much could be sent until the connection was cut."""
    sent, started = 0, time.monotonic()
    while time.monotonic() - started < 60:
        try:
            sent += connection.send(piece)
        except ConnectionError:
            return sent
    raise AssertionError(f"{sent} bytes were taken, and no end")


class TestTheRestOfARefusedBody:
    """After an early answer a client gets a moment to notice; then the connection is cut, whatever it still sends."""

    @pytest.mark.parametrize(
        ("path", "status"), [("/echo", b"413"), ("/v1/messages", b"413"), ("/nope", b"404"), ("/v1/models", b"405")]
    )
    def test_is_not_read_without_bound(self, target, path, status):
        with connect(target) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\n{HOST}\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
            assert status in connection.recv(100)
            sent = sent_until_cut(connection, bytes(65536))
        assert sent <= GuardedProtocol.linger_bytes + 32 * MIB, "what buffers hold comes on top"

    def test_a_silent_client_is_cut_too(self, target):
        with connect(target) as connection:
            connection.sendall(f"POST /echo HTTP/1.1\r\n{HOST}\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
            said = read_all(connection)
            assert said.startswith(b"HTTP/1.1 413")
            assert b"connection: close" in said.lower()

            def is_cut():
                try:
                    connection.send(b"x")
                except OSError:
                    return True
                return False

            wait_until(is_cut)

    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_client_that_sends_first_reads_the_answer(self, target, chunked):
        """Closing at once would have the kernel throw away what the client has not read."""
        body = bytes(8 * MIB)
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        with connect(target) as connection:
            connection.sendall(f"POST /echo HTTP/1.1\r\n{HOST}\r\n{framing}\r\n\r\n".encode())
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
            said = read_all(connection)
        assert said.startswith(b"HTTP/1.1 413")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"

    def test_it_is_no_further_request(self, target):
        with connect(target) as connection:
            connection.sendall(f"POST /echo HTTP/1.1\r\n{HOST}\r\nContent-Length: {2 * MIB}\r\n\r\n".encode())
            connection.sendall(f"GET /health HTTP/1.1\r\n{HOST}\r\n\r\n".encode() * 3)
            assert read_all(connection).count(b"HTTP/1.1 ") == 1

    def test_a_body_that_came_whole_keeps_the_connection(self, target):
        request = f"POST /nope HTTP/1.1\r\n{HOST}\r\nContent-Length: 4\r\n\r\nbody".encode()
        with connect(target) as connection:
            for _ in range(3):
                connection.sendall(request)
                assert connection.recv(65536).startswith(b"HTTP/1.1 404")


class TestTrailers:
    """Fields after a chunked body are no headers: not for us, and not for the worker."""

    def chunked(self, target, trailers, *, path="/echo"):
        body = b'11\r\n{"model":"plain"}\r\n0\r\n' + trailers + b"\r\n"
        return raw.request(target, f"POST {path} HTTP/1.1", HOST, "Transfer-Encoding: chunked", body=body)

    def test_are_ignored(self, target):
        told = self.chunked(
            target, b"Host: evil.example\r\nOrigin: https://evil.example\r\nAuthorization: Bearer x\r\nX-Mine: 1\r\n"
        )
        assert told.status == 200
        assert "x-mine" not in (told.header("x-echo-headers") or "").lower()

    @pytest.mark.parametrize("line", [b"a: b\r\n", b"a" * 1000, b"a: " + b"b" * 1000 + b"\r\n"])
    def test_are_bounded(self, target, line):
        with connect(target) as connection:
            connection.sendall(f"POST /echo HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            connection.sendall(b'11\r\n{"model":"plain"}\r\n0\r\n')
            sent_until_cut(connection, line * (100_000 // len(line)))

    def test_one_byte_chunks_are_a_body(self, target):
        body = b'{"model":"plain","x":"' + b"a" * 60_000 + b'"}'
        with connect(target) as connection:
            connection.sendall(f"POST /echo HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


class TestReadAnotherWay:
    """What a worker could read otherwise than we do is refused: it would find what we did not look at."""

    BODY = b'{"model":"plain"}'

    def told(self, target, *lines):
        head = ("POST /echo HTTP/1.1", HOST, f"Content-Length: {len(self.BODY)}")
        return raw.request(target, *head, *lines, body=self.BODY)

    @cases(
        "lines",
        [
            ("Content-Type: application/json; charset=utf-7",),
            ("Content-Type: application/json;CHARSET = utf-7",),
            ("Content-Type: application/json; charset=utf-7; charset=utf-8",),
            ("Content-Type: application/json; charset=utf-8; charset=utf-7",),
            ("Content-Type: application/json; charset*=utf-8''utf-7",),
            ("Content-Type: application/json", "Content-Type: multipart/form-data; boundary=X"),
            ("Content-Type: application/json", "Content-Encoding: deflate"),
        ],
    )
    def test_refused(self, target, lines):
        told = self.told(target, *lines)
        assert told.status == 400
        assert "error" in json.loads(told.body)

    @cases(
        "lines",
        [
            (),
            ("Content-Type: text/plain",),
            ("Content-Type: application/json; charset=utf-8",),
            ('Content-Type: application/json;charset="UTF-8"', "Content-Encoding: identity"),
            ("Content-Type: application/json; profile=x",),
        ],
    )
    def test_let_through(self, target, lines):
        assert self.told(target, *lines).status == 200


class TestNames:
    """A model's name is looked up, never kept at any length."""

    def test_a_long_one_is_refused(self, target):
        before = target.log_path.stat().st_size
        for told in (
            target.post("/echo", json={"model": "a" * 900_000}),
            target.post("/echo", params={"model": "b" * 5000}, json={}),
        ):
            assert told.status_code in {400, 404}
            assert len(told.content) < 2000
        assert target.events("request.finished"), "all its lines are out"
        assert target.log_path.stat().st_size - before < 10_000


class TestAddresses:
    """What stands in a request line is passed on as it is, so it must be what every parser takes for an address."""

    @cases("byte", ["\t", "\x0c", "\x0b", "\x7f", "\x01", "\x80", "\xe9"])
    @cases("address", ["/echo?a={}b", "/echo{}", "/{}echo?a=b"])
    def test_controls_are_refused(self, target, byte, address):
        body = b'{"model":"plain"}'
        lines = (f"POST {address.format(byte)} HTTP/1.1", HOST, f"Content-Length: {len(body)}")
        told = raw.request(target, *lines, body=body)
        assert told.status in {400, 404}
        assert told.status == 400 or "?" not in address
