"""How a worker treats each parameter of the language model endpoints: used, ignored or refused."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.parameters import Table, ignored, refused, used

_SAMPLING: Final[Table] = {
    "model": used("chooses the model; the supervisor has done so"),
    "stream": used(),
    "stream_options": used("`include_usage`"),
    "max_tokens": used("default, and at most: what the prompt leaves of the context"),
    "temperature": used("0: always the likeliest token. Default: the model's generation_config.json, else 1"),
    "top_p": used("default as with temperature"),
    "top_k": used("0 or -1: off; default as with temperature"),
    "min_p": used("default as with temperature"),
    "repetition_penalty": used("over prompt and answer"),
    "repeat_penalty": used("another name of repetition_penalty"),
    "presence_penalty": used("over the answer"),
    "frequency_penalty": used("over the answer"),
    "logit_bias": used("by token id"),
    "seed": used("same seed, same text, within what arithmetic allows"),
    "stop": used("up to 16 strings; thoughts don't count"),
    "n": refused("this runtime gives one answer a request; send several requests", 1),
    "beam_size": ignored("there are no beams here: each token is chosen once"),
    "user": ignored("for the caller's own books"),
    "metadata": ignored("for the caller's own books"),
    "store": ignored("nothing is stored"),
    "service_tier": ignored("there is one tier"),
    "safety_identifier": ignored("for the caller's own books"),
    "prompt_cache_key": ignored("prompts are read anew each time"),
    "prompt_cache_retention": ignored("prompts are read anew each time"),
    **{
        name: refused("use response_format in /v1/chat/completions")
        for name in ("grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
    },
    "min_tokens": refused("an answer ends where the model ends it", 0),
    "ignore_eos": refused("an answer ends where the model ends it", False),
}

CHAT: Final[Table] = {
    **_SAMPLING,
    "messages": used("text; pictures as data URLs for models that see"),
    "max_completion_tokens": used("same as max_tokens; wins over it"),
    "logprobs": used("of the answer's tokens, before temperature and penalties"),
    "top_logprobs": used("up to 20"),
    "tools": used("functions, for models whose chat template knows tools; `strict` where a call is asked for"),
    "tool_choice": used("auto, none, required, or one function; arguments that are asked for follow their schema"),
    "parallel_tool_calls": used("false: the answer ends after its first call"),
    "chat_template_kwargs": used(
        "arguments of the model's chat template; without effect, `enable_thinking` where it has no such switch"
    ),
    "reasoning_effort": used("for chat templates that know it; `none` turns thinking off where it can be"),
    "modalities": refused("answers are text", ["text"]),
    "response_format": used("text, json_object, or json_schema, strict or not: no other answer can be generated"),
    "prediction": ignored("it would only change the speed"),
    "verbosity": refused("no model here knows it", "medium"),
    "audio": refused("answers are text"),
    "web_search_options": refused("there is no web here"),
    "functions": refused("use tools"),
    "function_call": refused("use tool_choice"),
}

COMPLETIONS: Final[Table] = {
    **_SAMPLING,
    "prompt": used("a text, or a list of token ids"),
    "logprobs": used(
        "a number: so many likely tokens with each, up to 20; text_offset counts characters of the answer"
    ),
    "skip_special_tokens": used("false: special tokens stand in the text, but for those that end it"),
    "best_of": refused("this runtime gives one answer a request", 1),
    "echo": refused("the prompt's own text isn't given back", False),
    "suffix": refused("this runtime only continues texts", ""),
}
