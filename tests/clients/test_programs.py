"""Programs that nobody here wrote, each as its own users call it: see `programs/`, one script a client."""

from __future__ import annotations

import pytest

from tests.clients import test_agents, test_ollama
from tests.e2e.http.conftest import site as site  # a fixture
from tests.support import client_programs, tiny

EXTENSION_FIELDS = {"whole": tiny.ANSWER, "streamed": tiny.ANSWER}
RESPONSES = {"responses": tiny.ANSWER, "first_and_last": ["response.created", "response.completed"]}
CALLED = [tiny.TOOL_CALL["name"], tiny.TOOL_CALL["arguments"]]
SDK = {**EXTENSION_FIELDS, "models": ["quick"], "vectors": [True, True], **RESPONSES}

EXPECTED = {
    "anthropic_sdk.py": {
        **EXTENSION_FIELDS,
        "models": ["quick", "quick"],
        "stop": ["end_turn", "end_turn"],
        "request_id": True,
        "counted": True,
        "listed": True,
        "failure": "not_found_error",
    },
    "codex_responses.py": {
        "called": CALLED,
        "said": [tiny.ANSWER],
        "first_and_last": [["response.created", "response.completed"]] * 2,
        "outputs": [[], []],
    },
    "cohere_rerank.py": {"ranked": 2, "strange": [], "id": 36, "api": "2", "billed": 1.0},
    "langchain_chat.py": {**EXTENSION_FIELDS, "called": [CALLED], "vectors": [True, True]},
    "litellm_completion.py": {**EXTENSION_FIELDS, "vectors": [True, True], "failure": "NotFoundError"},
    "llm_prompt.py": EXTENSION_FIELDS,
    "openai_node.mjs": SDK,
    "openai_sdk.py": SDK,
}


def test_every_program_is_run():
    programs = {path.name for path in client_programs.PROGRAMS.iterdir() if path.suffix in {".py", ".mjs"}}
    assert programs == {*EXPECTED, *test_ollama.EXPECTED, test_agents.PROGRAM}


@pytest.mark.parametrize("program", EXPECTED)
def test_program(site, program):
    assert client_programs.run(program, site.url) == EXPECTED[program]
