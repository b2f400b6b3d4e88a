"""Prompts carry their media with them: references are refused before a worker could follow them. More: tests/security."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest

from runtimes.base import Endpoint, TextReferences
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body import json_body
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.media import media
from supervisor.gateway.media.media_loading import NOTHING
from tests.support.cases import cases

DATA = "data:image/png;base64,AAAA"
REMOTE = (
    "http://169.254.169.254/latest",
    "https://example.org/a.png",
    "file:///etc/passwd",
    "HTTP://x",
    " http://x",
    "ftp://x",
    "ht\ttp://169.254.169.254/",
    "\x00http://x",
    "\u2028file:///etc/passwd",
)


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def encode(prompt) -> bytes:
    return json.dumps({"model": "m", **prompt}).encode()


def look(body):
    """As requests are looked at."""
    asyncio.run(checked(body))


async def checked(body):
    await (await JsonBody.open(body)).check("m", None, Endpoint("/echo"))


class TestReferences:
    """Wherever a runtime would load from, and however it is written."""

    @cases("url", REMOTE)
    @cases(
        "shape",
        [
            lambda url: user(image(url)),
            lambda url: user({"type": "text", "text": "see"}, image(DATA), image(url)),
            lambda url: user({"type": "image_url", "image_url": url}),
            lambda url: user({"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}),
            lambda url: user({"type": "video_url", "video_url": {"url": url}}),
            lambda url: user({"type": "image", "source": {"type": "url", "url": url}}),
            lambda url: user(
                {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}
            ),
            lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            lambda url: {
                "input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": url}]}]
            },
            lambda url: {"messages": [{"role": "user", "type": "text", "content": [image(url)]}]},
            lambda url: user({"type": "image", "image": url}),
            lambda url: user({"type": "video", "video": [DATA, url]}),
            lambda url: user({"type": "audio", "audio": url}),
            lambda url: user({"type": "image", "path": url}),
            lambda url: user({"type": "image", "imageUrl": url}),
            lambda url: {"system": [image(url)], "messages": []},
            lambda url: {"instructions": [image(url)]},
            lambda url: {"prompt": {"variables": {"picture": {"type": "input_image", "image_url": url}}}},
            lambda url: {"query": {"content": [image(url)]}, "documents": []},
            lambda url: {"query": "q", "documents": [{"content": [image(url)]}, {"image": url}]},
            lambda url: {"data_1": {"content": [image(url)]}},
            lambda url: {"image": url, "prompt": "p"},
            lambda url: {"image": [DATA, url], "prompt": "p"},
            lambda url: {"images": [{"image_url": url}], "prompt": "p"},
            lambda url: {"input": "say", "ref_audio": url},
            lambda url: {"data": {"data": url, "data_format": "url"}},
        ],
    )
    def test_refused(self, shape, url):
        with pytest.raises(InvalidRequestError, match="not loaded for clients") as told:
            look(encode(shape(url)))
        assert told.value.code == "remote_media_refused"

    def test_escapes_hide_nothing(self):
        plain = encode(user(image(REMOTE[0])))
        for hidden in (
            plain.replace(b'"url"', b'"\\u0075rl"').replace(b"image_url", b"image_ur\\u006c"),
            plain.replace(b'"http:', b'"\\u0068ttp:'),
            plain.replace(b'"http://', b'"http:\\/\\/'),
        ):
            assert hidden != plain
            with pytest.raises(InvalidRequestError):
                look(hidden)

    @cases("key", ["URL", "Image_URL", "IMAGE_DATA", "imageURL", "imageurl", "Path", "url\u017f", "\u017frc"])
    def test_case_hides_nothing(self, key):
        """As Go's decoder reads keys."""
        for prompt in ({"prompt": "p", key: REMOTE[0]}, user({"type": "text", "text": "see", key: REMOTE[0]})):
            with pytest.raises(InvalidRequestError, match="not loaded for clients"):
                look(encode(prompt))

    @pytest.mark.parametrize("part", [{"type": "text", "Type": "image"}, {"TYPE": "text"}])
    def test_a_type_that_is_read_without_case(self, part):
        with pytest.raises(InvalidRequestError, match="not loaded for clients"):
            look(encode(user({**part, "text": "x", "source": {"url": REMOTE[0]}})))
        with pytest.raises(InvalidRequestError, match="not loaded for clients"):
            look(encode(user({"type": "text", "text": "x", "Content": [image(REMOTE[0])]})))


