"""Requests of `/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings` as canonical ones.

A chat without messages, and a prompt or an input that is empty, ask for the model alone: the canonical request is then one
for which a model computes as little as possible, so that it waits, counts and stays like every other request.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects import chat
from supervisor.dialects.ollama.answers import JSON, LINES, Answers, Shape
from supervisor.dialects.ollama.fields import (
    NAMES,
    common,
    decoded,
    encode,
    flag,
    keep_alive_s,
    present,
    raw,
    refuse,
    staying,
    text,
)
from supervisor.dialects.ollama.messages import content, messages
from supervisor.dialects.openai.embeddings import cut
from supervisor.dialects.openai.infill import PATH as INFILL
from supervisor.dialects.openai.infill import Infill
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.filters.translation import (
    AnswerTranslation,
    Chained,
    StreamTranslation,
    TargetModel,
    Times,
    Translation,
)

CHAT: Final = "/api/chat"
GENERATE: Final = "/api/generate"
EMBED: Final = "/api/embed"
EMBEDDINGS: Final = "/api/embeddings"
_COMMON: Final = frozenset({"model", "options", "stream", "think", "format", "keep_alive", "logprobs", "top_logprobs"})
_EMPTY: Final = re.compile(rb'""|\[\s*\]|\{\s*\}')


def is_load(path: str, fields: Fields) -> bool:
    """Does this chat, or prompt, ask for its model alone?"""
    asked = present(fields).get("messages" if path == CHAT else "prompt")
    return asked is None or _is_empty(asked)


def _is_empty(value: msgspec.Raw) -> bool:
    return _EMPTY.match(memoryview(value)) is not None


def is_unload(path: str, fields: Fields) -> bool:
    """Is it to let go of its model, and nothing else? Raises InvalidRequestError for a duration that is none."""
    return "keep_alive" in fields and is_load(path, fields) and keep_alive_s(present(fields)) == 0


class Chat:
    """See Translation."""

    path = chat.PATH

    def request(self, fields: Fields) -> tuple[Fields, Answers]:
        """See Translation."""
        fields = present(fields)
        if is_load(CHAT, fields):
            return _load("chat", fields)
        mapped, unused = common(fields)
        said, unknown = messages(fields)
        mapped["messages"] = raw(said)
        if "tools" in fields:  # they have the canonical form
            mapped["tools"] = fields["tools"]
        known = _COMMON | {"messages", "tools"}
        return _asked("chat", fields, mapped, [*unused, *unknown, *_others(fields, known)])


class Generate:
    """See Translation."""

    path = chat.PATH

    def request(self, fields: Fields) -> tuple[Fields, Answers]:
        """See Translation."""
        fields = present(fields)
        if is_load(GENERATE, fields):
            return _load("generate", fields)
        refuse(fields, "template", "a model's configuration chooses its template.")
        refuse(fields, "context", "send the conversation to /api/chat instead.")
        mapped, unused = common(fields)
        system, prompt = text(fields, "system"), content(text(fields, "prompt"), decoded(fields, "images"))
        first = [{"role": "system", "content": system}] if system else []
        mapped["messages"] = raw([*first, {"role": "user", "content": prompt}])
        known = _COMMON | {"prompt", "system", "images", "raw", "suffix", "template", "context"}
        return _asked("generate", fields, mapped, [*unused, *_others(fields, known)])


class Raw:
    """A prompt that no template is put around, or with a suffix, before which something is filled in."""

    def __init__(self, path: str) -> None:
        self.path = path

    def of(self, target: TargetModel, times: Times) -> Raw:
        """See TargetedTranslation."""
        return self

    def request(self, fields: Fields) -> tuple[Fields, AnswerTranslation]:
        """See Translation."""
        fields = present(fields)
        for name in ("images", "template", "context"):
            refuse(fields, name, "leave it out where the prompt goes to the model as it is.")
        mapped, unused = common(fields)
        unused += ["think"] if fields.get("think") not in (None, b"false") else []
        unused += ["system"] if text(fields, "system") else []
        for name in ("reasoning_effort", "chat_template_kwargs"):
            mapped.pop(name, None)
        mapped["prompt"] = raw(text(fields, "prompt"))
        known = _COMMON | {"prompt", "system", "images", "raw", "suffix", "template", "context"}
        mapped, answers = _asked("generate", fields, mapped, [*unused, *_others(fields, known)])
        if self.path != INFILL:
            return mapped, answers
        filled, completions = Infill().request(mapped | {"suffix": fields["suffix"]})
        return filled, Chained(completions, answers)


def raw_of(fields: Fields) -> Raw | None:
    """Set iff the prompt goes to its model as it is."""
    fields = present(fields)
    if is_load(GENERATE, fields):
        return None
    if text(fields, "suffix"):
        return Raw(INFILL)
    return Raw("/v1/completions") if flag(fields, "raw") else None


def _others(fields: Fields, known: frozenset[str]) -> list[str]:
    """Those that say something: Ollama's own client sends many that are empty."""
    return [key for key, value in fields.items() if key not in known and not _is_empty(value)]


