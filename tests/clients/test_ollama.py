"""Ollama's own clients at the port that is theirs, and the requests of its command and of Open WebUI's Ollama connection."""

from __future__ import annotations

import json

import httpx
import pytest
import yaml

from supervisor.catalog.keys import Scope, new_key
from tests.support import client_programs, tiny
from tests.support.daemon import REPOSITORY, Daemon, fake, gguf, wait_until
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

RECORDED = json.loads((REPOSITORY / "tests/golden/clients/ollama_requests.json").read_text())
CALLED = [[tiny.TOOL_CALL["name"], tiny.TOOL_CALL["arguments"]]]
LISTED = ["embed:latest", "endless:latest", "eyes:latest", "quick:latest", "thinker:latest"]
REFUSED = [501, True]
BOTH = {
    "whole": tiny.ANSWER,
    "streamed": tiny.ANSWER,
    "figures": ["stop", True, True],
    "thought": [tiny.THOUGHT, tiny.ANSWER],
    "called, streamed": CALLED,
    "seen": tiny.ANSWER,
    "shaped": {"it": "is so"},
    "prompt": tiny.ANSWER,
    "vectors": [8, 8],
    "listed": LISTED,
    "running": True,
    "can": ["completion", "tools", "thinking"],
    "pulled": ["success", "success"],
    "failure": 404,
    "refused": dict.fromkeys(("pull", "push", "create", "copy", "delete"), REFUSED),
    "unloaded": "unload",
}
EXPECTED = {
    "ollama_sdk.py": {
        **BOTH,
        "at_once": tiny.ANSWER,
        "thought, streamed": [tiny.THOUGHT, tiny.ANSWER],
        "called": CALLED,
        "told": tiny.ANSWER,
        "json": True,
        "limited": "length",
        "loaded": "load",
        "probable": tiny.ANSWER.split()[0],
        "vector": True,
        "context": 2048,
        "refused": {
            **BOTH["refused"],
            **dict.fromkeys(("pull, streamed", "create, streamed", "blob"), REFUSED),
        },
    },
    "ollama_node.mjs": {**BOTH, "version": 3, "aborted": "AbortError"},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    secret, entry = new_key("mine", [Scope.INFERENCE, Scope.ADMIN])
    (folder / "keys.yaml").write_text(yaml.safe_dump([entry]))
    port = quiet_ports()
    config = {
        "models": {
            "chat": gguf(parallel=2),
            "eyes": gguf(mmproj=str(tiny.projector()), modalities=["text", "image"]),
            "embed": gguf(tiny.model(name="tiny-embed", seed=2), type="embedding"),
            "endless": fake("--chunks=100000", "--chunk-delay=0.05", endpoints=["/v1/chat/completions"]),
        },
        "virtual_models": {
            "quick": {"model": "chat", "enable_thinking": False},
            "thinker": {"model": "chat"},
        },
        "server": {"ollama_port": port, "api_keys": str(folder / "keys.yaml")},
    }
    daemon = Daemon(folder, config)
    daemon.ollama, daemon.secret = f"http://127.0.0.1:{port}", secret
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


@pytest.mark.parametrize("program", EXPECTED)
def test_program(site, program):
    done = client_programs.run(program, site.ollama, site.secret)
    assert done == EXPECTED[program]


class TestRecorded:
    """What Open WebUI 0.12 sends to its Ollama connection, recorded, and the command's requests, as its source writes them."""

    @pytest.mark.parametrize("session", RECORDED)
    def test_session(self, site, session):
        headers = {"authorization": f"Bearer {site.secret}"}
        with httpx.Client(base_url=site.ollama, trust_env=False, timeout=LIMIT_S, headers=headers) as client:
            for asked in RECORDED[session]:
                method, path = asked["ask"].split()
                told = client.request(method, path, json=asked.get("body"))
                assert told.status_code == asked["status"], (asked, told.text)
                assert told.headers.get("x-llmux-ignored") == asked.get("ignored"), asked
                lines = [json.loads(line) for line in told.text.splitlines()] if path != "/" else []
                if told.status_code != 200:
                    assert [list(line) for line in lines] == [["error"]]
                elif path in {"/api/chat", "/api/generate"}:
                    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
                    assert len(lines) == 1 or "".join(map(said, lines))

    def test_what_open_webui_unloads_is_unloaded(self, site):
        headers = {"authorization": f"Bearer {site.secret}"}
        site.post("/v1/admin/models/embed/load", headers=headers)
        body = {"model": "embed:latest", "keep_alive": 0, "prompt": ""}
        assert httpx.post(f"{site.ollama}/api/generate", json=body, headers=headers, trust_env=False).status_code == 200

        def loaded():
            rows = httpx.get(f"{site.ollama}/api/ps", headers=headers, trust_env=False).json()["models"]
            return {row["model"] for row in rows}

        wait_until(lambda: "embed:latest" not in loaded(), what="it is unloaded")


def said(line) -> str:
    """What a line of an answer adds."""
    message = line.get("message", line)
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return "".join([message.get("content") or message.get("response") or "", message.get("thinking") or "", *calls])
