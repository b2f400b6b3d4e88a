"""What operators ask of models, and of their loads."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.operation import (
    EVENTS,
    PLAIN,
    Example,
    Operation,
    Parameter,
    Section,
    anything,
    array,
    choice,
    flag,
    listing,
    mapping,
    named,
    number,
    record,
    request,
    text,
    whole,
)

MEMORY: Final = {
    "lease_mib": whole(null=True),
    "measured_mib": whole(null=True),
    "parts": mapping(whole()),
    "estimate": named(record({"mib": whole(), "source": text(), "detail": text()}), "Footprint"),
    "learned": mapping(whole()),
    "raised": mapping(whole()),
    "need": mapping(anything("As `estimate`.")),
}
_FIELDS: Final = {
    "name": text("As configured."),
    "virtual_models": array(None, "As configured."),
    "runtime": text("As configured."),
    "type": text("As configured."),
    "priority": whole("As configured."),
    "pin": flag("Whether it is protected from eviction: as configured, or as set since with `…/pin`."),
    "state": text("Where the worker is in its [life](architecture.md#a-workers-life), for how long, and why."),
    "answering": flag("Whether its health check succeeds, so that it gets requests."),
    "reason": text(
        "Where the worker is in its [life](architecture.md#a-workers-life), for how long, and why.", null=True
    ),
    "since_s": number("Where the worker is in its [life](architecture.md#a-workers-life), for how long, and why."),
    "retry_s": number("Seconds until it is tried again by itself after a crash; else null.", null=True),
    "eta_s": number(
        "While it loads: the expected remaining time, from its last load or else from its size. While it drains: the time until its running requests are cut. Otherwise null.",
        null=True,
    ),
    "idle_s": number("Seconds since its last request; null while it has any.", null=True),
    "keep_alive_s": number(
        "Its keep-alive, or that of its type; null: none, it stays until its memory is needed.", null=True
    ),
    "unload_s": number(
        "Seconds until it is unloaded if nobody uses it, by the longest [keep-alive](configuration.md#how-long-a-model-stays) in force; else null.",
        null=True,
    ),
    "held_s": number(
        "Seconds during which no model of equal or lower priority evicts it (`hold_s`); else null.", null=True
    ),
    "in_flight": whole("Requests that it is working on; requests that wait for it."),
    "queued": whole("Requests that it is working on; requests that wait for it."),
    "waits_for": array(None, "Models that must be unloaded first."),
    "drain_s": number(
        "How long its running requests may go on after an unload that isn't forced; what is left then is cut."
    ),
    "device": text("Where it runs.", null=True),
    "devices": array(None, "The same as a list."),
    "remote": flag(
        "Whether another API runs it: no memory and no process here; see [runtimes](runtimes.md#openai_remote)."
    ),
    "memory": record(
        MEMORY,
        "`lease_mib` is its lease, `parts` what it has of each device. `measured_mib` is what it takes; in main memory each worker counts as if alone, so workers that share pages add up to more than is used. `estimate` is the expectation without a measurement (`mib`, `source`, `detail`), `learned` the earlier measurement by device, `raised` what it gets at least on a device since a load ran out of memory there. `need` is what the next load leases on each device, with its source: the best of these.",
    ),
    "sizing": record(
        {"context": whole(), "slots": whole(), "trained": whole(null=True), "text": text()},
        "What the runtime chose, or was told: `context` in tokens, `slots`, `trained` (the longest context that the model was made for), and all of it with the reason in `text`; null if unknown.",
        null=True,
    ),
    "warnings": array(None, "What can't be right about its memory, in sentences."),
    "worker": mapping(
        anything(),
        "`pid`, `shim_pid`, `port`, `uptime_s`, `connections`, `log`; null without a process. For a remote model `address`, `upstream_model`, `uptime_s` and `connections`; its `device` is `remote`. Where a [program](runtimes.md#claude_cli) answers, the fields of its worker and `upstream_model`.",
        null=True,
    ),
    "replicas": array(
        mapping(anything()),
        "Its workers, at most `replica_max`, usually one ([several](scheduling.md#several-workers-of-one-model)). What stands outside of this list is said of the one that answers first; `memory`, `in_flight` and `devices` of all together. Each has `worker` (name and generation), `state`, `answering`, `device`, `in_flight`, `lease_mib`, `measured_mib`, `parts`, and the fields of `worker` above.",
    ),
    "replica_max": whole("As configured."),
    "generation": whole("How often it was started."),
    "load_s": number("How long the last load took, also before a restart.", null=True),
    "crash": record(
        {"class": text(), "summary": text(), "exit_code": whole(null=True), "log_tail": array()},
        "Why it ended by itself: `class`, `summary`, `exit_code`, `log_tail`; else null.",
        null=True,
    ),
    "capabilities": mapping(
        anything(),
        "What it can do, from its files: `modalities`, `documents` (what becomes text for it: `text/plain`, and `application/pdf` with the extra `media`), `tools`, `thinking`, `thinking_modes` (what a request may choose: `default`, `enabled`, `disabled`), `multi_turn`, `context` (tokens of one request), `endpoints`; null if unknown.",
        null=True,
    ),
    "load_constraints": mapping(
        anything(), "The keys that a load may override, each with type and range as JSON Schema."
    ),
    "overrides": mapping(anything(), "The overrides of its loads."),
    "definition": mapping(anything(), "Its effective configuration. Values that look like secrets are masked."),
}
_MODEL: Final = named(record(_FIELDS), "ModelView")
_LOAD: Final = named(
    record(
        {
            "id": text(
                "Numbers grow, also over restarts. `worker`: the model or one of its replicas; `generation` once it is started."
            ),
            "model": text(
                "Numbers grow, also over restarts. `worker`: the model or one of its replicas; `generation` once it is started."
            ),
            "worker": text(
                "Numbers grow, also over restarts. `worker`: the model or one of its replicas; `generation` once it is started."
            ),
            "generation": whole(
                "Numbers grow, also over restarts. `worker`: the model or one of its replicas; `generation` once it is started.",
                null=True,
            ),
            "state": choice(
                "waiting",
                "loading",
                "ready",
                "failed",
                "cancelled",
                "interrupted",
                about="`waiting` for memory, a turn or a retry, `loading`; then `ready`, `failed`, `cancelled` or `interrupted`.",
            ),
            "reason": text("Why it waits, was begun, or ended.", null=True),
            "asked_at": number("Seconds since 1970; null: not yet."),
            "started_at": number("Seconds since 1970; null: not yet.", null=True),
            "ended_at": number("Seconds since 1970; null: not yet.", null=True),
            "waited_s": number("Until its worker was started; from then to the end, or until now."),
            "took_s": number("Until its worker was started; from then to the end, or until now.", null=True),
            "expected_s": number(
                "How long the model's last load took, null before the first; how much longer this one takes, null where that can't be said.",
                null=True,
            ),
            "eta_s": number(
                "How long the model's last load took, null before the first; how much longer this one takes, null where that can't be said.",
                null=True,
            ),
            "progress": number(
                "How much is done, from 0 to 1: the greatest of the shares of bytes read, of memory, and of what the log says."
            ),
            "stage": text("The last line of its worker's log while it loads.", null=True),
            "bytes_read": whole("Of the model's files; null: unknown.", null=True),
            "bytes_total": whole("Of the model's files; null: unknown.", null=True),
            "memory_mib": whole("What it takes so far, what it may take, and where.", null=True),
            "lease_mib": whole("What it takes so far, what it may take, and where.", null=True),
            "devices": array(None, "What it takes so far, what it may take, and where."),
        }
    ),
    "Load",
)
_NAME: Final = "/v1/admin/models/Tiny-Instruct"
_FORCE: Final = Parameter("force", "Cut the requests.", flag())
_CANCELLED: Final = {
    "id": "7",
    "model": "tiny-chat",
    "worker": "tiny-chat",
    "generation": 3,
    "state": "cancelled",
    "reason": "an operator cancelled it",
    "asked_at": 1790000000.0,
    "started_at": 1790000000.1,
    "ended_at": 1790000000.3,
    "waited_s": 0.1,
    "took_s": 0.2,
    "expected_s": 0.4,
    "eta_s": None,
    "progress": 0.5,
    "stage": None,
    "bytes_read": None,
    "bytes_total": None,
    "memory_mib": None,
    "lease_mib": 46,
    "devices": ["host"],
}
SECTION: Final = Section(
    "Administration: models",
    "What is loaded, why, and loads and unloads. `{name}` may be a model or a virtual model; the action always applies to the model.",
    (
        Operation(
            "GET",
            "/v1/admin/models",
            "All models. Each has the fields of `GET /v1/admin/models/{name}`.",
            scope="admin",
            answer=listing(_MODEL),
        ),
        Operation(
            "GET",
            "/v1/admin/models/{name}",
            "One model's whole state.",
            scope="admin",
            answer=_MODEL,
            errors=(404,),
            example=Example(path=_NAME),
        ),
        Operation(
            "POST",
            "/v1/admin/models/{name}/load",
            "Load the model; the answer is its view when it is ready.",
            """An optional body overrides keys that `load_constraints` allows; llmux never writes them to a file.

