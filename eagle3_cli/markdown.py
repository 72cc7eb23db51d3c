"""Markdown for a terminal, as it comes: cut into blocks, of which each is drawn once it is whole."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .console import visible

if TYPE_CHECKING:
    from rich.segment import Segment

WIDEST = 100  # columns; longer lines are hard to read
_FENCE = re.compile(r"\s*(?:(?:[-*+]|\d+[.)])\s+)?(`{3,}(?=[^`]*$)|~{3,})")  # perhaps behind a list's mark


class Blocks:
    """Cuts a text that comes in parts into blocks; joined, they are the text.

    A block ends with blank lines, outside of fences, as soon as the next line begins at the margin: an indented one
    still belongs to the list above.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[str]:
        """The blocks that are whole with this text."""
        self._held += text
        blocks = []
        while end := _first_end(self._held):
            blocks.append(self._held[:end])
            self._held = self._held[end:]
        return blocks

    def finish(self) -> str:
        """What is left, at the end of the text."""
        rest, self._held = self._held, ""
        return rest


def _first_end(text: str) -> int:
    """Where the first block of a text ends, behind its blank lines; 0 where it may go on."""
    fence, begun, blank, at = "", False, False, 0
    *whole, part = text.split("\n")
    for line in whole:
        if fence:
            fence = "" if _closes(line, fence) else fence
        elif not line.strip():
            blank = begun
        elif blank and not line[0].isspace():
            return at
        else:
            begun, blank = True, False
            opening = _FENCE.match(line)
            fence = opening[1] if opening else ""
        at += len(line) + 1
    return at if blank and part and not part[0].isspace() else 0


def _closes(line: str, fence: str) -> bool:
    mark = line.strip()
    return len(mark) >= len(fence) and mark == fence[0] * len(mark)


def code_blocks(text: str) -> list[str]:
    """What stands in the fenced blocks of a Markdown text, in order."""
    from markdown_it import MarkdownIt

    return [token.content for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"]


def drawn(block: str, columns: int) -> str:
    """A block's lines for a terminal of so many columns, with the colours that it has and NO_COLOR leaves.

    The only control sequences in it are the colours: neither the text nor what it says in entities can bring its own,
    tags are shown as they are written, and links with their address.
    """
    import io

    from markdown_it import MarkdownIt
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.segment import Segment, Segments

    document = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    # without "html" a tag is text; with it rich drops tags, and a model that speaks of <b> wants to be read
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    document.parsed = parser.parse(visible(block))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=max(1, min(columns, WIDEST)), legacy_windows=False)
    said = [Segment(visible(part.text), part.style) for part in console.render(document) if not part.control]
    lines = [_trimmed(line) for line in Segment.split_lines(said)]
    shown = [i for i, line in enumerate(lines) if line]  # rich has blank lines around lists and code
    lines = lines[shown[0] : shown[-1] + 1] if shown else []
    console.print(Segments([part for line in lines for part in (*line, Segment.line())]), end="", soft_wrap=True)
    return screen.getvalue()


def _trimmed(line: list[Segment]) -> list[Segment]:
    """The line without the spaces that fill it up: what is copied from the screen should not have them.  Those with a
    background stay."""
    kept = list(line)
    while kept and not (kept[-1].style and kept[-1].style.bgcolor):
        last = kept.pop()
        if text := last.text.rstrip():
            return [*kept, last._replace(text=text)]
    return kept
