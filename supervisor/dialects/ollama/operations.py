"""What Ollama's clients ask for."""

from __future__ import annotations

from typing import Any, Final

from supervisor.schema.operation import (
    LINES,
    Example,
    Method,
    Operation,
    Schema,
    Section,
    anything,
    array,
    choice,
    flag,
    mapping,
    named,
    number,
    record,
    request,
    text,
    whole,
)

_ERROR: Final = named(record({"error": text("What is wrong, and what to do.")}), "OllamaError")
_KEEP_ALIVE: Final = {
    "anyOf": [number(), text(pattern=r"^-?([0-9]{1,6}(ms|s|m|h)){1,3}$|^-?[0-9]{1,6}$")],
    "description": "For how long the model stays: seconds, or a duration such as `5m`. 0 with nothing to answer unloads it "
    "after its running requests, which needs the scope `admin`.",
}
_OPTIONS: Final = request(
    {
        **{name: number() for name in ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty")},
        **{name: whole() for name in ("top_k", "seed", "num_predict", "repeat_last_n")},
        **{name: number() for name in ("presence_penalty", "frequency_penalty")},
        "stop": {"anyOf": [text(), array()]},
    },
    more=True,
)
_PICTURES: Final = array(
    text("Base64, of a JPEG, PNG, WebP, GIF or BMP.", pattern="^(/9j/|iVBORw0KGgo|UklGR|R0lGOD|Qk)")
)
_THINK: Final = {"anyOf": [flag(), choice("low", "medium", "high")]}
_COMMON: Final = {
    "model": text("A public name, also with `:latest`."),
    "stream": flag("Send lines as they come, which is the default."),
    "options": _OPTIONS,
    "think": _THINK,
    "format": {"anyOf": [choice("json", ""), mapping(anything(), "A JSON schema.")]},
    "keep_alive": _KEEP_ALIVE,
}
_MESSAGE: Final = named(
    request(
        {
            "role": choice("system", "user", "assistant", "tool"),
            "content": text(),
            "thinking": text(),
            "images": _PICTURES,
            "tool_name": text(
                "Whose result it is; without it and `tool_call_id`, that of the oldest call that has none."
            ),
            "tool_call_id": text(),
            "tool_calls": array(
                request(
                    {
                        "id": text("What `tool_call_id` of its result says."),
                        "function": request({"name": text(), "arguments": mapping(anything())}, "name", more=True),
                    },
                    "function",
                    more=True,
                )
            ),
        },
        "role",
        more=True,
    ),
    "OllamaMessage",
)
_FIGURES: Final = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)
_ANSWER: Final = {
    "model": text(),
    "created_at": text(),
    "done": flag(),
    "done_reason": text(),
    **{name: whole("Nanoseconds." if name.endswith("duration") else "Tokens.") for name in _FIGURES},
}
_OPTIONAL: Final = ("done_reason", *_FIGURES)
_DETAILS: Final = record(
    {
        "parent_model": text(),
        "format": text(),
        "family": text(),
        "families": array(),
        "parameter_size": text(),
        "quantization_level": text(),
    }
)
_ENTRY: Final = {"name": text(), "model": text(), "digest": text("A hash of the name."), "details": _DETAILS}
_NAMED: Final = request({"model": text(), "name": text("What older clients call it.")}, more=True)


def _refused(method: Method, path: str) -> Operation:
    asked = path.replace("{digest}", "sha256:0")
    return Operation(
        method,
        path,
        "Refused: models come from the configuration.",
        scope="admin",
        status=501,
        answer=_ERROR if method != "HEAD" else None,
        example=Example(
            needs="Ollama: it is refused here",
            path=asked,
            answer=None
            if method == "HEAD"
            else {
                "error": f"{asked} is not offered: the models come from llmux's configuration. Its operator adds one with "
                "`llmux add` and removes one with `llmux remove`."
            },
        ),
    )


def _run(path: str, summary: str, asked: Schema, answer: Schema, body: dict[str, Any], **more: Any) -> Operation:
    return Operation("POST", path, summary, request=asked, answer=answer, is_run=True, example=Example(body), **more)


