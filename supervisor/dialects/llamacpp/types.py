"""Requests and answers of llama.cpp's server, its router and similar servers; a worker's server defines the rest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, field

from supervisor.dialects.model_status import ModelStatus
from supervisor.dialects.openai.types import ForLlmux, Maybe
from supervisor.schema.operation import Open, doc


class ModelName(Struct):
    """Which model; clients of other servers send more."""

    model: Annotated[str, doc("A public name; `GET /models` lists the choice.")]


class ModelQuery(Struct):
    """Which model's worker answers."""

    model: Annotated[str | None, doc("Whose worker is asked; needless where only one model serves the path.")] = None


class Accepted(Struct):
    """A load or an unload has begun."""

    success: bool = True


class RoutedModel(Struct):
    """A public name in the router's list of models."""

    id: str
    name: str
    object: Literal["model"]
    owned_by: Literal["llmux"]
    created: int
    status: ModelStatus


class RoutedModels(Struct):
    """The public names of all models."""

    object: Literal["list"]
    data: list[RoutedModel]


class RouterProps(Open, kw_only=True):
    """Those of the router."""

    role: Literal["router"] = "router"  # shows clients that they can name, list and load models
    max_instances: Annotated[int, doc("`limits.max_loaded` of language models; 0: as many as fit.")]
    models_autoload: bool = True
    model_alias: str = "llmux"
    model_path: str = "none"
    default_generation_settings: dict[str, Any]
    ui_settings: dict[str, Any] = field(default_factory=dict)
    build_info: str


class WorkerAnswer(Open):
    """As the worker answers."""


class ForWorker(ForLlmux, kw_only=True):
    """A request that names a model."""

    model: Maybe[str] = UNSET


class _ToGenerate(ForWorker, kw_only=True):
    n_predict: Maybe[Annotated[int, doc("Tokens at most; -1: as many as it takes.")]] = UNSET
    stream: Maybe[bool] = UNSET


class LlamaCppPrompt(_ToGenerate):
    """A text to be continued."""

    prompt: Annotated[Any, doc("A text, tokens, or a list of them.")]


class LlamaCppInfill(_ToGenerate):
    """A text with a gap."""

    input_prefix: str
    input_suffix: str
    prompt: Maybe[str] = UNSET


class LlamaCppCompletion(Open):
    """What a model adds to a text."""

    content: str
    stop: Maybe[bool] = UNSET


class LlamaCppTexts(ForWorker):
    """What becomes vectors."""

    content: Annotated[Any, doc("A text or a list of texts.")]


class LlamaCppEmbedding(Open):
    """The vectors of a text."""

    index: int
    embedding: list[Any]


class TextToTokenize(ForWorker):
    """A text to become tokens."""

    content: Maybe[str] = UNSET
    prompt: Maybe[str] = UNSET


class Tokens(Open):
    """A text as tokens."""

    tokens: list[Any]


class TokensToText(ForWorker):
    """Tokens to become a text."""

    tokens: list[int]


class TextOfTokens(Open):
    """Tokens as a text."""

    content: Maybe[str] = UNSET
    prompt: Maybe[str] = UNSET


class GenerateRequest(ForWorker):
    """A text to be continued, as SGLang or Text Generation Inference name it."""

    text: Any = UNSET
    inputs: Maybe[str] = UNSET
    sampling_params: Maybe[dict[str, Any]] = UNSET
    parameters: Maybe[dict[str, Any]] = UNSET


class GenerateStreamRequest(ForWorker):
    """A text to be continued, as Text Generation Inference names it."""

    inputs: str
    parameters: Maybe[dict[str, Any]] = UNSET


class Generated(Open):
    """What follows a text, as SGLang or Text Generation Inference name it."""

    text: Maybe[str] = UNSET
    generated_text: Maybe[str] = UNSET


class ChatTokens(Open):
    """A conversation as tokens."""

    tokenize_response: list[Any]


class TabbyText(ForWorker):
    """A text to become tokens."""

    text: Any


class TabbyTokens(Open):
    """A text as tokens."""

    tokens: list[int]
    length: int


class TabbyDecoded(Open):
    """Tokens as a text."""

    text: str


class ChatPrompt(Open):
    """A conversation as the model's template writes it."""

    prompt: str


class LoraAdapter(Open):
    """One of a worker's adapters."""

    id: int
    path: str
    scale: float