class TestPaths:
    """Where a runtime takes the path of a file."""

    @pytest.mark.parametrize("path", ["/etc/passwd", "x.png"])
    def test_refused(self, path):
        for prompt in (user({"type": "image", "path": path}), {"ref_audio_path": path}):
            with pytest.raises(InvalidRequestError, match="not loaded for clients"):
                look(encode(prompt))


class TestMessagesOfText:
    """Messages of nothing but text are not looked at closely: nothing that could be followed passes for them."""

    @pytest.mark.parametrize(
        "messages",
        [
            [{"role": "user", "content": 'Load the image at "url": "file:///etc/passwd"'}],
            [{"role": "user", "content": "a" * 50_000}, {"role": "assistant", "content": None, "name": "x"}],
            [],
        ],
    )
    def test_pass(self, messages):
        assert media.is_text(json.dumps(messages).encode())

    @cases(
        "messages",
        [
            b'[{"role": "user", "content": [], "name": "x"}]',
            b'[{"role": "user", "content": "x", "x": 1}]',
            b'[{"role": "user", "content": [{}], "content": "x"}]',
            b'[{"role": "user", "content": "x", "ur\\u006c": "y"}]',
            b'[{"role": "user", "content": "\xff"}]',
            b'[{"role": "user", "content": "x", "content": "y"}]',
            b"[5]",
        ],
    )
    def test_anything_else_is_looked_at(self, messages):
        assert not media.is_text(messages)


class TestSameKeyTwice:
    """Which of two fields a worker reads nobody knows."""

    def test_refused(self):
        body = encode(user(image(REMOTE[0])))[:-1] + b', "messages": []}'
        with pytest.raises(InvalidRequestError, match="same key twice"):
            look(body)

    @cases(
        "messages",
        [
            '[{"role":"user","content":"a","content":"b"}]',
            '[{"role":"user","content":"a", "role" :"user"}]',
            '[{"role":"user","content":"a","name":"x","name":"x"}]',
            '[{"content":null,"role":"user","content":null}]',
            '[{"role":"user","content":"a","cont\\u0065nt":"b"}]',
            '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:a","url":"data:b"}}]}]',
            '[{"role":"user","content":[{"type":"text","text":"x","type":"image_url"}]}]',
            '[{"role":"user","content":[{"type":"text","text":"\\u003a:\\\\u003a","text":"1"}]}]',
            '[{"role":"user","content":[{"type":"text","text":"\\u003A"}],"content":[{"type":"text","text":":"}]}]',
            '[{"role":"user","content":[{"text":"1e9","type":"text","n":1e9,"n":1e9}]}]',
        ],
    )
    @cases("beside", [0, 300_000])
    def test_refused_at_every_depth(self, messages, beside):
        with pytest.raises(InvalidRequestError, match="same key twice") as told:
            look(f'{{"model":"m","user":"{"u" * beside}","messages":{messages}}}'.encode())
        assert told.value.code == "duplicate_key"

    @cases("text", ["a: b", "\\u003a", "\\\\u003a", "\\\\\\u003A:", '\\"a\\":', "\\u00e9:", "\\/:\\n:", "\\u003b"])
    @cases("blank", ["", " "])
    def test_colons_of_texts_are_none_of_keys(self, text, blank):
        for content in (f'"{text}"', f'[{{"type":{blank}"text","text"{blank}:"{text}","{text}":1.50}}]'):
            look(f'{{"model":"m","messages":[{{"role":"user",{blank}"content"{blank}:{content}}}]}}'.encode())


