"""The speech worker: Chatterbox behind `/v1/audio/speech`.

A request's text is synthesised in pieces (sentences.py); each is encoded and sent as soon as it is ready. Each piece waits
for the model anew, and is synthesised only after the client has read the one before the last: slow clients delay nobody, and
nothing piles up. The library keeps one prepared voice in the model; preparing a voice takes seconds, so recent ones are cached
here. The library can't be interrupted, but it calls a torch module for each token: a hook on that module ends cancelled work,
and its tokens are counted. The library's watermark stays in the audio.
"""

from __future__ import annotations

import base64
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from runtimes.chatterbox.shared import languages, voices
from runtimes.chatterbox.worker import parameters
from runtimes.chatterbox.worker.sentences import pieces
from runtimes.sdk.audio.encode import FORMATS, Encoder, Tempo
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.parameters import check
from runtimes.sdk.server import Endpoint, Settings, Worker, events, serve, wait_first_item
from runtimes.sdk.worker_pool import Cancel, CancelledWorkError
from runtimes.shared.languages import code_of

MAX_CHARACTERS: Final = 100_000
VOICES_KEPT: Final = 16
TRIAL: Final = "Ready."
TRIAL_STEPS: Final = 150  # 25 are a second of speech


@dataclass(frozen=True, slots=True)
class Speech:
    """A parsed request. `keywords` go to the library."""

    texts: list[str]
    voice: str | None
    format: str
    speed: float
    seed: int | None
    keywords: Mapping[str, Any]
    preparation: Mapping[str, Any]


@dataclass(slots=True)
class LibraryCall:
    """One call of the library, with its cancellation, the text tokens read and the speech tokens generated."""

    cancel: Cancel = field(default_factory=Cancel)
    read: int = 0
    made: int = 0


