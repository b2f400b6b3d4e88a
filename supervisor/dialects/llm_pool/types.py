"""The requests and answers of llm-pool's API."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from supervisor.dialects.openai.types import ForLlmux
from supervisor.gateway.body.typed import Sent
from supervisor.schema.operation import doc

_LANGUAGES: Final = (
    "For [translation models](runtimes.md#ctranslate2) that know several languages, by their own codes, such as `deu_Latn`, and "
    "for models with the [prompt format](configuration.md#prompt-formats) `translategemma_template`; refused by all others. The "
    "target is required. With the prompt format codes are such as `nl` or `pt-BR`, and without a source, or with `auto` or "
    "`mixed`, the model is told to detect the language of each segment."
)
Language = Annotated[str | None, doc(_LANGUAGES)]


class _Closed(Struct, forbid_unknown_fields=True):
    """A part of a request, which has no other fields."""


class LlmPoolText(_Closed, tag_field="type", tag="text"):
    text: str


class LlmPoolImageUrl(_Closed, omit_defaults=True):
    url: Annotated[str, doc("A `data:` URL.", extra_json_schema={"pattern": "^data:"})]
    detail: Literal["auto", "low", "high"] | None = None


class LlmPoolImage(_Closed, tag_field="type", tag="image_url"):
    image_url: LlmPoolImageUrl


Content = str | Annotated[list[LlmPoolText | LlmPoolImage], Meta(min_length=1)]


class LlmPoolMessage(_Closed):
    role: Literal["user", "assistant"]
    content: Content


class LlmPoolDecoding(_Closed):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: list[str] | None = None
    beam_size: Annotated[int, Meta(ge=1)] | None = None


class LlmPoolRequest(ForLlmux, Sent):
    model: str | None = None
    input: Annotated[
        Content | None,
        doc(
            'One turn: a text, or a list of `{"type": "text", "text": …}` and '
            '`{"type": "image_url", "image_url": {"url": …, "detail": …}}`. Where all are texts, they are joined without anything '
            "between them."
        ),
    ] = None
    messages: (
        Annotated[
            list[LlmPoolMessage],
            doc(
                "Several turns instead: `role` `user` or `assistant`, `content` as `input`; the last one is the user's. "
                "400 `multi_turn_unsupported` for a model whose `capabilities.multi_turn` is false.",
                min_length=1,
            ),
        ]
        | None
    ) = None
    instructions: Annotated[str | None, doc("The system prompt. Refused by translation models.")] = None
    thinking: Annotated[
        Literal["default", "enabled", "disabled"] | None,
        doc(
            "`default`, `enabled` or `disabled`, switched as the model's runtime does it. 400 `thinking_unsupported` for what isn't "
            "in its `capabilities.thinking_modes`: a virtual model that switches thinking takes nothing else."
        ),
    ] = None
    decoding: Annotated[
        LlmPoolDecoding | None,
        doc(
            "`temperature`, `top_p`, `top_k`, `repetition_penalty`, `max_tokens`, `stop` (a list, beside the strings of the model's "
            "[prompt format](configuration.md#prompt-formats)), `beam_size`. What is left out is as "
            "[configured](configuration.md#virtual_models). What the model's runtime doesn't have stands in `x-llmux-ignored`: "
            "`beam_size`, except for [ctranslate2](runtimes.md#ctranslate2), and of [remote](runtimes.md#openai_remote) models also "
            "`top_k` and `repetition_penalty`. Other names are refused."
        ),
    ] = None
    source_lang_code: Language = None
    target_lang_code: Language = None
    stream: Annotated[bool | None, doc("As everywhere.")] = None


class AnswerMetrics(Struct, gc=False):
    """What isn't known is null."""

    backend_inference_wall_ms: Annotated[
        float | None, doc("From the admission of the request to the worker, to the end of the answer.")
    ]
    engine_total_wall_ms: Annotated[float | None, doc("From when it was queued for its model.")]
    engine_outside_backend_wall_ms: Annotated[float | None, doc("The part of that before the admission.")]
    pool_total_wall_ms: Annotated[float | None, doc("From the arrival of the request.")]
    engine_queue_wait_ms: Annotated[float | None, doc("The same as `engine_outside_backend_wall_ms`.")]
    engine_tokenize_ms: Annotated[float | None, doc("Null: no worker tells.")]
    gpu_time_to_first_token_ms: Annotated[
        float | None,
        doc(
            "Up to the first token, as llama.cpp tells; in streams of other workers as seen from outside, thoughts included."
        ),
    ]
    gpu_generate_total_ms: Annotated[float | None, doc("Both together.")]
    gpu_decode_after_first_token_ms: Annotated[float | None, doc("From then on.")]
    engine_prompt_tokens: Annotated[float | None, doc("As the worker counts.")]
    engine_output_tokens: Annotated[float | None, doc("As the worker counts.")]
    engine_tokens_per_second: Annotated[
        float | None, doc("Output tokens by `gpu_generate_total_ms`, or else by `backend_inference_wall_ms`.")
    ]


class LlmPoolOutput(Struct, tag_field="type", tag="output_text"):
    text: str


class LlmPoolResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    model: str
    output: list[LlmPoolOutput]
    output_text: str
    metrics: AnswerMetrics
