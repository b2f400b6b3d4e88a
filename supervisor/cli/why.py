"""What `llmux why --request` tells of one request: what came of it, what it waited for, and what was decided meanwhile."""

from __future__ import annotations

from supervisor.cli import client, output
from supervisor.cli.client import Json
from supervisor.core.demand import NORMAL


def story(request: Json) -> list[output.Words | output.Table]:
    """For people, from `GET /v1/admin/requests/{id}`."""
    told: list[output.Words | output.Table] = [_headline(request)]
    waited = client.rows(request, "wait")
    if waited:
        total_s = sum(_seconds(part.get("s")) for part in waited)
        told.append(f"It waited {_amount(total_s)} for a worker:")
        told.append(output.Table([(_amount(_seconds(part.get("s"))), _what(part)) for part in waited], head=False))
    elif request.get("worker") is not None:
        told.append("A worker took it at once.")
    now = client.part(request, "awaits")
    if now:
        eta = output.text(now.get("eta") or "nobody knows how long still")
        told.append(f"{_what(now)} {eta[:1].upper()}{eta[1:]}.")
    if (answer := _answer(request)) is not None:
        told.append(answer)
    decided: list[output.Row] = [
        (output.clock(each.get("at")), *(output.text(each.get(name)) for name in ("model", "kind", "reason")))
        for each in client.rows(request, "decisions")
    ]
    if decided:
        told += ["", output.Table([("TIME", "MODEL", "KIND", "REASON"), *decided], whole=True)]
    return told


def _headline(request: Json) -> str:
    name, model, path = (output.text(request.get(key)) for key in ("request_id", "model", "path"))
    asked = f"{name} asked {model} at {output.clock(request.get('at'))} ({path}){_demand(request)}"
    took = _amount(_seconds(request.get("total_ms")) / 1000)
    if request.get("state") != "finished":
        return f"{asked}; it has been {output.text(request.get('state'))} for {took}."
    error = f" ({request['error']})" if request.get("error") else ""
    return f"{asked}; it ended with {output.text(request.get('status'))}{error} after {took}."


def _demand(request: Json) -> str:
    """For whom, and how urgently, where that is anything but usual."""
    tenant, priority = request.get("tenant"), request.get("priority")
    told = f" for {output.text(tenant)}" if tenant not in (None, request.get("key")) else ""
    return told if priority in (None, NORMAL) else f"{told} with priority {priority}"


def _answer(request: Json) -> str | None:
    if request.get("error_message"):
        return f"Its client was told: {request['error_message']}"
    first_ms = request.get("first_token_ms")
    if not isinstance(first_ms, int | float):
        return None
    answer = f"The first piece of the answer came after {_amount(first_ms / 1000)}"
    if request.get("tokens_per_s") is not None:
        answer += f"; then {output.text(request.get('tokens_per_s'))} tokens per second"
    return f"{answer}."


def _what(part: Json) -> str:
    return output.text(part.get("what"))


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _amount(count_s: float) -> str:
    """A wait, to the millisecond where that matters."""
    return f"{count_s:.3f} s" if count_s < 1 else f"{count_s:.1f} s"
