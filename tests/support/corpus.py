"""The recorded contract: what clients and operators see, as files in tests/golden/contract/<api>/, and what plays them.

    python -m tests.support.corpus [NAME …]            play them, and print what differs, by kind
    python -m tests.support.corpus --write [NAME …]    write what came instead (make golden)

A new scenario needs no more than its requests; the second command writes the rest.

A file is a scenario: a configuration, and exchanges in their order, each on a connection of its own:

    {"config": {"models": {"a": {"fake": ["--chunks", "2"]}}}, "keys": null, "varies": ["created"],
     "exchanges": [{"request": {…}, "answer": {…}, "worker": [{…}]}], "log": [{…}]}

`request` and `answer` have the first line, the headers in their order and case, and the body: as `json` (compact) or
`spaced` (as Python's json writes it) where that gives the same bytes, else as `text`, or as `events` of a stream. `worker` is what the
fake workers got for it; `log` are the daemon's lines about requests, or null where jobs write some later. Kept out: dates, ids,
addresses, paths, cuts of chunks, times, and the numbers of the keys in `varies`. `<id 1>` is the first id that an answer brought; a
later request may name it.

A scenario may have more: `alone`, where its answers tell what the daemon did before, so that it can't share one; `files`, texts by their paths, written before the daemon starts; and `remote`, how somebody else's API
at the host `<remote>` answers one request after the other. An exchange may have `files` as well, written before it is asked, or
null for what is removed then; and `until`, which its answer matches in the end: it is asked again as long as it doesn't, and only
the last answer counts. `worker` is null where it depends on the time which exchange a worker's request belongs to.

What depends on when it happens isn't here: disconnects, keep-alives, hand-overs. They are in tests/faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from supervisor.host import distribution
from tests.support.daemon import REPOSITORY, Daemon, fake, gguf, running, wait_until
from tests.support.fake_http import serving
from tests.support.fake_remote import Reply, StandIn
from tests.support.limits import LIMIT_S

FOLDER = REPOSITORY / "tests" / "golden" / "contract"
SAW = "saw.jsonl"
KINDS = ("status", "headers", "body", "worker", "log")

_ID = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:[a-z]{2,9}[_-])[0-9a-f]{12,64}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=\d*[a-f])[0-9a-f]{16,64})(?![0-9A-Za-z])"
)
_DATES = re.compile(
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?"
)
_ADDRESS = re.compile(r"(127\.0\.0\.1:|port: |_first: |_last: )\d{4,5}")
_SPAN = re.compile(r"(ed in|d for|after|took|Waited|again in) \d+(?:\.\d+)?(?= m?s\b)")
_TIMES = r"\w+_(?:ms|ns|at|duration)|(?:age|eta|expires|idle|load|retry|since|uptime)(?:_s|_in)?|at|created|timestamp|pid|port|bytes|measured_mib|size(?:_vram)?"
_LEARNED = re.compile(r'("learned"\s*:\s*)\{[^}]*\}')
_NUMBER = r'("(?:{keys})"\s*:\s*)(?:null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)'
STYLES = {"json": {"separators": (",", ":")}, "spaced": {}}

Scenario = dict[str, Any]
Message = dict[str, Any]


class Words:
    """What is another one each time, and what stands for it in a file."""

    def __init__(self, folder: Path, varies: Iterable[str], remote: str = "") -> None:
        self._places = {remote: "<remote>"} if remote else {}
        self._places |= {str(folder): "<folder>", sys.executable: "<python>", str(REPOSITORY): "<repository>"}
        for word, own in (
            ("host", socket.gethostname()),
            ("python", platform.python_version()),
            ("version", distribution.version()),
        ):
            self._places[f'"{own}"'] = f'"<{word}>"'
        self._ids: dict[str, str] = {}
        self._number = re.compile(_NUMBER.replace("{keys}", "|".join([_TIMES, *map(re.escape, varies)])))

    def kept(self, text: str) -> str:
        """The text as it is in a file."""
        for place, word in self._places.items():
            text = text.replace(place, word)
        text = _SPAN.sub(r"\1 0", _ADDRESS.sub(r"\1<port>", _DATES.sub("<date>", text)))
        text = _ID.sub(lambda found: self._ids.setdefault(found[0], f"<id {len(self._ids) + 1}>"), text)
        return self._number.sub(r"\g<1>0", _LEARNED.sub(r"\1{}", text))

    def sent(self, text: str) -> str:
        """The text of a file as it is sent."""
        for actual, word in (self._places | self._ids).items():
            text = text.replace(word, actual)
        return text


def materialised(scenario: Scenario, folder: Path, remote: str = "") -> dict[str, Any]:
    """The configuration for `Daemon`: `fake` and `gguf` models become what these names mean."""
    config = json.loads(json.dumps(scenario["config"]).replace("<folder>", str(folder)).replace("<remote>", remote))
    for name, model in config["models"].items():
        if "fake" in model:
            flags = [*model.pop("fake"), "--saw-to", str(folder / SAW)]
            config["models"][name] = fake(*flags, **model)
        elif "gguf" in model:
            config["models"][name] = gguf(**{key: value for key, value in model.items() if key != "gguf"})
    return config


class Stage:
    """Where scenarios are played. Those of the same configuration get the same daemon while they follow each other."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._set: str | None = None  # what the daemon was started with
        self._daemon: Daemon
        self._remote: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def played(self, scenario: Scenario) -> Scenario:
        """The same scenario with what came."""
        self._start(scenario)
        daemon = self._daemon
        words = Words(daemon.folder, scenario["varies"], self._remote)
        before = len(daemon.events("request.finished"))
        exchanges = [_exchanged(daemon, words, exchange) for exchange in scenario["exchanges"]]
        lines = [words.kept(json.dumps(line)) for line in daemon.events("request.finished")[before:]]
        return scenario | {
            "exchanges": exchanges,
            "log": None if scenario.get("log", ()) is None else [json.loads(line) for line in lines],
        }

    def _start(self, scenario: Scenario) -> None:
        wanted = setting(scenario)
        if wanted == self._set and not {"alone", "files", "remote"} & set(scenario):
            return
        self._held.close()
        self._set = wanted
        folder = Path(self._held.enter_context(tempfile.TemporaryDirectory())).resolve()
        if scenario.get("keys"):
            (folder / "api_keys.yaml").write_text(scenario["keys"])
            (folder / "api_keys.yaml").chmod(0o600)
        _lay(folder, scenario.get("files", {}))
        self._remote = self._held.enter_context(_answering(scenario))
        config = materialised(scenario, folder, self._remote)
        self._daemon = self._held.enter_context(running(folder, config))


