"""What an answer of a chat looks like: as it comes, with its proposed tokens marked, or with its Markdown drawn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from ..console import Console
from ..errors import OptionError
from ..markdown import Blocks, drawn
from .build import flag, typed

# What proposed a token: the drafter, an n-gram match, both.  SGR codes and the words for them.
IN_COLOUR = (("32", "green"), ("36", "cyan"), ("32;4", "green and underlined"))
WITHOUT = (("4", "underlined"), ("1", "bold"), ("1;4", "bold and underlined"))  # NO_COLOR leaves these


class Display:
    """Shows one answer after the other, as it comes.  thinking: and what a reasoning model thinks before it."""

    legend = ""  # what somebody who looks has to know

    def __init__(self, console: Console, thinking: bool = True) -> None:
        self.console, self.thinking = console, thinking

    def source(self, source: int) -> None:
        """What had proposed the text that comes next, as in `Piece`."""

    def text(self, text: str) -> None:
        """Show a part of the answer."""
        self.console.text(text)

    def aside(self, text: str) -> None:
        """Show a part of the thinking."""
        if self.thinking:
            self.console.aside(text)

    def end(self) -> None:
        """The answer is over, whole or not."""
        self.console.end_text()


class Marked(Display):
    """The tokens that something had proposed in another style.

    Text that comes later than its token, as that of a character of several tokens, has the style of the last one.
    """

    def __init__(self, console: Console, thinking: bool = True) -> None:
        from ..engine.types import DRAFTED, LOOKED_UP

        super().__init__(console, thinking)
        styles = WITHOUT if os.environ.get("NO_COLOR") else IN_COLOUR
        sources = (DRAFTED, LOOKED_UP, DRAFTED | LOOKED_UP)
        self._codes = {source: code for source, (code, _) in zip(sources, styles, strict=True)}
        self._code = ""
        drafter, match, both = (words for _, words in styles)
        self.legend = f"{drafter}: proposed by the drafter; {match}: by a match in the text; {both}: by both"

    def source(self, source: int) -> None:
        self._code = self._codes.get(source, "")

    def text(self, text: str) -> None:
        self.console.text(text, self._code)


class Drawn(Display):
    """Markdown, block by block: each is drawn when it is whole, so nothing that is on the screen ever changes."""

    def __init__(self, console: Console, thinking: bool = True) -> None:
        super().__init__(console, thinking)
        self._blocks, self._begun = Blocks(), False

    def text(self, text: str) -> None:
        for block in self._blocks.push(text):
            self._draw(block)

    def end(self) -> None:
        self._draw(self._blocks.finish())
        self._begun = False
        super().end()

    def _draw(self, block: str) -> None:
        if not block.strip():
            return
        columns = shutil.get_terminal_size().columns
        self.console.drawn(("\n" if self._begun else "") + drawn(block, columns))
        self._begun = True


KINDS: dict[str, type[Display]] = {"markdown": Drawn, "show_drafts": Marked}


def display(console: Console, flags: Mapping[str, Any]) -> Display:
    """What the flags ask for.  OptionError where both are asked for, or one that has no effect here."""
    wanted = [name for name in KINDS if flags[name]]
    wanted = [name for name in wanted if typed(name)] or wanted
    if len(wanted) > 1:
        raise OptionError(f"{flag(wanted[1])}: cannot be used with {flag(wanted[0])}.", "Leave one of them out.")
    if wanted and not console.shows_styles:
        if typed(wanted[0]):
            raise OptionError(
                f"{flag(wanted[0])}: has no effect where stdout is no terminal, or a dumb one.", "Leave it out."
            )
        wanted = []
    kind = KINDS[wanted[0]] if wanted else Display
    return kind(console, thinking=not flags["hide_thinking"])
