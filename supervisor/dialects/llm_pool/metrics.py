"""The times and tokens in an answer: llm-pool's metrics. Responses in OpenAI's format get them, too.

llm-pool's timers are nested: the pool's time includes the engine's, and that includes the backend's. Here the backend's time
begins with the admission to the worker, the engine's in the model's queue, and the pool's when the request arrives.
"""

from __future__ import annotations

from supervisor.dialects import chat
from supervisor.dialects.llm_pool.types import AnswerMetrics
from supervisor.gateway.filters.translation import Times


def metrics_of(measured: chat.Measured, times: Times | None, now: float) -> AnswerMetrics:
    """The metrics at the end of an answer, in milliseconds and tokens. Unknown ones are None."""
    arrived_at, entered_at, admitted_at = (
        (None, None, None) if times is None else (times.arrived_at, times.entered_at, times.admitted_at)
    )
    backend_ms, queued_ms = _ms_between(admitted_at, now), _ms_between(entered_at, admitted_at)
    first_ms, rest_ms = _generation_ms(measured, admitted_at, now)
    generated_ms = None if first_ms is None or rest_ms is None else first_ms + rest_ms
    tokens = None if measured.usage is None else measured.usage.completion_tokens
    took_ms = generated_ms or backend_ms
    return AnswerMetrics(
        backend_inference_wall_ms=_rounded(backend_ms),
        engine_total_wall_ms=_rounded(_ms_between(entered_at, now)),
        engine_outside_backend_wall_ms=_rounded(queued_ms),
        pool_total_wall_ms=_rounded(_ms_between(arrived_at, now)),
        engine_queue_wait_ms=_rounded(queued_ms),
        engine_tokenize_ms=None,
        gpu_time_to_first_token_ms=_rounded(first_ms),
        gpu_generate_total_ms=_rounded(generated_ms),
        gpu_decode_after_first_token_ms=_rounded(rest_ms),
        engine_prompt_tokens=None if measured.usage is None else measured.usage.prompt_tokens,
        engine_output_tokens=tokens,
        engine_tokens_per_second=_rounded(1000 * tokens / took_ms) if tokens is not None and took_ms else None,
    )


def _generation_ms(measured: chat.Measured, admitted_at: float | None, now: float) -> tuple[float | None, float | None]:
    """Milliseconds until the first token, and after it: reported by the worker, else measured here."""
    if measured.timings is not None and measured.timings.predicted_ms is not None:
        return measured.timings.prompt_ms, measured.timings.predicted_ms
    return _ms_between(admitted_at, measured.first_at), _ms_between(measured.first_at, now)


def _ms_between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin) * 1000


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
