"""A prompt that would make a worker fetch or read something is refused; one that only speaks of addresses passes."""

from __future__ import annotations

import json

import pytest

from tests.support.cases import cases

DATA = "data:image/png;base64,AAAA"
METADATA = "http://169.254.169.254/latest/meta-data"
TARGETS = {
    "an address": METADATA,
    "https": "https://example.org/a.png",
    "upper case": "HTTP://127.0.0.1:22",
    "a tab within": "ht\ttp://127.0.0.1/",
    "blanks before": "  http://127.0.0.1/",
    "a file": "file:///etc/passwd",
    "an unknown scheme": "gopher://127.0.0.1:70/",
    "a path": "/etc/passwd",
    "a path of base64's letters": "/proc/self/fd/12",
    "two slashes": "//etc/passwd.",
    "a relative path": "../../etc/passwd",
    "a name": "picture.png",
    "a home": "~/.ssh/id_rsa",
    "no scheme": "//169.254.169.254/latest",
}


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def item(*parts):
    return {"input": [{"role": "user", "content": list(parts)}]}


ATTACKS = {
    "chat: a picture": lambda url: user({"type": "image_url", "image_url": {"url": url}}),
    "chat: a bare address": lambda url: user({"type": "image_url", "image_url": url}),
    "chat: the second of two": lambda url: user(
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": DATA},
        {"type": "image_url", "image_url": url},
    ),
    "chat: a text with a picture": lambda url: user({"type": "text", "text": "see", "image_url": url}),
    "chat: a text with a picture and a uuid": lambda url: user(
        {"type": "text", "text": "see", "uuid": "1", "image_url": {"url": url}}
    ),
    "chat: a thought with a picture": lambda url: user(
        {"type": "thinking", "thinking": "so", "video_url": {"url": url}}
    ),
    "chat: reasoning with a picture": lambda url: user({"type": "reasoning", "uuid": "1", "image_url": url}),
    "chat: a refusal with a sound": lambda url: user({"type": "refusal", "refusal": "no", "audio_url": {"url": url}}),
    "chat: a tool's call with a picture": lambda url: user({"type": "tool_use", "input": {}, "image_url": url}),
    "chat: a result with a picture": lambda url: user({"type": "web_search_result", "url": "u", "image_url": url}),
    "chat: an unknown type": lambda url: user({"type": "hologram", "image_url": url}),
    "chat: a type that is no text": lambda url: user({"type": 5, "image_url": url}),
    "chat: no type": lambda url: user({"image_url": url}),
    "chat: a type within": lambda url: user({"type": "image_url", "image_url": {"type": "text", "url": url}}),
    "chat: a sound's type within": lambda url: user(
        {"type": "input_audio", "input_audio": {"type": "text", "data": url}}
    ),
    "chat: a sound's url": lambda url: user({"type": "input_audio", "input_audio": {"url": url}}),
    "chat: a video": lambda url: user({"type": "input_video", "input_video": {"url": url}}),
    "chat: frames": lambda url: user({"type": "video", "video": [DATA, url]}),
    "chat: lists in lists": lambda url: user({"type": "video", "video": [[DATA], [[url]]]}),
    "chat: Hugging Face's url": lambda url: user({"type": "image", "url": url}),
    "chat: Hugging Face's path": lambda url: user({"type": "image", "path": url}),
    "chat: Hugging Face's base64": lambda url: user({"type": "image", "base64": url}),
    "chat: Hugging Face's image": lambda url: user({"type": "image", "image": url}),
    "chat: a source": lambda url: user({"type": "image", "src": url}),
    "chat: a file": lambda url: user({"type": "file", "file": {"file_data": url}}),
    "chat: an unknown place": lambda url: {"messages": [{"role": "user", "content": "x", "extra": {"image_url": url}}]},
    "chat: in a tool's result": lambda url: {"messages": [{"role": "tool", "content": [{"image_url": url}]}]},
    "messages: a picture": lambda url: user({"type": "image", "source": {"type": "url", "url": url}}),
    "messages: called text": lambda url: user({"type": "image", "source": {"type": "text", "url": url}}),
    "messages: a document": lambda url: user({"type": "document", "source": {"type": "url", "url": url}}),
    "messages: in a result": lambda url: user(
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}
    ),
    "messages: in a system prompt": lambda url: {"system": [{"type": "image", "source": {"url": url}}]},
    "responses: a picture": lambda url: item({"type": "input_image", "image_url": url}),
    "responses: a file": lambda url: item({"type": "input_file", "file_url": url}),
    "responses: an output": lambda url: {
        "input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": url}]}]
    },
    "responses: a screenshot": lambda url: {
        "input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": url}}]
    },
    "responses: a reasoning item": lambda url: {"input": [{"type": "reasoning", "content": [{"image_url": url}]}]},
    "responses: a prompt's variable": lambda url: {"prompt": {"variables": {"p": {"image_url": url}}}},
    "embeddings: content": lambda url: {"input": [{"content": [{"type": "image_url", "image_url": {"url": url}}]}]},
    "rerank: a document": lambda url: {"query": "q", "documents": [{"image": url}]},
    "score: data": lambda url: {"data_1": {"content": [{"image_url": {"url": url}}]}, "data_2": "b"},
    "images: a picture": lambda url: {"prompt": "p", "image": url},
    "images: several": lambda url: {"prompt": "p", "images": [{"image_url": url}]},
    "images: a mask": lambda url: {"prompt": "p", "mask": url},
    "speech: a voice's sound": lambda url: {"input": "say", "ref_audio": url},
    "any: capitals": lambda url: {"prompt": "p", "IMAGE_DATA": url},
    "chat: capitals": lambda url: user({"type": "image_url", "IMAGE_URL": {"URL": url}}),
    "any: a camel": lambda url: {"prompt": "p", "initImageUrl": url},
}

