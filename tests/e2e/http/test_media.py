"""Media in prompts, through a real daemon to a worker that sees."""

from __future__ import annotations

import base64
import io

import pytest

from tests.support import tiny
from tests.support.daemon import gguf, running


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    keys = {"mmproj": str(tiny.projector()), "modalities": ["text", "image"]}
    with running(tmp_path_factory.mktemp("seeing"), {"models": {"eyes": gguf(**keys)}}) as daemon:
        yield daemon


class TestEndToEnd:
    """A model that sees: pictures in the request work, addresses are refused."""

    def test_a_picture(self, seeing):
        from PIL import Image

        picture = io.BytesIO()
        Image.new("RGB", (32, 32), "red").save(picture, "PNG")
        url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
        answer = seeing.post("/v1/chat/completions", json={"model": "eyes", **user(image(url))})
        assert answer.status_code == 200, answer.text
        assert tiny.ANSWER in answer.json()["choices"][0]["message"]["content"]

    @pytest.mark.parametrize(
        "path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/apply-template"]
    )
    def test_an_address(self, seeing, path):
        part = (
            {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/"}}
            if "messages" in path
            else image("http://127.0.0.1:1/")
        )
        told = seeing.post(path, json={"model": "eyes", "max_tokens": 5, **user(part)})
        assert told.status_code == 400
        assert (told.json()["error"]["code"], told.json()["error"]["param"]) == ("remote_media_refused", "url")

    def test_deep_nesting(self, seeing):
        body = b'{"model": "eyes", "messages": ' + b'{"url":' * 5000 + b"1" + b"}" * 5000 + b"}"
        told = seeing.post("/v1/chat/completions", content=body)
        assert told.status_code == 400
        assert "error" in told.json()
