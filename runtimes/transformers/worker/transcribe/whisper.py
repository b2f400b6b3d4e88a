"""Whisper, window by window: decode 30 s, keep the phrases that ended within it, continue where the last one ended.

This is the published method (https://arxiv.org/abs/2212.04356, sections 3.8 and 4.5): timestamp tokens delimit phrases and
say where to continue; text that looks like a loop or a guess is decoded again at a higher temperature; windows without
speech are skipped. transformers' own loop returns nothing before the end of a file, so it is used for single windows.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AutoProcessor
from transformers.modeling_outputs import BaseModelOutput

from runtimes.sdk.audio.samples import RATE, Samples, is_silent
from runtimes.sdk.audio.transcript import Segment, Word
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.transcription import SegmentStream, TranscriptionOptions
from runtimes.sdk.worker_pool import Cancel
from runtimes.transformers.worker.transcribe.alignment import Aligner
from runtimes.transformers.worker.transcribe.family import Family, mean_logprob, stopping

WINDOW: Final = 30 * RATE
MIN_SAMPLES: Final = RATE // 10  # shorter than any word
STAMP_S: Final = 0.02
TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_REPETITION: Final = 2.4  # highest compression ratio of a text
MIN_LOGPROB: Final = -1.0  # lowest mean log probability of a text
NO_SPEECH: Final = 0.6
MAX_PROMPT: Final = 223  # tokens; half of what the decoder takes


@dataclass(frozen=True, slots=True)
class _Window:
    """An encoded window, with the facts from the scores of its first token."""

    states: torch.Tensor
    duration_s: float
    no_speech: float
    language: str | None
    probability: float | None  # of that language among all that the model knows


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The generated text of a window."""

    tokens: tuple[int, ...]
    logprob: float
    repetition: float
    temperature: float


@dataclass(frozen=True, slots=True)
class _Phrase:
    """Tokens of a segment, times in seconds from the window's beginning."""

    start: float
    end: float
    tokens: tuple[int, ...]


