"""A container engine without containers: `serve SOCKET LOG` is its daemon, everything else its client, called `docker`.

A container is a fake worker, and a child of the engine's daemon, so that killing the client leaves it running. The client of
`run` waits for it and passes SIGTERM on, as docker's does. $DOCKER_HOST says where the daemon listens. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
VALUED = {"-p", "--publish", "--name", "-v", "--volume", "-e", "--env", "--gpus"}

containers: dict[str, subprocess.Popen[bytes]] = {}


class Client(socketserver.StreamRequestHandler):
    """One command."""

    def handle(self) -> None:
        words = json.loads(self.rfile.readline())
        with Path(sys.argv[3]).open("a") as file:
            file.write(" ".join(words) + "\n")
        match words:
            case ["run", *rest]:
                self.run(rest)
            case ["stop", name]:
                self.end(name, signal.SIGTERM)
            case ["rm", "--force", name]:
                self.end(name, signal.SIGKILL)
            case _:
                self.say(exit=125, error=f"unknown command: {words}")

    def run(self, words: list[str]) -> None:
        options: dict[str, str] = {}
        while words[0].startswith("-"):
            option = words.pop(0)
            options[option] = words.pop(0) if option in VALUED else ""
        name, (host, port, _) = options["--name"], options["-p"].split(":")
        if name in containers:
            self.say(exit=125, error=f'Conflict. The container name "{name}" is already in use')
            return
        command = [sys.executable, "-I", "-S", str(FAKE_WORKER), "--host", host, "--port", port, *words[1:]]
        container = containers[name] = subprocess.Popen(command, env={}, stdout=subprocess.DEVNULL)
        threading.Thread(target=self.pass_signals_on, args=(container,), daemon=True).start()
        code = container.wait()
        containers.pop(name, None)
        self.say(exit=code & 0xFF)

    def pass_signals_on(self, container: subprocess.Popen[bytes]) -> None:
        for line in self.rfile:
            container.send_signal(int(line))

    def end(self, name: str, signum: int) -> None:
        container = containers.get(name)
        if container is None:
            self.say(exit=1, error=f"No such container: {name}")
            return
        container.send_signal(signum)
        container.wait()
        self.say(exit=0)

    def say(self, **words: object) -> None:
        with contextlib.suppress(OSError):  # the client was killed
            self.wfile.write(json.dumps(words).encode() + b"\n")


def ask(words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["DOCKER_HOST"].removeprefix("unix://"))
        connection.sendall(json.dumps(words).encode() + b"\n")
        signal.signal(signal.SIGTERM, lambda *_: connection.sendall(b"15\n"))
        answer = json.loads(connection.makefile().readline())
    print(answer.get("error", ""), file=sys.stderr)
    return int(answer["exit"])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        socketserver.ThreadingUnixStreamServer.daemon_threads = True
        with socketserver.ThreadingUnixStreamServer(sys.argv[2], Client) as server:
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                pass
            finally:
                for left in list(containers.values()):
                    left.kill()
    else:
        sys.exit(ask(sys.argv[1:]))
