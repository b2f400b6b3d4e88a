"""The order of filters: who sees what another made of a worker's answer.

The cache report sees what the worker said, and so do links to pictures; then come the name, what a dialect lacks, and last the
translation. Each case shows that a filter has seen what the one before it made. Where a dialect fills in what is lacking
nothing is translated, and it takes no notice of the name.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.e2e.wire.conftest import SOCKET, Site, configuration, exchange
from tests.e2e.wire.test_as_it_is import DONE, FINISH, WHOLE, request
from tests.e2e.wire.test_promises import ALL_WAYS, named
from tests.e2e.wire.test_translated import WAYS, Way
from tests.support.daemon import running
from tests.support.media_server import PNG
from tests.support.wire import Answer, Conn, answers, ok


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("order")
    with running(folder, configuration(folder, keepalive_s=60)) as daemon:
        yield Site(daemon, folder / SOCKET)


CALL = b'{"model":"native","id":"m1","stop_reason":"end_turn","stop_sequence":"STOP","usage":{"cache_read_input_tokens":7},"input":{"model":"native"}}'
TIMED = named(WHOLE, "m")[:-1] + b',"timings":{"cache_n":7,"prompt_ms":1,"predicted_ms":2}}'
TOOL = b'{"model":"m","id":"1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":"{\\"model\\":\\"m\\"}"}}]}}]}'
PICTURE = base64.b64encode(PNG + bytes(1 << 20))
DRAWN = (
    b'{"model":"native","data":[{"b64_json":"%s","of":{"model":"native"}}],"usage":{"cache_read_input_tokens":7}}'
    % PICTURE
)
HIT = {"x-cache-hit": "true", "x-cache-tokens-reused": "7"}


async def told(site: Site, asked: bytes, said: bytes, kind: bytes = b"application/json") -> Answer:
    fields = [b"Content-Type: " + kind, *([b"X-Llmux-Pictures: url"] if b"b64_json" in said else [])]

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.send(ok(said, *fields))
        await conn.closed()

    async with site.scripted(script):
        (answer,) = answers(await exchange(site.port, asked), "POST")
    assert (answer.status, answer.whole) == (200, True), answer
    return answer


@pytest.mark.parametrize("way", [*ALL_WAYS.values()][1:], ids=[*ALL_WAYS][1:])
async def test_cache_then_name_and_translation(site: Site, way: Way) -> None:
    """Only the worker tells its times and a length: whoever comes later would find neither."""
    way = replace(way, called="called-")
    answer = await told(site, way.asks(b"X-Cache-Mode: auto", stream=False), TIMED)
    found = {name: answer.header(name) for name in (*HIT, "x-gpu-time-ms")}
    assert found == {name: [value] for name, value in HIT.items()} | {"x-gpu-time-ms": ["3"]}
    assert (b'"model":"called-m"' in answer.body, b'"model":"m"' in answer.body) == (True, False)


async def test_cache_then_pictures_then_name(site: Site) -> None:
    """A large answer has its name replaced anywhere: it is small once its pictures are kept elsewhere."""
    body = json.dumps({"model": "called-native", "prompt": "a cat", "response_format": "url"}).encode()
    drawn = DRAWN.replace(PICTURE, base64.b64encode(PNG))
    asked = partial(request, body, path="/v1/images/generations")
    small = await told(site, asked(b"X-Cache-Mode: auto"), drawn)
    large = await told(site, asked(), DRAWN)
    assert {name: small.header(name) for name in HIT} == {name: [value] for name, value in HIT.items()}
    for answer in map(json.loads, (small.body, large.body)):
        (picture,) = answer["data"]
        assert answer["model"] == "called-native"
        assert picture.keys() == {"of", "url"}
        assert picture["of"] == {"model": "native"}


async def test_name_then_translation(site: Site) -> None:
    """A tool's arguments are text for the one, and objects only in what the other makes of them."""
    events = b"data: %s\n\n" % TOOL + FINISH + DONE
    asked = replace(WAYS["Ollama"], called="called-").asks(stream=True)
    answer = await told(site, asked, events, b"text/event-stream")
    calls = [json.loads(line) for line in answer.body.splitlines() if b"tool_calls" in line]
    assert [call["model"] for call in calls] == ["called-m"]
    assert calls[0]["message"]["tool_calls"][0]["function"]["arguments"] == {"model": "m"}


async def test_cache_then_name_and_repair(site: Site) -> None:
    """Both find what is theirs; a tool's arguments stay."""
    way = replace(WAYS["Anthropic"], called="called-")
    asked = way.asks(b"X-Cache-Mode: auto", stream=False, model="native", stop_sequences=["STOP"])
    answer = await told(site, asked, CALL)
    assert {name: answer.header(name) for name in HIT} == {name: [value] for name, value in HIT.items()}
    repaired = {"model": "called-native", "stop_reason": "stop_sequence"}
    assert json.loads(answer.body) == json.loads(CALL) | repaired
