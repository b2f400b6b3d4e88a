"""The workload for a model of each type, and the measurement of its speed.

    llm         a streamed answer: tokens a second, and the time to the first; with --ocr, of a page that it reads
    asr         a generated sound is transcribed: the sound's length over the time of the request
    tts         a text is spoken: the speech's length over the time of the request
    embedding   a batch of texts: vectors, or documents compared, a second

Requests go straight to the worker, rewritten as the daemon would rewrite them for the requested name. Each prompt begins
with the round's number, so that no worker can answer from its cache of the previous prompt. With --ocr every prompt is the
same, to show the gain by that cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import httpx

from runtimes.base import Endpoint
from supervisor.catalog import Route
from supervisor.cli.bench import audio, page
from supervisor.cli.bench.devices import BenchError
from supervisor.cli.client import Json, part, rows
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.json_body import JsonBody
from supervisor.host.upstream.upstream import UpstreamPool, WorkerResponse

PROMPT: Final = (
    "A lighthouse keeper finds a bottle on the beach after a storm. In it there is a map of the very island he lives on, "
    "drawn long before the tower was built, with a path that no longer exists and a cross where his garden is now. Tell what "
    "he does in the days that follow, whom he asks for advice, what he finds at last, and why he never speaks of it. Take "
    "your time, describe the weather and the sea, and let at least two people talk with each other."
)
SENTENCE: Final = (
    "The storm had passed, and in the morning light the keeper found a bottle on the beach below the tower."
)
CHAT: Final = "/v1/chat/completions"
REAL_TIME: Final = "x real time"
BATCH: Final = 32
TOKENS: Final = 128
OCR_TOKENS: Final = 2048
LIMIT: Final = 256 * 1024 * 1024  # bytes of an answer


@dataclass(frozen=True, slots=True)
class Round:
    """One answer. `amount` counts what the workload produces; `rate` is that amount per second."""

    amount: float
    seconds: float
    rate: float
    first_ms: float | None = None
    prompt_rate: float | None = None  # prompt tokens read per second, where the worker reports it
    note: str | None = None
    words_found: int | None = None  # of the page's words, with --ocr


@dataclass(frozen=True, slots=True)
class WorkerClient:
    """Requests to a ready worker. Methods raise BenchError for any status but 200, and UpstreamError."""

    upstream: UpstreamPool
    route: Route
    path: str

    async def post(self, fields: Json) -> WorkerResponse:
        body = await JsonBody.open(json.dumps({"model": self.route.model.id, **fields}).encode())
        return await self._send(await body.rewritten(self.route.rewrite, Endpoint(self.path)), b"application/json")

    async def post_file(self, fields: Mapping[str, str], name: str, content: bytes) -> WorkerResponse:
        texts: dict[str, tuple[str, ...]] = {
            key: (value,) for key, value in {"model": str(self.route.model.id), **fields}.items()
        }
        texts |= self.route.rewrite.form_fields(texts, Endpoint(self.path))
        form = httpx.Request("POST", "http://worker", data=texts, files={"file": (name, content, "audio/wav")})
        return await self._send(form.read(), form.headers["content-type"].encode())

    async def _send(self, body: bytes | bytearray, kind: bytes) -> WorkerResponse:
        model = self.route.model
        paths = {end.path: end.upstream_path or end.path for end in model.adapter.endpoints(model.config)}
        answer = await self.upstream.request("POST", paths[self.path].encode(), [(b"content-type", kind)], body)
        if answer.status != 200:
            raw = (await answer.read(4096)).decode(errors="replace")
            answer.close()
            raise BenchError(f"{self.path} answers with {answer.status}: {_error_message(raw)}")
        return answer


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of request. `run` sends it once, with its number, and waits for the whole answer."""

    unit: str  # of a round's rate
    counts: str  # the thing that a round's `amount` counts
    paths: tuple[str, ...]  # the first one that the model serves is used
    run: Callable[[WorkerClient, int], Awaitable[Round]]
    shows_cold: bool = False  # also report the first answer


