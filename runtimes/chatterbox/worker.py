"""The speech worker: Chatterbox behind `/v1/audio/speech`.

A request's text is spoken in pieces (sentences.py), each encoded and sent as soon as it is made. The library keeps one
prepared voice in the model; preparing one takes seconds, so the last ones used are kept here. It can't be interrupted, but
its language model is a torch module that is called once a token: a hook in front of it ends the work of those who left.
The library's watermark stays in all that is made.
"""

from __future__ import annotations

import base64
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from runtimes.chatterbox import parameters, voices
from runtimes.chatterbox.sentences import pieces
from runtimes.kit.audio.encode import FORMATS, Encoder, Tempo
from runtimes.kit.body import Body
from runtimes.kit.errors import WorkerError
from runtimes.kit.lane import Cancel, CancelledWorkError
from runtimes.kit.parameters import check
from runtimes.kit.server import Endpoint, Settings, Worker, events, serve, started

MOST_CHARACTERS: Final = 100_000
VOICES_KEPT: Final = 16
TRIAL: Final = "Ready."
TRIAL_STEPS: Final = 150  # 25 are a second of speech


@dataclass(frozen=True, slots=True)
class Speech:
    """What is asked for. `keywords` go to the library."""

    texts: list[str]
    voice: str | None
    format: str
    speed: float
    seed: int | None
    keywords: Mapping[str, Any]
    preparation: Mapping[str, Any]


