"""What is shown of strangers' words, how wide it is, and that nothing is loaded for it where nothing is shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from supervisor.api import openapi
from supervisor.cli import output
from supervisor.cli.exit_codes import ExitCode
from tests.support.daemon import REPOSITORY
from tests.support.limits import LIMIT_S
from tests.support.shell import LLMUX, Shell

MARKUP = "[red]red[/red] [link=http://evil.example]here[/link] [/] :smile: 'quoted' 127.0.0.1"
CONTROLS = "\x1b]0;title\x07\x1b[2J\x9b31m\x1b]8;;http://evil.example\x1b\\\r\u202eback\x08\x7f"
RUDE = MARKUP + CONTROLS
PLAIN = MARKUP + "]0;title[2J31m]8;;http://evil.example\\back"
OURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?1049[hl]|\?25[hl]|H|2K|1A)|\r")  # colours, other screen, cursor, repainting
OF_A_TERMINAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


def recorded(group: str, operation: str, /, **words: object) -> dict[str, object]:
    """The example of an operation, with these words in place of its own."""
    return openapi.recorded()[f"Administration: {group}: {operation}"] | words


MODEL = "models", "GET /v1/admin/models/{name}"
DECISION = {"seq": 1, "at": 0, "kind": "admit", "model": RUDE, "reason": RUDE}
ANSWERS = {
    "/v1/admin/models": {
        "object": "list",
        "data": [
            recorded(
                *MODEL, name="wide-漢字-👍", state="ready", device=RUDE, reason=f"first\n{RUDE} {'long ' * 60}end"
            ),
            recorded(*MODEL, name="b", state="[bold]odd", device="gpu0", reason="second\ud800"),
        ],
    },
    "/v1/admin/gpu-memory": {
        "devices": [
            recorded("memory", "GET /v1/admin/gpu-memory")["devices"][0]
            | {"id": "gpu0", "total_mib": 100, "free_mib": 50, "name": RUDE, "blocked": RUDE}
        ],
        "models": [],
    },
    "/v1/admin/leases": {"object": "list", "data": []},
    "/v1/admin/requests": {
        "object": "list",
        "data": [
            {
                "id": "1",
                "request_id": RUDE,
                "state": "running",
                "model": RUDE,
                "path": RUDE,
                "worker": RUDE,
                "key": RUDE,
                "tenant": RUDE,
                "priority": 50,
                "stream": False,
                "age_s": 1,
                "bytes": 1,
                "progress": None,
            }
        ],
    },
    "/v1/admin/decisions": {"object": "list", "data": [DECISION]},
    "/v1/admin/requests/x": recorded(
        "requests",
        "GET /v1/admin/requests/{id}",
        request_id=RUDE,
        wait=[{"kind": RUDE, "what": RUDE, "s": 1}],
        awaits={"kind": RUDE, "what": RUDE, "s": 1, "eta_s": None, "eta": RUDE},
        error_message=RUDE,
        decisions=[DECISION],
    ),
    "/v1/admin/reload": recorded("daemon", "POST /v1/admin/reload", added=[RUDE], unchanged=1),
}
DELTA = {"reasoning_content": f"hm {RUDE}", "content": f"{RUDE}\ud800"}


class Stranger(BaseHTTPRequestHandler):
    """Answers as a daemon would whose every word came from somebody else."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "follow=true" in self.path:
            self.answer(200, f"data: {RUDE}".replace("\r", "").encode() + b"\n\n")
        elif path.endswith("/logs"):
            self.answer(200, f"{RUDE}\x1b[31mred\x1b[0m\n".encode())
        elif path.endswith("/events"):
            data = {"model": RUDE, "kind": "admit", "reason": f"{RUDE}\n00:00:00  alert     forged"}
            self.answer(200, f"event: decision\ndata: {json.dumps(data)}\n\n".encode())
        elif path == "/v1/chat/completions":
            self.answer(200, f"data: {json.dumps({'choices': [{'delta': DELTA}]})}\n\ndata: [DONE]\n\n".encode())
        elif path in ANSWERS:
            self.answer(200, json.dumps(ANSWERS[path]).encode())
        else:
            self.answer(404, json.dumps({"error": {"message": RUDE, "detail": [RUDE]}}).encode())

    do_POST = do_GET

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def stranger(url, tmp_path) -> Shell:
    return Shell(tmp_path, url)


