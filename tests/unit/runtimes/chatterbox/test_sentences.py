"""Text in sentences."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.chatterbox.worker.sentences import MAX_CHARACTERS, pieces


class TestSentences:
    """Pieces are the text, none is too long, and they end where one would breathe."""

    @given(st.text(st.sampled_from("abc Ä.!?。,;\n\"'")))
    def test_nothing_is_lost(self, text):
        found = pieces(text)
        assert "".join("".join(found).split()) == "".join(text.split())
        assert all(0 < len(piece) <= MAX_CHARACTERS for piece in found)

    def test_sentences(self):
        assert pieces("Hello there. " * 30)[0].count("Hello") == 9
        assert all(piece.endswith(".") for piece in pieces("Hello there. " * 30))

    @pytest.mark.parametrize(
        "text",
        [
            "Dr. Smith met Mr. Jones at 3.5 km from St. Ives on a very long walk that went on and on for a while, said he.",
            "Am 3. Mai war z. B. der Himmel blau, und das blieb er auch noch einige Tage lang, wie man sich erzählte.",
        ],
    )
    def test_no_sentence_ends_here(self, text):
        long = " ".join([text] * 4)
        assert all(piece.endswith((text[-12:], text)) for piece in pieces(long))

    def test_a_long_sentence_is_cut_at_a_comma(self):
        text = "word " * 30 + "word, " + "word " * 60
        first, *_ = pieces(text)
        assert first.endswith("word,")

    def test_a_long_text_without_any_end(self):
        """The time it takes grows with its length, not with its square: the worker does nothing else meanwhile."""
        began = time.process_time()
        assert len(pieces("Am 1. 2. z. B. " * 6600)) == 330
        assert time.process_time() - began < 3

    def test_without_any_space(self):
        assert [len(piece) for piece in pieces("x" * 700)] == [300, 300, 100]
