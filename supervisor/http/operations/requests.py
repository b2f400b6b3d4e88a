"""What operators ask about requests, the queue, decisions and events."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.operation import (
    EVENTS,
    Example,
    Operation,
    Parameter,
    Section,
    array,
    choice,
    flag,
    listing,
    mapping,
    named,
    number,
    record,
    struct,
    text,
    whole,
)
from supervisor.gateway.filters.body_log import KeptBody

DECISION: Final = named(
    record(
        {
            "seq": whole("Its number."),
            "at": number("Seconds since 1970."),
            "kind": text(),
            "model": text(null=True),
            "reason": text(),
        }
    ),
    "Decision",
)
_RECORD: Final = {
    "request_id": text(),
    "path": text(),
    "model": text(null=True),
    "worker": text(null=True),
    "key": text(null=True),
    "status": whole(),
    "error": text(null=True),
    "cut": text(null=True),
    "queue_ms": number(null=True),
    "first_byte_ms": number(null=True),
    "total_ms": number(),
    "bytes": whole(),
    "prompt_tokens": whole(null=True),
    "completion_tokens": whole(null=True),
    "ignored": array(),
    "id": text("Its number; null if it was refused before it got one.", null=True),
    "at": number("When it arrived, in seconds since 1970."),
    "tenant": text(
        "[Who asked, and how urgently](#who-asks-and-how-urgently); `tenant` is null for nobody in particular.",
        null=True,
    ),
    "priority": whole(
        "[Who asked, and how urgently](#who-asks-and-how-urgently); `tenant` is null for nobody in particular."
    ),
    "stream": flag("Did the client ask for a stream?"),
    "first_token_ms": number("From its arrival to the first piece of the answer; null if none came.", null=True),
    "tokens_per_s": number(
        "A stream's completion tokens over the time from the first piece to the end; null where that is unknown.",
        null=True,
    ),
    "wait": array(
        record({"kind": text(), "what": text(), "s": number()}),
        "What it waited for before a worker took it, in order: `kind`, `what` (a sentence), `s`. The parts add up to the wait; a part of less than two milliseconds is left out.",
    ),
    "error_message": text(
        "What its client was told, at most 300 characters; null without an error. A worker's message may quote its client.",
        null=True,
    ),
}
_PROGRESS: Final = record(
    {"step": whole(), "steps": whole()},
    "How many steps were made, of so many, where its worker makes pictures and tells; else null.",
    null=True,
)
_ENDED: Final = named(record(_RECORD, optional=("ignored",)), "EndedRequest")
_ONE: Final = named(
    record(
        {
            "state": choice("queued", "running", "finished"),
            **_RECORD,
            "awaits": record(
                {"kind": text(), "what": text(), "s": number(), "eta_s": number(null=True), "eta": text(null=True)},
                "What a queued request waits for now: `kind`, `what`, `s` (how long already), `eta_s` (until the model is loaded, by its last load; null where nobody knows), `eta` (the same in words). Else null.",
                null=True,
            ),
            "progress": _PROGRESS,
            "decisions": array(
                DECISION,
                "What was decided meanwhile about its model and those it waited for, as from `GET /v1/admin/decisions`; as far as kept.",
            ),
        },
        optional=("ignored",),
    ),
    "Request",
)
_WAITS: Final = {
    "name": text(),
    "depth": whole(),
    "max_depth": whole(),
    "in_flight": whole(),
    "avg_wait_ms": whole(null=True),
    "p95_wait_ms": whole(null=True),
}
_LIMIT: Final = {
    "account": text(),
    "counts": choice("requests", "tokens", "concurrency"),
    "limit": number(),
    "period_s": number(null=True),
    "remaining": number(),
    "reset_s": number(null=True),
}
_QUEUE: Final = {
    "depth": whole("Requests that wait for a worker; how many may (`limits.queue_total`)."),
    "max_depth": whole("Requests that wait for a worker; how many may (`limits.queue_total`)."),
    "in_flight": whole("Requests that workers have."),
    "avg_wait_ms": whole(
        "The waits of those that a worker took within the last five minutes, at most the last 512, also of those that it took at once: their mean, and what all but a twentieth stayed within. Null where there are none.",
        null=True,
    ),
    "p95_wait_ms": whole(
        "The waits of those that a worker took within the last five minutes, at most the last 512, also of those that it took at once: their mean, and what all but a twentieth stayed within. Null where there are none.",
        null=True,
    ),
    "models": array(
        record(_WAITS),
        "The same for each model that somebody waits for, by `name`; `max_depth` is its `max_queue`, or `limits.queue_per_model`.",
    ),
    "limits": array(
        record(_LIMIT),
        "The [limits](#how-much-a-client-may-ask-for) of which a part is taken: `account` (`tenant NAME` or `key NAME`), `counts` (`requests`, `tokens`, `concurrency`), `limit`, `remaining`; of a rate also `period_s` and `reset_s`, until all of it is there again.",
    ),
}
_LIMITED: Final = Parameter("limit", "How many at most; 100 by default.", whole(minimum=1, maximum=1000))
SECTION: Final = Section(
    "Administration: requests",
    "What is asked now, what was asked, and what was decided.",
    (
        Operation(
            "GET",
            "/v1/admin/requests",
            "Requests in flight and queued, oldest first.",
            scope="admin",
            answer=listing(
                record(
                    {
                        "id": text(),
                        "state": choice("queued", "running"),
                        "request_id": text(),
                        "model": text(null=True),
                        "path": text(),
                        "key": text(null=True),
                        "tenant": text("Null: nobody in particular.", null=True),
                        "priority": whole(),
                        "stream": flag(),
                        "worker": text(null=True),
                        "age_s": number(),
                        "bytes": whole("Sent so far."),
                        "progress": _PROGRESS,
                    }
                )
            ),
        ),
        Operation(
            "GET",
            "/v1/admin/queue",
            "How many requests wait, and how long others have waited lately.",
            scope="admin",
            answer=record(_QUEUE),
        ),
        Operation(
            "GET",
            "/v1/admin/requests/ended",
            "The last 1000 requests that ended, newest first; never their bodies.",
            """They outlive reloads and restarts; one of an earlier daemon has an `id` with that daemon's mark before its number. Each has the fields of [the line in the log](operations.md#log), and those of
