"""The explanations of `llmux why`: the outcome of one request (`--request`), its waits, and the decisions meanwhile; for a
task, the candidate that would get a request.
"""

from __future__ import annotations

from supervisor.cli import output
from supervisor.core.demand import NORMAL
from supervisor.schema.request import Request
from supervisor.schema.task import Task


def story(request: Request) -> list[output.Words | output.Table]:
    """The explanation of one request for people, from `GET /v1/admin/requests/{id}`."""
    parts: list[output.Words | output.Table] = [_headline(request)]
    if request.wait:
        parts.append(f"It waited {_wait_text(sum(part.s for part in request.wait))} for a worker:")
        parts.append(output.Table([(_wait_text(part.s), part.what) for part in request.wait], head=False))
    elif request.worker is not None:
        parts.append("A worker took it at once.")
    if request.awaits is not None:
        eta = request.awaits.eta or "nobody knows how long still"
        parts.append(f"{request.awaits.what} {eta[:1].upper()}{eta[1:]}.")
    if (answer := _answer_sentence(request)) is not None:
        parts.append(answer)
    decided: list[output.Row] = [
        (output.clock(each.at), output.text(each.model), each.kind, each.reason) for each in request.decisions
    ]
    if decided:
        parts += ["", output.Table([("TIME", "MODEL", "KIND", "REASON"), *decided], whole=True)]
    return parts


def choice(task: Task) -> list[output.Words | output.Table]:
    """The explanation of `llmux why task:NAME`, from `GET /v1/admin/tasks/{name}`."""
    rows: list[output.Row] = [
        (
            "→" if candidate.model == task.chosen else "",
            candidate.model,
            output.state(str(candidate.state)),
            "" if candidate.allowed else "not asked: no cloud fallback is allowed",
        )
        for candidate in task.candidates
    ]
    return [
        f"{task.name} would go to {task.chosen}. {task.why}",
        "",
        output.Table([("", "CANDIDATE", "STATE", ""), *rows], whole=True),
    ]


def _headline(request: Request) -> str:
    model = output.text(request.model)
    sentence = f"{request.request_id} asked {model} at {output.clock(request.at)} ({request.path}){_tenant_and_priority(request)}"
    took = _wait_text(request.total_ms / 1000)
    if request.state != "finished":
        return f"{sentence}; it has been {request.state} for {took}."
    error = f" ({request.error})" if request.error else ""
    return f"{sentence}; it ended with {request.status}{error} after {took}."


def _tenant_and_priority(request: Request) -> str:
    """The tenant and the priority of a request, where they are not the usual ones."""
    about = f" for {request.tenant}" if request.tenant not in (None, request.key) else ""
    return about if request.priority == NORMAL else f"{about} with priority {request.priority}"


def _answer_sentence(request: Request) -> str | None:
    if request.error_message:
        return f"Its client was told: {request.error_message}"
    if request.first_token_ms is None:
        return None
    answer = f"The first piece of the answer came after {_wait_text(request.first_token_ms / 1000)}"
    if request.tokens_per_s is not None:
        answer += f"; then {request.tokens_per_s} tokens per second"
    return f"{answer}."


def _wait_text(count_s: float) -> str:
    """A wait: below a second to the millisecond, else to a tenth."""
    return f"{count_s:.3f} s" if count_s < 1 else f"{count_s:.1f} s"
