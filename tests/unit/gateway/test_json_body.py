"""What of a JSON request reaches a worker."""

from __future__ import annotations

import json

import pytest

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.json_body import JsonBody

CHAT = Endpoint("/v1/chat/completions")


async def sent(body: bytes) -> bytes:
    opened = await JsonBody.open(body)
    opened.take_permission()
    return bytes(await opened.rewritten(Rewrite(), CHAT))


class TestNoModel:
    """`null` is as good as nothing, and doesn't reach a worker."""

    @pytest.mark.parametrize("padding", ["", "x" * 300_000])
    async def test_null(self, padding):
        body = json.dumps({"model": None, "input": padding}).encode()
        assert (await JsonBody.open(body)).name is None
        assert json.loads(await sent(body)) == {"input": padding}

    @pytest.mark.parametrize("name", [b"1", b"[]", b"false"])
    async def test_what_is_no_name(self, name):
        with pytest.raises(InvalidRequestError, match="must be a string"):
            await JsonBody.open(b'{"model": %b}' % name)


class TestPrivateFields:
    """No worker gets a field whose name begins with `x_`; some say something to llmux."""

    async def test_what_they_say(self):
        body = await JsonBody.open(b'{"model": "m", "x_priority": 3, "x_client_id": "", "x_a": [1]}')
        assert [body.extension(name) for name in ("x_priority", "x_client_id", "x_b")] == [3, None, None]

    @pytest.mark.parametrize("padding", ["", "x" * 300_000])
    async def test_go_nowhere(self, padding):
        body = {"model": "m", "x_priority": 3, "messages": [{"x_in": 1}], "x_": {"a": [padding]}, "max_x_": padding}
        assert json.loads(await sent(json.dumps(body).encode())) == {
            "model": "m",
            "messages": [{"x_in": 1}],
            "max_x_": padding,
        }

    async def test_without_any_the_bytes_stay(self):
        body = b'{ "model" :"m", "brand_new": 1,"messages":[{"content": "\\u0041 x_a"}] }'
        assert await sent(body) == body