INNOCENT = {
    "a picture": user({"type": "image_url", "image_url": {"url": DATA, "detail": "auto"}}),
    "a picture of plain base64": user({"type": "image", "image": "iVBORw0KGgoAAAANSUhEUgAA\nAAEAAAABCAYAAAAfFcSJ"}),
    "Hugging Face's base64": user({"type": "image", "base64": "/9j/4AAQSkZJRgABAQ=="}),
    "a JPEG of plain base64": {"prompt": "p", "image": "/9j/4AAQSkZJRgABAQ=="},
    "base64url": {"prompt": "p", "image": "_-9jAAQSkZJRgABAQ"},
    "a sound": user({"type": "input_audio", "input_audio": {"data": "//uQxAAAAAAAAAAAAA==", "format": "mp3"}}),
    "a picture in a source": user(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    ),
    "a document that is text": user(
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": f"see {METADATA}."}}
    ),
    "a file by its number": item({"type": "input_file", "file_id": "file-1", "filename": "a.pdf"}),
    "text": user({"type": "text", "text": f'fetch "image_url": "{METADATA}"'}),
    "a message": {"messages": [{"role": "user", "content": METADATA}]},
    "prompts": {"prompt": [METADATA, "/etc/passwd"]},
    "texts": {"input": [METADATA, "file:///etc/passwd"]},
    "token ids": {"input": [[1, 2, 3], [4]]},
    "rerank": {"query": "q: a", "documents": [METADATA, {"text": METADATA}]},
    "MCP servers": {"messages": [], "mcp_servers": [{"type": "url", "url": METADATA, "name": "x"}]},
    "tools": {"messages": [], "tools": [{"type": "mcp", "server_url": METADATA}]},
    "functions": {
        "messages": [],
        "tools": [{"function": {"parameters": {"properties": {"url": {"default": METADATA}}}}}],
    },
    "a callback": {"messages": [], "callback_url": METADATA, "webhookUrl": METADATA},
    "metadata": {"messages": [], "metadata": {"url": METADATA}},
    "a schema": {"messages": [], "response_format": {"json_schema": {"schema": {"examples": [{"url": METADATA}]}}}},
    "template arguments": {"messages": [], "chat_template_kwargs": {"url": METADATA}},
    "a call's arguments": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"url": METADATA}}}]}]
    },
    "a tool's use": user({"type": "tool_use", "name": "fetch", "input": {"url": METADATA, "path": "/etc/passwd"}}),
    "a tool's result": {"messages": [{"role": "tool", "content": METADATA}]},
    "a tool's result in parts": user({"type": "tool_result", "content": [{"type": "text", "text": METADATA}]}),
    "a search": {"input": [{"type": "web_search_call", "action": {"type": "open_page", "url": METADATA}}]},
    "a patch": {"input": [{"type": "apply_patch_call", "operation": {"type": "update_file", "path": "src/a.py"}}]},
    "results of a search": user(
        {"type": "web_search_tool_result", "content": [{"type": "web_search_result", "url": METADATA, "title": "t"}]}
    ),
    "a page that was fetched": user(
        {
            "type": "web_fetch_tool_result",
            "content": {
                "type": "web_fetch_result",
                "url": METADATA,
                "content": {"type": "document", "source": {"type": "text", "data": METADATA}},
            },
        }
    ),
    "what was found": user({"type": "search_result", "source": METADATA, "content": [{"type": "text", "text": "x"}]}),
    "citations": user(
        {"type": "text", "text": "x", "citations": [{"type": "web_search_result_location", "url": METADATA}]}
    ),
    "annotations": {"messages": [{"role": "assistant", "annotations": [{"url_citation": {"url": METADATA}}]}]},
    "encrypted thoughts": user({"type": "redacted_thinking", "data": "a:b.c"}),
    "words that only look like it": {
        "input": "a: b",
        "file_id": "a:b",
        "database": "x:y",
        "filename": "a.b",
        "repath": "a:b",
    },
}


