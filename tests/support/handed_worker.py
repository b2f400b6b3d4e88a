"""A worker that hands each connection to the test that waits for it, byte by byte: `handed` in tests/support/wire.py.

    python -I -S handed_worker.py --port 1234 --to SOCKET

It listens, as a worker must itself, answers GET /health, and passes every other connection, with all that has come, to the
Unix socket. Where nobody listens there, the connection is closed. After SIGUSR1 it lives on, and refuses new connections.
Standard library only.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading

HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\nConnection: close\r\n\r\n" + b'{"status":"ok"}'


def handle(connection: socket.socket, to: str) -> None:
    with connection:
        if connection.recv(11, socket.MSG_PEEK | socket.MSG_WAITALL) == b"GET /health":
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            connection.sendall(HEALTHY)
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            try:
                channel.connect(to)
                socket.send_fds(channel, [b"c"], [connection.fileno()])
                channel.recv(1)  # it has it
            except OSError:
                print("nobody takes this connection", flush=True)


def main(port: int, to: str) -> None:
    with socket.create_server(("127.0.0.1", port), backlog=1024) as server:
        print(f"listening on {port}", flush=True)
        signal.signal(signal.SIGUSR1, lambda *_: server.close())
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                signal.pause()
                continue
            threading.Thread(target=handle, args=(connection, to), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[sys.argv.index("--to") + 1])
