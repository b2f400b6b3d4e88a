"""The requests and answers of Ollama's API.

Null is the same as absent, as with Ollama. A value that workers accept in the same format passes unparsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field, structs

from supervisor.gateway.body.typed import WITHOUT_EFFECT, Sent, unparsed
from supervisor.schema.operation import Open, doc, schema_of

PICTURES: Final = {"/9j/": "jpeg", "iVBORw0KGgo": "png", "UklGR": "webp", "R0lGOD": "gif", "Qk": "bmp"}
"""Beginnings of images in base64, and their formats. Condensed JSON of a large body keeps the beginning of each text."""
_TIME: Final = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)"
_Number = Annotated[Raw, Meta(extra_json_schema={"type": "number"})]
_Whole = Annotated[Raw, Meta(extra_json_schema={"type": "integer"})]
_Unused = Annotated[Raw, WITHOUT_EFFECT]
_Texts = Annotated[Raw, Meta(extra_json_schema=schema_of(str | list[str]))]
_Tools = Annotated[Raw, Meta(extra_json_schema=schema_of(list[Annotated[Any, doc("As in chat completions.")]]))]
_Vector = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "number"}})]
_Role = Annotated[str, Meta(extra_json_schema={"enum": ["system", "user", "assistant", "tool"]})]
_Picture = Annotated[str, doc("Base64, of a JPEG, PNG, WebP, GIF or BMP.", pattern=f"^(data:|{'|'.join(PICTURES)})")]
_Stream = Annotated[bool, doc("Send lines as they come, which is the default.")]
_KeepAlive = Annotated[
    float | Annotated[str, Meta(max_length=100, pattern=rf"^([+-]?(({_TIME})+|[0-9]+(\.[0-9]*)?))?$")],
    doc(
        "For how long the model stays: seconds, or a duration such as `5m`. 0 with nothing to answer unloads it after its "
        "running requests, which needs the scope `admin`."
    ),
]
_NoOptions = Annotated[dict[str, Raw] | None, doc(None, "named")]
_Nanoseconds = Annotated[int, doc("Nanoseconds.")] | UnsetType
_Tokens = Annotated[int, doc("Tokens.")] | UnsetType


# --------------------------------------------------------------------------------------------------------------- requests


class OllamaOptions(Sent):
    """Options for sampling. Others, about the load of a model, belong to its configuration and have no effect."""

    # The attributes have canonical names. Clients send other options by default, so unknown options aren't refused.
    temperature: _Number = unparsed()
    top_p: _Number = unparsed()
    top_k: _Whole = unparsed()
    min_p: _Number = unparsed()
    typical_p: _Number = unparsed()
    seed: _Whole = unparsed()
    stop: _Texts = unparsed()
    max_tokens: Annotated[float, Meta(multiple_of=1)] | None = field(name="num_predict", default=None)
    repetition_penalty: _Number = field(name="repeat_penalty", default_factory=Raw)
    repeat_last_n: _Whole = unparsed()
    presence_penalty: _Number = unparsed()
    frequency_penalty: _Number = unparsed()


NAMES: Final[Mapping[str, str]] = {
    **{option.name: f"options.{option.encode_name}" for option in structs.fields(OllamaOptions)},
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
    "response_format": "format",
}
"""Canonical fields → their names in Ollama's API."""