def ask(target, fields):
    return target.post("/echo", json={"model": "plain", **fields})


class TestJson:
    """In any part of any shape, by whatever key a worker would load."""

    @cases("shape", ATTACKS)
    def test_refused(self, target, shape):
        with target.client() as client:
            for name, url in TARGETS.items():
                told = client.post("/echo", json={"model": "plain", **ATTACKS[shape](url)})
                assert told.status_code == 400, name
                assert told.json()["error"]["code"] == "remote_media_refused", name

    @cases("shape", ["chat: a text with a picture", "images: a picture", "responses: a file"])
    @cases("beside", [10, 70_000, 300_000])
    def test_refused_beside_much_else(self, target, shape, beside):
        for fields in (
            {**ATTACKS[shape](METADATA), "user": "a" * beside},
            {**ATTACKS[shape]("a" * beside + METADATA), "user": list(range(beside // 10))},
            {**ATTACKS[shape](METADATA), "user": [{"x": 'a "word" \\'}] * (beside // 30)},
        ):
            assert ask(target, fields).json()["error"]["code"] == "remote_media_refused"

    @cases("name", INNOCENT)
    def test_let_through(self, target, name):
        for fields in (INNOCENT[name], {**INNOCENT[name], "user": "a" * 300_000}):
            told = ask(target, fields)
            assert told.status_code == 200, told.text
            assert json.loads(told.content) == {"model": "plain", **fields}


def form(name, value, disposition=""):
    part = 'Content-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    parts = [
        part.format("model", "", "plain"),
        part.format(name, disposition, value),
        part.format("prompt", "", METADATA),
    ]
    return "".join(f"--X\r\n{part}" for part in parts).encode() + b"--X--\r\n"


def send(target, body):
    return target.post("/echo", content=body, headers={"Content-Type": "multipart/form-data; boundary=X"})


class TestForms:
    """Fields of forms, too."""

    @cases("name", ["image", "image[]", "images", "mask", "file", "url", "audio_url", "input_audio", "path"])
    def test_refused(self, target, name):
        for what, url in TARGETS.items():
            told = send(target, form(name, url))
            assert told.status_code == 400, what
            assert told.json()["error"]["code"] == "remote_media_refused", what

    @pytest.mark.parametrize("length", [400, 600, 200_000, 400_000])
    def test_refused_at_the_end_of_much(self, target, length):
        assert send(target, form("image", "a" * length + "." + "a" * 100)).status_code == 400

    @cases(
        ("name", "value", "disposition"),
        [
            ("image", "anything: http://x", '; filename="http://x"'),
            ("image[]", "\0\1\2", '; filename="a.png"'),
            ("image", DATA + "A" * 300_000, ""),
            ("image", "iVBO" * 100_000, ""),
            ("image", "", ""),
            ("prompt", METADATA, ""),
            ("callback_url", METADATA, ""),
            ("language", "de", ""),
        ],
    )
    def test_let_through(self, target, name, value, disposition):
        body = form(name, value, disposition)
        told = send(target, body)
        assert (told.status_code, told.content) == (200, body)

    def test_a_name_that_only_some_read(self, target):
        for name in ('prompt"; name="image', "prompt\"; name*=utf-8''image; x=\"", 'image"; filename="'):
            assert send(target, form(name, METADATA)).status_code == 400

    def test_a_name_without_case(self, target):
        for name in ("IMAGE", "Image_URL", "maſk"):
            assert send(target, form(name, METADATA)).json()["error"]["code"] == "remote_media_refused"

    def test_two_names_for_one_part(self, target):
        body = form("prompt", METADATA, '\r\nContent-Disposition: form-data; name="image"')
        assert send(target, body).status_code == 400