WATCHING = [
    "ps",
    "ps --wide",
    "top --once",
    "why",
    "events",
    "logs x",
    "logs x -f",
    "reload",
    "load x",
    "unload x",
    "why --request x",
]


class TestStrangers:
    """Words of models, workers, clients and daemons are text, whatever is in them."""

    @pytest.mark.parametrize("words", [*WATCHING, "ps --json", "why --json", "events --json", "load x --json"])
    def test_on_a_terminal(self, stranger, words):
        with stranger.terminal(*words.split(), columns=3000) as terminal:
            terminal.end()
        assert not OF_A_TERMINAL.search(OURS.sub("", terminal.screen)), terminal.screen
        said = json.dumps(MARKUP)[1:-1] if "--json" in words and words != "load x --json" else MARKUP
        assert said in terminal.screen

    def test_on_the_other_screen(self, stranger):
        with stranger.terminal("top", columns=3000) as terminal:
            terminal.wait_for("q: quit")
            terminal.type("q")
            assert terminal.end() == ExitCode.DONE
        assert not OF_A_TERMINAL.search(OURS.sub("", terminal.screen))
        assert terminal.screen.count(PLAIN) >= 4

    def test_in_a_pipe(self, stranger):
        for words in ("ps", "top --once", "why", "events"):
            told = stranger(*words.split(), FORCE_COLOR="1", COLUMNS="40", TTY_COMPATIBLE="1").stdout
            assert PLAIN in told
            assert not OF_A_TERMINAL.search(told)

    @pytest.mark.parametrize("to_file", [False, True])
    def test_thoughts_on_a_terminal(self, stranger, to_file):
        out = stranger.home / "out"
        with stranger.terminal("chat", "x", "Hello", columns=3000, stdout=out if to_file else None) as terminal:
            assert terminal.end() == ExitCode.DONE
        assert not OF_A_TERMINAL.search(OURS.sub("", terminal.screen)), terminal.screen
        assert f"\x1b[2mhm {PLAIN}\x1b[0m" in terminal.screen, "dimmed"
        if to_file:
            assert out.read_bytes().decode() == f"{RUDE}?\n", "a file gets what the model wrote"

    def test_a_log_loses_its_colours_whole(self, stranger):
        assert stranger("logs", "x").stdout == PLAIN.replace("[2J", "") + "red\n"

    def test_json_is_the_same_json(self, stranger):
        assert json.loads(stranger("ps", "--json").stdout) == ANSWERS["/v1/admin/models"]


class TestTables:
    """A row a line, columns below each other, the last one cut where a terminal ends."""

    def test_in_a_pipe_nothing_is_cut(self, stranger):
        head, first, second = stranger("ps", COLUMNS="40").stdout.splitlines()
        assert first.endswith("long end")
        assert "first [red]red" in first, "a new line is no new row"
        # 漢, 字 and 👍 take two columns each
        assert head.index("STATE") == first.index("ready") + 3 == second.index("[bold]odd")
        assert [line for line in (head, first, second) if line != line.rstrip()] == []

    def test_an_event_is_a_line(self, stranger):
        (line,) = stranger("events").stdout.splitlines()
        assert line.endswith(" 00:00:00  alert     forged")

    @pytest.mark.parametrize("columns", [40, 80, 200])
    def test_on_a_terminal_the_last_column_is(self, stranger, columns):
        with stranger.terminal("ps", columns=columns) as terminal:
            assert terminal.end() == ExitCode.DONE
        first = OURS.sub("", terminal.screen).splitlines()[1]
        assert PLAIN in first, "the others are whole"
        assert first.endswith("…")
        assert len(first) - first.index("first") == 20, "and it is never narrower"

    def test_fits_where_there_is_room(self, stranger):
        with stranger.terminal("why", columns=40) as terminal:
            assert terminal.end() == ExitCode.DONE
        assert "…" not in terminal.screen, "a reason is never cut"

    def test_without_colours(self, stranger):
        with stranger.terminal("top", "--once", NO_COLOR="1") as terminal:
            assert terminal.end() == ExitCode.DONE
        assert "\x1b" not in terminal.screen
        assert re.search(r"gpu0  ━{12} {14}50 MiB of 100 MiB used", terminal.screen)