def choose(route: Route, prompt: str | None, tokens: int | None, *, ocr: bool = False) -> tuple[Workload, str]:
    """The workload for this model, and the path of its requests.

    Raises BenchError where no workload fits, InvalidRequestError for a prompt that the model could not use.
    """
    if ocr:
        return _ocr_workload(route, prompt, tokens or OCR_TOKENS)
    model, text = route.model, prompt or SENTENCE
    most = tokens or TOKENS
    write = Workload("tokens/s", "tokens", (CHAT, "/v1/completions"), partial(_complete, prompt or PROMPT, most))
    listen = Workload(REAL_TIME, "seconds of sound", ("/v1/audio/transcriptions",), _transcribe)
    speak = Workload(REAL_TIME, "seconds of speech", ("/v1/audio/speech",), partial(_speak, text))
    embed = Workload("vectors/s", "vectors", ("/v1/embeddings",), partial(_embed, text))
    rank = Workload("documents/s", "documents", ("/v1/rerank",), partial(_rank, text))
    by_type = {"llm": (write, rank), "asr": (listen,), "tts": (speak,), "embedding": (embed, rank), "vision": (embed,)}
    served = {endpoint.path for endpoint in model.adapter.endpoints(model.config)}
    if model.prompts is not None:  # requests go to the worker itself, which may have no chat template
        served.discard(CHAT)
    for workload in by_type.get(model.config.type, ()):
        for path in workload.paths:
            if path in served:
                if prompt is not None and workload is listen:
                    raise InvalidRequestError("A model that hears gets a generated sound; leave --prompt out.")
                return workload, path
    raise BenchError(f"{model.id} is of type {model.config.type} and serves nothing that can be measured.")


def _ocr_workload(route: Route, prompt: str | None, most: int) -> tuple[Workload, str]:
    model = route.model
    if "image" not in model.adapter.capabilities(model.config).modalities:
        raise BenchError(f"{model.id} takes no pictures, so it can't read a page: --ocr is for models that see.")
    if CHAT not in {endpoint.path for endpoint in model.adapter.endpoints(model.config)}:
        raise BenchError(f"{model.id} doesn't serve {CHAT}, by which --ocr shows the page.")
    read = partial(_read_page, prompt or page.PROMPT, most)
    return Workload("tokens/s", "tokens", (CHAT,), read, shows_cold=True), CHAT


async def _complete(prompt: str, most: int, client: WorkerClient, number: int) -> Round:
    text = f"({number}) {prompt}"
    fields: Json = {"messages": [{"role": "user", "content": text}]} if client.path == CHAT else {"prompt": text}
    round_, _ = await _stream_answer(client, fields | {"temperature": 0}, most)
    return round_


async def _read_page(prompt: str, most: int, client: WorkerClient, _number: int) -> Round:
    picture = {"type": "image_url", "image_url": {"url": page.data_url()}}
    message = {"role": "user", "content": [picture, {"type": "text", "text": prompt}]}
    round_, text = await _stream_answer(client, {"messages": [message], "temperature": 0, "top_k": 1}, most)
    found, printed = len(page.printed() & page.words(text)), len(page.printed())
    note = f"cut at {most} tokens" if round_.amount >= most else None
    found_note = f"{found} of {printed} words of the page"
    return replace(round_, note=f"{found_note}; {note}" if note else found_note, words_found=found)


