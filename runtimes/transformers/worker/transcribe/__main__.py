"""The worker program for speech recognition: load the model, choose its family, serve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import transformers
from transformers import AutoModelForSpeechSeq2Seq

from runtimes.sdk.audio.samples import Samples
from runtimes.sdk.server import serve
from runtimes.sdk.transcription import SegmentStream, TranscriptionOptions, TranscriptionWorker
from runtimes.sdk.worker_pool import Cancel
from runtimes.transformers.worker.transcribe.cohere import Cohere
from runtimes.transformers.worker.transcribe.family import Family
from runtimes.transformers.worker.transcribe.whisper import Whisper

FAMILIES: Final[Mapping[str, Callable[[Any, str], Family]]] = MappingProxyType(
    {"whisper": Whisper, "cohere_asr": Cohere}
)


class SpeechWorker(TranscriptionWorker):
    """Options: `path`, `device`, `dtype`."""

    def load(self) -> None:
        """Load the model, and transcribe a trial."""
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        options = self.settings.options
        model = AutoModelForSpeechSeq2Seq.from_pretrained(options["path"], dtype=options["dtype"])
        model = model.to(options["device"]).eval()
        self._family = FAMILIES[model.config.model_type](model, options["path"])
        self.parameters, self.translates = self._family.parameters, self._family.translates
        self.try_out()

    def languages(self) -> frozenset[str]:
        """The languages of the model, from its family."""
        return self._family.languages()

    def transcribe(self, samples: Samples, wanted: TranscriptionOptions, cancel: Cancel) -> SegmentStream:
        """Transcribe with the model's family."""
        return self._family.transcribe(samples, wanted, cancel)


if __name__ == "__main__":
    serve(SpeechWorker)
