"""A worker without a model: a real process with switches for everything a real one can do wrong. Standard library only.

Serves GET /health, /stats, /env, /files/… and a WebSocket at /ws, POST /v1/chat/completions (JSON, with what was `received` in it, and SSE),
/v1/completions, /v1/embeddings, /v1/audio/transcriptions, /v1/images/generations and /echo; the last three send back the
body as it came, the headers it came with in X-Echo-Headers, and the response headers asked for by
`{"fake": {"headers": [[name, value], …]}}`. With `--media` it speaks, too, and sounds, pictures and vectors are real (fake_media.py).
Every switch is a command-line flag; those about one answer can also be given per request as a JSON object `"fake"` in
the body, e.g. `{"fake": {"die_after": 2}}`. Only so: `message`, a whole chat's, and `deltas`, those of a streamed one (an
`error` among them is sent as one), both with `finish`; `texts`, the pieces of a completion, which has what was `received`
as well. Run it with `python -I -S fake_worker.py --port 1234 …`.

The usual suspects:

- slow start: `--start-delay 2` (nothing listens until then), `--warmup 2` (listens, but /health is 503)
- `--ignore-term`; `--term-delay 3` (exits that long after SIGTERM); `--outlive-term FILE` (its first thread ends then, the rest
  lives until the file is there)
- trees: `--fork` (a child in our group), `--daemonize` (a double-forked grandchild in a session of its own, which
  ignores SIGTERM and keeps our stdout open), `--respawn` (that grandchild forks away from whoever looks at it);
  `--leader-exits-after 1` leaves them behind; `--thread-outlives` ends the main thread only (state Z, not dead)
- `--exit-code 1 --log-text "CUDA error: out of memory"` (`\\n` separates lines) or `--exit-signal 9`: before ready;
  `--exit-after 3`: that long after ready, with code 0 or `--exit-code`; `--log-env` prints the environment as JSON
- `--die-after 2`: SIGKILL itself after two SSE chunks; `--break-after 2`: close that connection alone; `--end-after 2`: end as if
  nothing were missing;
  `--hang`: accept requests but never answer them;
  `--hang-up`: close the connection instead; `--hang-while FILE`: answer once that file is gone
- `--one-at-a-time`: another request waits; `--delay 2` before the head of each answer; `--status 500` of each answer of a model
- streams: `--chunks 9` of content, `--chunk-bytes` each instead of words, `--chunk-delay 0.1` after each,
  `--chunk-delay-without-gpu` where it sees none; `--goes-on-until FILE`: until it is there; `--end-delay 1` between the last
  event and the end
- `--bench`: as `llmux bench` asks: `max_tokens` chunks, of two tokens each, and their count at the end; speech of unknown
  length, as it is made; ranks
- `--lie`: /health is fine, everything else is 500; `--mute`: /health never answers; `--mute-while PATH`: while it is there
- `--flood`: writes without end; `--take-mib 100` of memory; `--grow-mib 5` a second
- `--reuseport`: share the port; `--no-listen`: never open one; `--key-env NAME`: requests must carry the variable's value

`--ids-to FILE` appends the id of each request to a file, so that what a killed worker has seen is known as well; `--saw-to FILE` a line
of JSON with its head and body. `--started FILE` is there once it has been started.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time

if __name__ == "__main__":  # isolated: it finds nothing beside it
    sys.path.append(os.path.abspath(f"{__file__}/../../.."))
from tests.support.fake_http import Handler

MIB = 1024 * 1024
MEDIA = ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images/generations", "/v1/embeddings")
WORDS = ("Hello", " from", " a", " fake", " worker")


def parse(argv: list[str]) -> argparse.Namespace:
    flags = argparse.ArgumentParser()
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=0)
    flags.add_argument("--name", default="fake")
    flags.add_argument("--log-text", default="")
    flags.add_argument("--status", type=int, default=200)
    flags.add_argument("--chunks", type=int, default=len(WORDS))
    for name in ("fork", "daemonize"):
        flags.add_argument(f"--{name}", type=int, nargs="?", const=1, default=0)
    for name in ("chunk-bytes", "take-mib", "grow-mib"):
        flags.add_argument(f"--{name}", type=int, default=0)
    for name in ("die-after", "break-after", "end-after"):
        flags.add_argument(f"--{name}", type=int, default=-1)
    for name in ("exit-code", "exit-signal"):
        flags.add_argument(f"--{name}", type=int)
    for name in ("start-delay", "warmup", "term-delay", "delay", "chunk-delay", "end-delay"):
        flags.add_argument(f"--{name}", type=float, default=0.0)
    for name in ("leader-exits-after", "thread-outlives", "exit-after", "chunk-delay-without-gpu"):
        flags.add_argument(f"--{name}", type=float)
    for name in ("outlive-term", "hang-while", "mute-while", "goes-on-until", "ids-to", "saw-to", "started", "key-env"):
        flags.add_argument(f"--{name}")
    for name in ("ignore-term", "respawn", "log-env", "hang", "hang-up", "one-at-a-time", "lie", "mute", "flood"):
        flags.add_argument(f"--{name}", action="store_true")
    for name in ("reuseport", "no-listen", "media", "bench"):
        flags.add_argument(f"--{name}", action="store_true")
    flags.set_defaults(headers=[], message=None, deltas=None, texts=None, finish="stop")
    return flags.parse_args(argv)


class Stats:
    """What this process has seen, for tests that count."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turn = threading.Lock()
        self.requests = 0
        self.active = 0
        self.peak = 0
        self.aborted = 0
        self.ids: list[str] = []
        self.last: object = None  # the JSON that came last

    def begin(self, request_id: str | None) -> None:
        with self.lock:
            self.requests += 1
            self.active += 1
            self.peak = max(self.peak, self.active)
            if request_id:
                self.ids.append(request_id)

    def end(self, *, aborted: bool) -> None:
        with self.lock:
            self.active -= 1
            self.aborted += aborted

    def as_json(self) -> dict[str, object]:
        with self.lock:
            return {
                "pid": os.getpid(),
                "requests": self.requests,
                "active": self.active,
                "peak": self.peak,
                "aborted": self.aborted,
                "ids": list(self.ids),
                "last": self.last,
            }


