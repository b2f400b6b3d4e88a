"""Requests and answers of OpenAI's API, as far as llmux reads or describes them; a worker's server defines the rest."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from runtimes.model_config import ModelType
from supervisor.dialects.model_status import ModelStatus
from supervisor.schema.model import Capabilities
from supervisor.schema.operation import Open, doc

T = TypeVar("T")
Maybe: TypeAlias = T | UnsetType
"""The type of a field that may be missing."""
Texts = str | Annotated[list[str], Meta(min_length=1)]
Many = Annotated[int, Meta(ge=1)]
DataUrl = Annotated[str, doc("A `data:` URL.", pattern="^data:")]
Base64 = Annotated[str, doc("Base64.", pattern="^[A-Za-z0-9+/]*={0,2}$")]
JsonSchema = Annotated[dict[str, Any], doc("A JSON schema.")]
Upload = Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]


class ForLlmux(Open, kw_only=True):
    """Fields of every JSON request to a model that are for llmux. No worker gets them."""

    allow_remote: Maybe[
        Annotated[
            bool, doc("May the request leave this machine? A [remote](runtimes.md#openai_remote) model needs it.")
        ]
    ] = UNSET
    x_priority: Annotated[
        Maybe[Literal["high", "normal", "low"] | Annotated[int, Meta(ge=0, le=100)]],
        doc("How urgent it is; lower goes first."),
    ] = UNSET
    x_client_id: Maybe[Annotated[str, doc("Who asks: the tenant.", max_length=64, pattern="^[ -~]*$")]] = UNSET
    x_timeout_s: Maybe[Annotated[float, doc("Within how many seconds the answer must come.", gt=0, le=86400)]] = UNSET
    x_keep_alive_s: Maybe[
        Annotated[float, doc("For how long the model stays loaded after it, at least.", ge=0, le=86400)]
    ] = UNSET


# ------------------------------------------------------------------------------------------------------------------ models


class ModelsQuery(Struct):
    """Which models are listed."""

    type: Annotated[ModelType | None, doc("Only models of this type.")] = None
    loaded: Annotated[
        bool | None,
        doc(
            "Only models that are loaded, and remote ones. Default: `false`, unless `server.responses` is `llm-pool`. `1` and `0` do as well."
        ),
    ] = None


class Architecture(Struct):
    """Where OpenRouter's clients look for what a model takes and gives."""

    input_modalities: list[str]
    output_modalities: list[str]


class ListedCapabilities(Capabilities):
    """What a model can do, from its files."""

    output_modalities: list[str]


class Model(Struct, kw_only=True):
    """A public name in the list of models."""

    id: Annotated[str, doc("The public name, which requests use.")]
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["llmux"] = "llmux"
    name: str
    type: ModelType
    runtime: str
    status: ModelStatus
    context_length: Maybe[int | None] = UNSET
    max_model_len: Maybe[int | None] = UNSET
    architecture: Maybe[Architecture] = UNSET
    supported_parameters: Maybe[list[str]] = UNSET
    capabilities: Maybe[ListedCapabilities] = UNSET
    description: Maybe[str] = UNSET


class Models(Struct, kw_only=True):
    """The public names of all models."""

    object: Literal["list"] = "list"
    data: list[Model]


# ------------------------------------------------------------------------------------------------------------------- chats


class TextPart(Open, tag_field="type", tag="text"):
    """A text in a message."""

    text: str


class ImageUrl(Open):
    """Where a picture is."""

    url: DataUrl
    detail: Maybe[str] = UNSET


class ImagePart(Open, tag_field="type", tag="image_url"):
    """A picture in a message."""

    image_url: ImageUrl


class AudioData(Open):
    """A sound."""

    data: Base64
    format: str


class AudioPart(Open, tag_field="type", tag="input_audio"):
    """A sound in a message."""

    input_audio: AudioData


class CalledFunction(Open):
    """A function that a model calls."""

    name: str
    arguments: Annotated[str, doc("JSON.")]


class ToolCall(Open):
    """A call of a tool by a model."""

    type: Literal["function"]
    function: CalledFunction
    id: Maybe[str] = UNSET


class ChatMessage(Open):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Maybe[str | list[TextPart | ImagePart | AudioPart] | None] = UNSET
    tool_calls: Maybe[list[ToolCall]] = UNSET
    tool_call_id: Maybe[str] = UNSET
    reasoning_content: Maybe[str | None] = UNSET


