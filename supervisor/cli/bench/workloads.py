"""What is asked of a model, by its type, and how fast its answers come.

    llm         a streamed answer: tokens a second, and the time to the first
    asr         a generated sound is written down: its length over the time that took
    tts         a text is read aloud: the length of the speech over the time that took
    embedding   a batch of texts: vectors, or documents compared, a second

Requests go straight to the worker, changed as the daemon would have changed them for the name that was asked for. Each
prompt begins with its number, so that no worker answers from what it kept of the one before.
"""

from __future__ import annotations

import abc
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from pydantic import JsonValue

from supervisor.catalog import Route
from supervisor.cli.bench import audio
from supervisor.cli.bench.devices import BenchError
from supervisor.io.upstream import UpstreamPool
from supervisor.io.upstream_response import UpstreamResponse

Json = dict[str, JsonValue]

PROMPT: Final = (
    "A lighthouse keeper finds a bottle on the beach after a storm. In it there is a map of the very island he lives on, "
    "drawn long before the tower was built, with a path that no longer exists and a cross where his garden is now. Tell what "
    "he does in the days that follow, whom he asks for advice, what he finds at last, and why he never speaks of it. Take "
    "your time, describe the weather and the sea, and let at least two people talk with each other."
)
SENTENCE: Final = (
    "The storm had passed, and in the morning light the keeper found a bottle on the beach below the tower."
)
BATCH: Final = 32
LIMIT: Final = 256 * 1024 * 1024  # bytes of an answer


@dataclass(frozen=True, slots=True)
class Round:
    """One answer. `amount` is of what the exercise counts; `rate` is what of it came in a second."""

    amount: float
    seconds: float
    rate: float
    first_ms: float | None = None
    prompt_rate: float | None = None  # tokens a second that were read, where the worker tells
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Asking:
    """A ready worker and how to address it. Methods raise BenchError for any status but 200, and UpstreamError."""

    upstream: UpstreamPool
    route: Route
    path: str

    async def post(self, fields: Json) -> UpstreamResponse:
        """A JSON request."""
        body = json.dumps({"model": self.route.model.id, **fields}).encode()
        return await self._send(self.route.rewrite.apply(body, self.path), b"application/json")

    async def post_file(self, fields: Mapping[str, str], name: str, content: bytes) -> UpstreamResponse:
        """A form with a file."""
        texts: dict[str, tuple[str, ...]] = {
            key: (value,) for key, value in {"model": str(self.route.model.id), **fields}.items()
        }
        texts |= self.route.rewrite.form_fields(texts, self.path)
        boundary = secrets.token_hex(16)
        parts = [
            f'--{boundary}\r\ncontent-disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
            for key, values in texts.items()
            for value in values
        ]
        head = f'content-disposition: form-data; name="file"; filename="{name}"\r\ncontent-type: audio/wav'
        parts += [f"--{boundary}\r\n{head}\r\n\r\n".encode(), content, f"\r\n--{boundary}--\r\n".encode()]
        return await self._send(b"".join(parts), f"multipart/form-data; boundary={boundary}".encode())

    async def _send(self, body: bytes | bytearray, kind: bytes) -> UpstreamResponse:
        model = self.route.model
        places = {end.path: end.upstream_path or end.path for end in model.adapter.endpoints(model.config)}
        answer = await self.upstream.request("POST", places[self.path].encode(), [(b"content-type", kind)], body)
        if answer.status != 200:
            said = (await answer.read(4096)).decode(errors="replace")
            answer.close()
            raise BenchError(f"{self.path} answers with {answer.status}: {_message(said)}")
        return answer


class Exercise(abc.ABC):
    """One kind of request."""

    unit: ClassVar[str]  # of a round's rate
    counts: ClassVar[str]  # what its amount is
    paths: ClassVar[tuple[str, ...]]  # the first that is served is asked

    @abc.abstractmethod
    async def run(self, asking: Asking, number: int) -> Round:
        """Ask once and wait for the whole answer."""