If the running worker was started with other values, a new one replaces it after its requests. Overrides stay, also through
evictions, until an operator unloads the model or loads it with others (`{}` removes all), or a reload changes its
configuration. A load without a body keeps them. 400 `invalid_override` names every key that can't be overridden this way,
with its range. A model of a backend of llm-pool's takes its names as well: `llama_server_n_ctx`, `vllm_max_model_len`.

A load gives a failed model a fresh start. It continues if the caller disconnects. If it fails, the response is 503
`load_failed` or `runtime_not_installed`.""",
            scope="admin",
            request=request({"overrides": mapping(anything(), "Keys of the configuration.", null=True)}),
            is_body_optional=True,
            answer=_MODEL,
            errors=(404, 503, 504),
            example=Example({"overrides": {"n_ctx": 1024}}, path=_NAME + "/load"),
        ),
        Operation(
            "POST",
            "/v1/admin/models/{name}/unload",
            "Unload the model after its running requests; the answer comes when its memory is back.",
            scope="admin",
            parameters=(_FORCE,),
            answer=_MODEL,
            errors=(404, 503),
            example=Example(path="/v1/admin/models/tiny-embed/unload"),
        ),
        Operation(
            "POST",
            "/v1/admin/models/{name}/pin",
            "Protect the model from eviction and from keep-alives.",
            '`{"pin": false}` removes the protection, even if the configuration pins the model. Both last until the daemon ends.',
            scope="admin",
            request=request({"pin": flag()}, "pin"),
            answer=_MODEL,
            errors=(404,),
            example=Example({"pin": True}, path=_NAME + "/pin"),
        ),
        Operation(
            "GET",
            "/v1/admin/models/{name}/logs",
            "The end of the worker's log, as plain text.",
            """`?follow=true` streams the same lines and then each new one as server-sent events, also across restarts of the worker,
