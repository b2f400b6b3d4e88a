"""Forms: the model is found wherever it stands, and the form reaches the worker byte for byte."""

from __future__ import annotations

import pytest

BOUNDARY = "llmux-test-boundary"
TYPE = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
PATH = "/v1/audio/transcriptions"


def form(*parts: tuple[str, bytes]) -> bytes:
    lines = []
    for head, content in parts:
        lines += [f"--{BOUNDARY}".encode(), f"Content-Disposition: form-data; {head}".encode(), b"", content]
    return b"\r\n".join([*lines, f"--{BOUNDARY}--".encode(), b""])


MODEL = ('name="model"', b"plain")
FILE = ('name="file"; filename="a.wav"', bytes(range(256)) * 2000)
LANGUAGE = ('name="language"', b"en")


class TestMultipart:
    """Transcriptions, as clients send them."""

    @pytest.mark.parametrize("parts", [(MODEL, LANGUAGE, FILE), (FILE, LANGUAGE, MODEL)], ids=["before", "after"])
    def test_model_before_and_after_the_file(self, site, parts):
        sent = form(*parts)
        answer = site.post(PATH, content=sent, headers=TYPE)
        assert answer.status_code == 200, answer.text
        assert sent == answer.content
        assert TYPE["content-type"] == answer.headers["content-type"]

    def test_without_a_length(self, site):
        sent = form(FILE, MODEL)
        pieces = (sent[i : i + 70_001] for i in range(0, len(sent), 70_001))
        assert sent == site.post(PATH, content=pieces, headers=TYPE).content

    def test_model_in_the_query(self, site):
        sent = form(FILE)
        assert sent == site.post(f"{PATH}?model=plain", content=sent, headers=TYPE).content

    @pytest.mark.parametrize(
        ("body", "headers", "says"),
        [
            (form(FILE), TYPE, "no field `model`"),
            (form(MODEL, MODEL), TYPE, "twice"),
            (form(('name="model"', b"x" * 600)), TYPE, "too long"),
            (form(*[LANGUAGE] * 70), TYPE, "more than"),
            (b"no form", TYPE, "can't be read"),
            (form(MODEL), {"content-type": "multipart/form-data"}, "boundary"),
        ],
    )
    def test_refused(self, site, body, headers, says):
        told = site.post(PATH, content=body, headers=headers)
        assert told.status_code == 400
        assert says in told.json()["error"]["message"]

    def test_unknown_model(self, site):
        told = site.post(PATH, content=form(('name="model"', b"plane"), FILE), headers=TYPE)
        assert told.status_code == 404
        assert "'plain'" in told.json()["error"]["message"]