class OfferedFunction(Open):
    """A function that a model may call."""

    name: str
    description: Maybe[str] = UNSET
    parameters: Maybe[JsonSchema] = UNSET


class Tool(Open):
    """A tool that a model may call."""

    type: Literal["function"]
    function: OfferedFunction


class StreamOptions(Open):
    """What a stream has besides the answer."""

    include_usage: Maybe[bool] = UNSET


class Sampling(ForLlmux, kw_only=True):
    """How a model is to generate."""

    stream: Maybe[Annotated[bool, doc("Send the answer piece by piece, as server-sent events.")]] = UNSET
    stream_options: Maybe[StreamOptions] = UNSET
    max_tokens: Maybe[Many] = UNSET
    temperature: Maybe[Annotated[float, Meta(ge=0)]] = UNSET
    top_p: Maybe[Annotated[float, Meta(ge=0, le=1)]] = UNSET
    seed: Maybe[int] = UNSET
    stop: Maybe[str | Annotated[list[str], Meta(max_length=16)]] = UNSET


class ChatRequest(Sampling):
    """A conversation to be answered."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: Maybe[Annotated[str, doc("A public name; needless where only one model serves the path.")]] = UNSET
    max_completion_tokens: Maybe[Many] = UNSET
    tools: Maybe[list[Tool]] = UNSET
    tool_choice: Annotated[Any, doc("`none`, `auto`, `required`, or a function.")] = UNSET
    response_format: Annotated[Any, doc("`text`, `json_object`, or a `json_schema`.")] = UNSET
    chat_template_kwargs: Maybe[Annotated[dict[str, Any], doc("For the template, such as `enable_thinking`.")]] = UNSET


class Usage(Open):
    """Tokens of the whole request."""

    prompt_tokens: Maybe[int] = UNSET
    completion_tokens: Maybe[int] = UNSET
    total_tokens: Maybe[int] = UNSET


class ChatAnswer(Open):
    """What a model answers."""

    role: Literal["assistant"]
    content: Maybe[str | None] = UNSET
    reasoning_content: Maybe[Annotated[str, doc("What the model thought.")] | None] = UNSET
    tool_calls: Maybe[list[ToolCall] | None] = UNSET


class ChatChoice(Open):
    """One of the answers."""

    index: int
    message: ChatAnswer
    finish_reason: str | None


class ChatCompletion(Open):
    """A conversation's answer."""

    id: str
    created: int
    model: Annotated[str, doc("The name that the client asked for.")]
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Maybe[Usage] = UNSET


class TokenCount(Open):
    """How long a request is."""

    input_tokens: int


class CompletionRequest(Sampling):
    """A text to be continued."""

    prompt: str | list[str]
    model: Maybe[str] = UNSET


class CompletionChoice(Open):
    """One of the continuations."""

    text: str
    finish_reason: str | None


class Completion(Open):
    """What follows a text."""

    created: int
    model: Annotated[str, doc("The name that the client asked for.")]
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    id: Maybe[str] = UNSET
    usage: Maybe[Usage] = UNSET


# ----------------------------------------------------------------------------------------------- vectors, scores, classes


class EmbeddingRequest(ForLlmux):
    """What becomes vectors."""

    input: str | Annotated[list[Any], doc("Texts, their tokens, or parts such as `image_url`.", min_length=1)]
    model: Maybe[str] = UNSET
    encoding_format: Maybe[Literal["float", "base64"]] = UNSET
    dimensions: Maybe[Many] = UNSET
    candidate_labels: Maybe[Annotated[list[str], Meta(min_length=1)]] = UNSET
    hypothesis_template: Maybe[str] = UNSET


class LabelScore(Struct):
    """How well a label fits."""

    label: str
    score: float


class Embedding(Open):
    """A vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | Annotated[str, doc("Base64.")]
    scores: Maybe[list[LabelScore]] = UNSET


class Embeddings(Open):
    """Vectors of all inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModerationRequest(ForLlmux):
    """Texts to be judged."""

    input: Any
    model: Maybe[str] = UNSET


class Moderation(Open):
    """Judgements."""

    results: list[Any]


