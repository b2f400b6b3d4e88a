"""Large bodies, through a real daemon."""

from __future__ import annotations

import json

import pytest

from tests.support.daemon import fake, running

MIB = 1024 * 1024
PICTURE = "data:image/png;base64," + "iVBORw0KGgo/" * (3 * MIB // 12)


def chat(*urls: str, **fields) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}], **fields}).encode()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    config = {
        "models": {"plain": fake(endpoints=["/echo", "/v1/chat/completions"])},
        "virtual_models": {"other": {"model": "plain", "defaults": {"seed": 7}}},
        "limits": {"body_mib": 8},
    }
    with running(tmp_path_factory.mktemp("large"), config) as daemon:
        yield daemon


class TestEndToEnd:
    """Over the wire, through a real daemon to a real process."""

    def test_arrives_as_it_was_sent(self, site):
        body = chat(PICTURE).replace(b'"m"', b'"plain"')
        assert site.post("/echo", content=body).content == body

    def test_arrives_rewritten(self, site):
        body = json.loads(chat(PICTURE)) | {"model": "other"}
        told = site.post("/v1/chat/completions", json=body)
        assert told.json()["received"] == body | {"seed": 7}

    def test_a_reference_in_one_is_refused(self, site):
        told = site.post("/echo", json=json.loads(chat(PICTURE, "file:///etc/passwd")) | {"model": "plain"})
        assert told.status_code == 400
        assert told.json()["error"]["code"] == "remote_media_refused"