class TestProgress:
    """A line that is repainted."""

    def test_what_painting_raises_stays_there(self, monkeypatch, capsys):
        """As where a folder that is counted goes away."""
        asked = threading.Semaphore(0)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # prints, as without pytest

        def frame():
            asked.release()
            raise FileNotFoundError("gone")

        with output.progress(frame):
            assert asked.acquire(timeout=LIMIT_S)
        assert "Traceback" not in capsys.readouterr().err

    def test_it_is_cut_to_the_terminal(self, monkeypatch, capsys):
        painted = threading.Semaphore(0)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", "30")

        def frame():
            painted.release()
            return [["load: ", output.state("starting")], "漢字" * 40]

        with output.progress(frame):
            assert painted.acquire(timeout=LIMIT_S)
            assert painted.acquire(timeout=LIMIT_S), "the first one stands there"
        lines = [line for line in re.split("[\r\n]", OURS.sub("\r", capsys.readouterr().err)) if "漢" in line]
        assert lines
        assert max(line.count("漢") for line in lines) < 8


class TestRich:
    """What draws is loaded by what draws."""

    @staticmethod
    def loaded(stderr: str) -> set[str]:
        names = {line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")}
        assert "click" in names
        return {name for name in names if name.startswith(("rich.", "pygments."))}

    @pytest.mark.parametrize(
        "words", ["--help", "ps --json", "load --help", "doctor --json", "runtimes list --json", "keys list --json"]
    )
    def test_not_for_machines(self, stranger, words):
        told = stranger(*words.split(), PYTHONPROFILEIMPORTTIME="1")
        assert told.stdout
        assert self.loaded(told.stderr) == set()

    def test_for_people(self, stranger):
        assert "rich.table" in self.loaded(stranger("ps", PYTHONPROFILEIMPORTTIME="1").stderr)

    def test_not_by_the_daemon(self, alone):
        (alone.home / "my.yaml").write_text("models: {a: {cmd: [cat, '${port}'], vram_mib: 1}}\n")
        command = [*LLMUX, "serve", "my.yaml", "--port", "0", "--state-dir", "state", "--json"]
        with (
            (alone.home / "stderr").open("w") as stderr,
            subprocess.Popen(
                command,
                env=alone.env(PYTHONPATH=str(REPOSITORY), PYTHONPROFILEIMPORTTIME="1"),
                cwd=alone.home,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as daemon,
        ):
            try:
                told = json.loads(daemon.stdout.readline())
                assert json.loads(alone("ps", "--json", "--url", told["url"]).stdout)["data"]
            finally:
                daemon.terminate()
            daemon.stdout.read()
        assert self.loaded((alone.home / "stderr").read_text()) == set()


class TestTracebacks:
    """The log on a terminal tells where something broke, not what was in the variables there."""

    def test_no_variables(self):
        program = (
            "import rich, structlog; from supervisor.cli.serving import log_setup; log_setup.configure('info', 'console')\n"
            "def broken(secret):\n    raise ValueError('broken')\n"
            "try:\n    broken(''.join(['sk', '-', '1234']))\n"
            "except ValueError:\n    structlog.get_logger().exception('it.broke')\n"
        )
        told = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
        assert "ValueError: broken" in told.stderr
        assert "sk-1234" not in told.stderr
