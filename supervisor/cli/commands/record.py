"""`llmux record` and `llmux replay`: the scheduler's events as a file, and the same decisions made again from it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client
from supervisor.cli.options import counted, daemon_options, json_option, print_json
from supervisor.errors import InvalidRequestError, LlmuxError, UnavailableError

_FILE = click.Path(dir_okay=False, path_type=Path)
LAST_DECISIONS = 1000
LONGEST_LINE = 64 * 1024 * 1024


def write(daemon: Client, file: Path, seconds: int | None) -> int:
    """Write the daemon's recording into a new file until the recording ends; returns the number of events.

    Raises InvalidRequestError where the file exists already, and UnavailableError for a recording that broke off; the lines
    so far stay. KeyboardInterrupt leaves a complete file.
    """
    path = operations.RECORD_SCHEDULER.at({"seconds": seconds})
    events = -1  # the first line is the state
    try:
        with contextlib.ExitStack() as stack:
            out: TextIO | None = None
            for event in daemon.events(path):
                if event.kind == "end":
                    return events
                if out is None:  # create the file only once the daemon answers
                    out = stack.enter_context(file.open("x", buffering=1, encoding="utf-8"))  # line-buffered
                out.write(event.data + "\n")
                events += 1
    except KeyboardInterrupt:
        return max(events, 0)
    except OSError as error:
        message = f"{file} can't be written: {error.strerror}. Name a file that is not there."
        raise InvalidRequestError(message) from error
    raise UnavailableError(f"The recording broke off after {max(events, 0)} events; the daemon's log may say why.")


def replayed(file: Path) -> tuple[int, float, list[dict[str, object]]]:
    """Replay a recording: the number of events, their span in seconds, and the last decisions, timed from the first event.

    Raises InvalidRequestError if the file is no recording, and LlmuxError if a decision differs.
    """
    from supervisor.core.effects import Decided  # noqa: PLC0415  # imports the whole scheduler
    from supervisor.engine import recording  # noqa: PLC0415  # as above

    first, last, decisions = None, 0.0, deque[dict[str, object]](maxlen=LAST_DECISIONS)
    one: recording.Replayed | None = None
    for one in recording.replay(_read_lines(file)):
        first = one.at if first is None else first
        last = one.at - first
        if not one.is_same:
            raise LlmuxError(
                f"Event {one.number} came out otherwise: the scheduler looked at something that is not in its events.",
                detail=(f"recorded: {one.recorded.decode().strip()}", f"replayed: {one.replayed.decode().strip()}"),
            )
        decisions.extend(
            {"at": last, "model": effect.model, "kind": effect.kind, "reason": effect.reason}
            for effect in one.effects
            if isinstance(effect, Decided)
        )
    return one.number if one is not None else 0, last, list(decisions)


def _read_lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            while line := lines.readline(LONGEST_LINE):
                yield line  # a cut line is no JSON, so the parser refuses it
    except OSError as error:
        raise InvalidRequestError(f"{file} can't be read: {error.strerror}.") from error


@click.command()
@click.argument("file", type=_FILE)
@click.option("--seconds", type=click.IntRange(1, 86400), help="How long; by default until Ctrl-C.")
@daemon_options
def record(file: Path, seconds: int | None, daemon: Client, as_json: bool) -> None:
    """Record every event and decision of the scheduler into FILE, until Ctrl-C.

    The daemon spends nothing on it while nobody records. FILE has the names of models and devices, the reasons of
    decisions, and the last log lines of workers that crashed, but no keys.
    """
    events = write(daemon, file, seconds)
    if as_json:
        print_json({"file": str(file), "events": events})
    else:
        click.echo(f"{counted(events, 'event')} in {file}. Replay them: llmux replay {file}")


@click.command()
@click.argument("file", type=_FILE)
@click.option("-n", "--limit", default=30, show_default=True, type=click.IntRange(0, 1000), help="How many decisions.")
@json_option
def replay(file: Path, limit: int, as_json: bool) -> None:
    """Make the decisions recorded in FILE again, compare them, and show the last ones. Needs no daemon."""
    events, seconds, decisions = replayed(file)
    shown = decisions[-limit:] if limit else []
    if as_json:
        print_json({"events": events, "seconds": round(seconds, 3), "decisions": shown})
        return
    if shown:
        rows = [
            tuple(map(output.text, (f"{one['at']:.3f} s", one["model"], one["kind"], one["reason"]))) for one in shown
        ]
        output.show(output.Table([("AFTER", "MODEL", "KIND", "REASON"), *rows], whole=True))
    click.echo(f"{counted(events, 'event')} of {seconds:.1f} s: every decision came out the same.")
