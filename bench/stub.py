"""A worker that costs next to nothing: small JSON, paced event streams, silence.

The header `x-bench` selects the answer. Without it: one small JSON answer in the format of the requested API. `stream CHUNKS
INTERVAL_MS`: events with the clock at their writing, the first one at a random time within the interval, or at once with
`now`. `silent`: no answer. When a silent request begins, and when the connection of an unfinished request is lost, the stub
sends the clock as a datagram to `--report`, to measure the time from the client's disconnect to the worker's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import time

import httptools
import uvloop

ANSWER = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":"stub","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"Hello from a stub."},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":5,'
    b'"total_tokens":14}}'
)
MESSAGE = (
    b'{"id":"msg_0","type":"message","role":"assistant","model":"stub","content":[{"type":"text","text":"Hello from a stub."}],'
    b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":9,"output_tokens":5}}'
)
RESPONSE = (
    b'{"id":"resp_0","object":"response","created_at":0,"status":"completed","model":"stub","output":[{"type":"message","id":'
    b'"msg_0","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello from a stub.","annotations":'
    b'[]}]}],"usage":{"input_tokens":9,"output_tokens":5,"total_tokens":14}}'
)


def _json_response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


JSON = _json_response(ANSWER)
OTHERS = {b"/v1/messages": _json_response(MESSAGE), b"/v1/responses": _json_response(RESPONSE)}
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"stub","t":%019d,"choices":[{"index":0,'
    b'"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
END = b"0\r\n\r\n"


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self, report: tuple[socket.socket, int] | None) -> None:
        self._report = report
        self._parser = httptools.HttpRequestParser(self)
        self._order: list[bytes] = []
        self._path = b""
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a TCP connection has one
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._busy:
            self._send_report()

    def _send_report(self) -> None:
        if self._report is not None:
            sock, port = self._report
            sock.sendto(b"%d" % time.monotonic_ns(), ("127.0.0.1", port))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-bench":
            self._order = value.split()

    def on_message_complete(self) -> None:
        order, self._order = self._order, []
        if not order:
            self._transport.write(OTHERS.get(self._path, JSON))
            return
        self._busy = True
        if order[0] == b"stream":
            self._transport.write(SSE)
            interval_s = int(order[2]) / 1000
            loop = asyncio.get_running_loop()
            begins = (
                0.0 if order[-1] == b"now" else random.random()
            )  # streams start at different times, as real ones do
            first_at = loop.time() + begins * interval_s
            self._timer = loop.call_at(first_at, self._send_event, loop, int(order[1]), interval_s, first_at)
        else:
            self._send_report()

    def _send_event(self, loop: asyncio.AbstractEventLoop, left: int, interval_s: float, due: float) -> None:
        if left == 0:
            self._busy = False
            self._transport.write(END)
            return
        event = EVENT % time.monotonic_ns()
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        self._timer = loop.call_at(due + interval_s, self._send_event, loop, left - 1, interval_s, due + interval_s)


async def _serve(port: int, report_port: int | None) -> None:
    report = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM), report_port) if report_port else None
    server = await asyncio.get_running_loop().create_server(lambda: Stub(report), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """`python -m bench.stub --port P [--core N] [--report UDP_PORT]`."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--core", type=int)
    flags.add_argument("--report", type=int)
    given = flags.parse_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    uvloop.run(_serve(given.port, given.report))


if __name__ == "__main__":
    main()