def setting(scenario: Scenario) -> str:
    """What its daemon is started with."""
    return json.dumps([scenario["config"], scenario.get("keys")])


@contextlib.contextmanager
def _answering(scenario: Scenario) -> Iterator[str]:
    """The address of a remote that answers as the scenario says, where there is one."""
    if not (replies := scenario.get("remote")):
        yield ""
        return
    with serving(StandIn()) as remote:
        remote.replies += [
            Reply(reply["status"], json.dumps(reply["json"]).encode(), {"Content-Type": "application/json"})
            for reply in replies
        ]
        yield f"localhost:{remote.server_address[1]}"


def _lay(folder: Path, files: Mapping[str, str | None]) -> None:
    """Write them; what is null, and may be a pattern, is removed."""
    for name, text in files.items():
        if text is None:
            for path in folder.glob(name):
                path.rename(folder / f"removed-{path.name}")  # at once, also a folder in which the daemon writes
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode("latin-1"))
            (folder / name).chmod(0o600)


def _exchanged(daemon: Daemon, words: Words, exchange: Mapping[str, Any]) -> dict[str, Any]:
    _lay(daemon.folder, exchange.get("files", {}))
    request, saw = exchange["request"], daemon.folder / SAW
    before = saw.stat().st_size if saw.exists() else 0

    def answered() -> tuple[bytes, bytes] | None:
        head, body = asked(daemon.port, request["line"].split()[0], _bytes_of(request, words))
        return (head, body) if re.search(exchange.get("until", "").encode(), body) else None

    head, body = wait_until(answered, what=f"{request['line']} matches {exchange.get('until')}")
    if exchange.get("worker", ()) is None:
        return {**exchange, "answer": _message(words, head, body)}
    seen = saw.read_bytes()[before:].splitlines() if saw.exists() else []
    worker = [_message(words, *(part.encode("latin-1") for part in json.loads(line))) for line in seen]
    return {**exchange, "answer": _message(words, head, body), "worker": worker}


