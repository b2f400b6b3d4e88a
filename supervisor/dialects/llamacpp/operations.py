"""What llama.cpp's server has besides OpenAI's API: its router's management of models, and its own paths of inference."""

from __future__ import annotations

from typing import Any, Final

from supervisor.dialects.openai.schemas import CHAT_REQUEST, RERANK_REQUEST, RERANKED, RERANKING, STATUS, X_FIELDS
from supervisor.schema.operation import (
    EVENTS,
    Example,
    Operation,
    Parameter,
    Schema,
    Section,
    anything,
    array,
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

_ENTRY: Final = record(
    {
        "id": text(),
        "name": text(),
        "object": {"const": "model"},
        "owned_by": {"const": "llmux"},
        "created": whole(),
        "status": STATUS,
    }
)
_NAMED: Final = request({"model": text("A public name.")}, "model", more=True)
_MODEL: Final = Parameter("model", "Whose worker is asked; needless where only one model serves the path.")
_TEXT: Final = named(
    record({"content": text(), "stop": flag()}, more=True, optional=("stop",)),
    "LlamaCppCompletion",
)
_CUT: Final = {"n_predict": whole("Tokens at most; -1: as many as it takes."), "stream": flag(), **X_FIELDS}


def _run(path: str, summary: str, asked: Schema, answer: Schema, body: dict[str, Any], **more: Any) -> Operation:
    example = more.pop("example", None) or Example({"model": "Tiny-Instruct", **body})
    return Operation("POST", path, summary, request=asked, answer=answer, is_run=True, example=example, **more)


def _asked(*needed: str, **fields: Schema) -> Schema:
    return request({"model": text(), **fields}, *needed, more=True)


_PROPS: Final = record(
    {
        "role": {"const": "router"},
        "max_instances": whole("`limits.max_loaded` of language models; 0: as many as fit."),
        "models_autoload": {"const": True},
        "model_alias": text(),
        "model_path": text(),
        "default_generation_settings": mapping(anything()),
        "ui_settings": mapping(anything()),
        "build_info": text(),
    },
    more=True,
)
_RERANKED: Final = Example(
    **RERANKED,
    answer={"model": "reranker", "results": [{"index": 0, "relevance_score": 0.98}]},
)
SECTION: Final = Section(
    "llama.cpp",
    "The paths of llama.cpp's server, and of its router.",
    (
        Operation(
            "GET",
            "/models",
            "The same names as `GET /v1/models`, each with its `status.value`.",
            "It is `unloaded`, `loading`, `loaded` or `failed`. `failed` comes with `exit_code` and `reason`.",
            answer=listing(_ENTRY),
        ),
        Operation(
            "POST",
            "/models/load",
            "Load a model.",
            "The answer comes at once; the list and the stream show when the model is loaded.",
            scope="admin",
            request=_NAMED,
            answer=record({"success": {"const": True}}),
            errors=(404, 503),
            example=Example({"model": "Tiny-Instruct"}),
        ),
        Operation(
            "POST",
            "/models/unload",
            "Unload a model after its running requests.",
            "The answer comes at once.",
            scope="admin",
            request=_NAMED,
            answer=record({"success": {"const": True}}),
            errors=(404, 503),
            example=Example({"model": "Tiny-Other"}),
        ),
        Operation(
            "GET",
            "/models/sse",
            "Server-sent events: the status of every model, then each change.",
            answer_type=EVENTS,
            errors=(503,),
            example=Example(
                needs="patience: it goes on until Ctrl-C",
                answer='data: {"model":"Tiny-Instruct","event":"model_status","data":{"status":"unloaded"}}\n\n'
                'data: {"model":"Tiny-Instruct","event":"status_change","data":{"status":"loading"}}\n',
            ),
        ),
        Operation(
            "GET",
            "/props",
            "That this is a router.",
            "With `?model=NAME` the answer is that of the model's worker.",
            parameters=(_MODEL,),
            answer={"anyOf": [_PROPS, mapping(anything(), "A worker's own.")]},
            errors=(404, 429, 502, 503, 504),
        ),
        _run(
            "/completion",
            "Continue a text, in llama.cpp's own format.",
            _asked("prompt", prompt=anything("A text, tokens, or a list of them."), **_CUT),
            _TEXT,
            {"prompt": "Hello", "n_predict": 8},
            stream_type=EVENTS,
        ),
        _run(
            "/infill",
            "Fill in the middle.",
            _asked(
                "input_prefix",
                "input_suffix",
                input_prefix=text(),
                input_suffix=text(),
                prompt=text(),
                **_CUT,
            ),
            _TEXT,
            {},
            stream_type=EVENTS,
            example=Example(
                {"model": "coder", "input_prefix": "def one():\n    return ", "input_suffix": "\n"},
                needs="a model that can fill in",
                answer={"content": "1", "stop": True},
            ),
        ),
        _run(
            "/embedding",
            "Turn texts into vectors, in llama.cpp's own format.",
            _asked("content", content=anything("A text or a list of texts."), **X_FIELDS),
            array(record({"index": whole(), "embedding": array(anything())}, more=True)),
            {},
            example=Example(
                {"model": "embedder", "content": "Hello"},
                needs="a short vector",
                answer=[{"index": 0, "embedding": [[0.6, 0.8]]}],
            ),
        ),
        _run(
            "/tokenize",
            "Turn a text into tokens. vLLM calls it `prompt`.",
            _asked(content=text(), prompt=text(), **X_FIELDS),
            record({"tokens": array(anything())}, more=True),
            {"content": "Hello"},
        ),
        _run(
            "/detokenize",
            "Turn tokens into a text.",
            _asked("tokens", tokens=array(whole()), **X_FIELDS),
            record({"content": text(), "prompt": text()}, more=True, optional=("content", "prompt")),
            {"tokens": [39, 68]},
        ),
        _run(
            "/generate",
            "Continue a prompt, as SGLang (`text`, `sampling_params`) and Text Generation Inference (`inputs`, `parameters`) say it.",
            _asked(
                text=anything(),
                inputs=text(),
                sampling_params=mapping(anything()),
                parameters=mapping(anything()),
                **X_FIELDS,
            ),
            record({"text": text(), "generated_text": text()}, more=True, optional=("text", "generated_text")),
            {"inputs": "Hello"},
            example=Example(
                {"model": "served-by-tgi", "inputs": "Hello", "parameters": {"max_new_tokens": 2}},
                needs="a model on Text Generation Inference",
                answer={"generated_text": " from a"},
            ),
        ),
        _run(
            "/generate_stream",
            "The same as a stream, as Text Generation Inference says it.",
            _asked("inputs", inputs=text(), parameters=mapping(anything()), **X_FIELDS),
            record({"generated_text": text()}, more=True, optional=("generated_text",)),
            {"inputs": "Hello"},
            example=Example(
                {"model": "served-by-tgi", "inputs": "Hello"},
                needs="a model on Text Generation Inference",
                answer={"generated_text": " from a"},
            ),
        ),
        _run(
            "/chat_tokenize",
            "The tokens of a conversation, as Text Generation Inference counts them.",
            CHAT_REQUEST,
            record({"tokenize_response": array(anything())}, more=True),
            {"messages": [{"role": "user", "content": "Hello"}]},
            example=Example(
                {"model": "served-by-tgi", "messages": [{"role": "user", "content": "Hello"}]},
                needs="a model on Text Generation Inference",
                answer={"tokenize_response": [{"id": 39, "text": "Hello"}]},
            ),
        ),
        _run(
            "/v1/token/encode",
            "Turn a text into tokens, as TabbyAPI does.",
            _asked("text", text=anything(), **X_FIELDS),
            record({"tokens": array(whole()), "length": whole()}, more=True),
            {"text": "Hello"},
            example=Example(
                {"model": "served-by-tabbyapi", "text": "Hello"},
                needs="a model on TabbyAPI",
                answer={"tokens": [39, 68], "length": 2},
            ),
        ),
        _run(
            "/v1/token/decode",
            "Turn tokens into a text, as TabbyAPI does.",
            _asked("tokens", tokens=array(whole()), **X_FIELDS),
            record({"text": text()}, more=True),
            {"tokens": [39, 68]},
            example=Example(
                {"model": "served-by-tabbyapi", "tokens": [39, 68]},
                needs="a model on TabbyAPI",
                answer={"text": "Hello"},
            ),
        ),
        _run(
            "/apply-template",
            "What a model's template makes of a conversation.",
            CHAT_REQUEST,
            record({"prompt": text()}, more=True),
            {"messages": [{"role": "user", "content": "Hello"}]},
        ),
        _run(
            "/v1/chat/completions/control",
            "Say something to a chat while it is answered, such as that it has thought enough.",
            _asked(**X_FIELDS),
            mapping(anything()),
            {},
            example=Example(
                {"model": "Tiny-Thinking", "id": "chatcmpl-1", "action": "reasoning_end"},
                needs="a chat under way",
                answer={"success": True},
            ),
        ),
        _run(
            "/v1/reranking",
            "The same as `POST /v1/rerank`.",
            RERANK_REQUEST,
            RERANKING,
            {},
            example=_RERANKED,
        ),
        Operation(
            "GET",
            "/slots",
            "What a worker's slots do.",
            parameters=(_MODEL,),
            answer=array(mapping(anything())),
            is_run=True,
            example=Example(
                path="/slots?model=Tiny-Instruct",
                answer=[{"id": 0, "n_ctx": 4096, "is_processing": False}],
            ),
        ),
        Operation(
            "GET",
            "/lora-adapters",
            "A worker's adapters.",
            parameters=(_MODEL,),
            answer=array(record({"id": whole(), "path": text(), "scale": number()}, more=True)),
            is_run=True,
            example=Example(path="/lora-adapters?model=Tiny-Instruct"),
        ),
    ),
)
