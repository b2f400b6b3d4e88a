"""What is kept of bodies, and what never is."""

from __future__ import annotations

import base64
import json
import os

import msgspec
import pytest

from supervisor.gateway.filters.body_log import SHOWN_BYTES, Capture
from supervisor.gateway.filters.filters import Head, Use
from supervisor.host.store import kept_bodies
from supervisor.host.store.kept_bodies import MOST, KeptBodies
from tests.support.cases import cases

PNG = base64.b64encode(os.urandom(3000)).decode()


def kept(body: object, *pieces: bytes, content_type: bytes = b"application/json"):
    """What is kept of this body and of an answer in these pieces."""
    return captured(body if isinstance(body, bytes) else json.dumps(body).encode(), pieces, content_type)


def captured(data: bytes, pieces: tuple[bytes, ...], content_type: bytes):
    capture = Capture(data)
    assert capture.head(Head(200, [(b"content-type", content_type)])) is Use.PIECES
    assert [capture.feed(piece) for piece in pieces] == [*pieces]
    return capture.kept()


class TestKept:
    """The texts that passed."""

    def test_question_and_answer(self):
        found = kept(
            {"messages": [{"content": "Hello"}]},
            b"data: {}\n\n",
            b"data: [DONE]\n\n",
            content_type=b"text/event-stream",
        )
        assert json.loads(found.request) == {"messages": [{"content": "Hello"}]}
        assert (found.answer, found.answer_type) == ("data: {}\n\ndata: [DONE]\n\n", "text/event-stream")
        assert (found.request_cut, found.answer_cut) == (False, False)

    def test_half_a_character(self):
        found = kept(b'{"content": "\\ud800 and more"}', b"")
        assert json.loads(msgspec.json.encode(found))["request"] == '{\n "content": "? and more"\n}'

    @cases("field", ["api_key", "token", "password", "client_secret", "Authorization"])
    def test_no_value_that_is_named_like_a_secret(self, field):
        found = kept({"a": {"b": [{field: "hush-hush"}]}}, json.dumps({field: "hush-hush"}).encode())
        assert "hush" not in found.request + found.answer

    @pytest.mark.parametrize("secret", ["sk-0123456789abcdef0123", "hf_0123456789abcdef0123", "Bearer hush-hush-hush"])
    def test_no_text_that_looks_like_one(self, secret):
        found = kept(
            {"content": f"use {secret} now"}, f"data: use {secret} now\n\n".encode(), content_type=b"text/event-stream"
        )
        assert secret.split()[-1] not in found.request + found.answer

    def test_no_media(self):
        body = {"url": f"data:image/png;base64,{PNG}", "audio": {"data": PNG}}
        found = kept(body, json.dumps({"data": [{"b64_json": PNG}]}).encode())
        assert PNG[:40] not in found.request + found.answer
        assert f"(image/png, {len(PNG)} characters of base64)" in found.request
        assert kept(b"\0\1\2" * 100, b"RIFF\0\0\0\0WAVE").answer == "(12 bytes that are no text)"

    @pytest.mark.parametrize("around", ['{"password": %s}', '{"a": [{"client_secret": {"x": [{"y": 1}], "z": %s}}]}'])
    def test_no_secret_of_what_is_cut_or_streamed(self, around):
        secret = around % json.dumps('hush "hush" hush')
        long = "so it goes, " * SHOWN_BYTES
        cut = f'{{"a": {secret}, "b": "{long}"}}'
        nested = json.dumps({"arguments": secret})
        found = [
            kept(b'{"a": %s, "b": "%s"}' % (secret.encode(), long.encode() * 20), cut.encode()),
            kept(nested.encode(), f"data: {secret}\n\ndata: {nested}\n\n".encode()),
            kept(json.dumps({"a": nested}).encode(), f'data: {nested}\n\ndata: {{"x": {nested[:-30]}'.encode()),
            kept(b"{}", f'{{"a": {json.dumps(secret)}, "b": "{long}"}}'.encode()),
        ]
        assert [one for one in found if "hush" in one.request + one.answer] == []
        assert (found[0].request_cut, found[0].answer_cut) == (True, True)
        assert "so it goes" in found[0].answer

    def test_no_media_of_what_is_cut_or_streamed(self):
        long = PNG * 30
        lines = "\n".join(PNG[at : at + 76] for at in range(0, len(PNG), 76))
        found = [
            kept({"image": long * 70}, json.dumps({"data": [{"b64_json": long}]}).encode()),
            kept({"image": lines}, f"data: {json.dumps({'delta': PNG})}\n\n".encode()),
        ]
        assert [one for one in found if PNG[1000:1040] in one.request + one.answer] == []
        assert (found[0].request_cut, found[0].answer_cut) == (True, True)
        assert f"({len(PNG)} characters of base64)" in found[1].answer

    def test_a_stream_stays_as_it_was(self):
        text = 'data: {"a":1, "b": "x y"}\n\n: ping\n\ndata: [DONE]\n\n'
        assert kept({}, text.encode()).answer == text

    def test_no_more_than_it_may(self):
        found = kept({"content": "no base64, " * SHOWN_BYTES}, *[b"y " * 500] * 300, content_type=b"text/plain")
        assert (len(found.request), len(found.answer)) == (SHOWN_BYTES, SHOWN_BYTES)
        assert (found.request_cut, found.answer_cut) == (True, True)

    def test_what_is_no_json(self):
        assert kept(b"[" * 100_000).request_cut is True
        assert kept(b"{").request == "{"


class TestFiles:
    """Bounded, and for their owner alone."""

    def test_the_oldest_go(self, tmp_path):
        bodies = KeptBodies(tmp_path / "bodies")
        bodies.models = {"a/../b"}
        for number in range(MOST + 3):
            bodies.keep("a/../b", f"f-{number}", f"{number}")
        files = [path for path in (tmp_path / "bodies").rglob("*") if path.is_file()]
        assert len(files) == MOST
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        assert bodies.find(f"f-{MOST}") == f"{MOST}"

    @pytest.mark.parametrize("number", ["", "*", "../x", "f-1/../..", "f-*", "F-1", "f-1\n"])
    def test_only_numbers_are_looked_up(self, tmp_path, number):
        bodies = KeptBodies(tmp_path)
        bodies.models = {"a"}
        bodies.keep("a", "f-1", "x")
        assert bodies.find(number) is None

    def test_of_other_models_nothing_stays_nor_comes(self, tmp_path):
        bodies = KeptBodies(tmp_path)
        bodies.models = {"a", "b"}
        for model in "ab":
            bodies.keep(model, f"{ord(model):x}-1", model)
        bodies.models = {"a"}
        bodies.delete_others()
        bodies.keep("b", "62-2", "a request that began before")
        assert [bodies.find(number) for number in ("61-1", "62-1", "62-2")] == ["a", None, None]

    def test_all_together_are_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(kept_bodies, "MOST_BYTES", 25)
        bodies = KeptBodies(tmp_path)
        bodies.models = {"a", "b"}
        for number, model in enumerate("abab"):
            bodies.keep(model, f"f-{number}", "x" * 10)
        assert [bodies.find(f"f-{number}") is None for number in range(4)] == [True, True, False, False]
