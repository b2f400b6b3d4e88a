"""OpenAI's paths for sound and pictures, and the lists of voices and speech models, which need no API key.

Open WebUI requests the lists without its key and without a model's name. The lists contain only names of voices and models.
"""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct
from starlette.responses import FileResponse, Response

from supervisor import catalog
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.openai import types
from supervisor.errors import NotFoundError
from supervisor.gateway.filters.picture_links import PREFIX
from supervisor.gateway.operation import Group
from supervisor.schema.operation import EVENTS, FORM, JSON, PLAIN, Example

GROUP: Final = Group("Sound and pictures", "OpenAI's paths for speech, transcription and pictures.", scope="inference")
_HEARD: Final = Example(
    {"model": "whisper", "file": "@speech.wav"},
    needs="a model for speech recognition",
    answer={"text": "Hello."},
)


def _declare_pictures(path: str, about: str, reads: type[Struct], request_type: str = FORM, **body: str) -> None:
    about += """

    What a model takes depends on its runtime; see [diffusers](runtimes.md#diffusers) for `seed`, `steps`, `guidance`,
    `negative_prompt`, `strength` and the rest. With `stream`, the answer is a stream of OpenAI's events."""
    answer = {"created": 1790000000, "data": [{"b64_json": "iVBORw0KGgo…"}]}
    GROUP.model_endpoint(
        path,
        about,
        reads=reads,
        request_type=request_type,
        answer=types.Pictures,
        stream_type=EVENTS,
        example=Example({"model": "painter", **body}, needs="a model for pictures", answer=answer),
    )


GROUP.model_endpoint(
    "/v1/audio/speech",
    """Speak a text.

    The answer is the sound, in the format that was asked for; it comes as it is made.""",
    reads=types.SpeechRequest,
    answer_type="audio/*",
    example=Example(
        {"model": "speaker", "input": "Hello.", "voice": "anna", "response_format": "wav"},
        needs="a model that speaks",
    ),
)
for _path, _about in (
    ("/v1/audio/transcriptions", "Write down what is said."),
    ("/v1/audio/translations", "Write down in English what is said."),
):
    GROUP.model_endpoint(
        _path,
        _about,
        reads=types.TranscriptionForm,
        request_type=FORM,
        answer=types.Transcription,
        stream_type=EVENTS,
        other_types=(PLAIN,),
        example=_HEARD,
    )
_declare_pictures("/v1/images/generations", "Draw a picture.", types.ImageRequest, JSON, prompt="A cat")
_declare_pictures("/v1/images/edits", "Change a picture.", types.EditForm, image="@cat.png", prompt="Add a hat")
_declare_pictures("/v1/images/variations", "Draw a picture like another.", types.VariationForm, image="@cat.png")


@GROUP.operation(
    "GET",
    f"{PREFIX}{{name}}",
    scope=None,
    answer_type="image/*",
    errors=(404,),
    example=Example(path="/v1/images/files/NAME.png", needs="an address from an answer"),
)
async def read_picture(daemon: Daemon, name: str) -> Response:
    """A picture whose address was asked for.

    The address is in the answer of a request with `response_format: url`. Whoever knows it needs no key. It holds for
    `limits.pictures_keep_s`, and not beyond the daemon's end.
    """
    kept = await asyncio.to_thread(daemon.pictures.find, name)
    if kept is None:
        raise NotFoundError("There is no such picture, or no longer.", code="picture_not_found")
    headers = {"cache-control": f"private, max-age={int(kept.left_s)}", "x-content-type-options": "nosniff"}
    return FileResponse(kept.path, headers=headers, media_type=f"image/{kept.path.suffix[1:]}")


@GROUP.operation(
    "GET",
    "/v1/audio/voices",
    scope=None,
    errors=(404,),
    aliases=("/audio/voices",),
    example=Example(
        needs="a model that speaks",
        answer={"voices": [{"id": "anna", "name": "anna"}, {"id": "bob", "name": "bob"}]},
    ),
)
async def list_voices(daemon: Daemon, query: types.SpeakersQuery) -> types.Voices:
    """The voices of all speech models, loaded or not.

    Each request reads the models' folders of clips again.
    """
    models = {entry.model.id: entry.model for entry in _speech_models(daemon, query)}.values()
    found = await asyncio.to_thread(lambda: {name for model in models for name in model.adapter.voices(model.config)})
    return types.Voices([types.Speaker(name, name) for name in sorted(found)])


@GROUP.operation(
    "GET",
    "/v1/audio/models",
    scope=None,
    errors=(404,),
    aliases=("/audio/models",),
    example=Example(needs="a model that speaks", answer={"models": [{"id": "speaker", "name": "speaker"}]}),
)
async def list_speakers(daemon: Daemon, query: types.SpeakersQuery) -> types.Speakers:
    """The public names of the models of type `tts`."""
    return types.Speakers([types.Speaker(entry.name, entry.name) for entry in _speech_models(daemon, query)])


def _speech_models(daemon: Daemon, query: types.SpeakersQuery) -> list[catalog.Route]:
    """All speech models, or only the model that the query names. Raises NotFoundError."""
    found = [entry for entry in daemon.catalog.listing() if entry.model.config.type == "tts"]
    if query.model is None:
        return found
    chosen = [entry for entry in found if entry.name == query.model]
    if not chosen:
        raise NotFoundError(f"There is no speech model {query.model[:200]!r}.", code="model_not_found", param="model")
    return chosen
