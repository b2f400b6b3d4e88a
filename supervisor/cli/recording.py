"""`llmux record` and `llmux replay`: the scheduler's events as a file, and the same decisions made again from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from supervisor.cli.client import Client
from supervisor.core.effects import Decided
from supervisor.daemon.recording import Replayed, replay
from supervisor.errors import InvalidRequestError, LlmuxError, UnavailableError

LAST_DECISIONS = 1000


def record(daemon: Client, file: Path, seconds: int | None) -> int:
    """Write the daemon's recording into a new file until it ends; how many events it has.

    Raises InvalidRequestError where the file is there already, and UnavailableError for a recording that broke off; what
    was written stays. KeyboardInterrupt leaves a whole file.
    """
    path = "/v1/admin/recording" + (f"?seconds={seconds}" if seconds is not None else "")
    events = -1  # the first line is the state
    try:
        with file.open("x", encoding="utf-8") as out:
            for told in daemon.events(path):
                if told.kind == "end":
                    return events
                out.write(told.data + "\n")
                events += 1
    except KeyboardInterrupt:
        return events
    except OSError as error:
        raise InvalidRequestError(
            f"{file} can't be written: {error.strerror}. Name a file that is not there."
        ) from error
    raise UnavailableError(f"The recording broke off after {events} events; the daemon may have ended.")


def replayed(file: Path) -> tuple[int, float, list[dict[str, object]]]:
    """Replay a recording: how many events, the seconds they cover, and the last decisions, timed from the first event.

    Raises InvalidRequestError for what is none, and LlmuxError where a decision came out otherwise.
    """
    first, last, decisions = None, 0.0, deque[dict[str, object]](maxlen=LAST_DECISIONS)
    one: Replayed | None = None
    for one in replay(_lines(file)):
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


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise InvalidRequestError(f"{file} can't be read: {error.strerror}.") from error
