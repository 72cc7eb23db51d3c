"""Boxes, words and arrows of an SVG drawing, as text.  Lengths are in pixels, points are (x, y), y grows downwards.

The same input gives the same bytes on every machine.  The white background is part of a drawing, so that it reads the
same on a dark page; what differs in colour differs in its outline or its words, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, GREY, LINE = "#1f2933", "#52606d", "#9aa5b1"
TARGET, DRAFTER, KEPT = "#0b62a4", "#b8481a", "#2e7d32"
PALE = {TARGET: "#e3eef8", DRAFTER: "#fbebe2", KEPT: "#e4f1e5", LINE: "#f4f5f7", INK: "#ffffff", GREY: "#f4f5f7"}
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"

Point = tuple[float, float]


def text(at: Point, words: str, size: float = 13, colour: str = INK, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{at[0]:g}" y="{at[1]:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def box(at: Point, size: Point, colour: str, dashed: bool = False, thick: bool = False) -> str:
    """at: the upper left corner."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{at[0]:g}" y="{at[1]:g}" width="{size[0]:g}" height="{size[1]:g}" rx="5" fill="{PALE[colour]}"'
        f' stroke="{colour}" stroke-width="{2.5 if thick else 1.2:g}"{dashes}/>'
    )


def label(at: Point, size: Point, words: str, colour: str, dashed: bool = False, thick: bool = False) -> str:
    """A box with one line, or lines separated by a line break, in its middle."""
    lines = words.split("\n")
    middle, first = at[0] + size[0] / 2, at[1] + size[1] / 2 + 4.5 - 8 * (len(lines) - 1)
    shown = [text((middle, first + 16 * i), line, colour=GREY if dashed else INK) for i, line in enumerate(lines)]
    return box(at, size, colour, dashed, thick) + "".join(shown)


def arrow(points: Sequence[Point], colour: str = GREY, dashed: bool = False) -> str:
    """A line through the points with a head at the last one, which is drawn, not referred to."""
    (x, y), (before_x, before_y) = points[-1], points[-2]
    angle = math.degrees(math.atan2(y - before_y, x - before_x))
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    joined = " ".join(f"{px:g},{py:g}" for px, py in points)
    return (
        f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.4"{dashes}/>'
        f'<path d="M0 0 L-8 -3.6 L-8 3.6 Z" fill="{colour}" transform="translate({x:g} {y:g}) rotate({angle:g})"/>'
    )


def drawing(size: tuple[int, int], title: str, parts: Sequence[str]) -> str:
    """A whole file."""
    (width, height), body = size, "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" font-family="{FONT}">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n{body}\n</svg>\n'
    )
