"""Every metric of llmux's own: its name, type, labels and meaning. /metrics and docs/reference/metrics.md show these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Type = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Described:
    """A metric. The samples of a counter have names with the suffix `_total`."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str

    @property
    def sample_name(self) -> str:
        """Its name in Prometheus's queries."""
        return f"{self.name}_total" if self.type == "counter" else self.name

    def gauge(self, value: float | None = None) -> GaugeMetricFamily:
        """A family to add samples to, or the only sample of a gauge without labels."""
        return GaugeMetricFamily(self.name, self.help, value=value, labels=None if value is not None else self.labels)

    def counter(self) -> CounterMetricFamily:
        """A family to add samples to."""
        return CounterMetricFamily(self.name, self.help, labels=self.labels)


ALL: Final[list[Described]] = []


def _add(name: str, type_: Type, about: str, *labels: str) -> Described:
    ALL.append(described := Described(name, type_, labels, about))
    return described


REQUESTS: Final = _add(
    "llmux_requests",
    "counter",
    "Requests that ended, by the status of the answer; of an answer that broke off, by the status of its error. Unknown model names"
    " count as `unknown`.",
    "model",
    "status",
)
TENANT_REQUESTS: Final = _add(
    "llmux_tenant_requests",
    "counter",
    "Requests that ended, by tenant. Tenants that neither a key nor a profile names count as `other`.",
    "tenant",
    "status",
)
PROMPT_TOKENS: Final = _add("llmux_prompt_tokens", "counter", "Tokens of prompts.", "model")
COMPLETION_TOKENS: Final = _add("llmux_completion_tokens", "counter", "Tokens of answers.", "model")
QUEUE_WAIT: Final = _add(
    "llmux_queue_wait_seconds", "histogram", "From a request's arrival until a worker gets it.", "model"
)
DURATION: Final = _add(
    "gen_ai_server_request_duration_seconds", "histogram", "From a request's arrival to its end.", "model"
)
FIRST_TOKEN: Final = _add(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "From the moment when a worker gets the request to the first piece of its answer.",
    "model",
)
PER_TOKEN: Final = _add(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "Time for each token after the first, in streamed answers.",
    "model",
)
SPEED: Final = _add(
    "llmux_tokens_per_second", "histogram", "Tokens of an answer per second while a worker had its request.", "model"
)
REFUSALS: Final = _add(
    "llmux_refusals", "counter", "Requests that no worker got; the reason is the error's code.", "reason"
)
LOAD: Final = _add("llmux_load_seconds", "histogram", "From the start of a worker until it is ready.", "model")
SWAPS: Final = _add("llmux_swaps", "counter", "Loads for which another model was evicted.", "model")
EVICTIONS: Final = _add("llmux_evictions", "counter", "Workers that were stopped.", "model", "reason")
CRASHES: Final = _add("llmux_crashes", "counter", "Workers that ended by themselves.", "model", "class")
LOG_LINES_DROPPED: Final = _add(
    "llmux_log_lines_dropped",
    "counter",
    "Lines of the daemon's log that were lost: nobody read them in time, or they could not be written.",
)
ORPHANS: Final = _add(
    "llmux_orphans_reaped", "counter", "Processes of an earlier run that the daemon killed at its start."
)
DECISION: Final = _add("llmux_decision_seconds", "histogram", "How long a decision of the scheduler took.")
BUILD: Final = _add("llmux_build_info", "gauge", "Always 1.", "version")
MODEL_STATE: Final = _add("llmux_model_state", "gauge", "1 for the current state of a model.", "model", "state")
QUEUE_DEPTH: Final = _add("llmux_queue_depth", "gauge", "Requests that wait for a model.", "model")
IN_FLIGHT: Final = _add("llmux_in_flight", "gauge", "Requests that a model's workers have.", "model")
BODIES: Final = _add(
    "llmux_body_bytes", "gauge", "Size of the request bodies that the daemon keeps, in `memory` or on `disk`.", "where"
)
BODY_LIMIT: Final = _add("llmux_body_limit_bytes", "gauge", "How much these bodies may take there.", "where")
DEVICE_TOTAL: Final = _add("llmux_device_total_bytes", "gauge", "Memory of a device that llmux may use.", "device")
DEVICE_FREE: Final = _add("llmux_device_free_bytes", "gauge", "Memory that was free at the last reading.", "device")
DEVICE_AVAILABLE: Final = _add("llmux_device_available_bytes", "gauge", "Memory that a new lease may take.", "device")
DEVICE_OUTSIDE: Final = _add("llmux_device_outside_bytes", "gauge", "Memory that other programs use.", "device")
WORKER_LEASE: Final = _add("llmux_worker_lease_bytes", "gauge", "Memory leased to a worker.", "model", "device")
WORKER_MEMORY: Final = _add(
    "llmux_worker_memory_bytes", "gauge", "Memory that a worker was measured to take.", "model", "device"
)
PARTNER_LEASE: Final = _add("llmux_partner_lease_bytes", "gauge", "Memory leased to a partner.", "lease", "device")
PARTNER_MEMORY: Final = _add(
    "llmux_partner_memory_bytes", "gauge", "Memory that a partner was measured to take.", "lease", "device"
)
TASKS: Final = _add("asyncio_tasks", "gauge", "Tasks of the daemon's event loop.")

# Under the names that schedulers of model runners look for: see `runner_metrics`.
RUNNER_REQUESTS: Final = _add(
    "vllm_requests", "counter", "Requests that ended, by `success` or `error`.", "model", "tenant", "status"
)
RUNNER_WORK: Final = _add(
    "vllm_inference_duration_seconds",
    "histogram",
    "From the moment when a worker gets the request to its end.",
    "model",
)
RUNNER_QUEUE_WAIT: Final = _add(
    "vllm_queue_wait_seconds", "histogram", "From a request's arrival until a worker gets it.", "model"
)
RUNNER_CACHE_HITS: Final = _add(
    "vllm_cache_hit_rate",
    "gauge",
    "Share of the prompts' tokens that were cached, from answers that say how many were.",
    "model",
)
RUNNER_QUEUE_DEPTH: Final = _add("vllm_queue_depth", "gauge", "Requests that wait, for whatever model.")
RUNNER_GPU_MEMORY: Final = _add("vllm_gpu_memory_used", "gauge", "Memory in use on a GPU, in bytes.", "gpu")
RUNNER_MODEL_MEMORY: Final = _add(
    "vllm_model_memory_bytes",
    "gauge",
    "Memory of loaded models: `weights` and `kv_cache` as computed, `other` for the rest that was measured or leased.",
    "model",
    "part",
)
