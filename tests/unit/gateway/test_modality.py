"""Media that a model can't take are refused in every API's shape; what it takes, and words about media, are not."""

from __future__ import annotations

import asyncio
import json
import re

from runtimes.base import Endpoint
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.json_body import JsonBody
from tests.support.cases import cases

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT, SEES, HEARS = frozenset({"text"}), frozenset({"text", "image"}), frozenset({"text", "audio"})
DATA = "data:image/png;base64,AAAA"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
SOUND = {"data": "AAAA", "format": "wav"}


def chat(*parts, role="user"):
    return CHAT, {"messages": [{"role": role, "content": list(parts)}]}


def items(*parts, **item):
    return RESPONSES, {"input": [{"role": "user", "content": list(parts), **item}]}


def anthropic(*parts):
    return ANTHROPIC, {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 5}


def output(*parts):
    return RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1", "output": list(parts)}]}


def tool_result(*parts):
    return anthropic({"type": "tool_result", "tool_use_id": "1", "content": list(parts)})


IMAGES = [
    chat({"type": "image_url", "image_url": {"url": DATA}}),
    chat({"type": "text", "text": "see"}, {"type": "image_url", "image_url": DATA}, role="tool"),
    chat({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}),
    items({"type": "input_image", "image_url": DATA}),
    output({"type": "input_image", "image_url": DATA}),
    anthropic({"type": "image", "source": SOURCE}),
    tool_result({"type": "text", "text": "see"}, {"type": "image", "source": SOURCE}),
]
SOUNDS = [
    chat({"type": "input_audio", "input_audio": SOUND}),
    chat({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}),
    items({"type": "input_audio", "input_audio": SOUND}),
]
DOCUMENTS = [
    chat({"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}),
    items({"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"}),
    anthropic({"type": "document", "source": {**SOURCE, "media_type": "application/pdf"}}),
    anthropic({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hello"}}),
    tool_result({"type": "document", "source": SOURCE}),
]


def refusal(path, prompt, inputs, *, padding=0) -> InvalidRequestError | None:
    body = json.dumps({"model": "m", **prompt, "user": "x" * padding}).encode()

    async def checked():
        await (await JsonBody.open(body)).check("m", inputs, Endpoint(path))

    try:
        asyncio.run(checked())
    except InvalidRequestError as error:
        return error
    return None


class TestRefused:
    """Before a model is loaded for it."""

    @cases(
        ("asked", "inputs", "word"),
        [
            *((asked, inputs, "(images|video)") for asked in IMAGES for inputs in (TEXT, HEARS)),
            *((asked, inputs, "audio") for asked in SOUNDS for inputs in (TEXT, SEES)),
            *((asked, SEES | HEARS, "documents") for asked in DOCUMENTS),
        ],
    )
    @cases("padding", [0, 300_000])  # a large body's outline shows it, too
    def test_in_every_shape(self, asked, inputs, word, padding):
        error = refusal(*asked, inputs, padding=padding)
        assert error is not None
        assert error.code == "modality_unsupported"
        assert re.search(f"no {word}\\.$", error.message)
        assert error.param in asked[1]


class TestServed:
    """Never refuse what a model takes, or may take."""

    @cases(
        ("asked", "inputs"),
        [
            *((asked, SEES) for asked in IMAGES),
            *((asked, HEARS) for asked in SOUNDS),
            *((asked, None) for asked in (*IMAGES, *SOUNDS, *DOCUMENTS)),
        ],
    )
    def test_media_for_a_model_that_takes_them_or_of_which_nothing_is_known(self, asked, inputs):
        assert refusal(*asked, inputs) is None

    @cases(
        "asked",
        [
            chat({"type": "text", "text": '{"type": "image_url"}'}),
            (CHAT, {"messages": [], "tools": [{"type": "image", "function": {"parameters": {"type": "file"}}}]}),
            (CHAT, {"messages": [], "response_format": {"type": "audio"}, "metadata": {"type": "image"}}),
            (
                ANTHROPIC,
                {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"type": "file"}}]}]},
            ),
            tool_result({"type": "text", "text": "see"}),
            output({"type": "input_text", "text": "see"}),
            (RESPONSES, {"input": "image_url"}),
        ],
    )
    def test_words_about_media(self, asked):
        assert refusal(*asked, TEXT) is None


class TestMessages:
    """What is no list of messages loads no model; whether they may be left out is the worker's affair."""

    @cases("path", [CHAT, ANTHROPIC, "/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"])
    @cases("messages", ["hello", {}, 3, True])
    def test_of_another_type(self, path, messages):
        error = refusal(path, {"messages": messages}, None)
        assert error is not None
        assert error.param == "messages"

    @cases(
        ("path", "prompt"),
        [
            (CHAT, {}),
            (CHAT, {"messages": None}),
            (CHAT, {"messages": []}),
            (RESPONSES, {"messages": 3}),
            ("/echo", {"messages": 3}),
        ],
    )
    def test_anything_else(self, path, prompt):
        assert refusal(path, prompt, None) is None
