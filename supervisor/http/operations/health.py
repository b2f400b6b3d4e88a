"""What monitors, scrapers and browsers ask for."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.operation import (
    PLAIN,
    Example,
    Operation,
    Section,
    anything,
    array,
    choice,
    mapping,
    record,
    text,
    whole,
)

_HEALTH: Final = {
    "anyOf": [
        record({"status": choice("ok", "stopping"), "models_loaded": array(), "queued": whole()}),
        record(
            {
                "status": choice("healthy", "unhealthy"),
                "reason": choice("starting", "stopping", "gpu_oom", "all_models_failed", "queue_full"),
                "uptime": whole("Seconds."),
                "modelsLoaded": whole(),
                "queueDepth": whole(),
            },
            "With `health: runner`.",
            optional=("reason",),
        ),
    ]
}
SECTION: Final = Section(
    "Health and metrics",
    "For monitors, Prometheus and browsers.",
    (
        Operation(
            "GET",
            "/health",
            "For load balancers and monitors: 200 while the daemon serves, 503 while it stops.",
            """With `health: runner` in the section `server` the answer is `{"status": "healthy", "uptime": 86400, "modelsLoaded": 2,
"queueDepth": 3}`. It is also 503, `unhealthy` with a `reason`, when a model's last start ran out of memory (`gpu_oom`), all
models have failed (`all_models_failed`), the queue is full (`queue_full`), or memory wasn't read yet (`starting`).""",
            scope=None,
            answer=_HEALTH,
            other_statuses=(503,),
            aliases=("/v1/health",),
        ),
        Operation(
            "GET",
            "/livez",
            "200 while the process answers, whatever its models and queue do.",
            "For an orchestrator that restarts what is dead.",
            scope=None,
            answer=record({"status": {"const": "ok"}}),
        ),
        Operation(
            "GET",
            "/metrics",
            "Metrics for Prometheus, in its text format.",
            scope="metrics",
            answer_type=PLAIN,
            example=Example(
                answer='llmux_requests_total{model="Tiny-Instruct",status="200"} 1.0\n',
            ),
        ),
        Operation(
            "GET",
            "/openapi.json",
            "What llmux serves, as an OpenAPI 3.1 document.",
            "It has all paths that a configuration may serve.",
            answer=record({"openapi": text(), "info": mapping(anything()), "paths": mapping(anything())}, more=True),
            example=Example(
                answer={"openapi": "3.1.0", "info": {"title": "llmux"}, "paths": {}},
            ),
        ),
        Operation(
            "GET",
            "/",
            "`Ollama is running`, for programs; browsers get to the dashboard, at `/ui/`.",
            scope=None,
            answer_type=PLAIN,
            other_statuses=(307,),
            example=Example(answer="Ollama is running"),
        ),
        Operation(
            "GET",
            "/ui",
            "Redirects to the dashboard, at `/ui/`.",
            scope=None,
            status=307,
            example=Example(),
        ),
        Operation(
            "GET",
            "/ui/{path}",
            "The dashboard's files.",
            scope=None,
            answer_type="*/*",
            other_statuses=(304,),
            errors=(404,),
            example=Example(path="/ui/"),
        ),
    ),
)