class Speaker(Worker):
    """One variant of Chatterbox."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        options = settings.options
        self.variant: str = options["variant"]
        self.path = Path(options["path"])
        self.folder = Path(options["voices"]) if options["voices"] else None
        self.aliases: Mapping[str, str] = options["aliases"]
        self.prepared: OrderedDict[str, Any] = OrderedDict()  # the library's conditionals, by voice; last used last
        self.languages: Mapping[str, str] = {}
        self.cancel: Cancel | None = None  # of the work in progress: there is one at a time

    def load(self) -> None:
        """Raises what the library raises, and FileNotFoundError without any voice."""
        import torch  # noqa: PLC0415  # seconds: not before the port is open

        self.torch: Any = torch
        self.model: Any = self._class().from_local(self.path, self.settings.options["device"])
        if self.variant == "multilingual":
            self.languages = self.model.get_supported_languages()
        if self.model.conds is not None:
            self.prepared[voices.BUILT_IN] = self.model.conds
        self.model.t3.tfmr.register_forward_pre_hook(self._look)
        known = voices.names(self.path, self.folder, {})
        if not known:
            raise FileNotFoundError(f"no voice: {self.path} has none of its own, and the folder of voices has no clip")
        language = {"language_id": "en"} if self.variant == "multilingual" else {}
        self._voice(self.settings.options["default_voice"] or known[0], {})
        with self._working(_Trial()), contextlib.suppress(CancelledWorkError):
            self.model.generate(TRIAL, **language)

    def _class(self) -> Any:
        """The library's model class; each variant is a module of its own."""
        if self.variant == "turbo":
            from chatterbox.tts_turbo import ChatterboxTurboTTS as Model  # noqa: PLC0415  # as above
        elif self.variant == "multilingual":
            from chatterbox.mtl_tts import ChatterboxMultilingualTTS as Model  # noqa: PLC0415
        else:
            from chatterbox.tts import ChatterboxTTS as Model  # noqa: PLC0415
        return Model

    def routes(self) -> Mapping[str, Endpoint]:
        """Speech, and who can speak."""
        return {"POST /v1/audio/speech": self.speech, "GET /v1/audio/voices": self.listing}

    async def listing(self, _request: Request) -> Response:
        """The names that a request may say."""
        names = voices.names(self.path, self.folder, self.aliases)
        return JSONResponse({"voices": [{"id": name, "name": name} for name in names]})

    async def speech(self, request: Request) -> Response:
        """The file, or events with pieces of it, as it is made."""
        body = await Body.of(request)
        check(parameters.SPEECH[self.variant], body.values)
        speech = self._asked(body)
        as_events = body.choice("stream_format", ("audio", "sse"), "audio") == "sse"
        parts = await started(self.lane.stream(lambda cancel: self._file(speech, cancel)))
        self.meters.tokens_in.inc(sum(map(len, speech.texts)))
        if as_events:
            return events(_deltas(parts, sum(map(len, speech.texts))))
        return StreamingResponse(parts, media_type=FORMATS[speech.format].media_type)

    def _asked(self, body: Body) -> Speech:
        """Raises WorkerError."""
        text = body.needed_text("input")
        if len(text) > MOST_CHARACTERS:
            raise WorkerError(f"input has {len(text)} characters; {MOST_CHARACTERS} are the most.", param="input")
        seed = body.whole("seed", None, 0, (1 << 63) - 1)
        exaggeration = body.number("exaggeration", None, 0.25, 2)
        given = {
            "temperature": body.number("temperature", None, 0.05, 5),
            "repetition_penalty": body.number("repetition_penalty", None, 1, 3),
            "top_p": body.number("top_p", None, 0, 1),
        }
        preparation: dict[str, Any] = {}
        if self.variant == "turbo":
            given |= {"top_k": body.whole("top_k", None, 1)}
            preparation = {"norm_loudness": body.flag("norm_loudness", default=True)}
        else:
            given |= {
                "exaggeration": exaggeration,
                "cfg_weight": body.number("cfg_weight", None, 0, 1),
                "min_p": body.number("min_p", None, 0, 1),
            }
        keywords: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.variant == "multilingual":
            keywords["language_id"] = self._language(body)
        return Speech(
            texts=pieces(text),
            voice=self._named(body),
            format=body.choice("response_format", tuple(FORMATS), "mp3"),
            speed=body.number("speed", 1.0, 0.25, 4),
            seed=seed,
            keywords=keywords,
            preparation=preparation,
        )

    def _language(self, body: Body) -> str:
        language = (body.text("language") or self.settings.options["default_language"]).lower().partition("-")[0]
        if language not in self.languages:
            raise body.wrong("language", f"one of {', '.join(sorted(self.languages))}")
        return language

    def _named(self, body: Body) -> str:
        """The voice asked for. Raises WorkerError for one that isn't there."""
        given = body.values.get("voice")
        name = given.get("id") if isinstance(given, dict) else given
        known = voices.names(self.path, self.folder, self.aliases)
        if name is None or name == "":
            name = self.settings.options["default_voice"] or (known[0] if known else "")
        name = self.aliases.get(name, name) if isinstance(name, str) else name
        if name not in known:
            raise body.wrong(
                "voice", f"one of {', '.join(known) or 'none: there are no clips in the folder of voices'}"
            )
        return str(name)

    def _file(self, speech: Speech, cancel: Cancel) -> Iterator[bytes]:
        """Pieces of the file. In the model's thread."""
        with self._working(cancel):
            encoder = Encoder(speech.format, self.model.sr)
            tempo = Tempo(speech.speed, self.model.sr) if speech.speed != 1 else None
            self._voice(str(speech.voice), speech.preparation)
            for place, text in enumerate(speech.texts):
                cancel.check()
                if speech.seed is not None:
                    self.torch.manual_seed(speech.seed + place)
                samples = np.asarray(self.model.generate(text, **speech.keywords), "<f4").reshape(-1)
                if tempo is not None:
                    samples = tempo.feed(samples)
                if data := encoder.feed(samples):
                    yield data
            if tempo is not None:
                yield encoder.feed(tempo.end())
            yield encoder.end()

    def _voice(self, name: str, preparation: Mapping[str, Any]) -> None:
        """Make the model speak with it. Raises WorkerError for a clip that can't be used."""
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
    def _working(self, cancel: Cancel) -> Iterator[None]:
        self.cancel = cancel
        try:
            yield
        finally:
            self.cancel = None

    def _look(self, *_call: object) -> None:
        if self.cancel is not None:
            self.cancel.check()


class _Trial(Cancel):
    """Ends by itself: a model that finds no end must not keep the worker from being ready."""

    steps = 0

    def check(self) -> None:
        self.steps += 1
        if self.steps > TRIAL_STEPS:
            raise CancelledWorkError


async def _deltas(parts: AsyncIterator[bytes], characters: int) -> AsyncIterator[object]:
    async for part in parts:
        if part:
            yield {"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()}
    usage = {"input_tokens": characters, "output_tokens": 0, "total_tokens": characters}
    yield {"type": "speech.audio.done", "usage": usage}


if __name__ == "__main__":
    serve(Speaker)