_HELLO: Final = [{"role": "user", "content": "Hello"}]
_ABOUT_EMPTY: Final = "Without a prompt it loads its model, or, with `keep_alive: 0`, unloads it."
SECTION: Final = Section(
    "Ollama",
    "Ollama's API, for clients that know no other.",
    (
        _run(
            "/api/chat",
            "Let a model answer a conversation.",
            named(
                request(
                    {**_COMMON, "messages": array(_MESSAGE), "tools": array(anything("As in chat completions."))},
                    "model",
                    more=True,
                ),
                "OllamaChatRequest",
            ),
            named(
                record(
                    {
                        **_ANSWER,
                        "message": record(
                            {
                                "role": {"const": "assistant"},
                                "content": text(),
                                "thinking": text(),
                                "tool_calls": array(anything()),
                            },
                            optional=("thinking", "tool_calls"),
                            more=True,
                        ),
                    },
                    optional=_OPTIONAL,
                    more=True,
                ),
                "OllamaChat",
            ),
            {"model": "Tiny-Instruct:latest", "messages": _HELLO, "stream": False, "keep_alive": "10m"},
            stream_type=LINES,
            description="Without messages it loads its model, or, with `keep_alive: 0`, unloads it.",
        ),
        _run(
            "/api/generate",
            "Let a model answer a prompt.",
            named(
                request(
                    {**_COMMON, "prompt": text(), "system": text(), "images": _PICTURES},
                    "model",
                    more=True,
                ),
                "OllamaGenerateRequest",
            ),
            named(
                record(
                    {**_ANSWER, "response": text(), "thinking": text()},
                    optional=("thinking", *_OPTIONAL),
                    more=True,
                ),
                "OllamaGeneration",
            ),
            {"model": "Tiny-Instruct", "prompt": "Hello", "stream": False},
            stream_type=LINES,
            description=_ABOUT_EMPTY,
        ),
        _run(
            "/api/embed",
            "Turn texts into vectors.",
            request(
                {
                    "model": text(),
                    "input": {"anyOf": [text(), array()]},
                    "dimensions": whole(minimum=1),
                    "truncate": flag(),
                    "options": mapping(anything()),
                    "keep_alive": _KEEP_ALIVE,
                },
                "model",
                more=True,
            ),
            record(
                {
                    "model": text(),
                    "embeddings": array(array(number())),
                    "total_duration": whole(),
                    "load_duration": whole(),
                    "prompt_eval_count": whole(),
                }
            ),
            {"model": "tiny-embed", "input": []},
            description="Without a text it loads its model.",
        ),
        _run(
            "/api/embeddings",
            "The older way to turn a text into a vector.",
            request(
                {
                    "model": text(),
                    "prompt": text(),
                    "options": mapping(anything()),
                    "keep_alive": _KEEP_ALIVE,
                },
                "model",
                more=True,
            ),
            record({"embedding": array(number())}),
            {"model": "tiny-embed", "prompt": ""},
            description="Without a text it loads its model.",
        ),
        Operation(
            "GET",
            "/api/tags",
            "The public names of models that chat or embed, loaded or not; those without a tag have `:latest`.",
            "`digest` is a hash of the name, `size` that of its weights in bytes (0: unknown).",
            answer=record({"models": array(record({**_ENTRY, "modified_at": text(), "size": whole()}))}),
        ),
        Operation(
            "GET",
            "/api/ps",
            "Those that are loaded, with what their worker takes.",
            "It is `size`, and of that `size_vram` on GPUs. `expires_at` is a century away for a model that stays until its "
            "memory is needed.",
            answer=record(
                {
                    "models": array(
                        record(
                            {
                                **_ENTRY,
                                "size": whole(),
                                "size_vram": whole(),
                                "expires_at": text(),
                                "context_length": whole(),
                            }
                        )
                    )
                }
            ),
        ),
        Operation(
            "POST",
            "/api/show",
            "What a model can do.",
            "`capabilities` has `completion`, `embedding`, `vision`, `tools` and `thinking`, as far as they are known; "
            "`model_info` the architecture and its `context_length`. Templates, parameters and licences are not shown.",
            request=_NAMED,
            answer=record(
                {
                    "modelfile": text(),
                    "parameters": text(),
                    "template": text(),
                    "details": _DETAILS,
                    "model_info": mapping(anything()),
                    "capabilities": array(),
                    "modified_at": text(),
                }
            ),
            errors=(404,),
            example=Example({"model": "Tiny-Instruct"}),
        ),
        Operation(
            "GET",
            "/api/version",
            "The version of Ollama's API that these paths are made for, not llmux's own.",
            answer=record({"version": text()}),
        ),
        Operation(
            "POST",
            "/api/pull",
            "Fetch the missing files of a configured model; `success` for one that is there.",
            "Files are fetched from the model's `source`, where `server.allow_pull` is on; a pull whose client leaves goes on. Any other "
            "model is refused: operators add models, with `llmux add`.",
            scope="admin",
            request=_NAMED,
            answer=record({"status": {"const": "success"}}),
            stream_type=LINES,
            errors=(404, 501),
            example=Example({"model": "Tiny-Instruct", "stream": False}),
        ),
        _refused("POST", "/api/push"),
        _refused("POST", "/api/create"),
        _refused("POST", "/api/copy"),
        _refused("DELETE", "/api/delete"),
        _refused("HEAD", "/api/blobs/{digest}"),
        _refused("POST", "/api/blobs/{digest}"),
    ),
    _ERROR,
)
