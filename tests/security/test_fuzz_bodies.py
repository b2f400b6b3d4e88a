"""Every parser of bodies that is ours, with anything: it agrees with another parser or refuses, and never fails otherwise.

LLMUX_SOAK=1 tries far more.
"""

from __future__ import annotations

import asyncio
import contextlib
import email
import email.policy
import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.dialects.openai import OPENAI
from supervisor.errors import InvalidRequestError, LlmuxError
from supervisor.gateway.attempt import Outcome
from supervisor.gateway.body import condensed_json, form, json_body
from supervisor.gateway.body.form import read_form
from supervisor.gateway.body.json_body import JsonBody, open_object
from supervisor.gateway.body.parameters import json_object
from supervisor.gateway.upstream_error import error_answer, upstream_error
from tests.support.counts import times

CHAT = Endpoint("/v1/chat/completions")
few = settings(max_examples=times(15, 20_000), deadline=None)

WORDS = st.sampled_from(
    [
        "type",
        "text",
        "content",
        "url",
        "image_url",
        "data",
        "path",
        "source",
        "input",
        "role",
        "callback_url",
        "model",
        "image",
        "images",
        "output",
        "tool_calls",
        "uuid",
        "file_data",
        "imageUrl",
        "base64",
        "tool_use",
        "reasoning",
    ]
)
TEXTS = (
    st.text(max_size=20)
    | WORDS
    | st.sampled_from(
        ["http://x/", "/etc/passwd", "data:a;base64,AAAA", "iVBORw0KGgo=", "//uQ", "/9j/4AAQ", "user", "a" * 60]
    )
    | st.text(st.sampled_from('a:./"\\\n é🙂'), min_size=15, max_size=60)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(st.integers(), min_size=15, max_size=40)
        | st.dictionaries(WORDS | TEXTS, inner, max_size=4)
    ),
    max_leaves=15,
)
OBJECTS = st.dictionaries(WORDS | TEXTS, JSON, max_size=6)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """With some bytes removed, doubled, or replaced."""
    body = draw(whole)
    for _ in range(draw(st.integers(0, 3))):
        begin, end = sorted(draw(st.tuples(st.integers(0, len(body)), st.integers(0, len(body)))))
        body = body[:begin] + draw(st.sampled_from([b"", body[begin:end] * 2]) | st.binary(max_size=4)) + body[end:]
    return body


BODIES = st.builds(
    lambda document, ascii_only, indent: json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode(),
    OBJECTS,
    st.booleans(),
    st.sampled_from([None, 1]),
)


