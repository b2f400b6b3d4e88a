"""The fixed page that `llmux bench --ocr` shows to a model: a picture of a document, and the words on it.

`page.png` was drawn from these lines by `python -m tools.ocr_page`. The page stays the same, so that figures of different days
and machines can be compared.
"""

from __future__ import annotations

import base64
import re
from functools import cache
from pathlib import Path
from typing import Final

TITLE: Final = "Harbour Office: Report of the Third Quarter"
HEADINGS: Final = ("1. Arrivals", "2. Fees", "3. Open questions")
PARAGRAPHS: Final = (
    (
        "Between July and September 412 vessels called at the harbour, 37 more than in the same months of the year before. "
        "Most of them stayed for less than two days. The longest stay was that of the survey ship Meridian, which waited "
        "nineteen days for a spare part."
    ),
    (
        "Fees are due on departure. The table shows what was charged for each class, in euro. Vessels under ten metres pay "
        "nothing from October to March."
    ),
)
TABLE: Final = (
    ("Class", "Length", "Calls", "Fee", "Total"),
    ("Small craft", "under 10 m", "231", "12.50", "2887.50"),
    ("Coastal", "10 to 40 m", "126", "85.00", "10710.00"),
    ("Freight", "40 to 120 m", "48", "410.00", "19680.00"),
    ("Large freight", "over 120 m", "7", "1260.00", "8820.00"),
)
ITEMS: Final = (
    "The crane on pier 4 is rated for 8 t; two calls needed more.",
    "Shore power reaches berths 1 to 6 only.",
    "Who pays for the new buoy at Gull Rock?",
)
FOOTER: Final = "Page 3 of 7, ref. HO-2291-C"

PROMPT: Final = (
    "This is a scanned page. Read all of it, from top to bottom, and give back its text and its structure in Markdown: the "
    "title as a first-level heading, each section's heading as a second-level one, paragraphs as they are, the table as a "
    "Markdown table with every row and column, lists as lists, and the footer as the last line in italics. Copy words, numbers "
    "and punctuation exactly as they are printed. Correct, shorten, translate and explain nothing. If you can't read a word, "
    "write [?] in its place. Answer with the Markdown alone."
)


@cache
def data_url() -> str:
    """The picture, as chat completions take it."""
    return f"data:image/png;base64,{base64.b64encode(Path(__file__).with_name('page.png').read_bytes()).decode()}"


def words(text: str) -> frozenset[str]:
    """The words and numbers of a text, without regard to case and punctuation."""
    return frozenset(re.findall(r"\w+(?:[.\-]\w+)*", text.casefold()))


@cache
def printed() -> frozenset[str]:
    """The words on the page."""
    cells = (cell for row in TABLE for cell in row)
    return words("\n".join((TITLE, *HEADINGS, *PARAGRAPHS, *cells, *ITEMS, FOOTER)))
