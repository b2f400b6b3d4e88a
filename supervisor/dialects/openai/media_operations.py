"""OpenAI's paths for sound and pictures, and the lists of who can speak."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.openai.schemas import X_FIELDS
from supervisor.schema.operation import (
    EVENTS,
    FORM,
    PLAIN,
    Example,
    Operation,
    Parameter,
    Schema,
    Section,
    array,
    choice,
    flag,
    number,
    record,
    request,
    text,
    whole,
)

_FILE: Final = {"type": "string", "contentMediaType": "application/octet-stream"}
_HEARD: Final = request(
    {
        "model": text(),
        "file": _FILE,
        "language": text(),
        "prompt": text(),
        "response_format": choice("json", "text", "srt", "verbose_json", "vtt"),
        "temperature": number(minimum=0),
        "stream": text("`true`, for a stream."),
    },
    "file",
    more=True,
)
_TEXT: Final = record({"text": text()}, more=True)
_PICTURE: Final = record(
    {
        "b64_json": text("The file."),
        "url": text("Where it is, for an hour (`limits.pictures_keep_s`), with `response_format: url`."),
        "seed": whole("Of this picture, from the runtime `diffusers`."),
        "revised_prompt": text("What was read of a prompt that is too long."),
    },
    optional=("b64_json", "url", "seed", "revised_prompt"),
    more=True,
)
_PICTURES: Final = record({"data": array(_PICTURE)}, more=True)
_OPTIONS: Final = {
    "n": whole(minimum=1),
    "size": text("`WIDTHxHEIGHT`, or `auto`."),
    "quality": text("How many steps are made: `low`, `medium`, `high`, `auto`."),
    "output_format": choice("png", "jpeg", "webp"),
    "output_compression": whole(minimum=0, maximum=100),
    "response_format": choice("b64_json", "url"),
    "background": choice("auto", "opaque", "transparent"),
    "partial_images": whole("Of a stream: so many pictures of what is there so far.", minimum=0, maximum=3),
}
_DRAWN_BY: Final = (
    "What a model takes depends on its runtime; see [diffusers](runtimes.md#diffusers) for `seed`, `steps`, `guidance`, "
    "`negative_prompt`, `strength` and the rest. With `stream`, the answer is a stream of OpenAI's events."
)
_SPEAKERS: Final = Parameter("model", "Only of this model.")
_NAMES: Final = array(record({"id": text(), "name": text()}))


def _heard(path: str, summary: str) -> Operation:
    return Operation(
        "POST",
        path,
        summary,
        request=_HEARD,
        request_type=FORM,
        answer=_TEXT,
        stream_type=EVENTS,
        other_types=(PLAIN,),
        is_run=True,
        example=Example(
            {"model": "whisper", "file": "@speech.wav"},
            needs="a model for speech recognition",
            answer={"text": "Hello."},
        ),
    )


def _options(*, form: bool) -> dict[str, Schema]:
    """A form's values are texts."""
    return {name: text() for name in (*_OPTIONS, "stream")} if form else {**_OPTIONS, "stream": flag()}


def _drawn(path: str, summary: str, fields: dict[str, Schema], example: Example, *needed: str, form: bool) -> Operation:
    more = {} if form else X_FIELDS
    return Operation(
        "POST",
        path,
        summary,
        _DRAWN_BY,
        request=request({"model": text(), **fields, **_options(form=form), **more}, *needed, more=True),
        request_type=FORM if form else "application/json",
        answer=_PICTURES,
        stream_type=EVENTS,
        is_run=True,
        example=example,
    )


_DRAWN: Final = {"created": 1790000000, "data": [{"b64_json": "iVBORw0KGgo…"}]}
_NEEDS: Final = "a model for pictures"
SECTION: Final = Section(
    "Sound and pictures",
    "OpenAI's paths for speech, transcription and pictures.",
    (
        Operation(
            "POST",
            "/v1/audio/speech",
            "Speak a text.",
            "The answer is the sound, in the format that was asked for; it comes as it is made.",
            request=request(
                {
                    "model": text(),
                    "input": text(minLength=1),
                    "voice": {"anyOf": [text(), request({"id": text()}, "id", more=True)]},
                    "response_format": choice("mp3", "opus", "aac", "flac", "wav", "pcm"),
                    "speed": number(),
                    **X_FIELDS,
                },
                "input",
                more=True,
            ),
            answer_type="audio/*",
            is_run=True,
            example=Example(
                {"model": "speaker", "input": "Hello.", "voice": "anna", "response_format": "wav"},
                needs="a model that speaks",
            ),
        ),
        _heard("/v1/audio/transcriptions", "Write down what is said."),
        _heard("/v1/audio/translations", "Write down in English what is said."),
        _drawn(
            "/v1/images/generations",
            "Draw a picture.",
            {"prompt": text()},
            Example({"model": "painter", "prompt": "A cat"}, needs=_NEEDS, answer=_DRAWN),
            "prompt",
            form=False,
        ),
        _drawn(
            "/v1/images/edits",
            "Change a picture.",
            {"image": _FILE, "mask": _FILE, "prompt": text()},
            Example(
                {"model": "painter", "image": "@cat.png", "prompt": "Add a hat"},
                needs=_NEEDS,
                answer=_DRAWN,
            ),
            "image",
            "prompt",
            form=True,
        ),
        _drawn(
            "/v1/images/variations",
            "Draw a picture like another.",
            {"image": _FILE},
            Example({"model": "painter", "image": "@cat.png"}, needs=_NEEDS, answer=_DRAWN),
            "image",
            form=True,
        ),
        Operation(
            "GET",
            "/v1/images/files/{name}",
            "A picture whose address was asked for.",
            "The address is in the answer of a request with `response_format: url`. Whoever knows it needs no key. It holds for "
            "`limits.pictures_keep_s`, and not beyond the daemon's end.",
            scope=None,
            answer_type="image/*",
            errors=(404,),
            example=Example(path="/v1/images/files/NAME.png", needs="an address from an answer"),
        ),
        Operation(
            "GET",
            "/v1/audio/voices",
            "The voices of all speech models, loaded or not.",
            "Each request reads the models' folders of clips again.",
            scope=None,
            parameters=(_SPEAKERS,),
            answer=record({"voices": _NAMES}),
            errors=(404,),
            aliases=("/audio/voices",),
            example=Example(
                needs="a model that speaks",
                answer={"voices": [{"id": "anna", "name": "anna"}, {"id": "bob", "name": "bob"}]},
            ),
        ),
        Operation(
            "GET",
            "/v1/audio/models",
            "The public names of the models of type `tts`.",
            scope=None,
            parameters=(_SPEAKERS,),
            answer=record({"models": _NAMES}),
            errors=(404,),
            aliases=("/audio/models",),
            example=Example(needs="a model that speaks", answer={"models": [{"id": "speaker", "name": "speaker"}]}),
        ),
    ),
)