@contextlib.contextmanager
def outlined():
    """Everything is large, and every slice small."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (
            ("_LONG_BYTES", 30),
            ("_KEPT_BYTES", 12),
            ("_SLICE", 50),
            ("_FIRST_LOOK", 3),
            ("_MIN_RUN", 10),
        ):
            patch.setattr(condensed_json, name, size)
        patch.setattr(json_body, "SMALL", 0)
        patch.setattr(json_body, "_LARGE_BYTES", 0)
        yield


def reference(body: bytes) -> dict[str, object] | None:
    """As Python's parser reads it: with no name twice at the top; None for anything else."""
    depths = []

    def pairs(found):
        depths.append([name for name, _ in found])
        return dict(found)

    try:
        document = json.loads(body.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or len(depths[-1]) != len(document):  # the outermost ends last
        return None
    return document


def values(fields) -> dict[str, object]:
    return {key: json.loads(bytes(value)) for key, value in fields.items()}


class TestJson:
    """Opening, checking, changing: what Python's own parser reads, or an error that says why not."""

    @few
    @given(damaged(BODIES))
    @example(b'{"a": 1, "\\u0061": 2}')
    @example(b'{"a": NaN}')
    @example(b"\xef\xbb\xbf{}")
    def test_opening(self, body):
        try:
            fields = open_object(body)
        except InvalidRequestError:
            return
        try:
            told = values(fields)
        except ValueError:
            assert reference(body) is None, "a value that no parser reads; a worker says so"
            return
        assert told == reference(body)

    @few
    @given(document=OBJECTS, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
    def test_changing(self, document, ascii_only, indent):
        document = {**document, "model": "m", "stream": True}
        body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()

        async def changed(rewrite: Rewrite) -> bytes:
            return bytes(await (await JsonBody.open(body)).rewritten(rewrite, CHAT))

        with outlined():
            assert asyncio.run(changed(Rewrite())) == body
        rewrite = Rewrite.compile(
            upstream_model="n", strip=["image", "a"], defaults={"seed": 1}, force={"type": {"a": 1}}
        )
        kept = {key: value for key, value in document.items() if key not in {"image", "a"}}
        with outlined():
            told = json.loads(asyncio.run(changed(rewrite)))
        assert told == {"seed": 1, **kept, "type": {"a": 1}, "model": "n"}

    @few
    @given(document=OBJECTS, ascii_only=st.booleans())
    def test_checking_an_outline(self, document, ascii_only):
        """It is refused exactly where the whole is."""
        body = json.dumps({**document, "model": "m"}, ensure_ascii=ascii_only).encode()

        async def refused() -> bool:
            found = await JsonBody.open(body)
            try:
                await found.check("m", frozenset({"text"}), Endpoint("/v1/chat/completions"))
            except InvalidRequestError:
                return True
            return False

        directly = asyncio.run(refused())
        with outlined():
            assert asyncio.run(refused()) == directly

    @few
    @given(damaged(BODIES) | st.binary(max_size=200))
    def test_nothing_else_is_raised(self, body):
        async def gone_through() -> None:
            found = await JsonBody.open(body)
            await found.check("m", frozenset({"text"}), Endpoint("/v1/chat/completions"))
            await found.rewritten(Rewrite.compile(upstream_model="n", system_prompt_prefix="p"), CHAT)

        with outlined(), contextlib.suppress(InvalidRequestError):
            asyncio.run(gone_through())

    @few
    @given(damaged(BODIES) | st.binary(max_size=50))
    def test_of_our_own_routes(self, body):
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        request = Request({"type": "http", "headers": [], "method": "POST", "path": "/"}, receive)
        try:
            told = asyncio.run(json_object(request))
        except InvalidRequestError:
            return
        assert told == (reference(body) if body.strip() else {})


NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters='"\\%'), min_size=1, max_size=8)
PARTS = st.lists(
    st.tuples(
        NAMES | st.sampled_from(["file", "image[]", "language", "prompt"]),
        st.none() | NAMES,
        st.binary(max_size=40) | st.sampled_from([b"\r\n--X", b"\r\n--", b"--X--", b"\r", b"\n", b"-" * 60]),
    ),
    max_size=5,
)


def encoded(parts, boundary: bytes) -> bytes:
    body = b""
    for name, filename, value in parts:
        file = b"" if filename is None else b'; filename="%b"' % filename.encode()
        head = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n' % (boundary, name.encode(), file)
        body += head + value + b"\r\n"
    return body + b"--%b--\r\n" % boundary


def parsed(body: bytes, boundary: bytes) -> list[tuple[str, bytes]]:
    """By the standard library, which is lenient."""
    head = b"MIME-Version: 1.0\r\nContent-Type: multipart/form-data; boundary=%b\r\n\r\n" % boundary
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP.clone(utf8=True))
    parts = message.get_payload() if message.is_multipart() else []
    named = [part for part in parts if part["content-disposition"] is not None]
    return [(part["content-disposition"].params.get("name", ""), part.get_payload(decode=True)) for part in named]


