"""Clients that ask for long answers and don't read them."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

import psutil

from tests.support.clients import stats
from tests.support.counts import times
from tests.support.daemon import Daemon, fake, running, wait_until

MIB = 1 << 20


def unread(daemon: Daemon) -> socket.socket:
    """A client that asks for 64 MiB and reads the head only."""
    body = json.dumps({"model": "m", "messages": [], "stream": True, "fake": {"chunks": 1024, "chunk_bytes": 1 << 16}})
    return head_only(daemon, "POST /v1/chat/completions", body)


def head_only(daemon: Daemon, asked: str, body: str = "") -> socket.socket:
    """A client that reads the status of an answer only."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", daemon.port))
    head = f"{asked} HTTP/1.1\r\nHost: 127.0.0.1:{daemon.port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


class Test27SlowReader:
    """A client that doesn't read costs at most 1 MiB, and holds nobody else up."""

    def test_memory_is_bounded(self, tmp_path, measured):
        count = times(20, 200)
        with running(tmp_path, {"models": {"m": fake()}}, by_exec=True) as daemon, ExitStack() as clients:
            process = psutil.Process(daemon.process.pid)
            assert daemon.chat("m").status_code == 200
            assert daemon.chat("m", stream=True, fake={"chunks": 20, "chunk_bytes": 1 << 16}).status_code == 200
            before = process.memory_info().rss
            for _ in range(count):
                clients.enter_context(unread(daemon))
            worker = psutil.Process(daemon.model("m")["worker"]["pid"])
            last = -1.0
            while last != (last := worker.cpu_times().user):  # until it can send no more
                time.sleep(1.0)
            growth_mib = (process.memory_info().rss - before) / MIB / count
            assert stats(daemon, "m")["active"] == count
            assert daemon.chat("m").status_code == 200
            assert growth_mib <= 1.0
            clients.close()
            wait_until(lambda: stats(daemon, "m")["active"] == 0)
            measured(streams=count, growth_each_mib=growth_mib)

    def test_memory_is_bounded_for_what_is_kept(self, tmp_path):
        """However long the conversation and the answer are, and from the first moment."""
        count, size = times(8, 40), 16 * MIB
        with running(tmp_path, {"models": {"m": fake()}}, by_exec=True) as daemon, ExitStack() as clients:
            process = psutil.Process(daemon.process.pid)
            body = {"model": "m", "input": "x" * size, "background": True, "stream": True}
            events = daemon.post("/v1/responses", json=body).text
            name = json.loads(events.partition("data: ")[2].partition("\n")[0])["response"]["id"]
            path = f"/v1/responses/{name}"
            paths = [path, f"{path}/input_items", f"{path}?stream=true"]
            for each in paths:
                assert daemon.get(each).status_code == 200
            before = process.memory_info().rss
            for number in range(count):
                clients.enter_context(head_only(daemon, f"GET {paths[number % 3]}"))
            assert len(daemon.get(paths[1]).content) > size
            assert (process.memory_info().rss - before) / MIB / count <= 1.0
            assert daemon.chat("m").status_code == 200