class RerankRequest(ForLlmux):
    """Texts to be put in an order."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1)]
    model: Maybe[str] = UNSET
    top_n: Maybe[Many] = UNSET
    return_documents: Maybe[bool] = UNSET


class Ranked(Open):
    """How well one text answers the query."""

    index: int
    relevance_score: float


class Reranking(Open):
    """Texts in their order."""

    results: list[Ranked]


class ClassifyRequest(ForLlmux):
    """Texts of which a model says something."""

    input: Texts
    model: Maybe[str] = UNSET


class ScoreRequest(ForLlmux):
    """Texts that are compared."""

    text_1: Texts
    text_2: Texts
    model: Maybe[str] = UNSET


class EmbedRequest(ForLlmux):
    """Texts that become vectors, as Cohere's second version asks."""

    texts: Texts
    model: Maybe[str] = UNSET


class WorkerData(Open):
    """What vLLM's server says of texts."""

    data: Maybe[list[Any]] = UNSET


# ------------------------------------------------------------------------------------------------------ sound and pictures


class VoiceId(Open):
    """A voice."""

    id: str


class SpeechRequest(ForLlmux):
    """A text to be spoken."""

    input: Annotated[str, Meta(min_length=1)]
    model: Maybe[str] = UNSET
    voice: Maybe[str | VoiceId] = UNSET
    response_format: Maybe[Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]] = UNSET
    speed: Maybe[float] = UNSET


class TranscriptionForm(Open):
    """A recording of speech."""

    file: Upload
    model: Maybe[str] = UNSET
    language: Maybe[str] = UNSET
    prompt: Maybe[str] = UNSET
    response_format: Maybe[Literal["json", "text", "srt", "verbose_json", "vtt"]] = UNSET
    temperature: Maybe[Annotated[float, Meta(ge=0)]] = UNSET
    stream: Maybe[Annotated[str, doc("`true`, for a stream.")]] = UNSET


class Transcription(Open):
    """What was heard."""

    text: str


class ImageRequest(ForLlmux):
    """A picture to be drawn."""

    prompt: str
    model: Maybe[str] = UNSET
    n: Maybe[Many] = UNSET
    size: Maybe[Annotated[str, doc("`WIDTHxHEIGHT`, or `auto`.")]] = UNSET
    quality: Maybe[Annotated[str, doc("How many steps are made: `low`, `medium`, `high`, `auto`.")]] = UNSET
    output_format: Maybe[Literal["png", "jpeg", "webp"]] = UNSET
    output_compression: Maybe[Annotated[int, Meta(ge=0, le=100)]] = UNSET
    response_format: Maybe[Literal["b64_json", "url"]] = UNSET
    background: Maybe[Literal["auto", "opaque", "transparent"]] = UNSET
    partial_images: Maybe[Annotated[int, doc("Of a stream: so many pictures of what is there so far.", ge=0, le=3)]] = (
        UNSET
    )
    stream: Maybe[bool] = UNSET


class VariationForm(Open, kw_only=True):
    """A picture like which others are drawn; the values of a form are texts."""

    image: Upload
    model: Maybe[str] = UNSET
    n: Maybe[str] = UNSET
    size: Maybe[str] = UNSET
    quality: Maybe[str] = UNSET
    output_format: Maybe[str] = UNSET
    output_compression: Maybe[str] = UNSET
    response_format: Maybe[str] = UNSET
    background: Maybe[str] = UNSET
    partial_images: Maybe[str] = UNSET
    stream: Maybe[str] = UNSET


class EditForm(VariationForm):
    """A picture to be changed."""

    prompt: str
    mask: Maybe[Upload] = UNSET


class Picture(Open):
    """A picture that was drawn."""

    b64_json: Maybe[Annotated[str, doc("The file.")]] = UNSET
    url: Maybe[
        Annotated[str, doc("Where it is, for an hour (`limits.pictures_keep_s`), with `response_format: url`.")]
    ] = UNSET
    seed: Maybe[Annotated[int, doc("Of this picture, from the runtime `diffusers`.")]] = UNSET
    revised_prompt: Maybe[Annotated[str, doc("What was read of a prompt that is too long.")]] = UNSET


class Pictures(Open):
    """The pictures that were drawn."""

    data: list[Picture]


class SpeakersQuery(Struct):
    """Of which models."""

    model: Annotated[str | None, doc("Only of this model.")] = None


class Speaker(Struct):
    """A voice, or a model that speaks."""

    id: str
    name: str


class Voices(Struct):
    """Whose voices there are."""

    voices: list[Speaker]


class Speakers(Struct):
    """The models that speak."""

    models: list[Speaker]
