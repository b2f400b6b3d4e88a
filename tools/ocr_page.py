"""Draw the page that `llmux bench --ocr` shows: `python -m tools.ocr_page`, needed only when its text changes.

A new picture makes earlier figures incomparable.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from supervisor.cli.bench import page

PLACE: Final = Path(page.__file__).with_name("page.png")
WIDTH, HEIGHT, MARGIN = 1000, 1400, 80
COLUMNS: Final = (0, 210, 420, 560, 700)


def draw() -> Image.Image:
    """Draw in black on white, without shades of grey: small, and the same everywhere."""
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    pen = ImageDraw.Draw(image)
    y = MARGIN

    def write(text: str, size: int, *, x: int = MARGIN, gap: int = 10) -> None:
        nonlocal y
        pen.text((x, y), text, 0, ImageFont.load_default(size))
        y += size + gap

    def paragraph(text: str, size: int = 24) -> None:
        for line in textwrap.wrap(text, 66):
            write(line, size)

    write(page.TITLE, 36, gap=40)
    write(page.HEADINGS[0], 30, gap=16)
    paragraph(page.PARAGRAPHS[0])
    y += 24
    write(page.HEADINGS[1], 30, gap=16)
    paragraph(page.PARAGRAPHS[1])
    y += 20
    top = y
    for row in page.TABLE:
        for x, cell in zip(COLUMNS, row, strict=True):
            pen.text((MARGIN + x + 10, y + 8), cell, 0, ImageFont.load_default(22))
        pen.line((MARGIN, y, WIDTH - MARGIN, y), 0, 2)
        y += 42
    pen.line((MARGIN, y, WIDTH - MARGIN, y), 0, 2)
    for x in (*COLUMNS, WIDTH - 2 * MARGIN):
        pen.line((MARGIN + x, top, MARGIN + x, y), 0, 2)
    y += 44
    write(page.HEADINGS[2], 30, gap=16)
    for item in page.ITEMS:
        pen.ellipse((MARGIN + 8, y + 10, MARGIN + 16, y + 18), 0)
        write(item, 24, x=MARGIN + 34)
    y = HEIGHT - MARGIN
    write(page.FOOTER, 20)
    return image.point(lambda shade: 255 if shade > 128 else 0, "1")  # the middle of the grey scale


if __name__ == "__main__":
    draw().save(PLACE, optimize=True)
    sys.stdout.write(f"{PLACE}: {PLACE.stat().st_size} bytes\n")
