"""How the transformers runtime takes generated text apart: the same, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtimes.sdk.chat.detokenize import Detokenizer
from runtimes.sdk.chat.formats.harmony import HarmonyParser
from runtimes.sdk.chat.formats.pieces import CallArguments, CallStart, Text, Thought, merge_pieces
from runtimes.sdk.chat.formats.tagged import TaggedParser
from runtimes.sdk.chat.response_builder import Stops
from tests.support.cases import cases

SCHEMAS = {
    "f": {
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"type": ["array", "null"]},
            "flag": {"type": "boolean"},
        }
    }
}

PARSERS = {
    "tagged": lambda: TaggedParser(thinking=False, calls=True, schemas=SCHEMAS),
    "within a thought": lambda: TaggedParser(thinking=True, calls=True, schemas=SCHEMAS),
    "without calls": lambda: TaggedParser(thinking=False, calls=False),
    "harmony": lambda: HarmonyParser(calls=True),
    "harmony without calls": lambda: HarmonyParser(calls=False),
}

SCRAPS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "</parameter>"]
SCRAPS += [
    "<parameter=a>",
    "<parameter=n>",
    "<parameter=either>",
    "<parameter=other>",
    '{"name": "f"',
    ', "arguments": ',
]
SCRAPS += [
    '{"a": "',
    '"}',
    "}",
    "{",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    "<",
    ">",
    "\n",
    "\n\n",
    " ",
    "x",
    "12",
    "🙂",
    "null",
]
SCRAPS += ["<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>json"]
SCRAPS += ["analysis", "final", "commentary", " to=functions.f "]

texts = st.lists(st.sampled_from(SCRAPS), max_size=25).map("".join)


def whole(make, text):
    parser = make()
    return merge_pieces([*parser.feed(text), *parser.end()])


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def in_pieces(make, pieces):
    parser = make()
    found = [piece for part in pieces for piece in parser.feed(part)]
    return merge_pieces([*found, *parser.end()])


class TestAnyCut:
    """However a text is cut, the result is that of the whole, and each letter by itself gives it, too."""

    @pytest.mark.parametrize("kind", PARSERS)
    @given(text=texts, places=st.lists(st.integers(0, 10_000), max_size=8))
    @example(text="<tool_call>\n<function=f>\n<parameter=a>x\n\n<parameter=n>1</function></tool_call>", places=[38, 40])
    def test_same(self, kind, text, places):
        expected = whole(PARSERS[kind], text)
        assert in_pieces(PARSERS[kind], cut(text, places)) == expected
        assert in_pieces(PARSERS[kind], list(text)) == expected

    @given(
        text=st.text("abc", max_size=30),
        stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
        places=st.lists(st.integers(0, 10_000), max_size=8),
    )
    def test_stops(self, text, stops, places):
        filtered = Stops(stops)
        out = "".join(filtered.feed(part) for part in cut(text, places))
        out += filtered.end()
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert out == (text[: min(ends)[1]] if ends else text)
        assert (filtered.hit is not None) == bool(ends)
        assert not any(stop in out for stop in stops)

    @pytest.mark.parametrize("kind", PARSERS)
    @given(text=texts)
    def test_arguments_come_after_their_call_has_begun(self, kind, text):
        begun = -1
        for piece in whole(PARSERS[kind], text):
            if isinstance(piece, CallStart):
                begun += 1
            if isinstance(piece, CallStart | CallArguments):
                assert piece.index == begun


def calls(pieces):
    found = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            found.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            found[-1][1] += piece.text
    return [(name, json.loads(arguments)) for name, arguments in found]


class TestTagged:
    """Thoughts in tags and calls in tags, of JSON or of tags."""

    @cases(
        ("text", "expected"),
        [
            ("Hello", [Text("Hello")]),
            ("  Hello\n", [Text("  Hello\n")]),
            ("<think>\nwell\n</think>\n\nHello", [Thought("well"), Text("Hello")]),
            ("\n<think>well</think>Hello ", [Thought("well"), Text("Hello ")]),
            ("<think>\n\n</think>\n\nHello", [Text("Hello")]),
            ("<think>\nwell\n", [Thought("well")]),
            ("<think>\na\n\nb\n</think>", [Thought("a\n\nb")]),
            ("1 < 2 <thin", [Text("1 < 2 <thin")]),
            ("say <think>", [Text("say <think>")]),
            ("", []),
            ("<tool_call>\nno JSON\n</tool_call>!", [Text("<tool_call>\nno JSON\n</tool_call>!")]),
        ],
    )
    def test_text(self, text, expected):
        assert whole(PARSERS["tagged"], text) == expected

    def test_a_prompt_that_ends_within_a_thought(self):
        assert whole(PARSERS["within a thought"], "well\n</think>\n\nHello") == [Thought("well"), Text("Hello")]

    def test_calls_are_text_where_none_were_offered(self):
        text = '<tool_call>\n{"name": "f"}\n</tool_call>'
        assert whole(PARSERS["without calls"], text) == [Text(text)]

    @cases(
        ("block", "arguments"),
        [
            ('{"name": "f", "arguments": {"a": "x", "b": [1, {"c": null}]}}', {"a": "x", "b": [1, {"c": None}]}),
            ('{"arguments": {"a": "x"}, "name": "f"}', {"a": "x"}),
            ('{"name": "f", "arguments": "{\\"a\\": \\"}\\"}"}', {"a": "}"}),
            ('{"name": "f", "arguments": {"a": "</tool_call> \\" {"}}', {"a": '</tool_call> " {'}),
            ('{"name": "f"}', {}),
            ('{"name": "f", "arguments": {}}', {}),
            ('{"id": 1.5, "name": "f", "parameters": {"a": 1}}', {"a": 1}),
            ("<function=f>\n</function>", {}),
            ("<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", {"a": "x"}),
            (
                "<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>",
                {"a": "12", "n": 12},
            ),
            (
                '<function=f><parameter=a>\n\n  def f():\n    "<b>"\n\n</parameter></function>',
                {"a": '\n  def f():\n    "<b>"\n'},
            ),
            ("<function=f><parameter=n>many</parameter></function>", {"n": "many"}),
            ("<function=f><parameter=either>null</parameter></function>", {"either": None}),
            ("<function=f><parameter=either>12</parameter></function>", {"either": "12"}),
            ("<function=f><parameter=flag>True</parameter></function>", {"flag": True}),
            ("<function=f><parameter=n>true</parameter></function>", {"n": "true"}),
            ("<function=f><parameter=list>[1, 2]</parameter></function>", {"list": [1, 2]}),
            ('<function=f><parameter=other>{"x": 1}</parameter></function>', {"other": {"x": 1}}),
            ("<function=f><parameter=other>NaN</parameter></function>", {"other": "NaN"}),
            ("<function=f><parameter=a>x\n<parameter=n>1\n</function>", {"a": "x", "n": 1}),
        ],
    )
    def test_one_call(self, block, arguments):
        pieces = whole(PARSERS["tagged"], f"<tool_call>\n{block}\n</tool_call>")
        assert calls(pieces) == [("f", arguments)]
        assert not any(isinstance(piece, Text) for piece in pieces)

    def test_several_calls_after_a_word(self):
        one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        two = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
        pieces = whole(PARSERS["tagged"], f"<think>\nhm\n</think>\n\nLet me see.\n\n{one}\n{two}")
        assert pieces[:2] == [Thought("hm"), Text("Let me see.")]
        assert calls(pieces) == [("f", {}), ("f", {"a": "x"})]

    def test_arguments_come_before_the_call_is_over(self):
        parser = PARSERS["tagged"]()
        parser.feed('<tool_call>{"name": "f", "arguments": {"a": "par')
        assert parser.feed("t") == [CallArguments(0, "t")]
        parser = PARSERS["tagged"]()
        parser.feed("<tool_call><function=f><parameter=a>\npar")
        assert parser.feed('t"') == [CallArguments(0, 't\\"')]


class TestHarmony:
    """Messages with headers."""

    def test_thought_and_answer(self):
        text = "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>final<|message|>Hello"
        assert whole(PARSERS["harmony"], text) == [Thought("well"), Text("Hello")]

    @pytest.mark.parametrize(
        "header",
        [
            "<|channel|>commentary to=functions.f <|constrain|>json",
            " to=functions.f<|channel|>commentary json",
            "<|channel|>commentary to=f",
        ],
    )
    def test_call(self, header):
        pieces = whole(PARSERS["harmony"], f'{header}<|message|>{{"a": "x"}}')
        assert calls(pieces) == [("f", {"a": "x"})]
        assert whole(PARSERS["harmony without calls"], f'{header}<|message|>{{"a": "x"}}') == [Thought('{"a": "x"}')]

    def test_a_word_beside_the_answer(self):
        text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Done."
        assert whole(PARSERS["harmony"], text) == [Text("I look.\n\nDone.")]

    def test_a_header_that_never_ended_is_nothing(self):
        assert whole(PARSERS["harmony"], "<|channel|>fin") == []


class TestDetokenizer:
    """Text comes as soon as it can be told, and never half a character."""

    @given(st.text(max_size=30))
    def test_bytes(self, text):
        decode = lambda ids: bytes(ids).decode(errors="replace")
        reader = Detokenizer(decode)
        parts = [reader.feed(byte) for byte in text.encode()]
        assert "".join(parts) + reader.end() == text
        assert not any("\ufffd" in part for part in parts if "\ufffd" not in text)

    @given(st.lists(st.integers(0, 255), max_size=60))
    def test_garbage_is_not_held_back_for_ever(self, tokens):
        decode = lambda ids: bytes(ids).decode(errors="replace")
        reader = Detokenizer(decode)
        waiting = 0
        for token in tokens:
            waiting = 0 if reader.feed(token) else waiting + 1
            assert waiting < 8
        reader.end().encode()

    def test_a_tokenizer_that_drops_the_first_blank(self):
        words = ["▁Hello", "▁big", "▁world"]
        decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip(" ")
        reader = Detokenizer(decode)
        assert [reader.feed(i) for i in range(3)] == ["Hello", " big", " world"]
