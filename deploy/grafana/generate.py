"""Writes llmux.json, the Grafana dashboard, from the table below: `python deploy/grafana/generate.py`."""

from __future__ import annotations

import json
from pathlib import Path

RATE = "$__rate_interval"


def rate(metric: str, by: str = "model") -> str:
    """Series begin at 0, long before anything is counted; without it they would fill the legend."""
    return f"sum by ({by}) (rate({metric}[{RATE}])) > 0"


def quantile(metric: str, share: float, by: str = "model") -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket[{RATE}])))"


# title, unit, width (of 24), [(expression, legend)]
PANELS: list[tuple[str, str, int, list[tuple[str, str]]]] = [
    (
        "Device memory",
        "bytes",
        12,
        [
            ("llmux_device_total_bytes", "{{device}} total"),
            ("llmux_device_free_bytes", "{{device}} free"),
            ("llmux_device_available_bytes", "{{device}} available"),
            ("llmux_device_outside_bytes", "{{device}} outside"),
        ],
    ),
    (
        "Worker memory: measured and leased",
        "bytes",
        12,
        [
            ("llmux_worker_memory_bytes", "{{model}} measured"),
            ("llmux_worker_lease_bytes", "{{model}} lease"),
            ("llmux_partner_memory_bytes", "{{lease}} measured"),
            ("llmux_partner_lease_bytes", "{{lease}} lease"),
        ],
    ),
    ("Models", "short", 8, [("sum by (model, state) (llmux_model_state) > 0", "{{model}} {{state}}")]),
    ("Queue depth", "short", 8, [("llmux_queue_depth", "{{model}}")]),
    ("In flight", "short", 8, [("llmux_in_flight", "{{model}}")]),
    ("Requests", "reqps", 8, [(rate("llmux_requests_total", "model, status"), "{{model}} {{status}}")]),
    (
        "Requests by tenant",
        "reqps",
        8,
        [(rate("llmux_tenant_requests_total", "tenant, status"), "{{tenant}} {{status}}")],
    ),
    ("Refusals", "reqps", 8, [(rate("llmux_refusals_total", "reason"), "{{reason}}")]),
    (
        "Tokens out",
        "short",
        8,
        [(rate("llmux_completion_tokens_total"), "{{model}} out"), (rate("llmux_prompt_tokens_total"), "{{model}} in")],
    ),
    ("Speed of an answer, median", "short", 8, [(quantile("llmux_tokens_per_second", 0.5), "{{model}} tokens/s")]),
    ("Queue wait, p95", "s", 8, [(quantile("llmux_queue_wait_seconds", 0.95), "{{model}}")]),
    ("Time to first token, p95", "s", 8, [(quantile("gen_ai_server_time_to_first_token_seconds", 0.95), "{{model}}")]),
    (
        "Time per output token, p95",
        "s",
        8,
        [(quantile("gen_ai_server_time_per_output_token_seconds", 0.95), "{{model}}")],
    ),
    ("Request duration, p95", "s", 8, [(quantile("gen_ai_server_request_duration_seconds", 0.95), "{{model}}")]),
    ("Load time, median", "s", 8, [(quantile("llmux_load_seconds", 0.5), "{{model}}")]),
    (
        "Swaps and evictions",
        "short",
        8,
        [
            (f"sum(increase(llmux_swaps_total[{RATE}]))", "swaps"),
            (f"sum by (reason) (increase(llmux_evictions_total[{RATE}]))", "{{reason}}"),
        ],
    ),
    (
        "Crashes",
        "short",
        8,
        [(f"sum by (model, class) (increase(llmux_crashes_total[{RATE}])) > 0", "{{model}} {{class}}")],
    ),
    ("Orphans reaped at starts", "short", 8, [("llmux_orphans_reaped_total", "orphans")]),
    (
        "Log lines lost",
        "short",
        8,
        [(f"sum(increase(llmux_log_lines_dropped_total[{RATE}]))", "lines")],
    ),
    (
        "Request bodies kept",
        "bytes",
        8,
        [("llmux_body_bytes", "in {{where}}"), ("llmux_body_limit_bytes", "limit, {{where}}")],
    ),
    ("Scheduler decision, p99", "s", 8, [(quantile("llmux_decision_seconds", 0.99, "job"), "decision")]),
]


def panels() -> list[dict[str, object]]:
    placed: list[dict[str, object]] = []
    x = y = 0
    for number, (title, unit, width, queries) in enumerate(PANELS, 1):
        if x + width > 24:
            x, y = 0, y + 8
        placed.append(
            {
                "id": number,
                "type": "timeseries",
                "title": title,
                "gridPos": {"h": 8, "w": width, "x": x, "y": y},
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + i), "expr": expression, "legendFormat": legend}
                    for i, (expression, legend) in enumerate(queries)
                ],
            }
        )
        x += width
    return placed


def dashboard() -> dict[str, object]:
    return {
        "uid": "llmux",
        "title": "llmux",
        "tags": ["llmux"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": panels(),
    }


if __name__ == "__main__":
    Path(__file__).with_name("llmux.json").write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