async def _stream_answer(client: WorkerClient, fields: Json, most: int) -> tuple[Round, str]:
    """The figures and the text of the answer. Tokens: the worker's own count, else the number of pieces in the answer."""
    fields = fields | {"max_tokens": most, "stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    answer = await client.post(fields)
    first = last = 0.0
    pieces, texts, usage, timings = 0, list[str](), Json(), Json()
    async for event in _parse_events(answer):
        if "error" in event:
            raise BenchError(f"{client.path} breaks off: {_error_message(json.dumps(event))}")
        if _has_answer_part(event):
            last = time.perf_counter()
            first = first or last
            pieces += 1
            texts.append(_answer_text(event))
        usage, timings = part(event, "usage") or usage, part(event, "timings") or timings
    if not pieces:
        raise BenchError("The answer is empty; ask for something else with --prompt.")
    tokens = _number_field(usage, "completion_tokens") or _number_field(timings, "predicted_n") or pieces
    # The time to the first token is spent on the prompt. A worker's own clock doesn't see pieces that arrive together.
    between = (tokens - 1) / (last - first) if tokens > 1 and last > first else tokens / (last - began)
    rate = _number_field(timings, "predicted_per_second") or between
    note = f"answers end after {tokens:.0f} tokens" if tokens < min(most, 32) else None
    round_ = Round(
        tokens, last - began, rate, (first - began) * 1000, _number_field(timings, "prompt_per_second"), note
    )
    return round_, "".join(texts)


async def _transcribe(client: WorkerClient, _number: int) -> Round:
    content = audio.murmur()
    began = time.perf_counter()
    answer = await client.post_file({"response_format": "json"}, "sound.wav", content)
    heard = _parse_json(await answer.read(LIMIT), client.path)
    took = time.perf_counter() - began
    note = None if heard.get("text") else "no words were heard in the generated sound: speech takes longer"
    return Round(audio.SECONDS, took, audio.SECONDS / took, note=note)


async def _speak(text: str, client: WorkerClient, _number: int) -> Round:
    model = client.route.model
    voices = model.adapter.voices(model.config)
    fields: Json = {"input": text, "response_format": "wav", **({"voice": voices[0]} if voices else {})}
    began = time.perf_counter()
    answer = await client.post(fields)
    content, first = bytearray(), 0.0
    while piece := await answer.next_chunk():
        content += piece
        if not first and len(content) > audio.WAV_HEAD:
            first = time.perf_counter()
    took = time.perf_counter() - began
    spoken = audio.seconds_of(bytes(content))
    if not spoken:
        raise BenchError(f"{client.path} gives no speech as WAV.")
    return Round(spoken, took, spoken / took, (first - began) * 1000)


async def _embed(text: str, client: WorkerClient, number: int) -> Round:
    texts = [f"({number}.{at}) {text}" for at in range(BATCH)]
    return await _send_batch(client, {"input": texts}, "data")


async def _rank(query: str, client: WorkerClient, number: int) -> Round:
    documents = [f"({number}.{at}) {SENTENCE}" for at in range(BATCH)]
    return await _send_batch(client, {"query": query, "documents": documents}, "results")


async def _send_batch(client: WorkerClient, fields: Json, field: str) -> Round:
    began = time.perf_counter()
    answer = await client.post(fields)
    content = await answer.read(LIMIT)
    took = time.perf_counter() - began
    found = _parse_json(content, client.path).get(field)
    if not isinstance(found, list) or not found:
        raise BenchError(f"{client.path} answers without {field!r}.")
    return Round(len(found), took, len(found) / took)


async def _parse_events(answer: WorkerResponse) -> AsyncIterator[Json]:
    rest = b""
    while piece := await answer.next_chunk():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":
                event = json.loads(content)
                if isinstance(event, dict):
                    yield event


def _has_answer_part(event: Json) -> bool:
    """Whether the event has a part of the answer. The first event often only names the role."""
    choices = rows(event, "choices")
    delta = part(choices[0], "delta") | {"text": choices[0].get("text")} if choices else {}
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls", "text"))


def _answer_text(event: Json) -> str:
    """The text that an event adds to the answer, without reasoning."""
    choices = rows(event, "choices")
    content = part(choices[0], "delta").get("content") or choices[0].get("text") if choices else None
    return content if isinstance(content, str) else ""


def _parse_json(content: bytes, path: str) -> Json:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise BenchError(f"{path} does not answer in JSON.") from error
    return found if isinstance(found, dict) else {}


def _error_message(body: str) -> str:
    try:
        decoded = json.loads(body)
    except ValueError:
        return body[:200]
    error = decoded.get("error") if isinstance(decoded, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else body[:200]


def _number_field(value: Json, key: str) -> float | None:
    found = value.get(key)
    return float(found) if isinstance(found, int | float) and found > 0 else None
