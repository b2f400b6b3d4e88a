"""Large bodies are looked at in outline: nothing is lost, nothing that matters is hidden, and all of it comes back."""

from __future__ import annotations

import asyncio
import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body import condensed_json
from supervisor.gateway.body.condensed_json import CondensedJson
from supervisor.gateway.body.json_body import JsonBody, open_object
from supervisor.gateway.media.media import is_content
from tests.support.cases import cases

MIB = 1024 * 1024
MARK = re.compile("[0-9a-f]{16}-[0-9]+-:?")
LIST = re.compile("data:[0-9a-f]{16}-[0-9]+-")
PICTURE = "data:image/png;base64," + "iVBORw0KGgo/" * (3 * MIB // 12)


def outlined(body: bytes) -> CondensedJson:
    return asyncio.run(CondensedJson.of(body))


def restored(found: CondensedJson, text: bytes) -> bytes:
    return bytes(asyncio.run(found.restored(text)))


async def checked(body: bytes) -> None:
    await (await JsonBody.open(body)).check("m", None, Endpoint("/echo"))


async def rewritten(body: bytes, rewrite: Rewrite, path: str) -> bytes:
    return bytes(await (await JsonBody.open(body)).rewritten(rewrite, Endpoint(path)))


def chat(*urls: str, **fields) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}], **fields}).encode()


def is_number(item: object) -> bool:
    return type(item) is int or (isinstance(item, str) and LIST.fullmatch(item) is not None)


def assert_same(whole: object, cut: object) -> None:
    """All is there but for the ends of strings and the middles of lists of numbers, and what looks like content is."""
    if isinstance(whole, str):
        assert isinstance(cut, str)
        mark = MARK.search(cut)
        assert whole == cut if mark is None else whole.startswith(cut[: mark.start()])
        assert is_content("url", whole) or not is_content("url", cut)
    elif isinstance(whole, list):
        assert isinstance(cut, list)
        if any(isinstance(item, str) and LIST.fullmatch(item) for item in cut):
            whole, cut = ([item for item in items if not is_number(item)] for items in (whole, cut))
        for pair in zip(whole, cut, strict=True):
            assert_same(*pair)
    elif isinstance(whole, dict):
        assert isinstance(cut, dict)
        assert_same(list(whole), list(cut))
        assert_same(list(whole.values()), list(cut.values()))
    else:
        assert whole == cut


class TestCutting:
    """What is long and harmless is cut out."""

    def test_a_picture(self):
        found = outlined(chat(PICTURE))
        assert len(found.text) < 3000
        (message,) = json.loads(found.text)["messages"]
        assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")

    @cases(
        "text",
        ["\n" * MIB, "http://x" + "a:" * MIB, '"' * MIB, "a" * MIB + "http://x" + "a" * MIB, "\\" * MIB, "é" * MIB],
    )
    def test_long_texts(self, text):
        for body in (chat(text), json.dumps({"model": "m", "prompt": text}, ensure_ascii=False).encode()):
            found = outlined(body)
            assert len(found.text) < 3000
            assert_same(json.loads(body), json.loads(found.text))
            assert restored(found, found.text) == body

    def test_numbers(self):
        body = json.dumps({"model": "m", "input": [[1, -2.5e3, *range(100_000)], ["a", *range(MIB), None]]}).encode()
        found = outlined(body)
        assert len(found.text) < 30_000
        assert restored(found, found.text) == body
        (first, second) = json.loads(found.text)["input"]
        assert (first[0], second[0], first[-1], second[-1]) == (1, "a", 99_999, None)

    def test_blanks(self):
        body = json.dumps({"model": "m", "input": [1, {"a": True}]}, indent=10_000).encode()
        found = outlined(body)
        assert len(found.text) < 1000
        assert json.loads(found.text) == json.loads(body)

    def test_not_between_characters(self):
        for shift in range(4):
            body = json.dumps({"model": "m", "prompt": "x" * shift + "汉🙂é" * MIB}, ensure_ascii=False).encode()
            found = outlined(body)
            assert len(found.text) < 3000
            assert json.loads(found.text)["prompt"].startswith("x" * shift + "汉🙂é汉")
            assert restored(found, found.text) == body

    def test_references_beside_pictures_are_found(self):
        for body in (
            chat(PICTURE, "http://127.0.0.1/"),
            chat(" " * MIB + "http://127.0.0.1/"),
            chat("a" * MIB + ":" + "a" * MIB),
        ):
            with pytest.raises(InvalidRequestError, match="not loaded for clients"):
                asyncio.run(checked(body))


class TestRestoring:
    """What was cut out is put back, whatever became of the fields around it."""

    def test_changed_fields(self):
        body = chat(PICTURE, PICTURE[:100_000], user="u" * MIB)
        rewrite = Rewrite.compile(
            upstream_model="n", strip=["user"], force={"seed": 1}, system_prompt_prefix="Be brief."
        )
        path = "/v1/chat/completions"
        fields = open_object(body)
        rewrite.apply(fields, Endpoint(path))
        assert asyncio.run(rewritten(body, rewrite, path)) == msgspec.json.encode(fields)

    def test_marks_are_not_to_be_guessed(self):
        first, second = outlined(chat(PICTURE)), outlined(chat(PICTURE))
        assert first.text != second.text
        assert restored(second, first.text) == first.text


TEXT = st.text(st.sampled_from('ab"\\:/\né汉🙂\x00{}[],')) | st.text("ab汉", min_size=30) | st.text("a\\", min_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(st.integers(), min_size=10) | st.dictionaries(TEXT, inner, max_size=4)
    ),
)


@given(JSON, st.booleans(), st.sampled_from([None, 0, 3]))
def test_any_json(document, ascii_only, indent):
    """With sizes so small that everything is large."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (
            ("_LONG_BYTES", 30),
            ("_KEPT_BYTES", 12),
            ("_SLICE", 50),
            ("_FIRST_LOOK", 3),
            ("_MIN_RUN", 10),
        ):
            patch.setattr(condensed_json, name, size)
        body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
        found = outlined(body)
        assert_same(document, json.loads(found.text))
        assert restored(found, found.text).translate(None, b" \n") == body.translate(None, b" \n")


class TestQuoted:
    """JSON of the outline may become a string, such as the arguments of a tool call."""

    @pytest.mark.parametrize("indent", [None, 1])
    def test_what_comes_back_is_quoted_as_the_rest(self, indent):
        text = 'a "quoted" \\ \n line, é ' * 10_000
        value = {"text": text, "plain": "A" * 200_000, "k" * 500: {"numbers": list(range(5000))}, "last": text}
        found = outlined(json.dumps(value, indent=indent).encode())
        assert len(found.text) < 2000
        whole = json.loads(restored(found, json.dumps({"arguments": found.text.decode(), "own": '"'}).encode()))
        assert json.loads(whole["arguments"]) == value
        assert whole["own"] == '"'


@given(st.text(min_size=1, max_size=6), st.sampled_from(['"', "\\", "\n", "é", "x", "\u2028", "😀"]))
def test_json_that_becomes_a_text_is_whole(piece, special):
    """What was cut out of it gets the escapes of the text that it is in now."""
    value = {"code": (piece + special) * 200, "numbers": list(range(300)), "end": special}
    found = outlined(json.dumps({"arguments": value}, indent=1).encode())
    outline_of_it = msgspec.json.decode(found.text)["arguments"]
    text = msgspec.json.encode({"arguments": msgspec.json.encode(outline_of_it).decode(), "after": [1]})
    told = json.loads(restored(found, text))
    assert (json.loads(told["arguments"]), told["after"]) == (value, [1])
