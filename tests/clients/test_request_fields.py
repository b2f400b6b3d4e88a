"""Each field that the SDKs of OpenAI, Anthropic and Ollama know is used, refused by name, or named as ignored; none is a 500.

The fields and their kinds are read from the SDKs themselves, so that a new one is asked about here.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache

import pytest

from tests.support import client_programs, tiny_language
from tests.support.daemon import fake, gguf, running

TALK = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
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
TYPICAL = {"int": 2, "float": 0.5, "str": "x", "bool": True, "list": ["x"], "object": {"a": "x"}}
ODD = [{"a": [1]}, [{"a": 1}], [["x"]], -1, 1e300, "", "\u0000", False]
OWN = {  # where a value of just any kind is a mistake
    "tools": {"/v1/messages": [TOOL], "/v1/messages/count_tokens": [TOOL]},
    "input": dict.fromkeys(BASE, "hi"),
    "messages": dict.fromkeys(BASE, TALK),
    "options": {path: {"seed": 3} for path in BASE},
}
# What llama.cpp's server does something with. A field that is new in an SDK belongs here, or to what its adapter says is passed over.
USED = {
    "/v1/chat/completions": (
        "messages model frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n parallel_tool_calls presence_penalty "
        "reasoning_effort response_format seed stop stream_options temperature tool_choice tools top_logprobs top_p"
    ),
    "/v1/completions": (
        "model prompt frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream_options suffix temperature top_p"
    ),
    "/v1/embeddings": "input model dimensions encoding_format",
}


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
            "llama": gguf(),
            "llama-embed": gguf(type="embedding"),
            "transformers": {"runtime": "transformers", "path": str(tiny_language.model()), "threads": 1},
            "stub": fake(endpoints=stub),
        }
    }
    with running(tmp_path_factory.mktemp("fields"), config) as daemon:
        yield daemon


def typical(path, name, kinds):
    if name in OWN and path in OWN[name]:
        return OWN[name][path]
    literal = next((kind[1:] for kind in kinds if kind[0] == "="), None)
    return literal if literal is not None else next(TYPICAL[kind] for kind in kinds if kind in TYPICAL)


def model_for(name, path):
    if name == "transformers" and path in {"/v1/embeddings", "/api/embed"}:
        pytest.skip("a language model has no embeddings")
    return "llama-embed" if name == "llama" and path in {"/v1/embeddings", "/api/embed"} else name


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize("name", ["llama", "transformers", "stub"])
class TestFields:
    """On real workers, and on one that says what it got."""

    def test_nothing_is_an_internal_error(self, site, name, path):
        model = model_for(name, path)
        for field, kinds in fields()[path].items():
            for value in [None, typical(path, field, kinds), *ODD]:
                asked = {"model": model, **BASE[path], field: value}
                if field == "model" and value is not None:
                    continue
                told = site.post(path, json=asked)
                assert told.status_code < 500, (field, value, told.text)
                if value is None and field not in {"model", *BASE[path]}:
                    assert told.status_code == 200, (field, told.text)

    def test_a_typical_value_is_used_or_named(self, site, name, path):
        model = model_for(name, path)
        plain = received(site.post(path, json={"model": model, **BASE[path]}))
        for field, kinds in fields()[path].items():
            if field in {"model", "background", "store", "previous_response_id", *BASE[path]}:
                continue
            told = site.post(path, json={"model": model, **BASE[path], field: typical(path, field, kinds)})
            ignored = told.headers.get("x-llmux-ignored", "")
            if told.status_code == 400:
                assert field in told.text or "image" in told.text or "unsupported" in told.text, (field, told.text)
            elif name == "stub" and plain is not None and field not in ignored:
                assert received(told) != plain or told.json() != plain, field


def received(told):
    """What the stub says that it got."""
    return told.json().get("received") if told.status_code == 200 else None


@pytest.mark.parametrize("path", USED)
def test_llama_cpp_uses_the_rest(site, path):
    model = model_for("llama", path)
    for field, kinds in fields()[path].items():
        told = (
            site.post(path, json={"model": model, **BASE[path], field: typical(path, field, kinds)})
            if field != "model"
            else None
        )
        is_named = told is not None and field in told.headers.get("x-llmux-ignored", "").split(", ")
        assert is_named != (field in USED[path].split()), field
