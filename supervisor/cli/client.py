"""Asking a running daemon, and showing what it says."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from urllib.parse import quote

import httpx

from supervisor.errors import InvalidRequestError, LlmuxError, UnavailableError

Json = dict[str, object]


def quoted(name: str) -> str:
    """A model's name as a piece of a URL."""
    return quote(name, safe="")


def get(url: str, key: str | None, path: str) -> Json:
    """GET a JSON object. Raises LlmuxError with the daemon's own words."""
    return _ask("GET", url, key, path, timeout_s=10.0)


def post(url: str, key: str | None, path: str) -> Json:
    """POST, and wait as long as it takes: loading is somebody's wish and may take minutes."""
    return _ask("POST", url, key, path, timeout_s=None)


def _ask(method: str, url: str, key: str | None, path: str, timeout_s: float | None) -> Json:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        # A daemon on this machine must not be asked through a proxy, nor its key be shown to one.
        with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
            response = client.request(method, path, headers=headers)
            answer = response.json()
    except httpx.InvalidURL as error:
        raise InvalidRequestError(f"{url} is no URL ({error}).") from error
    except httpx.HTTPError as error:
        raise UnavailableError(f"No daemon answers at {url} ({error}). Start one with: llmux serve") from error
    except ValueError as error:
        raise UnavailableError(f"What answers at {url} is not llmux.") from error
    if not isinstance(answer, dict):
        raise UnavailableError(f"What answers at {url} is not llmux.")
    if response.is_error:
        told = _object(answer.get("error"))
        message = str(told.get("message", f"HTTP {response.status_code}"))
        if response.status_code in {401, 403}:
            message += " Pass a key with the scope admin: --key or $LLMUX_API_KEY (llmux keys new NAME --scope admin)."
        detail = told.get("detail")
        raise LlmuxError(message, detail=tuple(map(str, detail)) if isinstance(detail, list) else ())
    return answer


def models_table(answer: Json) -> str:
    """Models as a table."""
    rows = [("MODEL", "STATE", "DEVICE", "LEASE", "MEASURED", "PID", "PORT", "FLIGHT", "QUEUED", "IDLE", "REASON")]
    for model in _rows(answer):
        memory, worker = _object(model["memory"]), _object(model["worker"])
        rows.append(
            (
                str(model["name"]),
                str(model["state"]),
                _text(model["device"]),
                _text(memory.get("lease_mib"), " MiB"),
                _text(memory.get("measured_mib"), " MiB"),
                _text(worker.get("pid")),
                _text(worker.get("port")),
                str(model["in_flight"]),
                str(model["queued"]),
                _seconds(model["idle_s"]),
                str(model["reason"]),
            )
        )
    return table(rows)


def decisions_lines(answer: Json, *, with_model: bool) -> str:
    """Decisions, a line each, oldest first."""
    rows = []
    for decision in _rows(answer):
        at = decision["at"]
        assert isinstance(at, float | int)
        when = time.strftime("%H:%M:%S", time.localtime(at))
        row = (when, str(decision["kind"]), str(decision["reason"]))
        rows.append((row[0], _text(decision["model"]), *row[1:]) if with_model else row)
    return table(rows) if rows else "Nothing was decided yet."


def table(rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rows(answer: Json) -> list[Json]:
    data = answer.get("data")
    assert isinstance(data, list)
    return data


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _text(value: object, unit: str = "") -> str:
    return "-" if value is None else f"{value}{unit}"


def _seconds(value: object) -> str:
    return f"{value:.0f} s" if isinstance(value, float | int) else "-"
