"""OpenAI's speech recognition endpoints for any model: everything except the model itself.

A runtime's worker subclasses `TranscriptionWorker` and implements `transcribe`, which yields segments. Parsing the form,
decoding, silence, languages, formats and streaming are here, so that every engine behaves alike.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Final

import numpy as np
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response

from runtimes.sdk.audio.decode import decode
from runtimes.sdk.audio.parameters import PARAMETERS
from runtimes.sdk.audio.samples import RATE, Samples, is_silent
from runtimes.sdk.audio.transcript import FORMATS, Format, Segment, Task, Transcript
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError, unsupported
from runtimes.sdk.form import read_form
from runtimes.sdk.parameters import Table, check
from runtimes.sdk.server import Endpoint, Settings, Worker, events, wait_first_item
from runtimes.sdk.worker_pool import Cancel
from runtimes.shared.languages import code_of

GRANULARITIES: Final = ("segment", "word")

_LISTS: Final = frozenset({"timestamp_granularities", "include", "known_speaker_names", "known_speaker_references"})


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """A request's options for the model. `language` is a code that the model knows; None: detect the language."""

    task: Task = "transcribe"
    language: str | None = None
    prompt: str | None = None
    temperature: float = 0.0
    words: bool = False


@dataclass(frozen=True, slots=True)
class SegmentStream:
    """The segments as the model finds them. `language` is a code; None: unknown.

    `probability`: the probability of a detected language; None: unknown, or not detected.
    """

    language: str | None
    segments: Iterator[Segment]
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """A parsed request."""

    file: BinaryIO
    wanted: TranscriptionOptions
    format: Format
    granularities: Sequence[str]
    stream: bool


