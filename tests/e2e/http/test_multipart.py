"""Forms: the model is found wherever it stands; the form reaches the worker byte for byte, but for what was configured."""

from __future__ import annotations

import pytest

from tests.support.daemon import fake, running

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


@pytest.fixture(scope="module")
def dictation(tmp_path_factory):
    """A virtual model over one that insists on its own name."""
    virtual = {
        "model": "asr",
        "defaults": {"language": "de"},
        "force": {"response_format": "json"},
        "strip": ["prompt"],
    }
    config = {
        "models": {"asr": fake(type="asr", upstream_model="whisper-1", endpoints=[PATH])},
        "virtual_models": {"dictation": virtual},
    }
    with running(tmp_path_factory.mktemp("dictation"), config) as daemon:
        yield daemon


class TestVirtualModels:
    """What a virtual model says is done to forms as well."""

    def test_its_fields(self, dictation):
        sent = form(('name="model"', b"dictation"), FILE, ('name="prompt"', b"Hm"), ('name="response_format"', b"srt"))
        got = dictation.post(PATH, content=sent, headers=TYPE)
        assert got.status_code == 200, got.text
        added = (('name="language"', b"de"), ('name="response_format"', b"json"), ('name="model"', b"whisper-1"))
        assert form(*added, FILE) == got.content

    def test_the_clients_word_on_defaults(self, dictation):
        sent = form(FILE, ('name="language"', b"en"), ('name="model"', b"dictation"))
        got = dictation.post(PATH, content=sent, headers=TYPE).content
        assert form(('name="response_format"', b"json"), ('name="model"', b"whisper-1"), FILE, LANGUAGE) == got

    def test_the_models_own_name(self, dictation):
        got = dictation.post(PATH, content=form(FILE, ('name="model"', b"asr")), headers=TYPE).content
        assert form(('name="model"', b"whisper-1"), FILE) == got

    def test_the_only_model_need_not_be_named(self, dictation):
        assert b"whisper-1" in dictation.post(PATH, content=form(FILE), headers=TYPE).content
