"""The form of an upload, in pieces of any size."""

from __future__ import annotations

import pytest

from supervisor.api.batches import _Form
from supervisor.errors import InvalidRequestError
from tests.support.cases import cases

PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: x/y\r\n\r\n'


def form(*parts: bytes) -> bytes:
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + b"--B--\r\n"


def read(body: bytes, size: int = 1 << 20) -> tuple[_Form, bytes]:
    parsed = _Form(b"B")
    content = b"".join(parsed.parse(body[at : at + size]) for at in range(0, len(body), size))
    parsed.check()
    return parsed, content


class TestForm:
    @cases("size", [1, 2, 7, 1 << 20])
    @cases("content", [b"", b"line\n", b"\r\n--B\r\n-like\r\n--A--", b"\r\n" * 50])
    def test_the_file_whatever_the_pieces(self, size, content):
        content = content.replace(b"--B\r\n", b"--b\r\n")
        parsed, found = read(form(PURPOSE, FILE + content), size)
        assert (found, parsed.filename) == (content, "a b.jsonl")

    def test_the_purpose_may_come_last(self):
        assert read(form(FILE + b"x", PURPOSE))[1] == b"x"

    def test_a_name_is_shown_as_it_can_be(self):
        head = b'Content-Disposition: form-data; name="file"; filename="' + b"n" * 300 + b'\x07"\r\n\r\n'
        assert read(form(PURPOSE, head))[0].filename == "n" * 255

    @cases(
        ("body", "param"),
        [
            (form(PURPOSE), "file"),
            (form(FILE), "purpose"),
            (form(PURPOSE + b"es", FILE), "purpose"),
            (form(PURPOSE, PURPOSE, FILE), "purpose"),
            (form(PURPOSE, FILE, FILE), "file"),
            (form(PURPOSE, b'Content-Disposition: form-data; name="model"\r\n\r\nm', FILE), "model"),
            (form(PURPOSE, b"X: y\r\n\r\nm", FILE), None),
            (form(PURPOSE + b"x" * 600, FILE), None),
            (form(b"X: " + b"y" * 600 + b"\r\n\r\n"), None),
            (form(PURPOSE, FILE)[:-6], None),
            (b"no form at all", None),
        ],
    )
    def test_what_is_none(self, body, param):
        with pytest.raises(InvalidRequestError) as told:
            read(body, 11)
        assert told.value.param == param