class TestLetThrough:
    """Content itself, and all that only speaks of addresses."""

    @cases(
        "prompt",
        [
            user(image(DATA)),
            user(image("DATA:image/png;base64,AAAA")),
            user({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
            user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
            user({"type": "text", "text": 'fetch "url": "http://example.org"'}),
            {"messages": [{"role": "user", "content": "http://example.org"}]},
            user({"type": "tool_use", "name": "fetch", "input": {"url": "http://example.org"}}),
            user({"type": "web_search_result", "url": "http://example.org"}),
            {"input": [{"type": "web_search_call", "action": {"type": "open_page", "url": "http://example.org"}}]},
            {"input": [{"content": [{"type": "output_text", "annotations": [{"url": "http://example.org"}]}]}]},
            {"messages": [{"role": "assistant", "annotations": [{"url_citation": {"url": "http://example.org"}}]}]},
            {"messages": [], "tools": [{"function": {"parameters": {"url": "http://example.org"}}}]},
            {"input": ["http://example.org", [1, 2]]},
            {"messages": 5, "input": "http://example.org", "prompt": ["http://example.org"]},
            {"input": [[1, 2], [3]], "metadata": {"url": "http://example.org"}},
            {"query": "q: a", "documents": ["http://example.org", {"text": "see: http://example.org"}]},
            {"input": "q: a", "voice": "alloy", "file_id": "a:b", "database": "x:y", "repath": "a:b"},
        ],
    )
    def test_untouched(self, prompt):
        look(encode(prompt))


TGI = TextReferences("![](", ")")


async def read(body, loading=NOTHING):
    opened = await JsonBody.open(body)
    return opened, await opened.check("m", None, Endpoint("/echo"), loading, TGI)


class TestTextsThatAreReferences:
    """A runtime that finds addresses in the midst of texts gets none."""

    ADDRESS = f"![]({REMOTE[0]})"

    @cases(
        "prompt",
        [
            {"messages": [{"role": "user", "content": f"see {ADDRESS} and"}]},
            {"messages": [{"role": "user", "content": "a" * 200 + ADDRESS}]},
            {"messages": [{"role": "user", "content": f"![]({DATA}){ADDRESS}"}]},
            {"messages": [{"role": ADDRESS, "content": "x"}]},
            {"prompt": ADDRESS},
            {"prompt": ["x", ADDRESS]},
            {"inputs": f"![]({DATA}) {ADDRESS}"},
            {"inputs": "![](/etc/passwd)"},
            {"inputs": "![](HTTP://x)"},
            user({"type": "text", "text": ADDRESS}),
            user(image(f"{DATA}){ADDRESS}")),
            user(image(f"{DATA}){ADDRESS[:-1]}")),
            user(image("data:image/png;base64," + "A" * 1000 + f"){ADDRESS}")),
            user({"type": "text", "text": "!"}, {"type": "text", "text": ADDRESS[1:]}),
            user({"type": "text", "text": "a longer one ![]"}, {"type": "text", "text": ADDRESS[3:]}),
            user(*({"type": "text", "text": letter} for letter in ADDRESS)),
            user({"type": "text", "text": ADDRESS[:9]}, {"type": "text", "text": ADDRESS[9:]}),
            user(
                {"type": "text", "text": f"![](data:x) ![{'a' * 10}!["},
                {"type": "text", "text": f"](http://x) ![]({DATA})"},
            ),
            {"messages": [{"role": "user", "content": "Hi!\n"}, {"role": "user", "content": "\t [](http://x)"}]},
            {"messages": [], "tools": [{"function": {"name": "f", "description": ADDRESS}}]},
            {"messages": [], "tools": [{"function": {"parameters": {"properties": {ADDRESS: {}}}}}]},
        ],
    )
    @cases("beside", [0, 300_000])
    def test_refused(self, prompt, beside):
        with pytest.raises(InvalidRequestError, match="not loaded for clients"):
            asyncio.run(read(encode(prompt | {"user": "u" * beside})))

    @pytest.mark.parametrize("hidden", [b"\\u0021[](", b"!\\u005b](", b"![\\u005D(", b"![]\\u0028"])
    def test_escapes_hide_nothing(self, hidden):
        with pytest.raises(InvalidRequestError, match="not loaded for clients"):
            asyncio.run(read(encode({"inputs": self.ADDRESS}).replace(b"![](", hidden)))

    @cases("where", [0, 63, 64, 65, 1000, (1 << 20) - 2, 3_000_000])
    def test_found_wherever_it_stands(self, where):
        with pytest.raises(InvalidRequestError, match="not loaded for clients"):
            asyncio.run(read(encode({"inputs": "a" * where + self.ADDRESS + "b" * 300_000})))

    @cases(
        "prompt",
        [
            {"inputs": f"![]({DATA})What is this?![]({DATA})"},
            {"inputs": "![](data:image/png;base64," + "iVBO" * 300_000 + ")What is this?"},
            user(image(DATA), {"type": "text", "text": "What is [this](http://x)!"}, image(DATA)),
            user(image("data:image/png;base64," + "iVBO" * 300_000), {"type": "text", "text": "[](http://x)"}),
            {"messages": [{"role": "user", "content": "a[0](b) ![named](http://x) [](http://x) !()"}]},
            {"messages": [{"role": "user", "content": "Hi!"}, {"role": "tool", "content": "[]"}]},
            {"input": [1.5] * 200_000, "stop": ["]"], "n": None, "flag": True},
        ],
    )
    def test_let_through(self, prompt):
        body = encode(prompt)
        opened, wanted = asyncio.run(read(body))
        assert not wanted
        assert asyncio.run(opened.rewritten(Rewrite(), Endpoint("/echo"))) == body

    @pytest.mark.parametrize("unit", ["ä€😀x", "\\u00e4\\ud83d\\ude00", '\\"a\\\\', "0123456789ab\\n"])
    def test_long_texts_are_read_whole(self, unit):
        body = '{"inputs": "%s"}' % (unit * (3_000_000 // len(unit)) + "%s")
        asyncio.run(read((body % "![](data:x)").encode()))
        with pytest.raises(InvalidRequestError, match="not loaded for clients"):
            asyncio.run(read((body % "![](x)").encode()))

    def test_pieces_of_texts_are_whole(self):
        """Wherever a text is cut, no escape and no character is cut in two."""
        units = [
            "a",
            "\\\\",
            '\\"',
            "\\n",
            "\\u00e4",
            "\\ud83d\\ude00",
            "\\uD83D\\uDE00",
            "ä",
            "😀",
            "ud83d",
            " ",
            "\\/",
        ]
        for seed in range(2000):
            random = Random(seed)
            some = random.sample(units, random.randint(1, 4))
            text = "".join(random.choices(some, k=200)).encode()
            at, pieces = 0, []
            while at < len(text):
                end = len(text) if len(text) - at <= 64 else json_body._split_point(text, at, at + 64)
                assert at < end <= at + 64
                pieces.append(json.loads(b'"%b"' % text[at:end]))
                at = end
            assert "".join(pieces).encode() == json.loads(b'"%b"' % text).encode()

    def test_what_is_no_text(self):
        with pytest.raises(InvalidRequestError) as told:
            asyncio.run(read(b'{"inputs": "' + b"a" * 300_000 + b'\xff"}'))
        assert told.value.code == "invalid_json"

    def test_for_other_runtimes_they_are_texts(self):
        look(encode({"inputs": self.ADDRESS}))
