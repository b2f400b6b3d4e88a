"""Answers that a response template describes, read by the worker's parser on the real library, whole and letter by letter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import runtimes
from tests.support import tiny_language
from tests.support.made_once import command_of

PROMPT = "<|turn>user\n<|channel>thought\nhi<turn|>\n<|turn>model\n"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
]
CALL = "<|tool_call>call:f{a: 1}<tool_call|>"


@pytest.fixture(scope="module")
def answers():
    """Asks the program; one interpreter answers all, since loading transformers takes longer than they do."""
    command = command_of("answers", "transformers", str(Path(runtimes.__file__).parent))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:

        def ask(**question: Any) -> Any:
            program.stdin.write(json.dumps(question) + "\n")
            program.stdin.flush()
            return json.loads(program.stdout.readline())

        yield ask
        program.stdin.close()


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    """A checkpoint's own."""
    described = json.loads((tiny_language.model("turns") / "tokenizer_config.json").read_text())
    found: dict[str, Any] = described["response_template"]
    return found


@pytest.fixture
def read(answers, template):
    """The pieces of an answer, which are the same however it comes."""

    def read(text: str, *, tools: object = TOOLS, prompt: str = PROMPT, template: object = template) -> list[list[Any]]:
        def joined(parts: list[str]) -> list[list[Any]]:
            out: list[list[Any]] = []
            for _, pieces in answers(template=template, prompt=prompt, tools=tools, parts=parts):
                for piece in pieces:
                    if out and out[-1][:-1] == piece[:-1] and piece[0] != "CallStart":
                        out[-1] = [*piece[:-1], out[-1][-1] + piece[-1]]
                    else:
                        out.append(piece)
            return out

        whole = joined([text])
        assert joined([*text]) == whole
        return whole

    return read


def call(index: int, arguments: str) -> list[list[Any]]:
    return [["CallStart", index, "f"], ["CallArguments", index, arguments]]


class TestReading:
    """Thoughts, answers and calls, without the blanks around them."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("Hello", [["Text", "Hello"]]),
            ("  Hello\n", [["Text", "  Hello\n"]]),
            ("<|channel>thought\nwell\n<channel|>\n\nHello", [["Thought", "well"], ["Text", "Hello"]]),
            ("<|channel>thought\nwell\n", [["Thought", "well"]]),
            ("1 < 2 <|chan", [["Text", "1 < 2 <|chan"]]),
            ("", []),
            (CALL, call(0, '{"a": 1}')),
            (f"Let me see.\n\n{CALL}\n{CALL}", [["Text", "Let me see."], *call(0, '{"a": 1}'), *call(1, '{"a": 1}')]),
            ("<|tool_call>call:f{a: 1}", call(0, '{"a": 1}')),
            ("<|tool_call>call:f{}<tool_call|>done", [*call(0, "{}"), ["Text", "done"]]),
        ],
    )
    def test_text(self, read, text, expected):
        assert read(text) == expected

    def test_the_prompt_may_end_within_a_thought(self, read, answers, template):
        begun = f"{PROMPT}<|channel>thought\n"
        assert read("well<channel|>Hello", prompt=begun) == [["Thought", "well"], ["Text", "Hello"]]
        first = answers(template=template, prompt=begun, parts=[""])[0]
        assert first == [True, []]

    def test_a_conversation_without_the_models_turn_is_not_read(self, read):
        assert read("Hello", prompt="<|channel>thought\nhi") == [["Text", "Hello"]]

    def test_arguments_have_the_types_of_their_schema(self, answers, read):
        found = answers(model_type="qwen3_5")
        text = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
        number = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}
        tools = [{"type": "function", "function": number}]
        assert read(text, tools=tools, prompt="", template=found) == call(0, '{"a": "7", "n": 7}')


class TestUnreadable:
    """Nothing is lost, and nothing fails: what is no call is text."""

    @pytest.mark.parametrize(
        "text",
        [
            "<|tool_call>call:f{a: nonsense}<tool_call|>",
            "<|tool_call>call:f[1, 2]<tool_call|>",
            "<|tool_call>call:f7<tool_call|> and so on",
            "<|tool_call>call:f{a: 1",
            "so <|tool_call>call:f" + "[" * 50_000 + "<tool_call|>",
        ],
        ids=["no JSON", "a list", "a number", "broken off", "too deep"],
    )
    def test_it_is_text(self, read, text):
        assert read(text) == [["Text", text]]

    def test_what_follows_is_read_again(self, read):
        broken = "<|tool_call>call:f{a: nonsense}<tool_call|>"
        assert read(f"{broken}{CALL}") == [["Text", broken], *call(0, '{"a": 1}')]

    @pytest.mark.parametrize("after", ["", "\n", "x", " \n"])
    def test_calls_are_text_where_none_were_offered(self, read, after):
        assert read(f"so {CALL}{after}", tools=[]) == [["Text", f"so {CALL}{after}"]]

    def test_a_template_that_is_none(self, answers):
        assert answers(template={"version": 7}, parts=["Hello"]) is None


class TestTokens:
    def test_those_that_the_template_looks_for_are_shown_to_it(self, answers, template):
        tokens = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<turn|>", "<pad>", "<|turn>", ""]
        assert answers(template=template, tokens=tokens) == [
            "<channel|>",
            "<tool_call|>",
            "<turn|>",
            "<|channel>",
            "<|tool_call>",
        ]

    def test_of_transformers_own(self, answers):
        found = answers(model_type="gemma4")
        assert answers(template=found, tokens=['<|"|>', "<|tool_call>", "<bos>"]) == ['<|"|>', "<|tool_call>"]
