"""What programs print, cut anywhere, and the chat completions that become of it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.claude_cli.worker.answer import Answer
from runtimes.claude_cli.worker.output import OUTPUTS, OutputError, Result, Usage
from tests.support.cases import cases

USAGE = {"input_tokens": 5, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 4}
DONE = {"type": "result", "subtype": "success", "is_error": False, "result": "Grüße", "usage": USAGE}


def piece(text: str) -> dict[str, object]:
    return {
        "type": "stream_event",
        "event": {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}},
    }


def message(*texts: str, **more: object) -> dict[str, object]:
    content = [{"type": "thinking", "thinking": "hm"}, *({"type": "text", "text": text} for text in texts)]
    return {"type": "assistant", "message": {"content": content}, **more}


def lines(*facts: object) -> bytes:
    return b"".join(json.dumps(fact, ensure_ascii=False).encode() + b"\n" for fact in facts)


def whole(style: str, data: bytes, *cuts: int) -> tuple[str, Result]:
    """The whole text, where the data comes in these pieces."""
    output, places = OUTPUTS[style](), sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    text = "".join(output.feed(data[a:b]) for a, b in itertools.pairwise(places))
    result = output.end()
    return text + result.text, result


class TestText:
    @given(st.text(), st.lists(st.integers(0, 1000)))
    def test_cut_anywhere(self, text, cuts):
        assert whole("text", text.encode(), *cuts)[0] == text.rstrip()

    def test_what_is_no_text(self):
        assert whole("text", b"a\xff b\xc3")[0] == "a\ufffd b\ufffd"


class TestJson:
    def test_a_result(self):
        text, result = whole("claude_json", b"\x1b[?25l" + lines({**DONE, "stop_reason": "max_tokens"}))
        assert (text, result.finish_reason, result.usage) == ("Grüße", "length", Usage(10, 2, 4))

    @cases(
        "data",
        [b"", b"nothing", b"[1]", lines({"type": "other"}), lines({**DONE, "is_error": True}),
         lines({"type": "result", "subtype": "error_max_turns"}), lines({"type": "result", "subtype": "success"})],
    )  # fmt: skip
    def test_what_is_no_answer(self, data):
        with pytest.raises(OutputError):
            whole("claude_json", data)

    @pytest.mark.parametrize("usage", [None, 5, {}, {"input_tokens": "5", "output_tokens": -1}])
    def test_strange_usage(self, usage):
        found = whole("claude_json", lines({**DONE, "usage": usage}))[1].usage
        assert found == (Usage(0, 0, 0) if isinstance(usage, dict) else None)


class TestStreamJson:
    @given(st.lists(st.integers(0, 1000)))
    def test_pieces_cut_anywhere(self, cuts):
        data = lines({"type": "system", "subtype": "init"}, piece("Grü"), piece("ße"), message("Grüße"), DONE)
        assert whole("claude_stream_json", data, *cuts) == ("Grüße", Result("", "stop", Usage(10, 2, 4)))

    def test_messages_without_pieces(self):
        assert whole("claude_stream_json", lines(message("Grü", "ße"), DONE))[0] == "Grüße"

    def test_a_result_alone(self):
        assert whole("claude_stream_json", lines(DONE).rstrip())[0] == "Grüße"

    def test_what_parts_of_the_program_say_to_each_other(self):
        data = lines(message("inner", parent_tool_use_id="t"), {**piece("x"), "parent_tool_use_id": "t"}, DONE)
        assert whole("claude_stream_json", data)[0] == "Grüße"

    @pytest.mark.parametrize(
        "data", [b"", b"nothing\n", lines(piece("so far")), lines(piece("so far"), {**DONE, "is_error": True})]
    )
    def test_what_is_no_answer(self, data):
        with pytest.raises(OutputError):
            whole("claude_stream_json", data)


class TestAnswers:
    def test_whole(self):
        made = Answer("m", include_usage=True).to_object(["Hel", "lo", Result("")])
        assert (made["object"], made["model"], "usage" in made) == ("chat.completion", "m", False)
        assert made["choices"][0]["message"]["content"] == "Hello"
        assert (
            Answer("m", include_usage=False).to_object([Result("", usage=Usage(10, 2, 4))])["usage"]["total_tokens"]
            == 14
        )

    def test_events(self):
        events = [*Answer("m", include_usage=False).chunks(["ab", "c", Result("", "length")])]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas == [{"role": "assistant", "content": "ab"}, {"content": "c"}, {}]
        assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
        assert len({event["id"] for event in events}) == 1
        assert not any("usage" in event for event in events)

    @pytest.mark.parametrize(("usage", "total"), [(Usage(10, 2, 4), 14), (None, None)])
    def test_usage_comes_last(self, usage, total):
        *others, last = Answer("m", include_usage=True).chunks(["a", Result("", usage=usage)])
        assert (last["choices"], (last["usage"] or {}).get("total_tokens")) == ([], total)
        assert [event["usage"] for event in others] == [None] * len(others)

    def test_an_answer_without_a_word(self):
        first, last = Answer("m", include_usage=False).chunks([Result("")])
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert last["choices"][0]["finish_reason"] == "stop"