class TestForms:
    """The names, the model, and a changed form: as the standard library reads them."""

    @few
    @given(PARTS, st.sampled_from([b"X", b"-" * 60 + b"a", b"a.b_c"]), st.integers(1, 40))
    def test_well_formed(self, parts, boundary, size):
        parts = [(name, "f" if filename is None else filename, value) for name, filename, value in parts]
        parts = [part for part in parts if part[0] not in {"model", "stream", "n"} and b"--" not in part[2]]
        parts = [*parts, ("model", None, b"whisper"), ("n", None, b"0")]
        body = encoded(parts, boundary)

        async def changed():
            found = await read_form(body, b"multipart/form-data; boundary=" + boundary)
            return found, await found._with_fields({"model": ("m\n1",), "n": (), "new": ("1", "2")})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "SLICE", size)
            found, new = asyncio.run(changed())
        assert (found.name, found.names) == ("whisper", {name for name, _, _ in parts})
        kept = encoded(parts[:-2], boundary).removesuffix(b"--%b--\r\n" % boundary)
        added = encoded([("model", None, b"m\n1"), ("new", None, b"1"), ("new", None, b"2")], boundary)
        assert bytes(new) == added.removesuffix(b"--%b--\r\n" % boundary) + kept + b"--%b--\r\n" % boundary

    @few
    @given(damaged(st.builds(encoded, PARTS.map(lambda parts: [*parts, ("model", None, b"m")]), st.just(b"X"))))
    @example(b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--X--')
    def test_the_model_is_the_one_that_others_read(self, body):
        try:
            found = asyncio.run(read_form(body, b"multipart/form-data; boundary=X"))
        except InvalidRequestError:
            return
        if found.name is None or not body.isascii() or body.count(b"--X--") > 1:
            return  # what comes after the end is read by some, and skipped by us and by Starlette
        others = [value for name, value in parsed(body, b"X") if name == "model"]
        assert not others or found.name.encode() in others

    @few
    @given(damaged(st.builds(encoded, PARTS, st.just(b"X"))), st.binary(max_size=80), st.integers(1, 40))
    def test_nothing_else_is_raised(self, body, content_type, size):
        async def gone_through(kind: bytes) -> None:
            found = await read_form(body, kind)
            await found.check("m", None, Endpoint("/echo"))
            found.take_permission()
            await found.rewritten(
                Rewrite.compile(upstream_model="n", strip=["image"]), Endpoint("/v1/audio/transcriptions")
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "SLICE", size)
            for kind in (b"multipart/form-data; boundary=X", b"multipart/form-data;" + content_type):
                with contextlib.suppress(InvalidRequestError):
                    asyncio.run(gone_through(kind))


PIECES = st.lists(
    st.binary(min_size=1, max_size=20)
    | st.sampled_from(
        [b'"usage":{"prompt_tokens":', b"3", b"9" * 100, b',"completion_tokens": 4}', b"\n\n", b"\r\n", b"\r"]
    )
    | st.sampled_from([b'"timings":{"prompt_n":2,', b'"predicted_n":5}', b"data: [DONE]"]),
    max_size=8,
)


class TestAnswers:
    """What workers send is looked through, whatever it is."""

    @few
    @given(PIECES)
    @example([b'{"usage":{"prompt_tokens":' + b"9" * 3000, b"9" * 3000 + b"}}"])
    @example([b'"timings":{"prompt_n":' + b"9" * 3000, b"9" * 3000 + b"}}"])
    def test_usage(self, pieces):
        outcome = Outcome()
        for piece in pieces:
            outcome.keep(piece)
        prompt, completion, _ = outcome.usage()
        assert all(count is None or 0 <= count < 10**15 for count in (prompt, completion))
        whole = b"".join(pieces)
        assert not whole or outcome.tail()
        assert whole.endswith(outcome.tail())

    @few
    @given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 30))
    def test_usage_in_pieces(self, prompt, completion, size):
        text = json.dumps({"id": "x", "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}).encode()
        outcome = Outcome()
        for start in range(0, len(text), max(size, len(text) // 4 + 1)):
            outcome.keep(text[start : start + max(size, len(text) // 4 + 1)])
        assert outcome.usage()[:2] == (prompt, completion)

    @few
    @given(
        st.integers(400, 599),
        st.sampled_from([b"application/json", b"text/plain", b"", b"text/html; charset=x"]),
        damaged(BODIES | st.builds(lambda error: msgspec.json.encode({"error": error}), JSON)) | st.binary(max_size=50),
    )
    def test_errors(self, status, content_type, body):
        error = upstream_error(status, content_type, body)
        assert isinstance(error, LlmuxError)
        assert error.message
        error_answer(status, content_type, body, OPENAI)
