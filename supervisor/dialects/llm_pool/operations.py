"""llm-pool's requests to `/v1/responses`."""

from __future__ import annotations

from typing import Final

from supervisor.schema.operation import (
    EVENTS,
    Example,
    Operation,
    Schema,
    Section,
    array,
    choice,
    flag,
    named,
    number,
    record,
    request,
    text,
    whole,
)

_IMAGE: Final = request(
    {"url": text("A `data:` URL.", pattern="^data:"), "detail": choice("auto", "low", "high")}, "url"
)
_CONTENT: Final[Schema] = {
    "anyOf": [
        text(),
        array(
            {
                "oneOf": [
                    request({"type": {"const": "text"}, "text": text()}, "type", "text"),
                    request({"type": {"const": "image_url"}, "image_url": _IMAGE}, "type", "image_url"),
                ]
            },
            minItems=1,
        ),
    ]
}
_MS: Final = {
    "backend_inference_wall_ms": "From the admission of the request to the worker, to the end of the answer.",
    "engine_total_wall_ms": "From when it was queued for its model.",
    "engine_outside_backend_wall_ms": "The part of that before the admission.",
    "pool_total_wall_ms": "From the arrival of the request.",
    "engine_queue_wait_ms": "The same as `engine_outside_backend_wall_ms`.",
    "engine_tokenize_ms": "Null: no worker tells.",
    "gpu_time_to_first_token_ms": "Up to the first token, as llama.cpp tells; in streams of other workers as seen from "
    "outside, thoughts included.",
    "gpu_generate_total_ms": "Both together.",
    "gpu_decode_after_first_token_ms": "From then on.",
    "engine_prompt_tokens": "As the worker counts.",
    "engine_output_tokens": "As the worker counts.",
    "engine_tokens_per_second": "Output tokens by `gpu_generate_total_ms`, or else by `backend_inference_wall_ms`.",
}
_LANGUAGES: Final = (
    "For [translation models](runtimes.md#ctranslate2) that know several languages, by their own codes, such as `deu_Latn`, and "
    "for models with the [prompt format](configuration.md#prompt-formats) `translategemma_template`; refused by all others. The "
    "target is required. With the prompt format codes are such as `nl` or `pt-BR`, and without a source, or with `auto` or "
    "`mixed`, the model is told to detect the language of each segment."
)
METRICS: Final = record({name: number(about, null=True) for name, about in _MS.items()}, "What isn't known is null.")

SECTION: Final = Section(
    "llm-pool",
    "The requests of llm-pool, on the path of OpenAI's Responses: they are told by their fields.",
    (
        Operation(
            "POST",
            "/v1/responses",
            "As llm-pool asks.",
            "A stream has the events `response.created`, `response.output_text.delta` for each piece of text as it comes, "
            "`response.metrics` and `response.completed`, which has the whole answer. A failure is an event `error`, after which "
            "none follows. What the model thinks is no part of the text.",
            request=named(
                request(
                    {
                        "model": text(),
                        "input": {
                            **_CONTENT,
                            "description": 'One turn: a text, or a list of `{"type": "text", "text": …}` and '
                            '`{"type": "image_url", "image_url": {"url": …, "detail": …}}`. Where all are texts, they '
                            "are joined without anything between them.",
                        },
                        "messages": array(
                            request({"role": choice("user", "assistant"), "content": _CONTENT}, "role", "content"),
                            "Several turns instead: `role` `user` or `assistant`, `content` as `input`; the last one is the user's. "
                            "400 `multi_turn_unsupported` for a model whose `capabilities.multi_turn` is false.",
                            minItems=1,
                        ),
                        "instructions": text("The system prompt. Refused by translation models.", null=True),
                        "thinking": choice(
                            "default",
                            "enabled",
                            "disabled",
                            null=True,
                            about="`default`, `enabled` or `disabled`, switched as the model's runtime does it. 400 `thinking_unsupported` for what isn't in its "
                            "`capabilities.thinking_modes`: a virtual model that switches thinking takes nothing else.",
                        ),
                        "decoding": request(
                            {
                                "temperature": number(null=True),
                                "top_p": number(null=True),
                                "top_k": whole(null=True),
                                "repetition_penalty": number(null=True),
                                "max_tokens": whole(null=True, minimum=1),
                                "stop": array(null=True),
                                "beam_size": whole(null=True, minimum=1),
                            },
                            about="`temperature`, `top_p`, `top_k`, `repetition_penalty`, `max_tokens`, `stop` (a list, "
                            "beside the strings of the model's [prompt format](configuration.md#prompt-formats)), `beam_size`. What is left out is as [configured](configuration.md#virtual_models). What the "
                            "model's runtime doesn't have stands in `x-llmux-ignored`: `beam_size`, except for [ctranslate2](runtimes.md#ctranslate2), and of "
                            "[remote](runtimes.md#openai_remote) models also `top_k` and `repetition_penalty`. Other names are "
                            "refused.",
                        ),
                        "source_lang_code": text(_LANGUAGES, null=True),
                        "target_lang_code": text(_LANGUAGES, null=True),
                        "stream": flag("As everywhere.", null=True),
                        "allow_remote": flag("As everywhere."),
                    },
                    more=True,
                ),
                "LlmPoolRequest",
            ),
            answer=named(
                record(
                    {
                        "id": text(),
                        "object": {"const": "response"},
                        "model": text(),
                        "output": array(record({"type": {"const": "output_text"}, "text": text()})),
                        "output_text": text(),
                        "metrics": METRICS,
                    }
                ),
                "LlmPoolResponse",
            ),
            stream_type=EVENTS,
            is_run=True,
            example=Example(
                {
                    "model": "Tiny-Instruct",
                    "instructions": "Translate to Dutch.",
                    "input": "Good morning.",
                    "thinking": "disabled",
                    "decoding": {"temperature": 0, "max_tokens": 256},
                }
            ),
        ),
    ),
)