class TranscriptionWorker(Worker):
    """A speech recognition model. Options: `default_language`, `max_audio_s`."""

    parameters: Table = PARAMETERS
    translates = True  # into English; `load` may change it

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        registry = self.meters.registry
        self._audio_seconds = Counter("llmux_worker_audio_seconds", "Seconds of audio transcribed.", registry=registry)
        self._processing_seconds = Counter(
            "llmux_worker_audio_processing_seconds", "Seconds that transcribing it took.", registry=registry
        )
        self._transcript_count = Counter(
            "llmux_worker_transcripts", "Transcripts, by the code of their language.", ["language"], registry=registry
        )

    @abc.abstractmethod
    def languages(self) -> frozenset[str]:
        """The codes of the languages that the model knows."""

    @abc.abstractmethod
    def transcribe(self, samples: Samples, wanted: TranscriptionOptions, cancel: Cancel) -> SegmentStream:
        """Begin a transcription. Blocks, as does each step of the segments. Checks `cancel` as often as possible."""

    def routes(self) -> Mapping[str, Endpoint]:
        """OpenAI's endpoints for transcriptions and translations."""
        return {"POST /v1/audio/transcriptions": self._transcription, "POST /v1/audio/translations": self._translation}

    def try_out(self) -> None:
        """Transcribe half a second of noise, at the end of `load`. Raises whatever the model raises."""
        noise = np.random.default_rng(0).normal(0.0, 0.01, RATE // 2).astype(np.float32)
        language = self._default_language() or ("en" if "en" in self.languages() else None)
        wanted = TranscriptionOptions(language=language, temperature=0.2)  # above 0: no retries at higher temperatures
        for _segment in self.transcribe(noise, wanted, Cancel()).segments:
            pass

    async def _transcription(self, request: Request) -> Response:
        return await self._respond(request, "transcribe")

    async def _translation(self, request: Request) -> Response:
        if not self.translates:
            raise WorkerError(
                "This model does not translate; /v1/audio/transcriptions writes what was said as it was said.",
                code="endpoint_not_supported",
                param="model",
            )
        return await self._respond(request, "translate")

    async def _respond(self, request: Request, task: Task) -> Response:
        parsed = await self._read_request(request, task)
        if parsed.stream:
            return events(await wait_first_item(self._stream_events(parsed)))
        transcript = await self.pool.run(lambda cancel: self._transcribe_all(parsed, cancel))
        return await asyncio.to_thread(transcript.response, parsed.format, parsed.granularities)

    async def _stream_events(self, parsed: _Request) -> AsyncIterator[object]:
        """The events of a stream: a delta for each segment, then the whole text."""
        text = ""
        done: dict[str, object] = {}
        async for item in self.pool.stream(lambda cancel: self._transcribe_segments(parsed, cancel)):
            if isinstance(item, Segment):
                delta = item.text if text else item.text.lstrip()
                text += delta
                yield {"type": "transcript.text.delta", "delta": delta}
            elif isinstance(item, Transcript):
                done = {"metrics": item.metrics.fields()}
        yield {"type": "transcript.text.done", "text": text, **done}

    def _transcribe_all(self, parsed: _Request, cancel: Cancel) -> Transcript:
        *segments, transcript = self._transcribe_segments(parsed, cancel)
        assert isinstance(transcript, Transcript)
        transcript.segments.extend(piece for piece in segments if isinstance(piece, Segment))
        return transcript

    def _transcribe_segments(self, parsed: _Request, cancel: Cancel) -> Iterator[Transcript | Segment]:
        """The segments, then a transcript without segments, which has the language and the metrics."""
        began = time.monotonic()
        with parsed.file as file:
            samples = decode(file, longest_s=float(self.settings.options["max_audio_s"]), cancel=cancel)
        duration_s = len(samples) / RATE
        if is_silent(samples):
            result = SegmentStream(parsed.wanted.language, iter(()))
        else:
            result = self.transcribe(samples, parsed.wanted, cancel)
        for segment in result.segments:
            cancel.check()
            if segment.text.strip():
                start, end = min(segment.start, duration_s), min(segment.end, duration_s)
                yield replace(segment, start=start, end=max(start, end), text=segment.text.rstrip())
        took_s = time.monotonic() - began
        self._audio_seconds.inc(duration_s)
        self._processing_seconds.inc(took_s)
        self._transcript_count.labels(result.language or "unknown").inc()
        yield Transcript(
            parsed.wanted.task, duration_s, result.language, probability=result.probability, processing_s=took_s
        )

    async def _read_request(self, request: Request, task: Task) -> _Request:
        form = await read_form(request, "file", _LISTS)
        try:
            return self._parse_fields(form.fields, form.file, task)
        except WorkerError:
            if form.file is not None:
                form.file.close()
            raise

    def _parse_fields(self, fields: Body, file: BinaryIO | None, task: Task) -> _Request:
        check(self.parameters, fields.values)
        if file is None:
            raise WorkerError(
                "file is needed: the audio, as a part with a filename.", param="file", code="missing_file"
            )
        kind = fields.choice("response_format", FORMATS, "json")
        granularities = fields.texts("timestamp_granularities", 2)
        for name in granularities:
            if name not in GRANULARITIES:
                raise fields.wrong_value("timestamp_granularities", f"of {', '.join(GRANULARITIES)}")
        if "word" in granularities and kind != "verbose_json":
            raise unsupported("timestamp_granularities", "words come with response_format verbose_json only.")
        stream = fields.flag("stream")
        if stream and kind not in {"json", "text"}:
            raise unsupported("stream", f"{kind} is not streamed; leave out response_format, or stream.")
        return _Request(
            file=file,
            wanted=TranscriptionOptions(
                task=task,
                language=self._requested_language(fields.text("language")),
                prompt=fields.text("prompt"),
                temperature=fields.number("temperature", 0.0, 0.0, 1.0),
                words="word" in granularities,
            ),
            format=kind,
            granularities=granularities,
            stream=stream,
        )

    def _requested_language(self, given: str | None) -> str | None:
        if given is None:
            return self._default_language()
        found = code_of(given, self.languages())
        if found is None:
            known = ", ".join(sorted(self.languages()))
            raise WorkerError(f"language is {given[:40]!r}, but this model knows: {known}.", param="language")
        return found

    def _default_language(self) -> str | None:
        default = self.settings.options.get("default_language")
        return None if default is None else code_of(default, self.languages())
