"""The worker program for Whisper on whisper.cpp: OpenAI's API in front of whisper.cpp's own server, a child process.

The server handles one request at a time, supports few kinds of files, and answers once the whole file is done. So the worker
decodes files, and sends them in pieces, as WAV: text arrives piece by piece, and a client that disconnects costs at most the
rest of a step, because the server gives up when its connection closes.
"""

from __future__ import annotations

import http.client
import io
import itertools
import json
import secrets
import wave
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from runtimes.sdk.audio.samples import RATE, Samples
from runtimes.sdk.audio.transcript import Segment, Word
from runtimes.sdk.audio.windows import Window, windows
from runtimes.sdk.child import HOST, Child
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.server import serve
from runtimes.sdk.transcription import SegmentStream, TranscriptionOptions, TranscriptionWorker
from runtimes.sdk.worker_pool import Cancel
from runtimes.shared.languages import NAMES, code_of

PIECE_S: Final = 120.0
SEARCH_S: Final = 15.0
SHORTEST: Final = RATE // 10  # samples; the server fails on fewer
CONTEXT: Final = 200  # characters of the preceding text that the next piece gets as its prompt
UNBOUNDED: Final = 1_000_000  # characters of a segment: without it the server cuts them at 60, within words
PATH: Final = "/inference"
UNSPACED: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue", "km", "bo"})


class WhisperCppWorker(TranscriptionWorker):
    """Options: `argv` (the server and its options, without its address), `multilingual`."""

    _child: Child | None = None

    def load(self) -> None:
        """Start the server, and transcribe a trial."""
        argv = [*self.settings.options["argv"], "--host", HOST, "--inference-path", PATH, "--port"]
        self.translates = self.settings.options["multilingual"]
        self._child = Child(lambda port: [*argv, str(port)], "/health")
        self._child.wait_ready()
        self.try_out()

    def close(self) -> None:
        """End the server."""
        if self._child is not None:
            self._child.close()

    def languages(self) -> frozenset[str]:
        """All languages of Whisper, or English alone for an English model."""
        return frozenset(NAMES) if self.translates else frozenset({"en"})

    def transcribe(self, samples: Samples, wanted: TranscriptionOptions, cancel: Cancel) -> SegmentStream:
        """Transcribe piece by piece. An unnamed language is detected in the first piece that isn't silent."""
        pieces = (piece for piece in windows(samples, PIECE_S, SEARCH_S) if len(piece.samples) >= SHORTEST)
        first = next(pieces, None)
        if first is None:
            return SegmentStream(wanted.language, iter(()))
        given = wanted.language or (None if self.translates else "en")
        found = self._transcribe_piece(first, wanted, given, wanted.prompt, cancel)
        language = given or code_of(str(found.get("language")), NAMES)

        def segments() -> Iterator[Segment]:
            context = wanted.prompt or ""
            for piece in itertools.chain((first,), pieces):
                cancel.check()
                result = (
                    found
                    if piece is first
                    else self._transcribe_piece(piece, wanted, language, context[-CONTEXT:], cancel)
                )
                for segment in result["segments"]:
                    context += segment["text"]
                    yield _to_segment(segment, piece, language, words=wanted.words)

        probability = None if given else found.get("detected_language_probability")
        return SegmentStream(language, segments(), probability)

    def _transcribe_piece(
        self, piece: Window, wanted: TranscriptionOptions, language: str | None, prompt: str | None, cancel: Cancel
    ) -> Mapping[str, Any]:
        fields = {
            "response_format": "verbose_json",
            "language": language or "auto",
            "no_language_probabilities": "false" if language is None else "true",  # they cost another pass
            "translate": "true" if wanted.task == "translate" else "false",
            "temperature": str(wanted.temperature),
            "temperature_inc": "0.0" if wanted.temperature else "0.2",
            "max_len": str(UNBOUNDED),
            "prompt": prompt or "",
        }
        assert self._child is not None, "it is loaded"
        body, kind = _multipart_form(fields, _to_wav(piece.samples))
        try:
            status, answer = self._child.request("POST", PATH, body, kind, cancel)
            found: Mapping[str, Any] = json.loads(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _server_error(str(error)) from error
        if status != http.client.OK:
            raise _server_error(str(found.get("error")))
        return found


def _server_error(why: str) -> WorkerError:
    return WorkerError(f"whisper.cpp's server failed: {why}.", code="worker_failed", status=500)


def _to_wav(samples: Samples) -> bytes:
    """The samples as a WAV file, 16 bits at 16 kHz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(np.rint(np.clip(samples * 32_768, -32_768, 32_767)).astype("<i2").tobytes())
    return file.getvalue()


def _multipart_form(fields: Mapping[str, str], sound: bytes) -> tuple[bytes, str]:
    """A multipart body and its content type."""
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="sound.wav"\r\n'
    body = "".join(parts).encode() + head.encode() + b"Content-Type: audio/wav\r\n\r\n" + sound
    return body + f"\r\n--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def _to_segment(found: Mapping[str, Any], piece: Window, language: str | None, *, words: bool) -> Segment:
    begin = piece.start_s
    return Segment(
        start=begin + found["start"],
        end=begin + found["end"],
        text=found["text"],
        words=tuple(_join_words(found.get("words", ()), begin, language)) if words else (),
        tokens=tuple(found.get("tokens", ())),
        avg_logprob=found["avg_logprob"] or 0.0,  # null: not a number
        no_speech_prob=found.get("no_speech_prob") or 0.0,
        temperature=found["temperature"],
        seek=begin,
    )


def _join_words(tokens: Any, begin: float, language: str | None) -> Iterator[Word]:
    """The words in the server's list of tokens. A token begins a word after a blank, or in a language without blanks."""
    word: Word | None = None
    for token in tokens:
        text, start, end = token["word"], begin + token["start"], begin + token["end"]
        if word is None or text.startswith(" ") or language in UNSPACED:
            if word is not None:
                yield word
            word = Word(start, end, text.strip())
        else:
            word = Word(word.start, end, word.text + text.rstrip())
    if word is not None:
        yield word


if __name__ == "__main__":
    serve(WhisperCppWorker)
