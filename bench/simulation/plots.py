"""A plot as SVG: the share of requests that waited longer than x seconds, both axes logarithmic."""

from __future__ import annotations

import math
from bisect import bisect_right

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 360, 60, 44, 16
SECONDS = (0.1, 1000.0)
SHARES = (1e-5, 1.0)
COLOURS = ("#0072b2", "#d55e00", "#009e73")


def _x(seconds: float) -> float:
    low, high = map(math.log10, SECONDS)
    return LEFT + (math.log10(seconds) - low) / (high - low) * (WIDTH - LEFT - 16)


def _y(share: float) -> float:
    low, high = map(math.log10, SHARES)
    return TOP + (high - math.log10(max(share, SHARES[0]))) / (high - low) * (HEIGHT - TOP - BOTTOM)


def curves(waits: dict[str, list[float]]) -> str:
    """A curve for each entry of `waits`: name → sorted waits."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">seconds waited</text>',
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">share that waited longer</text>',
    ]
    for power in range(-1, 4):
        x = _x(10.0**power)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(-5, 1):
        y = _y(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 16}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * 10.0**power:g} %</text>')
    for index, (name, values) in enumerate(waits.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = []
        for step in range(161):
            seconds = SECONDS[0] * (SECONDS[1] / SECONDS[0]) ** (step / 160)
            share = 1 - bisect_right(values, seconds) / max(1, len(values))
            if share < SHARES[0]:
                break
            points.append(f"{_x(seconds):.1f} {_y(share):.1f}")
        parts.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{WIDTH - 24}" y="{TOP + 18 + 16 * index}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
