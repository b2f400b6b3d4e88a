"""The model in a form."""

from __future__ import annotations

import pytest

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.form import read_form
from tests.support.cases import cases

FORM = b'--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n%s\r\n'
TYPE = b'multipart/form-data; boundary="X"'


class TestForms:
    """One short field is found wherever it stands; nothing else is decoded."""

    @pytest.mark.parametrize("audio", [b"\0\xff\r\n--Y", bytes(3_000_000), b"\r\n--X-" * 300_000])
    @pytest.mark.parametrize("first", [True, False])
    async def test_found(self, audio, first):
        parts = [FORM % (b"model", b"whisper"), FILE % audio, FORM % (b"language", b"de")]
        body = b"".join(parts if first else parts[::-1]) + b"--X--\r\n"
        assert (await read_form(body, TYPE)).name == "whisper"
        assert (await read_form(bytearray(body), TYPE)).name == "whisper"

    async def test_absent(self):
        assert (await read_form(FILE % b"model" + b"--X--\r\n", TYPE)).name is None

    @pytest.mark.parametrize(
        ("body", "content_type"),
        [
            (b"", b"multipart/form-data"),
            (b"no form at all", TYPE),
            (FORM % (b"x", b"1") * 100 + b"--X--\r\n", TYPE),
            (FORM % (b"model", b"a") * 2 + b"--X--\r\n", TYPE),
            (FORM % (b"model", b"a" * 1000) + b"--X--\r\n", TYPE),
            (FORM % (b"model", b"\xff") + b"--X--\r\n", TYPE),
            (b"--X\r\n" + b"A: b\r\n" * 1000 + b"\r\n\r\n--X--\r\n", TYPE),
            (b"", b"multipart/form-data; boundary=" + b"b" * 1000),
            (FORM % (b"x", b"1") + b"--X--\r\n" + FORM % (b"image", b"/etc/passwd") + b"--X--\r\n", TYPE),
            (FORM % (b"x", b"1") + b"--X--\r\n\r\n" + FORM % (b"image", b"/etc/passwd"), TYPE),
            (FORM % (b"x", b"1") + b"--X--\r\n--X--\r\n", TYPE),
            (FORM % (b"image", b"/etc/passwd"), TYPE),
            (FORM % (b"x", b"1") + b"--X--" + bytes(100_000), TYPE),
            (FORM % (b"x", b"1") + b"--X-", TYPE),
        ],
        ids=[
            "no boundary",
            "no form",
            "many parts",
            "twice",
            "long",
            "not utf-8",
            "many headers",
            "long boundary",
            "parts after the end",
            "a part after the end",
            "two ends",
            "no end",
            "an end far from the end",
            "half an end",
        ],
    )
    async def test_refused(self, body, content_type):
        with pytest.raises(InvalidRequestError):
            await read_form(body, content_type)

    @pytest.mark.parametrize(
        "audio", [b"", b"--X--", b"\0\xff\r\n--Y\r\n--X-", bytes(3_000_000), b"\r\n--X-" * 300_000]
    )
    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
    async def test_changed(self, audio, order):
        parts = [FORM % (b"model", b"asr"), FILE % audio, FORM % (b"language", b"de"), FORM % (b"tags[]", b"a")]
        end = b"--X--\r\nepilogue"
        body = b"".join(parts[i] for i in order) + end
        form = await read_form(body, TYPE)
        assert {"model", "file", "language", "tags[]"} == form.names
        new = {"model": ("whisper",), "tags[]": (), "n": ("1", "2")}
        kept = b"".join(parts[i] for i in order if i in (1, 2))
        added = FORM % (b"model", b"whisper") + FORM % (b"n", b"1") + FORM % (b"n", b"2")
        assert added + kept + end == await form._with_fields(new)
        again = await read_form(await form._with_fields(new), TYPE)
        assert ("whisper", form.names - {"tags[]"} | {"n"}) == (again.name, again.names)
        assert await form._with_fields({}) is body