class OllamaFunction(Sent):
    """A tool's name, and its arguments: an object, or JSON in a text, the canonical form, which some clients send back."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: _Unused = unparsed()  # clients send back the index of an answer's call


class OllamaCall(Sent):
    function: OllamaFunction
    id: Annotated[str, doc("What `tool_call_id` of its result says.")] | float | None = None  # numbers are ignored
    type: _Unused = unparsed()  # from the canonical format
    index: _Unused = unparsed()


class OllamaMessage(Sent):
    role: _Role
    content: str | None = None
    thinking: str | None = None
    images: list[_Picture] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: (
        Annotated[str, doc("Whose result it is; without it and `tool_call_id`, that of the oldest call that has none.")]
        | None
    ) = None
    name: Annotated[str, doc("The same, from older clients.")] | None = None
    tool_call_id: str | None = None


class OllamaLoad(Sent):
    """A request for a model alone, which has nothing to answer. Every other one has its fields, too."""

    model: Annotated[str, doc("A public name, also with `:latest`.")] = ""
    stream: _Stream = True
    keep_alive: _KeepAlive = ""


class OllamaRequest(OllamaLoad):
    """The fields that conversations and prompts have in common."""

    options: OllamaOptions = field(default_factory=OllamaOptions)
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    format: Literal["json", ""] | Annotated[dict[str, Raw], doc("A JSON schema.")] = ""
    logprobs: bool = False
    top_logprobs: _Whole = unparsed()


class OllamaChatRequest(OllamaRequest):
    messages: list[OllamaMessage] | None = None
    tools: _Tools = unparsed()


class OllamaGenerateRequest(OllamaRequest):
    prompt: str = ""
    system: str = ""
    images: list[_Picture] | None = None
    raw: Annotated[bool, doc("Send the prompt to the model without a template.")] = False
    suffix: Annotated[str, doc("Fill in the text between the prompt and this one.")] = ""
    template: Annotated[
        str, doc("Not supported: a model's configuration chooses its template.", "refused", max_length=0)
    ] = ""
    context: Annotated[tuple[()], doc("Not supported: send the conversation to `/api/chat`.", "refused")] = ()


class OllamaEmbedRequest(Sent):
    model: str = ""
    input: str | list[str] = ""
    dimensions: Annotated[int, Meta(ge=0)] = 0
    truncate: bool = True
    options: _NoOptions = None
    keep_alive: _KeepAlive = ""


class OllamaEmbeddingsRequest(Sent):
    """One text to turn into a vector, in the older form."""

    model: str = ""
    input: str = field(name="prompt", default="")
    truncate: bool = False
    options: _NoOptions = None
    keep_alive: _KeepAlive = ""


class OllamaShowRequest(Struct):
    """The name of a model."""

    model: Annotated[str, doc("A public name; `GET /api/tags` lists the choice.")] | None = None
    name: Annotated[Any, doc("What older clients call it.", extra_json_schema={"type": ["string", "null"]})] = None


class OllamaPullRequest(OllamaShowRequest):
    """A model whose files are missing."""

    stream: _Stream | None = None


# ---------------------------------------------------------------------------------------------------------------- answers


class OllamaError(Struct):
    error: Annotated[str, doc("What is wrong, and what to do.")]


class OllamaAnswer(Open):
    """Whole answers, and the last line of a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: _Nanoseconds = UNSET
    load_duration: _Nanoseconds = UNSET
    prompt_eval_count: _Tokens = UNSET
    prompt_eval_duration: _Nanoseconds = UNSET
    eval_count: _Tokens = UNSET
    eval_duration: _Nanoseconds = UNSET


class OllamaAnswerMessage(Open):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET


class OllamaChat(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGeneration(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaVectors(Struct):
    model: str
    embeddings: list[_Vector]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(Struct):
    embedding: _Vector


class OllamaDetails(Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct):
    name: str
    model: str
    digest: Annotated[str, doc("A hash of the name.")]
    details: OllamaDetails


class OllamaListedModel(OllamaModel):
    modified_at: str
    size: int


class OllamaLoadedModel(OllamaModel):
    size: int
    size_vram: int
    expires_at: str
    context_length: int


class OllamaModels(Struct):
    models: list[OllamaListedModel]


class OllamaLoadedModels(Struct):
    models: list[OllamaLoadedModel]


class OllamaShown(Struct, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct):
    version: str


class OllamaPulled(Struct):
    status: Literal["success"] = "success"
