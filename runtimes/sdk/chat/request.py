"""Parses a request's generation parameters: sampling, limits, stop strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from runtimes.sdk import parameters
from runtimes.sdk.body import Body
from runtimes.sdk.chat.language import Language
from runtimes.sdk.errors import WorkerError, unsupported

MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 20
SEEDS: Final = 1 << 63
_SWITCH: Final = "enable_thinking"
_EFFORT: Final = "reasoning_effort"
MIN_TEMPERATURE: Final = 1e-4  # below it only the likeliest token has a chance, and scores overflow


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. `logprobs`: how many alternatives to report for each token; None: no log probabilities."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """`max_tokens` None: as many as fit into the context. `usage`: report token counts at the end of a stream."""

    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool


def generation(body: Body, language: Language, logprobs: int | None) -> Generation:
    """The generation parameters of a request. Raises WorkerError for wrong fields."""
    options = body.values.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise body.wrong_value("stream_options", "an object")
    stops = body.texts("stop", MAX_STOPS)
    if not all(stops):
        raise body.wrong_value("stop", "texts that are not empty")
    return Generation(
        sampling=_read_sampling(body, language, logprobs),
        max_tokens=body.integer("max_completion_tokens", None, 1) or body.integer("max_tokens", None, 1),
        stops=tuple(stops),
        stream=body.flag("stream"),
        usage=Body(options or {}).flag("include_usage"),
    )


def chat_logprobs(body: Body) -> int | None:
    """The number of alternatives from `logprobs` and `top_logprobs` of a chat request; None: no log probabilities."""
    top = body.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if not body.flag("logprobs"):
        if top:
            raise WorkerError("top_logprobs needs logprobs: true.", param="top_logprobs")
        return None
    return top or 0


def template_arguments(body: Body, language: Language) -> dict[str, object]:
    """Arguments for the chat template. Raises WorkerError for unknown arguments, and for an unknown effort.

    A template without `enable_thinking` ignores that argument: clients and defaults set it for all models alike. A request
    with both an effort and `enable_thinking` says the same twice: the template gets those that it has.
    """
    arguments = body.values.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise body.wrong_value("chat_template_kwargs", "an object")
    effort = body.text("reasoning_effort")
    template = language.template
    has_switch = _SWITCH in template
    always_allowed = {_SWITCH} if effort is None else {_SWITCH, _EFFORT}
    for name in arguments:
        if name not in always_allowed and name not in template:
            raise unsupported("chat_template_kwargs", f"this model's chat template has no argument {name!r}")
    if effort is None:
        if _SWITCH in arguments and not has_switch:
            parameters.without_effect(f"chat_template_kwargs.{_SWITCH}")
        return {name: value for name, value in arguments.items() if has_switch or name != _SWITCH}
    if _EFFORT in template:
        if effort not in {"low", "medium", "high"}:
            raise unsupported("reasoning_effort", f"this model knows low, medium and high, not {effort!r}")
        known = {name: value for name, value in arguments.items() if has_switch or name != _SWITCH}
        return {_EFFORT: effort, **known}
    if has_switch and (effort == "none" or _SWITCH in arguments):
        return {_SWITCH: False, **{name: arguments[name] for name in arguments if name != _EFFORT}}
    raise unsupported("reasoning_effort", "this model has no such levels")


def token_budget(requested: int | None, prompt: int, context: int, param: str, key: str) -> int:
    """The number of tokens that may be generated. `key` is the name of the configuration key for the context.

    Raises WorkerError if the prompt leaves no room.
    """
    if prompt >= context:
        message = (
            f"This model's context is {context} tokens, and the prompt has {prompt}. Shorten it, or raise {key} if the"
            " model was made for more."
        )
        raise WorkerError(message, code="context_length_exceeded", param=param)
    return context - prompt if requested is None else min(requested, context - prompt)


def _read_sampling(body: Body, language: Language, logprobs: int | None) -> Sampling:
    default = language.defaults.get
    penalty = body.number("repetition_penalty", None, 0.01, 10) or body.number("repeat_penalty", None, 0.01, 10)
    temperature = body.number("temperature", default("temperature", 1.0), 0, 10)
    return Sampling(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0,
        top_p=body.number("top_p", default("top_p", 1.0), 0, 1),
        top_k=max(body.integer("top_k", int(default("top_k", 0)), -1), 0),
        min_p=body.number("min_p", default("min_p", 0.0), 0, 1),
        repetition_penalty=default("repetition_penalty", 1.0) if penalty is None else penalty,
        presence_penalty=body.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=body.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_read_logit_bias(body, language),
        seed=body.integer("seed", None, -SEEDS, SEEDS - 1),
        logprobs=logprobs,
    )


def _read_logit_bias(body: Body, language: Language) -> dict[int, float]:
    given = body.values.get("logit_bias") or {}
    size = language.vocabulary
    expected = f"an object of token ids (below {size}) with numbers from -100 to 100"
    if not isinstance(given, dict):
        raise body.wrong_value("logit_bias", expected)
    out: dict[int, float] = {}
    for key, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < size and number):
            raise body.wrong_value("logit_bias", expected)
        out[int(key)] = float(value)
    return out
