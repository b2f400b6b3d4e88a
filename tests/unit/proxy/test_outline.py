"""Large bodies are looked at in outline: nothing is lost, nothing that matters is hidden, and all of it comes back."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.base import Endpoint
from supervisor.catalog.rewrite import Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.proxy import outline
from supervisor.proxy.json_body import JsonBody, open_object
from supervisor.proxy.outline import Outline

MIB = 1024 * 1024
PICTURE = "data:image/png;base64," + "iVBORw0KGgo/" * (3 * MIB // 12)


def outlined(body: bytes) -> Outline:
    return asyncio.run(Outline.of(body))


def restored(found: Outline, text: bytes) -> bytes:
    return bytes(asyncio.run(found.restored(text)))


async def checked(body: bytes) -> None:
    await (await JsonBody.open(body)).check("m", None)


async def rewritten(body: bytes, rewrite: Rewrite, path: str) -> bytes:
    return bytes(await (await JsonBody.open(body)).rewritten(rewrite, Endpoint(path)))


def chat(*urls: str, **fields) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}], **fields}).encode()


def assert_same(whole: object, cut: object) -> None:
    """All is there but for the middle of strings, and nothing that means anything is missing there."""
    assert type(whole) is type(cut)
    if isinstance(whole, str) and whole != cut:
        assert (whole[:2], whole[-2:], whole.count(":")) == (cut[:2], cut[-2:], cut.count(":"))
    elif isinstance(whole, list | dict):
        for pair in zip(whole, cut, strict=True):
            assert_same(*pair)
        if isinstance(whole, dict):
            assert_same(list(whole.values()), list(cut.values()))
    elif not isinstance(whole, str):
        assert whole == cut


class TestCutting:
    """What is long and harmless is cut out."""

    def test_a_picture(self):
        found = outlined(chat(PICTURE))
        assert len(found.text) < 3000
        (message,) = json.loads(found.text)["messages"]
        assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")

    @pytest.mark.parametrize(
        "text", ["\n" * MIB, "http://x" + "a:" * MIB, '"' * MIB, "a" * MIB + "http://x" + "a" * MIB, "\\" * MIB]
    )
    def test_not_what_could_matter(self, text):
        body = json.dumps({"model": "m", "prompt": text}).encode()
        assert outlined(body).text == body

    def test_not_between_characters(self):
        for shift in range(4):
            body = json.dumps({"model": "m", "prompt": "x" * shift + "汉🙂é" * MIB}, ensure_ascii=False).encode()
            found = outlined(body)
            assert len(found.text) < 3000
            assert json.loads(found.text)["prompt"].startswith("x" * shift + "汉🙂é汉")
            assert restored(found, found.text) == body

    def test_many_strings_are_left_alone(self):
        body = json.dumps({"model": "m", "input": ["a"] * 2000, "picture": PICTURE}).encode()
        assert outlined(body).text == body

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
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@given(JSON, st.booleans())
def test_any_json(document, ascii_only):
    """With sizes so small that everything is large."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_LONG", 30), ("_KEPT", 8), ("_SLICE", 7)):
            patch.setattr(outline, name, size)
        body = json.dumps(document, ensure_ascii=ascii_only).encode()
        found = outlined(body)
        assert_same(document, json.loads(found.text))
        assert restored(found, found.text) == body
