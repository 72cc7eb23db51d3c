"""A reasoning model's thinking, told from its answer.

Such a model begins with <think>, or its chat template has written that already, and goes on with its answer behind
</think>.  Only the beginning counts: an answer that speaks of the tag further on stays whole.  A tag that the model's
vocabulary has as a control token prints nothing, so it cannot be seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

OPEN, CLOSE = "<think>", "</think>"
TAIL = 16  # tokens of a prompt's end that can hold the opening tag and white space behind it

_Place = Enum("_Place", ["START", "INSIDE", "BEHIND", "ANSWER"])


def opened_by(prompt: Sequence[int], piece: Callable[[int], bytes]) -> bool:
    """Whether a prompt ends with the opening tag, as some chat templates leave it.  piece: the bytes of a token."""
    tail = b"".join(map(piece, prompt[-TAIL:]))
    return tail.decode("utf-8", "replace").rstrip().endswith(OPEN)


class Thinking:
    """Splits a text that comes in parts.  White space around the thinking and the tags themselves are dropped; what may
    still become a tag is held back."""

    def __init__(self, opened: bool = False) -> None:
        """opened: the prompt has the opening tag already, so the text begins inside."""
        self._opened = opened
        self._place = _Place.START
        self._begun = False  # some thinking has been handed out
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What became certain with this text: of the thinking, of the answer."""
        self._held += text
        return self._take(last=False)

    def finish(self) -> tuple[str, str]:
        """What is still held, at the end of the text."""
        return self._take(last=True)

    def _take(self, last: bool) -> tuple[str, str]:
        thinking = ""
        if self._place is _Place.START:
            self._begin(last)
        if self._place is _Place.INSIDE:
            thinking = self._think(last)
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is not _Place.ANSWER:
            return thinking, ""
        answer, self._held = self._held, ""
        return thinking, answer

    def _begin(self, last: bool) -> None:
        """Leave START as soon as it is certain whether the text begins with the tag."""
        body = self._held.lstrip()
        if body.startswith(OPEN):
            self._held, self._place = body[len(OPEN) :], _Place.INSIDE
        elif last or not OPEN.startswith(body):
            self._place = _Place.INSIDE if self._opened else _Place.ANSWER

    def _think(self, last: bool) -> str:
        """Thinking that can be handed out; behind the closing tag the place is BEHIND."""
        if not self._begun:
            self._held = self._held.lstrip()
        at = self._held.find(CLOSE)
        if at >= 0:
            said, self._held, self._place = self._held[:at].rstrip(), self._held[at + len(CLOSE) :], _Place.BEHIND
            return said
        end = len(self._held) if last else len(self._held) - _begun_tag(self._held)
        said = self._held[:end].rstrip()
        self._held = "" if last else self._held[len(said) :]
        self._begun = self._begun or bool(said)
        return said


def _begun_tag(text: str) -> int:
    """Length of the longest end of a text with which the closing tag begins."""
    return next((n for n in range(min(len(CLOSE) - 1, len(text)), 0, -1) if text.endswith(CLOSE[:n])), 0)