def _asked(shape: Shape, fields: Fields, mapped: Fields, unused: Sequence[str]) -> tuple[Fields, Answers]:
    if "model" in fields:
        mapped["model"] = fields["model"]
    if flag(fields, "stream", default=True):
        mapped |= {"stream": raw(True), "stream_options": raw({"include_usage": True})}
    return mapped, Answers(shape, text(fields, "model"), tuple(unused))


def _load(shape: Shape, fields: Fields) -> tuple[Fields, Answers]:
    kept, unkept = staying(fields)
    mapped = {**kept, "messages": raw([{"role": "user", "content": "."}]), "max_tokens": raw(1)}
    known = frozenset({"model", "stream", "keep_alive", "messages" if shape == "chat" else "prompt"})
    unused = [*unkept, *_others(fields, known)]
    canonical, answers = _asked(shape, fields, mapped, unused)
    return canonical, Answers(shape, answers.model, answers.ignored, is_load=True)


# ---------------------------------------------------------------------------------------------------------- embeddings


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    model: str = ""
    usage: chat.Usage | None = None


_vectors: Final = msgspec.json.Decoder(_Vectors).decode
_numbers: Final = msgspec.json.Decoder(list[float]).decode


@dataclass(frozen=True, slots=True)
class VectorAnswers:
    """See AnswerTranslation."""

    model: str
    ignored: Sequence[str] = ()
    is_single: bool = False  # the older path, with one vector
    is_load: bool = False
    dimensions: int = 0  # at most so many of each vector; 0: all
    begun: int = field(default_factory=time.monotonic_ns)
    content_type: bytes = JSON
    stream_content_type: bytes = LINES
    names: ClassVar[Mapping[str, str]] = NAMES

    def answer(self, body: bytes) -> bytes:
        """See AnswerTranslation."""
        try:
            found = _vectors(body)
            ordered = () if self.is_load else sorted(found.data, key=lambda row: row.index)
            rows = [self._cut(row.embedding) for row in ordered]
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise UpstreamError("The worker's answer is no list of embeddings.") from error
        if self.is_single:
            return encode({"embedding": rows[0] if rows else []})
        return encode(
            {
                "model": self.model or found.model,
                "embeddings": rows,
                "total_duration": time.monotonic_ns() - self.begun,
                "load_duration": 0,  # a part of the time that nobody told
                "prompt_eval_count": 0 if found.usage is None else found.usage.prompt_tokens,
            }
        )

    def _cut(self, vector: msgspec.Raw) -> msgspec.Raw:
        if not self.dimensions:
            return vector
        return raw(cut(_numbers(vector), self.dimensions))

    def stream(self) -> StreamTranslation:
        """Embeddings have none. Raises UpstreamError."""
        raise UpstreamError("The worker's answer is a stream, not a list of embeddings.")


class Embed:
    """See Translation."""

    path = "/v1/embeddings"

    def __init__(self, *, is_single: bool) -> None:
        self._is_single = is_single

    def request(self, fields: Fields) -> tuple[Fields, VectorAnswers]:
        """See Translation."""
        fields = present(fields)
        name = "prompt" if self._is_single else "input"
        asked = decoded(fields, name)
        if not (asked is None or isinstance(asked, str) or (not self._is_single and _is_texts(asked))):
            kind = "a text" if self._is_single else "a text or a list of texts"
            raise InvalidRequestError(f'"{name}" must be {kind}.', param=name)
        is_load = not asked
        mapped, unused = staying(fields)
        if "model" in fields:
            mapped["model"] = fields["model"]
        mapped["input"] = raw(".") if is_load else fields[name]
        mapped["encoding_format"] = raw("float")
        options = decoded(fields, "options")
        if not (options is None or isinstance(options, dict)):
            raise InvalidRequestError('"options" must be an object.', param="options")
        unused += [f"options.{key}" for key in options or ()]  # there is nothing to sample
        mapped["truncate"] = raw(flag(fields, "truncate", default=not self._is_single))
        known, size = {"model", name, "options", "keep_alive", "truncate"}, 0
        if not self._is_single:
            known.add("dimensions")
            size = decoded(fields, "dimensions") or 0
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise InvalidRequestError('"dimensions" must be a whole number.', param="dimensions")
        unused += _others(fields, frozenset(known))
        return mapped, VectorAnswers(text(fields, "model"), tuple(unused), self._is_single, is_load, size)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


TRANSLATIONS: Final[Mapping[str, Translation]] = {
    CHAT: Chat(),
    GENERATE: Generate(),
    EMBED: Embed(is_single=False),
    EMBEDDINGS: Embed(is_single=True),
}