class TestOneReading:
    """What two readers of a form could take for different fields, or values, is refused; what all read alike passes."""

    @cases(
        "head",
        [
            b"name*=utf-8''image",
            b"name=\"prompt\"; name*=utf-8''image",
            b'name="prompt"; name="image"',
            b'name="prompt"; NAME="image"',
            b'name="prompt"; name=image',
            b'name*0="im"; name*1="age"',
            b'name="ima\\ge"',
            b'name="prompt\\"; x=\\"; name="image"',
            b'name="prompt" name="image"',
            b'name="prompt"x',
            b'name="prompt',
            b'name="_charset_"',
            b'name="_CHARSET_"',
            b'name="prompt"\r\nContent-Transfer-Encoding: base64',
            b'name="prompt"\r\nContent-Transfer-Encoding: Quoted-Printable',
            b'name="prompt"\r\nContent-Type: text/plain; charset=utf-7',
            b'name="prompt"\r\nContent-Type: text/plain;charset="UTF-16LE"',
            b'name="prompt"\r\nContent-Type: text/plain; charset=utf-16\r\nContent-Type: text/plain',
            b'name="image"; filename=""',
        ],
    )
    async def test_refused(self, head):
        with pytest.raises(InvalidRequestError):
            await read_form(b"--X\r\nContent-Disposition: form-data; %s\r\n\r\n/etc/passwd\r\n--X--\r\n" % head, TYPE)

    @cases(
        ("head", "name"),
        [
            (b"name=prompt", "prompt"),
            (b'NAME="prompt";', "prompt"),
            (b'name="a;b"; filename="x"', "a;b"),
            (b'filename="C:\\dir\\a\\"b;.wav"; name=file', "file"),
            (b'name="file"; filename="?.wav"; filename*=UTF-8\'\'%C3%A4.wav', "file"),
            (b'name="prompt"\r\nContent-Transfer-Encoding: 8bit', "prompt"),
            (b'name="prompt"\r\nContent-Type: text/plain; charset=UTF-8', "prompt"),
            (b'name="prompt"\r\nContent-Type: text/plain; charset=ISO-8859-1', "prompt"),
            (b'name="file"; filename="a.txt"\r\nContent-Type: text/plain; charset=utf-16', "file"),
            ('name="größe"'.encode(), "größe"),
        ],
    )
    async def test_let_through(self, head, name):
        form = await read_form(b"--X\r\nContent-Disposition: form-data; %s\r\n\r\n/a\r\n--X--\r\n" % head, TYPE)
        assert form.names == {name}


class TestReadFields:
    """What llmux reads of a form besides the model."""

    async def test_the_format_of_pictures(self):
        form = await read_form(FILE % b"picture" + FORM % (b"response_format", b"url") + b"--X--\r\n", TYPE)
        assert form.raw("response_format") == b'"url"'
        assert form.raw("model") is None
        assert (await read_form(FILE % b"response_format" + b"--X--\r\n", TYPE)).raw("response_format") is None


class TestPrivateFields:
    """No worker gets a field whose name begins with `x_`; some say something to llmux."""

    async def test_what_they_say(self):
        fields = FORM % (b"x_priority", b"high") + FORM % (b"x_client_id", b"") + FORM % (b"x_other", b"x" * 5000)
        form = await read_form(FORM % (b"model", b"m") + fields + b"--X--\r\n", TYPE)
        assert (form.name, form.extension("x_priority"), form.extension("x_client_id")) == ("m", "high", None)

    async def test_a_long_one(self):
        with pytest.raises(InvalidRequestError, match="`x_client_id` is too long"):
            await read_form(FORM % (b"x_client_id", b"a" * 5000) + b"--X--\r\n", TYPE)

    async def test_are_cut_out(self):
        kept = [FORM % (b"model", b"m"), FILE % b"sound", FORM % (b"max_x_", b"1")]
        body = FORM % (b"x_tenant", b"a") + kept[0] + FORM % (b"x_", b"b") + kept[1] + kept[2] + b"--X--\r\n"
        form = await read_form(body, TYPE)
        sent = await form.rewritten(Rewrite(), Endpoint("/v1/audio/transcriptions"))
        assert bytes(sent) == b"".join(kept) + b"--X--\r\n"