class Whisper(Family):
    """Any model of class WhisperForConditionalGeneration."""

    def __init__(self, model: Any, path: str) -> None:
        processor = AutoProcessor.from_pretrained(path)
        self._model, self._processor, self._tokenizer = model, processor, processor.tokenizer
        config = model.generation_config
        if getattr(config, "no_timestamps_token_id", None) is None:
            raise ValueError("generation_config.json has no no_timestamps_token_id: this is an outdated Whisper model")
        self._codes: dict[str, int] = {
            token.strip("<|>"): number for token, number in (getattr(config, "lang_to_id", None) or {}).items()
        }
        self._multilingual = bool(getattr(config, "is_multilingual", False)) and bool(self._codes)
        self._tasks: dict[str, int] = getattr(config, "task_to_id", None) or {}
        self._start_token, self._end_token = config.decoder_start_token_id, model.config.eos_token_id
        self._first_stamp: int = config.no_timestamps_token_id + 1
        self._no_speech = config.no_timestamps_token_id - 1
        self._aligner = Aligner(model, self._tokenizer)
        self.translates = self._multilingual and "translate" in self._tasks

    def languages(self) -> frozenset[str]:
        """The languages with a token, or English alone."""
        return frozenset(self._codes) if self._multilingual else frozenset({"en"})

    def transcribe(self, samples: Samples, wanted: TranscriptionOptions, cancel: Cancel) -> SegmentStream:
        """Transcribe window by window. An unnamed language is detected in the first window that isn't silent."""
        seek = next((at for at in range(0, len(samples), WINDOW) if not is_silent(samples[at : at + WINDOW])), None)
        if seek is None:
            return SegmentStream(wanted.language, iter(()))
        first = self._encode_window(samples[seek : seek + WINDOW])
        language = (wanted.language or first.language) if self._multilingual else "en"
        heard = self._multilingual and not wanted.language
        segments = self._transcribe_windows(samples, seek, first, wanted, language, cancel)
        return SegmentStream(language, segments, first.probability if heard else None)

    def _transcribe_windows(
        self,
        samples: Samples,
        seek: int,
        first: _Window,
        wanted: TranscriptionOptions,
        language: str | None,
        cancel: Cancel,
    ) -> Iterator[Segment]:
        prompt = self._prompt_ids(wanted.prompt)
        window: _Window | None = first
        while len(samples) - seek >= MIN_SAMPLES:
            cancel.check()
            heard = samples[seek : seek + WINDOW]
            if is_silent(heard):
                seek += WINDOW
                continue
            window = window or self._encode_window(heard)
            decoded = self._decode_window(window, wanted, language, prompt, cancel)
            if window.no_speech > NO_SPEECH and decoded.logprob < MIN_LOGPROB:
                seek += WINDOW
            else:
                phrases, used_s = self._split_phrases(decoded.tokens, window.duration_s)
                yield from self._to_segments(phrases, window, decoded, seek / RATE, wanted, language)
                seek += round(used_s * RATE) or WINDOW
            window = None

    def _encode_window(self, samples: Samples) -> _Window:
        with torch.inference_mode():
            features = self._processor.feature_extractor(
                samples, sampling_rate=RATE, return_tensors="pt"
            ).input_features
            features = features.to(self._model.device, self._model.dtype)
            states = self._model.get_encoder()(features).last_hidden_state
            start = torch.tensor([[self._start_token]], device=self._model.device)
            outputs = BaseModelOutput(last_hidden_state=states)
            chances = self._model(encoder_outputs=outputs, decoder_input_ids=start).logits[0, -1].float().softmax(-1)
            spoken = {code: float(chances[token]) for code, token in self._codes.items()}
            language = max(spoken, key=spoken.__getitem__, default=None)
            probability = spoken[language] / sum(spoken.values()) if language is not None else None
            return _Window(states, len(samples) / RATE, float(chances[self._no_speech]), language, probability)

    def _decode_window(
        self,
        window: _Window,
        wanted: TranscriptionOptions,
        language: str | None,
        prompt: torch.Tensor | None,
        cancel: Cancel,
    ) -> _Decoded:
        with torch.inference_mode():
            best: _Decoded | None = None
            for temperature in (wanted.temperature,) if wanted.temperature else TEMPERATURES:
                output = self._model.generate(
                    encoder_outputs=BaseModelOutput(last_hidden_state=window.states),
                    return_timestamps=True,
                    force_unique_generate_call=True,
                    return_dict_in_generate=True,
                    output_scores=True,
                    temperature=temperature,
                    prompt_ids=prompt,
                    stopping_criteria=stopping(cancel),
                    **({"language": language, "task": wanted.task} if self._multilingual else {}),
                )
                cancel.check()
                tokens = output["sequences"][0].tolist()[-len(output["scores"]) :]
                logprob = mean_logprob(output["scores"], tokens, temperature)
                tokens = tokens[: tokens.index(self._end_token)] if self._end_token in tokens else tokens
                text = self._decode_text(tokens).strip().encode()
                repetition = len(text) / len(zlib.compress(text)) if text else 0.0
                decoded = _Decoded(tuple(tokens), logprob, repetition, temperature)
                if (repetition <= MAX_REPETITION and logprob >= MIN_LOGPROB) or (
                    window.no_speech > NO_SPEECH and logprob < MIN_LOGPROB
                ):
                    return decoded
                if best is None or (repetition <= MAX_REPETITION, logprob) > (
                    best.repetition <= MAX_REPETITION,
                    best.logprob,
                ):
                    best = decoded
            assert best is not None
            return best

    def _split_phrases(self, tokens: Sequence[int], duration_s: float) -> tuple[list[_Phrase], float]:
        """The phrases in a window, and the seconds they cover: to its end, or to where an unfinished phrase begins."""
        is_stamp = [token >= self._first_stamp for token in tokens]
        ends_alone = is_stamp[-2:] == [False, True]  # no phrase begins after it
        cuts = [at for at in range(1, len(tokens)) if is_stamp[at - 1] and is_stamp[at]]
        if not cuts:
            last = next((token for token in reversed(tokens) if token > self._first_stamp), None)
            end = duration_s if last is None else self._stamp_seconds(last)
            return [_Phrase(0.0, end, tuple(tokens))], duration_s
        used_s = duration_s if ends_alone else self._stamp_seconds(tokens[cuts[-1] - 1])
        bounds = [0, *cuts, *([len(tokens)] if ends_alone else [])]
        phrases = []
        for first, following in itertools.pairwise(bounds):
            start = self._stamp_seconds(tokens[first]) if is_stamp[first] else 0.0
            phrases.append(_Phrase(start, self._stamp_seconds(tokens[following - 1]), tuple(tokens[first:following])))
        return phrases, used_s

    def _to_segments(
        self,
        phrases: list[_Phrase],
        window: _Window,
        decoded: _Decoded,
        begin_s: float,
        wanted: TranscriptionOptions,
        language: str | None,
    ) -> Iterator[Segment]:
        texts = [[token for token in phrase.tokens if token < self._end_token] for phrase in phrases]
        words: list[list[Word]] = [[] for _ in phrases]
        if wanted.words:
            prefix = [self._start_token]
            if self._multilingual:
                prefix += [self._codes[language or "en"], self._tasks[wanted.task]]
            prefix.append(self._first_stamp - 1)
            words = self._aligner.words(window.states, prefix, texts, window.duration_s, begin_s, language)
        for phrase, text, own in zip(phrases, texts, words, strict=True):
            yield Segment(
                start=begin_s + phrase.start,
                end=begin_s + phrase.end,
                text=self._decode_text(text),
                words=tuple(own),
                tokens=phrase.tokens,
                avg_logprob=decoded.logprob,
                no_speech_prob=window.no_speech,
                compression_ratio=decoded.repetition,
                temperature=decoded.temperature,
                seek=begin_s,
            )

    def _stamp_seconds(self, stamp: int) -> float:
        return (stamp - self._first_stamp) * STAMP_S

    def _decode_text(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode([token for token in tokens if token < self._end_token], skip_special_tokens=True)
        )

    def _prompt_ids(self, text: str | None) -> torch.Tensor | None:
        if not text:
            return None
        try:
            ids = self._tokenizer.get_prompt_ids(text, return_tensors="pt").to(self._model.device)
        except ValueError as error:
            raise WorkerError(f"prompt: {error}", param="prompt") from error
        return torch.cat((ids[:1], ids[1:][-MAX_PROMPT:]))
