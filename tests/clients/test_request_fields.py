"""Each field that the SDKs of OpenAI, Anthropic and Ollama know is used, refused by name, or named as ignored; none is a 500.

The fields and their kinds are read from the SDKs themselves, so that a new one is asked about here. What became of each is kept
in tests/golden/request_fields.json (`make golden` writes it anew). `make docs` puts it on docs/reference/request-fields.md, beside what the
types of the dialects say of the field.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from supervisor.dialects.responses.types import StorageFields
from tests.support import client_programs, tiny_language
from tests.support.counts import SOAK
from tests.support.daemon import fake, gguf, running

TALK = [{"role": "user", "content": "hi"}]
BASE = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": TALK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/api/chat": {"messages": TALK, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/api/embed": {"input": "hi"},
}
EMBED = {"/v1/embeddings", "/api/embed"}
RUNTIMES = ["llama_server", "transformers", "command"]
TYPICAL = {"int": 2, "float": 0.5, "str": "x", "bool": True, "list": ["x"], "object": {"a": "x"}}
ODD = [{"a": [1]}, [{"a": 1}], [["x"]], -1, 1e300, "", "\u0000", False]
LLMUX_OWN = {*StorageFields.__struct_fields__}  # no worker needs to know of them
TOOL = {"name": "f", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": TOOL}
OWN = {  # where a value of just any kind is a mistake
    "audio": {"voice": "alloy", "format": "wav"},
    "cache_control": {"type": "ephemeral"},
    "format": "json",
    "functions": [TOOL],
    "input": "hi",
    "logit_bias": {"5": 1},
    "messages": TALK,
    "modalities": ["text"],
    "options": {"seed": 3},
    "output_config": {"effort": "low"},
    "reasoning": {"effort": "low"},
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "system": "x",
    "text": {"verbosity": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "/v1/chat/completions tools": [FUNCTION],
    "/v1/responses tools": [{"type": "function", **TOOL}],
    "/v1/messages metadata": {"user_id": "x"},
    "/v1/messages tool_choice": {"type": "auto"},
    "/v1/messages tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "/v1/messages/count_tokens tool_choice": {"type": "auto"},
    "/v1/messages/count_tokens tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "/api/chat tools": [FUNCTION],
}
GOLDEN = Path(__file__).parents[1] / "golden" / "request_fields.json"


@cache
def fields():
    """By path, the names of fields, and the kinds of JSON that they may have."""
    command = [client_programs.python(), "-I", client_programs.CLIENTS / "request_fields.py"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    stub = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    config = {
        "models": {
            "llama_server": gguf(),
            "llama_server-embed": gguf(type="embedding"),
            "transformers": {"runtime": "transformers", "path": str(tiny_language.model()), "threads": 1},
            "command": fake(endpoints=stub),
        }
    }
    with running(tmp_path_factory.mktemp("fields"), config) as daemon, daemon.client() as client:
        yield client


def typical(path, name, kinds):
    if (own := OWN.get(f"{path} {name}", OWN.get(name))) is not None:
        return own
    literal = next((kind[1:] for kind in kinds if kind[0] == "="), None)
    return literal if literal is not None else next(TYPICAL[kind] for kind in kinds if kind in TYPICAL)


def model_for(runtime, path):
    is_embedding = path in EMBED
    if runtime == "transformers" and is_embedding:
        pytest.skip("a language model has no embeddings")
    return "llama_server-embed" if runtime == "llama_server" and is_embedding else runtime


def odd(runtime, path):
    """Those that are tried on this runtime: at the gate each on one of those that have the path, in a soak each on all."""
    having = [name for name in RUNTIMES if name != "transformers" or path not in EMBED]
    return ODD if SOAK else ODD[having.index(runtime) :: len(having)]


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize("runtime", RUNTIMES)
class TestFields:
    """On real workers, and on one that says what it got."""

    def test_nothing_is_an_internal_error(self, site, runtime, path):
        model = model_for(runtime, path)
        for field in fields()[path]:
            for value in [None, *odd(runtime, path)]:
                asked = {"model": model, **BASE[path], field: value}
                if field == "model" and value is not None:
                    continue
                told = site.post(path, json=asked)
                assert told.status_code < 500, (field, value, told.text)
                if value is None and field not in {"model", *BASE[path]}:
                    assert told.status_code == 200, (field, told.text)

    def test_a_typical_value_is_used_refused_or_named(self, site, runtime, path):
        """What isn't named must be used: look that up for a field that is new in the golden file."""
        plain, found = site.post(path, json={"model": (model := model_for(runtime, path)), **BASE[path]}), {}
        for field, kinds in fields()[path].items():
            if field in {"model", *BASE[path]}:
                continue
            value = typical(path, field, kinds)
            told = site.post(path, json={"model": model, **BASE[path], field: value})
            assert told.status_code < 500, (field, value, told.text)
            outcome = became(field, told)
            if runtime == "command" and outcome == "used" and "received" in plain.json() and field not in LLMUX_OWN:
                assert told.json() != plain.json(), field
            found[field] = {"value": value, runtime: outcome}
        golden = json.loads(GOLDEN.read_text())
        if os.environ.get("LLMUX_GOLDEN") == "update":
            known = golden.get(path, {})
            golden[path] = {field: {**known.get(field, {}), **row} for field, row in found.items()}
            GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        columns = ("value", runtime)
        assert {field: {name: row[name] for name in columns} for field, row in golden[path].items()} == found, (
            "see make golden"
        )


def became(field, told):
    """What became of it, as docs/reference/request-fields.md calls that."""
    named = told.headers.get("x-llmux-ignored", "").split(", ")
    if any(name == field or name.startswith((f"{field}.", f"{field}[")) for name in named):
        return "ignored"
    if told.status_code == 400:
        assert any(word in told.text for word in (field, "image", "unsupported")), (field, told.text)
        return "refused"
    return "used"
