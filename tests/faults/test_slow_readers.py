"""Clients that ask for long answers and don't read them."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

import psutil

from tests.support.clients import stats, times
from tests.support.daemon import Daemon, fake, running, wait_until

MIB = 1 << 20


def unread(daemon: Daemon) -> socket.socket:
    """A client that asks for 64 MiB and reads the head only."""
    body = json.dumps({"model": "m", "messages": [], "stream": True, "fake": {"chunks": 1024, "chunk_bytes": 1 << 16}})
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", daemon.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{daemon.port}\r\nContent-Type: application/json\r\n"
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