class Answer(Handler):
    options: argparse.Namespace
    stats: Stats
    ready_at: float

    def send_response(self, status: int) -> None:
        print(f'request: "{self.requestline}" {status} -', flush=True)
        super().send_response(status)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            while self.options.mute:
                time.sleep(3600)
            while self.options.mute_while and os.path.exists(self.options.mute_while):
                time.sleep(0.05)
            if time.monotonic() < self.ready_at:
                self.send_json(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
            else:
                self.send_json(200, {"status": "ok"})
        elif path == "/ws" and self.headers.get("Upgrade") == "websocket":
            self.echo_frames()
        elif path.startswith("/files/"):
            self.noted(b"")
            self.send_json(200, {"path": self.path, "model": self.options.name})
        elif path == "/stats":
            self.send_json(200, self.stats.as_json())
        elif path == "/env":
            self.send_json(200, dict(os.environ))
        elif path == "/v1/models":
            self.send_json(200, {"object": "list", "data": [{"id": self.options.name, "object": "model"}]})
        else:
            self.send_json(404, {"error": {"message": "no such path", "type": "invalid_request_error"}})

    def echo_frames(self) -> None:
        """A WebSocket that sends back what it gets, and says goodbye after a close frame or the text `end`; `die` kills it."""
        import hashlib

        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        if chosen := self.headers.get("Sec-WebSocket-Protocol"):
            self.send_header("Sec-WebSocket-Protocol", chosen.split(",")[0].strip())
        self.end_headers()
        self.close_connection = True
        while head := self.rfile.read(2):
            size = head[1] & 127
            size = int.from_bytes(self.rfile.read(2)) if size == 126 else size
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(size)))
            if data == b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            if data == b"end":
                head, data = b"\x88\x00", (4001).to_bytes(2) + b"as told"
            length = len(data).to_bytes(1) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2)
            self.wfile.write(head[:1] + length + data)
            if head[0] == 0x88:
                return

    def noted(self, body: bytes) -> bytes:
        """For the test, where it wants to look."""
        if self.options.saw_to:
            head = "\r\n".join([self.requestline, *(f"{name}: {value}" for name, value in self.headers.items())])
            with open(self.options.saw_to, "ab", buffering=0) as file:
                file.write(json.dumps([head, body.decode("latin-1")]).encode() + b"\n")
        return body

    def do_POST(self) -> None:
        request_id = self.headers.get("X-Request-Id")
        self.stats.begin(request_id)
        if self.options.ids_to:
            with open(self.options.ids_to, "ab", buffering=0) as ids:
                ids.write(f"{request_id}\n".encode())
        aborted = True
        try:
            with self.stats.turn if self.options.one_at_a_time else contextlib.nullcontext():
                self.answer(self.noted(self.body()))
            aborted = False
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.stats.end(aborted=aborted)

    def answer(self, raw: bytes) -> None:
        path = self.path.partition("?")[0]
        try:
            request = json.loads(raw)
        except ValueError:
            request = {}
        if not isinstance(request, dict):
            request = {}
        self.stats.last = request
        options = argparse.Namespace(**{**vars(self.options), **request.get("fake", {})})
        if options.key_env and self.headers.get("Authorization") != f"Bearer {os.environ[options.key_env]}":
            self.send_json(401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})
            return
        while options.hang:
            raw, request = b"", {}  # for nobody: they would be kept for ever
            time.sleep(3600)
        while options.hang_while and os.path.exists(options.hang_while):
            time.sleep(0.02)
        if options.hang_up:
            raise ConnectionResetError
        if options.lie:
            self.send_json(500, {"error": {"message": "I only pretend to be healthy", "type": "server_error"}})
            return
        time.sleep(options.delay)
        if options.status != 200:
            self.send_json(options.status, {"error": {"message": "as told", "type": "server_error"}})
        elif options.media and path in MEDIA:
            from tests.support import fake_media

            kind, body = fake_media.answer(path, raw)
            self.send(200, body, kind)
        elif options.bench and path == "/v1/audio/speech":
            self.speak(options)
        elif options.bench and path == "/v1/rerank":
            ranks = [{"index": i, "relevance_score": 0.5} for i in range(len(request["documents"]))]
            self.send_json(200, {"results": ranks})
        elif path in ("/echo", "/v1/audio/transcriptions", "/v1/images/generations"):
            self.send_response(200)
            self.send_header("Content-Type", self.headers.get("Content-Type") or "application/octet-stream")
            self.send_header("X-Echo-Headers", json.dumps(self.headers.items()))
            self.send_header("Content-Length", str(len(raw)))
            for name, value in options.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)
        elif path == "/v1/chat/completions":
            count = request["max_tokens"] if options.bench else options.chunks
            words = ["x" * options.chunk_bytes or WORDS[i % len(WORDS)] for i in range(count)]
            if request.get("stream"):
                self.stream(options, words)
            else:
                message = options.message or {"content": "".join(words)}
                choice = {"message": {"role": "assistant", **message}, "finish_reason": options.finish}
                answer = self.completion(choice)
                self.send_json(200, answer | {"received": request})
        elif path == "/v1/completions":
            texts = options.texts or WORDS
            if request.get("stream"):
                self.stream_texts(texts)
            else:
                answer = self.completion({"text": "".join(texts), "logprobs": None}, kind="text_completion")
                self.send_json(200, answer | {"received": request})
        elif path == "/v1/embeddings":
            vector = {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}
            self.send_json(200, {"object": "list", "model": options.name, "data": [vector], "usage": {}})
        else:
            self.send_json(404, {"error": {"message": "no such path", "type": "invalid_request_error"}})

    def completion(self, choice: dict[str, object], kind: str = "chat.completion") -> dict[str, object]:
        return {
            "id": "chatcmpl-fake",
            "object": kind,
            "created": int(time.time()),
            "model": self.options.name,
            "choices": [{"index": 0, "finish_reason": "stop", **choice}],
            "usage": {"prompt_tokens": 1, "completion_tokens": len(WORDS), "total_tokens": 1 + len(WORDS)},
            "pid": os.getpid(),
        }

    def stream(self, options: argparse.Namespace, words: list[str]) -> None:
        self.begin_stream()
        for delta in options.deltas or ():
            self.event(delta) if "error" in delta else self.delta(delta)
        if options.bench:
            self.delta({"role": "assistant", "content": None})
        for i, word in enumerate(() if options.deltas else words):
            if i == options.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if i == options.end_after:
                self.chunk(b"")
                return
            if i == options.break_after:
                raise ConnectionResetError
            self.delta({"content": word})
            time.sleep(options.chunk_delay)
        while options.goes_on_until and not os.path.exists(options.goes_on_until):
            self.delta({"content": " still"})
            time.sleep(0.05)
        self.delta({}, options.finish)
        if options.deltas:
            self.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}})
        if options.bench:
            self.event({"choices": [], "usage": {"completion_tokens": 2 * len(words)}})
        self.chunk(b"data: [DONE]\n\n")
        time.sleep(options.end_delay)
        self.chunk(b"")

    def stream_texts(self, texts: list[str]) -> None:
        self.begin_stream()
        for text in (*texts, None):
            choice = {"index": 0, "text": text or "", "finish_reason": None if text else "stop", "logprobs": None}
            self.event({"object": "text_completion", "choices": [choice]})
        self.event({"object": "text_completion", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def speak(self, options: argparse.Namespace) -> None:
        """Two seconds of silence, as they are made."""
        from tests.support import fake_media

        self.begin_stream("audio/wav")
        self.chunk(fake_media.endless_head())
        for _ in range(20):
            time.sleep(options.chunk_delay)
            self.chunk(bytes(2 * fake_media.RATE // 10))
        self.chunk(b"")

    def delta(self, delta: dict[str, object], finish: str | None = None) -> None:
        self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def event(self, value: dict[str, object]) -> None:
        super().event({"id": "chatcmpl-fake", "object": "chat.completion.chunk", "model": self.options.name, **value})


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024

    def server_bind(self) -> None:
        reuse = (
            socket.SO_REUSEPORT if self.RequestHandlerClass.options.reuseport else socket.SO_REUSEADDR
        )  # the latter as servers do
        self.socket.setsockopt(socket.SOL_SOCKET, reuse, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def run_from(watcher_s: float) -> None:
    """Fork and let the parent end, again and again: the pid changes faster than a scan of /proc takes."""
    until = time.monotonic() + watcher_s
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)
    sleep_for_ever()


def grow_tree(options: argparse.Namespace) -> None:
    for _ in range(options.fork):
        if os.fork() == 0:
            sleep_for_ever()
    for _ in range(options.daemonize or options.respawn):
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if options.respawn:
                run_from(30.0)
            sleep_for_ever()
        os.waitpid(child, 0)


def flood() -> None:
    lines = (b"x" * 1023 + b"\n") * 64
    while True:
        os.write(1, lines)


def later(delay_s: float, code: int) -> None:
    def end() -> None:
        time.sleep(delay_s)
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def end_first_thread(until: str) -> None:
    def wait() -> None:
        while not os.path.exists(until):
            time.sleep(0.02)
        os._exit(0)

    threading.Thread(target=wait).start()
    import ctypes

    ctypes.CDLL(None).pthread_exit(None)


def main(argv: list[str], answer: type[Answer] = Answer) -> int:
    options = parse(argv)
    if options.started:
        open(options.started, "w").close()
    if options.chunk_delay_without_gpu is not None and not os.environ["CUDA_VISIBLE_DEVICES"]:
        options.chunk_delay = options.chunk_delay_without_gpu

    def on_term(signum: int, frame: object) -> None:
        if options.ignore_term:
            print("ignoring SIGTERM", flush=True)
        elif options.term_delay:
            later(options.term_delay, 0)
        elif options.outlive_term:
            end_first_thread(options.outlive_term)
        else:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    print(f"fake worker {os.getpid()} starting", flush=True)
    if options.log_text:
        print(options.log_text.replace("\\n", "\n"), flush=True)
    if options.log_env:
        print(json.dumps(dict(os.environ)), flush=True)
    grow_tree(options)
    if options.flood:
        threading.Thread(target=flood, daemon=True).start()
    taken = [bytearray(b"\1") * (options.take_mib * MIB)]
    if options.grow_mib:

        def grow() -> None:
            while True:
                taken.append(bytearray(b"\1") * (options.grow_mib * MIB))
                time.sleep(1.0)

        threading.Thread(target=grow, daemon=True).start()
    if options.leader_exits_after is not None:
        later(options.leader_exits_after, 0)
    if options.thread_outlives is not None:
        threading.Thread(target=lambda: (time.sleep(options.thread_outlives), os._exit(0))).start()
        sys.stdout.flush()
        import ctypes

        ctypes.CDLL(None).pthread_exit(None)
    time.sleep(options.start_delay)
    if options.exit_after is None:
        if options.exit_signal is not None:
            signal.signal(options.exit_signal, signal.SIG_DFL) if options.exit_signal != signal.SIGKILL else None
            os.kill(os.getpid(), options.exit_signal)
        if options.exit_code is not None:
            return options.exit_code
    if options.no_listen:
        print("ready", flush=True)
        sleep_for_ever()

    answer.options, answer.stats = options, Stats()
    answer.ready_at = time.monotonic() + options.warmup
    try:
        server = Server((options.host, options.port), answer)
    except OSError as error:
        print(f"couldn't bind HTTP server socket, hostname: {options.host}, port: {options.port}: {error}", flush=True)
        return 1
    print(f"listening on {server.server_address[0]}:{server.server_address[1]}", flush=True)
    if options.exit_after is not None:
        later(options.exit_after, options.exit_code or 0)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
