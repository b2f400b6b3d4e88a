"""CohereAsr (cohere-transcribe): text without timestamps, in a language that the request must name.

Long audio is split where it is quiet, into pieces as long as the model takes; each is one segment.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers import AutoTokenizer
from transformers.audio_utils import mel_filter_bank
from transformers.models.cohere_asr.processing_cohere_asr import LANGUAGES, CohereAsrProcessor

from runtimes.sdk.audio.parameters import COHERE
from runtimes.sdk.audio.samples import RATE, Samples
from runtimes.sdk.audio.transcript import Segment
from runtimes.sdk.audio.windows import Window, windows
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.transcription import SegmentStream, TranscriptionOptions
from runtimes.sdk.worker_pool import Cancel
from runtimes.transformers.worker.transcribe.family import Family, mean_logprob, stopping

NO_SPACES: Final = frozenset({"ja", "zh"})


def load_processor(path: str) -> Any:
    """The model's processor, as AutoProcessor loads it with librosa.

    transformers 5.22 needs librosa for one table; that package and its dependencies take 420 MB of disk, and memory in every
    worker. Later versions compute the table with their own function, as is done here.
    """
    module: Any = importlib.import_module("transformers.models.cohere_asr.feature_extraction_cohere_asr")
    module.librosa = SimpleNamespace(filters=SimpleNamespace(mel=_mel_filters))
    extractor = module.CohereAsrFeatureExtractor.from_pretrained(path)
    return CohereAsrProcessor(extractor, AutoTokenizer.from_pretrained(path))


def _mel_filters(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str) -> Any:
    return mel_filter_bank(n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm=norm, mel_scale="slaney").T


class Cohere(Family):
    """Any model of class CohereAsrForConditionalGeneration."""

    parameters = COHERE

    def __init__(self, model: Any, path: str) -> None:
        self._model, self._processor = model, load_processor(path)
        extractor = self._processor.feature_extractor
        self._search_s = float(extractor.overlap_chunk_second)
        self._longest_s = float(extractor.max_audio_clip_s) - self._search_s  # the processor would split longer ones

    def languages(self) -> frozenset[str]:
        """The languages it was trained on."""
        return frozenset(LANGUAGES)

    def transcribe(self, samples: Samples, wanted: TranscriptionOptions, cancel: Cancel) -> SegmentStream:
        """Transcribe piece by piece. Raises WorkerError without a language."""
        language = wanted.language
        if language is None:
            raise WorkerError(
                "language is needed: this model can't tell it. Send it, or set default_language in the configuration.",
                param="language",
                code="missing_parameter",
            )
        return SegmentStream(language, self._transcribe_windows(samples, wanted, language, cancel))

    def _transcribe_windows(
        self, samples: Samples, wanted: TranscriptionOptions, language: str, cancel: Cancel
    ) -> Iterator[Segment]:
        blank = ""
        for window in windows(samples, self._longest_s, min(self._search_s, self._longest_s / 2)):
            cancel.check()
            segment = self._transcribe_window(window, wanted, language, blank, cancel)
            blank = "" if language in NO_SPACES else " "
            yield segment

    def _transcribe_window(
        self, window: Window, wanted: TranscriptionOptions, language: str, blank: str, cancel: Cancel
    ) -> Segment:
        with torch.inference_mode():
            inputs = self._processor(audio=window.samples, language=language, sampling_rate=RATE)
            inputs.pop("audio_chunk_index", None)
            inputs = inputs.to(self._model.device, self._model.dtype)
            prompt = inputs["decoder_input_ids"].shape[1]
            sampled = (
                {"do_sample": True, "temperature": wanted.temperature} if wanted.temperature else {"do_sample": False}
            )
            output = self._model.generate(
                **inputs,
                **sampled,
                max_new_tokens=self._model.config.max_position_embeddings - prompt,
                return_dict_in_generate=True,
                output_scores=True,
                stopping_criteria=stopping(cancel),
            )
            cancel.check()
            tokens = output["sequences"][0].tolist()[-len(output["scores"]) :]
            text = self._processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            return Segment(
                start=window.start_s,
                end=window.end_s,
                text=f"{blank}{text}" if text else "",
                tokens=tuple(tokens),
                avg_logprob=mean_logprob(output["scores"], tokens, wanted.temperature),
                temperature=wanted.temperature,
                seek=window.start_s,
            )
