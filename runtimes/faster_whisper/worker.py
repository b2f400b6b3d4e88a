"""The worker program for Whisper on CTranslate2, with faster-whisper.

Long files are transcribed in pieces of `PIECE_S`: faster-whisper computes the spectrum of its whole input at once, which takes
a megabyte per second of audio, gigabytes for an hour.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from faster_whisper import WhisperModel

from runtimes.sdk.audio.samples import Samples
from runtimes.sdk.audio.transcript import Segment, Word
from runtimes.sdk.audio.windows import Window, windows
from runtimes.sdk.server import serve
from runtimes.sdk.transcription import SegmentStream, TranscriptionOptions, TranscriptionWorker
from runtimes.sdk.worker_pool import Cancel

PIECE_S: Final = 120.0
SEARCH_S: Final = 15.0
CONTEXT: Final = 200  # characters of the preceding text that the next piece gets as its prompt


class FasterWhisperWorker(TranscriptionWorker):
    """Options: `path`, `device`, `compute_type`, `threads`, `beam_size`, `vad`."""

    def load(self) -> None:
        """Load the model, and transcribe a short sample, which shows that it works."""
        options = self.settings.options
        self._model = WhisperModel(
            options["path"],
            device=options["device"],
            compute_type=options["compute_type"],
            cpu_threads=options["threads"] or 0,
            num_workers=self.settings.parallel,
            local_files_only=True,
        )
        self.translates = self._model.model.is_multilingual
        self.try_out()

    def languages(self) -> frozenset[str]:
        """All languages of Whisper, or English alone for an English model."""
        return frozenset(self._model.supported_languages)

    def transcribe(self, samples: Samples, wanted: TranscriptionOptions, cancel: Cancel) -> SegmentStream:
        """Transcribe piece by piece. An unnamed language is detected in the first piece that isn't silent."""
        pieces = windows(samples, PIECE_S, SEARCH_S)
        first = next(pieces, None)
        if first is None:
            return SegmentStream(wanted.language, iter(()))
        found, info = self._transcribe_piece(first, wanted, wanted.language, wanted.prompt)

        def segments() -> Iterator[Segment]:
            context = wanted.prompt or ""
            for piece in itertools.chain((first,), pieces):
                cancel.check()
                results = (
                    found
                    if piece is first
                    else self._transcribe_piece(piece, wanted, info.language, context[-CONTEXT:])[0]
                )
                for segment in results:
                    context += segment.text
                    yield _to_segment(segment, piece)

        return SegmentStream(info.language, segments(), None if wanted.language else float(info.language_probability))

    def _transcribe_piece(
        self, piece: Window, wanted: TranscriptionOptions, language: str | None, prompt: str | None
    ) -> tuple[Iterator[Any], Any]:
        options: dict[str, Any] = {} if wanted.temperature == 0 else {"temperature": wanted.temperature}
        found, info = self._model.transcribe(
            piece.samples,
            language=language,
            task=wanted.task,
            initial_prompt=prompt or None,
            word_timestamps=wanted.words,
            beam_size=self.settings.options["beam_size"],
            vad_filter=self.settings.options["vad"],
            **options,
        )
        return iter(found), info


def _to_segment(found: Any, piece: Window) -> Segment:
    begin = piece.start_s
    return Segment(
        start=float(begin + found.start),
        end=float(begin + found.end),
        text=found.text,
        words=tuple(
            Word(float(begin + word.start), float(begin + word.end), word.word.strip()) for word in found.words or ()
        ),
        tokens=tuple(found.tokens),
        avg_logprob=found.avg_logprob,
        no_speech_prob=found.no_speech_prob,
        compression_ratio=found.compression_ratio,
        temperature=found.temperature,
        seek=begin + found.seek / 100,
    )


if __name__ == "__main__":
    serve(FasterWhisperWorker)