the table. `kind` in its `wait` is one of `body` (its body arrived and was read), `place` (the worker answered as many as it
may), `turn` (other models came first), `drain` (requests of a worker that had to go), `unload` (a worker ended), `memory` (memory
came back), `load`, `crash` (the pause after one), `health` (the worker did not answer), `retry` (the first worker ended),
`handover`.""",
            scope="admin",
            parameters=(
                _LIMITED,
                Parameter("model", "Only of this: the name that was asked for, or the model behind it."),
                Parameter("key", "Only of this key, by its name."),
                Parameter("tenant", "Only of this tenant."),
                Parameter("failed", "Only those that failed; `false`: the others.", flag()),
            ),
            answer=listing(_ENDED),
            example=Example(path="/v1/admin/requests/ended?limit=1"),
        ),
        Operation(
            "GET",
            "/v1/admin/requests/{id}",
            "One request, in flight or among the last 1000 that ended.",
            "By its `id` or its `x-request-id` (the latest of several). It has the same fields, and `state`, `awaits` and `decisions`. "
            "404 `request_not_found` once a thousand others have ended after it.",
            scope="admin",
            answer=_ONE,
            errors=(404,),
            example=Example(path="/v1/admin/requests/1"),
        ),
        Operation(
            "GET",
            "/v1/admin/requests/{id}/body",
            "The body of a request that has ended, and the answer, where its model has [`keep_bodies`](operations.md#bodies-of-requests).",
            scope="admin",
            answer=struct(KeptBody),
            errors=(404,),
            example=Example(
                path="/v1/admin/requests/1/body",
                needs="a model with `keep_bodies`",
                answer={
                    "request": '{\n "model": "qwen3"\n}',
                    "request_cut": False,
                    "answer": '{"choices": []}',
                    "answer_cut": False,
                    "answer_type": "application/json",
                },
            ),
        ),
        Operation(
            "DELETE",
            "/v1/admin/requests/{id}",
            "Cancel a request.",
            "Its client gets 410 `request_cancelled`. If its response has begun, a stream ends with that error, and the connection of "
            "any other response is cut.",
            scope="admin",
            answer=record({"id": text(), "cancelled": flag()}),
            errors=(404,),
            example=Example(
                path="/v1/admin/requests/7", needs="a request under way", answer={"id": "7", "cancelled": True}
            ),
        ),
        Operation(
            "GET",
            "/v1/admin/decisions",
            "The last decisions, oldest first.",
            "[Operations](operations.md#decisions) lists the kinds.",
            scope="admin",
            parameters=(
                _LIMITED,
                Parameter("model", "Only about this model."),
                Parameter("after", "Those after this number, oldest first.", whole(minimum=0)),
            ),
            answer=listing(DECISION),
            errors=(404,),
            example=Example(path="/v1/admin/decisions?limit=2"),
        ),
        Operation(
            "GET",
            "/v1/admin/events",
            "New events, as server-sent events.",
            """`id` grows by one with each event of any type. A comment comes after 10 s without an event. A client that reads too