until the client disconnects. Events have an `id`; a client that was cut off, because the daemon restarted for one, sends the
last one as `Last-Event-ID` and gets what was added since. Lines of llmux itself are in square brackets: that the daemon
restarted, that lines may be missing.""",
            scope="admin",
            parameters=(
                Parameter("lines", "How many at most; 200 by default.", whole(minimum=0, maximum=10_000)),
                Parameter("follow", "Go on with each new one.", flag()),
                Parameter("last-event-id", "Go on behind this one.", place="header"),
            ),
            answer_type=PLAIN,
            stream_type=EVENTS,
            errors=(404, 503),
            example=Example(path=_NAME + "/logs?lines=3"),
        ),
        Operation(
            "GET",
            "/v1/admin/loads",
            "[Loads](operations.md#loads): those that wait or run and the last 100 that ended, the newest first.",
            "`estimates` says how good the expected times were: of how many `loads`, `mean_error_s` in seconds, `mean_error` as a share "
            "of the time. Each has the fields of `GET /v1/admin/loads/{id}`.",
            scope="admin",
            answer=record(
                {
                    "object": {"const": "list"},
                    "data": array(_LOAD),
                    "estimates": record(
                        {"loads": whole(), "mean_error_s": number(null=True), "mean_error": number(null=True)}
                    ),
                }
            ),
        ),
        Operation(
            "GET",
            "/v1/admin/loads/{id}",
            "One of them.",
            "404 `load_not_found` where it isn't kept any more.",
            scope="admin",
            answer=_LOAD,
            errors=(404,),
            example=Example(path="/v1/admin/loads/1"),
        ),
        Operation(
            "DELETE",
            "/v1/admin/loads/{id}",
            "Cancel it, whether it waits or loads.",
            "Requests that wait for the model get 503 `model_unloaded`, unless another replica serves them. The next request, or "
            "`POST …/load`, begins another load. 400 `load_ended` for one that has ended.",
            scope="admin",
            answer=_LOAD,
            errors=(404,),
            example=Example(path="/v1/admin/loads/7", needs="a load under way", answer=_CANCELLED),
        ),
    ),
)