@dataclass(frozen=True, slots=True)
class Writing(Exercise):
    """A streamed answer."""

    unit: ClassVar = "tokens/s"
    counts: ClassVar = "tokens"
    paths: ClassVar = ("/v1/chat/completions", "/v1/completions")
    prompt: str
    tokens: int

    async def run(self, asking: Asking, number: int) -> Round:
        """Tokens are the worker's own count, or pieces of the answer where it tells none."""
        text = f"({number}) {self.prompt}"
        chat: Json = {"messages": [{"role": "user", "content": text}]}
        fields: Json = chat if asking.path == self.paths[0] else {"prompt": text}
        fields |= {
            "max_tokens": self.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        answer = await asking.post(fields)
        first = last = 0.0
        pieces, usage, timings = 0, Json(), Json()
        async for event in _events(answer):
            if "error" in event:
                raise BenchError(f"{asking.path} breaks off: {_message(json.dumps(event))}")
            if _says_something(event):
                last = time.perf_counter()
                first = first or last
                pieces += 1
            usage, timings = _object(event, "usage") or usage, _object(event, "timings") or timings
        if not pieces:
            raise BenchError("The answer is empty; ask for something else with --prompt.")
        tokens = _number(usage, "completion_tokens") or _number(timings, "predicted_n") or pieces
        # The first token's time is that of reading the prompt. A worker's own clock doesn't see pieces that arrive together.
        between = (tokens - 1) / (last - first) if tokens > 1 and last > first else tokens / (last - began)
        rate = _number(timings, "predicted_per_second") or between
        note = f"answers end after {tokens:.0f} tokens" if tokens < min(self.tokens, 32) else None
        return Round(tokens, last - began, rate, (first - began) * 1000, _number(timings, "prompt_per_second"), note)


@dataclass(frozen=True, slots=True)
class Transcribing(Exercise):
    """A sound that is written down."""

    unit: ClassVar = "x real time"
    counts: ClassVar = "seconds of sound"
    paths: ClassVar = ("/v1/audio/transcriptions",)

    async def run(self, asking: Asking, number: int) -> Round:
        """The same sound each time."""
        content = audio.murmur()
        began = time.perf_counter()
        answer = await asking.post_file({"response_format": "json"}, "sound.wav", content)
        heard = _parsed(await answer.read(LIMIT), asking.path)
        took = time.perf_counter() - began
        note = None if heard.get("text") else "no words were heard in the generated sound: speech takes longer"
        return Round(audio.SECONDS, took, audio.SECONDS / took, note=note)


@dataclass(frozen=True, slots=True)
class Speaking(Exercise):
    """A text that is read aloud."""

    unit: ClassVar = "x real time"
    counts: ClassVar = "seconds of speech"
    paths: ClassVar = ("/v1/audio/speech",)
    text: str

    async def run(self, asking: Asking, number: int) -> Round:
        """In the first of the model's voices."""
        model = asking.route.model
        voices = model.adapter.voices(model.config)
        fields: Json = {"input": self.text, "response_format": "wav", **({"voice": voices[0]} if voices else {})}
        began = time.perf_counter()
        answer = await asking.post(fields)
        content, first = bytearray(), 0.0
        async for piece in answer:
            content += piece
            if not first and len(content) > audio.WAV_HEAD:
                first = time.perf_counter()
        took = time.perf_counter() - began
        spoken = audio.seconds_of(bytes(content))
        if not spoken:
            raise BenchError(f"{asking.path} gives no speech as WAV.")
        return Round(spoken, took, spoken / took, (first - began) * 1000)


@dataclass(frozen=True, slots=True)
class Embedding(Exercise):
    """A batch of texts."""

    unit: ClassVar = "vectors/s"
    counts: ClassVar = "vectors"
    paths: ClassVar = ("/v1/embeddings",)
    text: str

    async def run(self, asking: Asking, number: int) -> Round:
        """All in one request."""
        texts: list[JsonValue] = [f"({number}.{at}) {self.text}" for at in range(BATCH)]
        return await _batch(asking, {"input": texts}, "data")


@dataclass(frozen=True, slots=True)
class Ranking(Exercise):
    """A batch of documents, compared with a text."""

    unit: ClassVar = "documents/s"
    counts: ClassVar = "documents"
    paths: ClassVar = ("/v1/rerank",)
    text: str

    async def run(self, asking: Asking, number: int) -> Round:
        """All in one request."""
        documents: list[JsonValue] = [f"({number}.{at}) {SENTENCE}" for at in range(BATCH)]
        return await _batch(asking, {"query": self.text, "documents": documents}, "results")


def choose(route: Route, prompt: str | None, tokens: int) -> tuple[Exercise, str]:
    """The exercise for this model, and the path to ask. Raises BenchError where there is none."""
    model = route.model
    kinds: Mapping[str, Sequence[Exercise]] = {
        "llm": (Writing(prompt or PROMPT, tokens), Ranking(prompt or SENTENCE)),
        "asr": (Transcribing(),),
        "tts": (Speaking(prompt or SENTENCE),),
        "embedding": (Embedding(prompt or SENTENCE), Ranking(prompt or SENTENCE)),
    }
    served = {endpoint.path for endpoint in model.adapter.endpoints(model.config)}
    for exercise in kinds.get(model.config.type, ()):
        for path in exercise.paths:
            if path in served:
                return exercise, path
    raise BenchError(f"{model.id} is of type {model.config.type} and serves nothing that can be measured.")


async def _batch(asking: Asking, fields: Json, field: str) -> Round:
    began = time.perf_counter()
    answer = await asking.post(fields)
    content = await answer.read(LIMIT)
    took = time.perf_counter() - began
    found = _parsed(content, asking.path).get(field)
    if not isinstance(found, list) or not found:
        raise BenchError(f"{asking.path} answers without {field!r}.")
    return Round(len(found), took, len(found) / took)


async def _events(answer: UpstreamResponse) -> AsyncIterator[Json]:
    """The JSON objects of a stream of events."""
    rest = b""
    async for piece in answer:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":
                event = json.loads(content)
                if isinstance(event, dict):
                    yield event


def _says_something(event: Json) -> bool:
    """Is there a part of the answer in it? The first event often only names the role."""
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return False
    said = _object(choice, "delta") | {"text": choice.get("text")}
    return any(said.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls", "text"))


def _parsed(content: bytes, path: str) -> Json:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise BenchError(f"{path} does not answer in JSON.") from error
    return found if isinstance(found, dict) else {}


def _message(said: str) -> str:
    """The worker's own words."""
    try:
        told = json.loads(said)
    except ValueError:
        return said[:200]
    error = told.get("error") if isinstance(told, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else said[:200]


def _object(value: Json, key: str) -> Json:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _number(value: Json, key: str) -> float | None:
    found = value.get(key)
    return float(found) if isinstance(found, int | float) and found > 0 else None
