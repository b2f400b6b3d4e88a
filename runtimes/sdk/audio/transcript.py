"""Transcripts and their formats: plain text, OpenAI's JSON (short and verbose), SRT and WebVTT subtitles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from starlette.responses import JSONResponse, Response

from runtimes.shared.languages import NAMES

Task = Literal["transcribe", "translate"]
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORMATS: Final[Sequence[Format]] = ("json", "text", "srt", "verbose_json", "vtt")


@dataclass(frozen=True, slots=True)
class Word:
    """One word, without surrounding blanks. Times in seconds from the beginning of the file."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A phrase. The texts of all segments, concatenated, are the whole text: a blank between two belongs to the second.

    Times in seconds from the beginning of the file; `seek` is the beginning of the window it was found in. Where a model
    doesn't provide `avg_logprob`, `no_speech_prob` or `compression_ratio`, they stay 0.
    """

    start: float
    end: float
    text: str
    words: tuple[Word, ...] = ()
    tokens: tuple[int, ...] = ()
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    compression_ratio: float = 0.0
    temperature: float = 0.0
    seek: float = 0.0


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one transcription: the length of the audio, the time for decoding and for the model, the language.

    `probability` belongs to a detected language; None if the client or the configuration named the language.
    """

    audio_s: float
    processing_s: float
    language: str | None = None
    probability: float | None = None

    def fields(self) -> dict[str, object]:
        """The figures by name. A real-time factor below 1 is faster than the audio."""
        factor = self.processing_s / self.audio_s if self.audio_s else None
        return {
            "audio_s": round(self.audio_s, 3),
            "processing_ms": round(self.processing_s * 1000),
            "real_time_factor": None if factor is None else round(factor, 4),
            "language": self.language,
            "language_probability": None if self.probability is None else round(self.probability, 4),
        }

    def headers(self) -> dict[str, str]:
        """The known figures as headers, for a response in any format."""
        return {f"x-{name.replace('_', '-')}": str(value) for name, value in self.fields().items() if value is not None}


@dataclass(slots=True)
class Transcript:
    """The transcript of a file of `duration_s` seconds. `language` is a code; None: unknown."""

    task: Task
    duration_s: float
    language: str | None = None
    segments: list[Segment] = field(default_factory=list)
    probability: float | None = None  # of a detected language
    processing_s: float = 0.0

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def usage(self) -> dict[str, object]:
        """The usage in OpenAI's form for models billed by duration."""
        return {"type": "duration", "seconds": math.ceil(self.duration_s)}

    @property
    def metrics(self) -> Metrics:
        """The figures of this transcription."""
        return Metrics(self.duration_s, self.processing_s, self.language, self.probability)

    def response(self, kind: Format, granularities: Sequence[str]) -> Response:
        """The response in this format. `granularities` (segment, word) select the parts of verbose JSON."""
        response = self._format_response(kind, granularities)
        response.headers.update(self.metrics.headers())
        return response

    def _format_response(self, kind: Format, granularities: Sequence[str]) -> Response:
        match kind:
            case "text":
                return Response(f"{self.text}\n", media_type="text/plain")
            case "srt":
                return Response(self._subtitles(srt=True), media_type="application/x-subrip; charset=utf-8")
            case "vtt":
                return Response("WEBVTT\n\n" + self._subtitles(srt=False), media_type="text/vtt")
            case "verbose_json":
                return JSONResponse(self._verbose_json(granularities))
            case "json":
                return JSONResponse({"text": self.text, "usage": self.usage, "metrics": self.metrics.fields()})

    def _verbose_json(self, granularities: Sequence[str]) -> dict[str, object]:
        answer: dict[str, object] = {
            "task": self.task,
            "language": NAMES.get(self.language or "", self.language or "unknown"),
            "duration": round(self.duration_s, 3),
            "text": self.text,
            "usage": self.usage,
            "metrics": self.metrics.fields(),
        }
        if "word" in granularities:
            answer["words"] = [
                {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}
                for segment in self.segments
                for word in segment.words
            ]
        if "segment" in granularities or not granularities:
            answer["segments"] = [_segment_json(number, segment) for number, segment in enumerate(self.segments)]
        return answer

    def _subtitles(self, *, srt: bool) -> str:
        """All cues, without empty lines and arrows in their text, which would end or begin a cue."""
        cues: list[str] = []
        for segment in self.segments:
            if line := " ".join(segment.text.split()).replace("-->", "->"):
                mark, number = (",", f"{len(cues) + 1}\n") if srt else (".", "")
                line = line if srt else line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
                cues.append(
                    f"{number}{_format_time(segment.start, mark)} --> {_format_time(segment.end, mark)}\n{line}\n\n"
                )
        return "".join(cues)


def _segment_json(number: int, segment: Segment) -> dict[str, object]:
    return {
        "id": number,
        "seek": round(segment.seek * 100),  # frames of 10 ms, as Whisper counts
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _format_time(seconds: float, mark: str) -> str:
    ms = max(0, round(seconds * 1000))
    return f"{ms // 3_600_000:02d}:{ms // 60_000 % 60:02d}:{ms // 1000 % 60:02d}{mark}{ms % 1000:03d}"