def _bytes_of(message: Message, words: Words) -> bytes:
    if "text" in message:
        body = words.sent(message["text"]).encode("latin-1")
    else:
        style = next((style for style in STYLES if style in message), None)
        text = "" if style is None else json.dumps(message[style], ensure_ascii=False, **STYLES[style])
        body = words.sent(text).encode()
    head = [words.sent(message["line"])]
    for name, value in message["headers"]:
        if name.lower() == "content-length" and value.isdecimal():
            value = str(max(len(body), int(value)))  # more than there is may be announced
        head.append(f"{name}: {words.sent(value)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def _message(words: Words, head: bytes, body: bytes) -> Message:
    line, *fields = words.kept(head.decode("latin-1").removesuffix("\r\n")).split("\r\n")
    headers = [
        [name, _steady(name.lower(), value, len(body))]
        for name, _, value in (field.partition(": ") for field in fields)
    ]
    kind = next((value for name, value in headers if name.lower() == "content-type"), "")
    return {"line": line, "headers": headers, **_shown(words, kind, body)}


def _steady(name: str, value: str, size: int) -> str:
    """A header's value without times, and without the length of a body that has times in it."""
    if name.endswith("-ms") or name == "retry-after":
        return re.sub(r"\d+", "0", value)
    return "<length>" if name == "content-length" and value == str(size) else value


def _shown(words: Words, kind: str, body: bytes) -> Message:
    if not body:
        return {}
    if kind.startswith("text/event-stream"):
        events = words.kept(body.decode()).split("\n\n")
        return {"events": events if events[-1] else events[:-1]}
    with contextlib.suppress(UnicodeDecodeError, ValueError):
        text = words.kept(body.decode())
        value = json.loads(text)
        for style, options in STYLES.items():
            if json.dumps(value, ensure_ascii=False, **options) == text:
                return {style: value}
    return {"text": words.kept(body.decode("latin-1"))}


def asked(port: int, method: str, request: bytes) -> tuple[bytes, bytes]:
    """The head of the answer without its last empty line, and its body without the framing."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as answer:
            while True:
                head = b"".join(iter(answer.readline, b"\r\n"))
                status = int(head.split(b" ", 2)[1])
                if status >= 200:
                    break
            return head.removesuffix(b"\r\n"), b"".join(_pieces(answer, head.lower(), method, status))


def _pieces(answer: Any, head: bytes, method: str, status: int) -> Iterator[bytes]:
    if method == "HEAD" or status in {204, 304}:
        return
    if b"\r\ntransfer-encoding: chunked" in head:
        while size := int(answer.readline(), 16):
            yield answer.read(size)
            answer.readline()
        answer.readline()
    elif size := re.search(rb"\r\ncontent-length: (\d+)", head):
        yield answer.read(int(size[1]))
    else:
        yield answer.read()


def differences(wanted: Scenario, found: Scenario) -> Iterator[tuple[str, str]]:
    """What differs: its kind, and where and how."""
    for number, (before, after) in enumerate(zip(wanted["exchanges"], found["exchanges"], strict=True), 1):
        place = f"{number}. {before['request']['line']}"
        for kind, left, right in (
            ("status", before["answer"]["line"], after["answer"]["line"]),
            ("headers", before["answer"]["headers"], after["answer"]["headers"]),
            ("body", _body(before["answer"]), _body(after["answer"])),
            ("worker", before["worker"], after["worker"]),
        ):
            if left is not None and json.dumps(left) != json.dumps(right):
                yield kind, f"{place}\n  - {json.dumps(left)}\n  + {json.dumps(right)}"
    if None is not wanted["log"] != found["log"]:
        yield "log", f"  - {json.dumps(wanted['log'])}\n  + {json.dumps(found['log'])}"


def _body(message: Message) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key not in {"line", "headers"}}


def scenarios() -> dict[str, Path]:
    """By name: the api and the stem of the file. Those that can share a daemon follow each other."""
    found = sorted(FOLDER.glob("*/*.json"), key=lambda path: (setting(json.loads(path.read_text())), path))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in found}


def write(path: Path, scenario: Scenario) -> None:
    """A line for each part of an exchange, so that a difference is short. Raises ValueError where tomorrow's would differ."""

    def one(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    def parts(exchange: Mapping[str, Any]) -> str:
        keys = [key for key in ("files", "until", "request", "answer", "worker") if key in exchange]
        return "{" + ",\n   ".join(f'"{key}": {one(exchange[key])}' for key in keys) + "}"

    def listed(items: Iterable[str]) -> str:
        return "[" + ",".join(f"\n  {item}" for item in items) + "\n ]"

    fields = {
        key: one(scenario[key]) for key in ("config", "keys", "alone", "files", "remote", "varies") if key in scenario
    }
    fields["exchanges"] = listed(map(parts, scenario["exchanges"]))
    fields["log"] = "null" if scenario["log"] is None else listed(map(one, scenario["log"]))
    text = "{\n" + ",\n".join(f' "{key}": {value}' for key, value in fields.items()) + "\n}\n"
    if (today := datetime.now().astimezone().date().isoformat()) in text:
        raise ValueError(f"{path} would have the day of its recording: {today}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    flags = argparse.ArgumentParser(description="Play the recorded contract.")
    flags.add_argument("names", nargs="*", help="how the names of scenarios begin; else all")
    flags.add_argument("--write", action="store_true", help="write what came")
    told = flags.parse_args()
    found: Counter[str] = Counter()
    with Stage() as stage:
        for name, path in scenarios().items():
            if told.names and not name.startswith(tuple(told.names)):
                continue
            wanted = json.loads(path.read_text())
            came = stage.played(wanted)
            is_new = told.write and not any("answer" in exchange for exchange in wanted["exchanges"])
            for kind, text in () if is_new else differences(wanted, came):
                found[kind] += 1
                print(f"{kind}: {name} {text}")
            if told.write:
                write(path, came)
    print(", ".join(f"{found[kind]} of {kind}" for kind in KINDS if found[kind]) or "no differences")
    return 1 if found and not told.write else 0


if __name__ == "__main__":
    sys.exit(main())
