"""The page of `llmux bench --ocr`: the picture in the package is the one that its text makes."""

from __future__ import annotations

from PIL import Image

from supervisor.cli.bench import page
from tools import ocr_page


def test_the_picture_is_that_of_the_text():
    with Image.open(ocr_page.PLACE) as kept:
        assert (kept.size, kept.mode) == ((1000, 1400), "1")
        assert kept.tobytes() == ocr_page.draw().tobytes()


def test_words_are_compared_without_case_and_punctuation():
    assert page.words("Harbour Office: 2887.50, (HO-2291-C)!") == {"harbour", "office", "2887.50", "ho-2291-c"}
    markdown = "\n".join(["# " + page.TITLE, *page.PARAGRAPHS])
    assert page.words(markdown) < page.printed()