slowly is disconnected. After any lost connection, read the state again and reconnect. At most 64 clients may listen.

| `event` | `data` |
| --- | --- |
| `decision` | As in `GET /v1/admin/decisions`. |
| `model` | The model's view, when its state or its traffic changed; `{"name": …, "state": "removed"}` after a reload without it. |
| `memory` | `devices` as in `GET /v1/admin/gpu-memory`, when they changed, at most once a second. |
| `request` | `"state": "started"` with what is known so far, then `"state": "finished"` with what [`GET /v1/admin/requests/ended`](#get-v1adminrequestsended) has of it. |
| `alert` | `at`, `code`, `message`, `device`, `model`. |
| `reload` | What a reload changed. |
| `load` | As in [`GET /v1/admin/loads`](#get-v1adminloads), when its state or its progress changed, at most once a second. |
| `progress` | `id`, `request_id`, `model`, `step` and `steps` of a request that is made in steps, as pictures: how far it is, at most twice a second. |""",
            scope="admin",
            parameters=(Parameter("types", "Which, with commas between them."),),
            answer_type=EVENTS,
            errors=(503,),
            example=Example(
                path="/v1/admin/events?types=decision",
                needs="patience: it goes on until Ctrl-C",
                answer='event: decision\nid: 1\ndata: {"seq":1,"at":1790000000.0,"kind":"load","model":"tiny-chat","reason":"requests wait for it"}\n',
            ),
        ),
        Operation(
            "GET",
            "/v1/admin/recording",
            "Everything the scheduler gets and decides from now on, as server-sent events.",
            "Each `data` is one line of a recording, the first one is the scheduler's state. An event `end` closes a whole recording. "
            "`llmux record FILE` writes the lines into a file, `llmux replay FILE` decides them again. At most four at a time.",
            scope="admin",
            parameters=(Parameter("seconds", "When it ends; a day by default.", whole(minimum=1, maximum=86_400)),),
            answer_type=EVENTS,
            errors=(503,),
            example=Example(path="/v1/admin/recording?seconds=1", answer="event: end\ndata: end\n"),
        ),
        Operation(
            "GET",
            "/v1/admin/history",
            "The last half hour.",
            """`series` are lists of equal length with one value per interval. `memory_used_mib:DEVICE`, `memory_free_mib:DEVICE`,
`queued` and `in_flight` are samples (null if there is none), as is `worker_memory_mib:DEVICE/MODEL`, what a model's worker was
measured to take there, or its lease before it was measured. `tokens_per_s` (a response's tokens, spread over its duration) and
`swaps` (models evicted for others) are counts.""",
            scope="admin",
            answer=record(
                {
                    "interval_s": number(),
                    "from": number("Seconds since 1970."),
                    "series": mapping(array(number(null=True))),
                }
            ),
        ),
    ),
)
