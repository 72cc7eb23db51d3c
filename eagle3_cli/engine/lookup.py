"""Prompt lookup: where the end of the text occurred before, and how it went on there.  Pure; no model in sight.

Source: prompt lookup decoding (Saxena 2023), with matches of any length instead of one n and several continuations.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import _native

ALONE, BEST, OTHER = range(3)  # a match among those of the same end
CHECKED = 64  # most recent occurrences of the last `shortest` tokens that `find` looks at, at most 256


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the text's end.

    length   how many of the last tokens agree, at most `Lookup.longest`
    tokens   what followed there; as many as were asked for
    rank     ALONE where the text always went on with the same token, else BEST or OTHER
    """

    length: int
    tokens: Sequence[int]
    rank: int = ALONE


class Lookup:
    """One text, to find where its end occurred before.

    shortest, longest   least and most tokens that a match compares; 1 <= shortest <= longest
    """

    def __init__(self, shortest: int = 2, longest: int = 16) -> None:
        self.shortest, self.longest = shortest, longest
        self._text = array("i")

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text."""
        self._text.extend(tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; all of them if there are no more."""
        del self._text[length:]

    def text(self, root: int) -> array[int]:
        """The text and a root behind it, a copy."""
        return self._text + array("i", [root])

    def repeats(self, root: int, length: float) -> bool:
        """Whether the last `length` tokens of text + root occurred before.  Takes less time than `find`; never for more
        than the longest match."""
        if length > self.longest:
            return False
        self._text.append(root)
        found = _native.matches(self._text, int(length), int(length), 1)
        self._text.pop()
        return bool(found)

    def find(self, root: int, most: int, count: int = 2) -> list[Match]:
        """Up to `count` matches of the end of text + root, each continued by `most` tokens.  The root is not kept.

        No two continuations begin with the same token.  The longer match is better, then the more recent one.  A match
        may overlap the end that it equals.  A continuation that reaches the root goes on with what it proposes itself,
        as if that were in the text: "a b c a b" is followed by "c a b c a b ...", period 3.
        """
        if most < 1:
            return []
        self._text.append(root)
        found = _native.matches(self._text, self.shortest, self.longest, CHECKED)
        first = ALONE if len(found) == 1 else BEST
        best = sorted(found, reverse=True)[: max(count, 0)]
        matches = [
            Match(length, self._continue(end, most), first if i == 0 else OTHER) for i, (length, end) in enumerate(best)
        ]
        self._text.pop()
        return matches

    def _continue(self, end: int, most: int) -> list[int]:
        """What follows an n-gram's end: the rest of the text, and then itself."""
        tokens = self._text[end : end + most].tolist()
        period = len(tokens)
        while len(tokens) < most:
            tokens.append(tokens[-period])
        return tokens
