"""Programs that nobody here wrote, each as its own users call it: see `programs/`, one script a client."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.e2e.http.conftest import site as site  # a fixture
from tests.support import client_programs, tiny
from tests.support.limits import LIMIT_S

SAID = {"whole": tiny.ANSWER, "streamed": tiny.ANSWER}
RESPONSES = {"responses": tiny.ANSWER, "first_and_last": ["response.created", "response.completed"]}
CALLED = [tiny.TOOL_CALL["name"], tiny.TOOL_CALL["arguments"]]
SDK = {**SAID, "models": ["quick"], "vectors": [True, True], **RESPONSES}

EXPECTED = {
    "anthropic_sdk.py": {
        **SAID,
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
    "langchain_chat.py": {**SAID, "called": [CALLED], "vectors": [True, True]},
    "litellm_completion.py": {**SAID, "vectors": [True, True], "failure": "NotFoundError"},
    "llm_prompt.py": SAID,
    "openai_node.mjs": SDK,
    "openai_sdk.py": SDK,
}


def test_every_program_is_run():
    assert {path.name for path in client_programs.PROGRAMS.iterdir() if path.suffix in {".py", ".mjs"}} == set(EXPECTED)


@pytest.mark.parametrize("program", EXPECTED)
def test_program(site, program):
    if program.endswith(".mjs"):
        node, folder = client_programs.node()
        command = [node, folder / program]
    else:
        command = [client_programs.python(), "-I", client_programs.PROGRAMS / program]
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run([*command, site.url], env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == EXPECTED[program]