class Speaker(Worker):
    """One variant of Chatterbox."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        options = settings.options
        self.variant: str = options["variant"]
        self.path = Path(options["path"])
        self.folder = Path(options["voices"]) if options["voices"] else None
        self.aliases: Mapping[str, str] = options["aliases"]
        self.prepared: OrderedDict[str, Any] = (
            OrderedDict()
        )  # the library's conditionals by voice, least recently used first
        self.languages: Mapping[str, str] = {}
        self.call: LibraryCall | None = None  # at most one runs at a time

    def load(self) -> None:
        """Raises whatever the library raises, and FileNotFoundError without any voice."""
        import torch  # noqa: PLC0415  # seconds: not before the port is open

        self.torch: Any = torch
        self.model: Any = self._model_class().from_local(self.path, self.settings.options["device"])
        if self.variant == "multilingual":
            self.languages = self.model.get_supported_languages()
        if self.model.conds is not None:
            self.prepared[voices.BUILT_IN] = self.model.conds
        tokens = self.model.t3
        tokens.tfmr.register_forward_pre_hook(self._check_cancel)
        name = "inference_turbo" if self.variant == "turbo" else "inference"
        setattr(tokens, name, self._count_tokens(getattr(tokens, name)))
        known = voices.voice_names(self.path, self.folder, {})
        if not known:
            raise FileNotFoundError(f"no voice: {self.path} has none of its own, and the folder of voices has no clip")
        language = {"language_id": "en"} if self.variant == "multilingual" else {}
        self._set_voice(self.settings.options["default_voice"] or known[0], {})
        with self._running_call(LibraryCall(_TrialLimit())), contextlib.suppress(CancelledWorkError):
            self.model.generate(TRIAL, **language)

    def _model_class(self) -> Any:
        """The library's model class; each variant has its own module."""
        if self.variant == "turbo":
            from chatterbox.tts_turbo import ChatterboxTurboTTS as Model  # noqa: PLC0415  # as above
        elif self.variant == "multilingual":
            from chatterbox.mtl_tts import ChatterboxMultilingualTTS as Model  # noqa: PLC0415
        else:
            from chatterbox.tts import ChatterboxTTS as Model  # noqa: PLC0415
        return Model

    def routes(self) -> Mapping[str, Endpoint]:
        """The speech endpoint. The supervisor itself lists the voices."""
        return {"POST /v1/audio/speech": self.speech}

    async def speech(self, request: Request) -> Response:
        """The audio file, or events with pieces of it, while it is synthesised."""
        body = await Body.parse(request)
        check(parameters.SPEECH[self.variant], body.values)
        speech = self._parse_request(body)
        as_events = body.choice("stream_format", ("audio", "sse"), "audio") == "sse"
        calls: list[LibraryCall] = []
        parts = await wait_first_item(self._file_pieces(speech, calls))
        if as_events:
            return events(_delta_events(parts, calls))
        return StreamingResponse(parts, media_type=FORMATS[speech.format].media_type)

    def _parse_request(self, body: Body) -> Speech:
        """The parsed request. Raises WorkerError."""
        text = body.required_text("input")
        if len(text) > MAX_CHARACTERS:
            raise WorkerError(f"input has {len(text)} characters; {MAX_CHARACTERS} are the most.", param="input")
        seed = body.integer("seed", None, 0, (1 << 63) - 1)
        exaggeration = body.number("exaggeration", None, 0.25, 2)
        given = {
            "temperature": body.number("temperature", None, 0.05, 5),
            "repetition_penalty": body.number("repetition_penalty", None, 1, 3),
            "top_p": body.number("top_p", None, 0, 1),
        }
        preparation: dict[str, Any] = {}
        if self.variant == "turbo":
            given |= {"top_k": body.integer("top_k", None, 1)}
            preparation = {"norm_loudness": body.flag("norm_loudness", default=True)}
        else:
            given |= {
                "exaggeration": exaggeration,
                "cfg_weight": body.number("cfg_weight", None, 0, 1),
                "min_p": body.number("min_p", None, 0, 1),
            }
        keywords: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.variant == "multilingual":
            keywords["language_id"] = self._requested_language(body)
        return Speech(
            texts=pieces(text),
            voice=self._voice_name(body),
            format=body.choice("response_format", tuple(FORMATS), "mp3"),
            speed=body.number("speed", 1.0, 0.25, 4),
            seed=seed,
            keywords=keywords,
            preparation=preparation,
        )

    def _requested_language(self, body: Body) -> str:
        given = body.text("language") or str(self.settings.options["default_language"])
        found = code_of(given, self.languages)
        if found is None:
            raise body.wrong_value("language", languages.valid_codes(given, self.languages))
        return found

    def _voice_name(self, body: Body) -> str:
        """The requested voice. Raises WorkerError for an unknown one."""
        given = body.values.get("voice")
        name = given.get("id") if isinstance(given, dict) else given
        known = voices.voice_names(self.path, self.folder, self.aliases)
        if name is None or name == "":
            name = self.settings.options["default_voice"] or (known[0] if known else "")
        name = self.aliases.get(name, name) if isinstance(name, str) else name
        if name not in known:
            raise body.wrong_value(
                "voice", f"one of {', '.join(known) or 'none: there are no clips in the folder of voices'}"
            )
        return str(name)

    async def _file_pieces(self, speech: Speech, calls: list[LibraryCall]) -> AsyncIterator[bytes]:
        """The pieces of the file; each is made after the client has read the one before. Appends the calls to `calls`."""
        encoder = Encoder(speech.format, self.model.sr)
        tempo = Tempo(speech.speed, self.model.sr) if speech.speed != 1 else None
        for place in range(len(speech.texts)):
            say = partial(self._synthesise, speech, place, encoder, tempo, calls)
            if data := await self.pool.run(say, again=place > 0):
                yield data
        if tempo is not None:
            yield encoder.feed(tempo.end())
        yield encoder.end()

    def _synthesise(
        self,
        speech: Speech,
        place: int,
        encoder: Encoder,
        tempo: Tempo | None,
        calls: list[LibraryCall],
        cancel: Cancel,
    ) -> bytes:
        """Synthesise one of the texts. Returns the bytes that it adds to the file. Runs in the model's thread."""
        call = LibraryCall(cancel)
        with self._running_call(call):
            self._set_voice(str(speech.voice), speech.preparation)
            if speech.seed is not None:
                self.torch.manual_seed(speech.seed + place)
            made = self.model.generate(speech.texts[place], **speech.keywords)
        calls.append(call)
        samples = np.asarray(made, "<f4").reshape(-1)
        return encoder.feed(samples if tempo is None else tempo.feed(samples))

    def _set_voice(self, name: str, preparation: Mapping[str, Any]) -> None:
        """Set the model's voice. Raises WorkerError for a clip that can't be used."""
        key = f"{name} {dict(preparation)}" if preparation.get("norm_loudness") is False else name
        if key not in self.prepared:
            clip = voices.clips(self.folder).get(name)
            if clip is None:
                raise WorkerError(f"voice: {name!r} has been removed.", param="voice")
            try:
                self.model.prepare_conditionals(str(clip), **preparation)
            except Exception as error:
                raise WorkerError(
                    f"voice: the clip {clip.name} can't be used: {error}", code="voice_unusable", param="voice"
                ) from error
            self.prepared[key] = self.model.conds
            kept = [other for other in self.prepared if other != voices.BUILT_IN]
            if len(kept) > VOICES_KEPT:
                del self.prepared[kept[0]]
        self.prepared.move_to_end(key)
        self.model.conds = self.prepared[key]

    @contextlib.contextmanager
    def _running_call(self, call: LibraryCall) -> Iterator[None]:
        call.cancel.check()
        self.call = call
        try:
            yield
        finally:
            self.call = None

    def _check_cancel(self, *_call: object) -> None:
        if self.call is not None:
            self.call.cancel.check()

    def _count_tokens(self, inference: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the library's function so that its tokens are counted."""

        def counted(*, text_tokens: Any, **further: Any) -> Any:
            made = inference(text_tokens=text_tokens, **further)
            if self.call is not None:
                self.call.read += text_tokens.shape[-1]
                self.call.made += made.shape[-1]
            self.meters.tokens_in.inc(text_tokens.shape[-1])
            self.meters.tokens_out.inc(made.shape[-1])
            return made

        return counted


class _TrialLimit(Cancel):
    """Ends the trial after some steps: a model that finds no end must not prevent readiness."""

    steps = 0

    def check(self) -> None:
        self.steps += 1
        if self.steps > TRIAL_STEPS:
            raise CancelledWorkError


async def _delta_events(parts: AsyncIterator[bytes], calls: Sequence[LibraryCall]) -> AsyncIterator[object]:
    async for part in parts:
        if part:
            yield {"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()}
    read, made = sum(call.read for call in calls), sum(call.made for call in calls)
    usage = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
    yield {"type": "speech.audio.done", "usage": usage}


if __name__ == "__main__":
    serve(Speaker)
