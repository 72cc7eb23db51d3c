"""Prompt lookup: where the end of the text occurred before, and how it went on there.  Pure; no model in sight.

Source: prompt lookup decoding (Saxena 2023), with matches of any length instead of one n and several continuations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALONE, BEST, OTHER = range(3)  # a match among those of the same end
CHECKED = 64  # most recent occurrences of the last `shortest` tokens that `find` looks at


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the text's end.

    length   how many of the last tokens agree, at most the index's `longest`
    tokens   what followed there; as many as were asked for
    rank     ALONE where the text always went on with the same token, else BEST or OTHER
    """

    length: int
    tokens: Sequence[int]
    rank: int = ALONE


class Lookup:
    """All n-grams of one text, to find where its end occurred before.

    shortest, longest   least and most tokens that a match compares; 1 <= shortest <= longest

    An n-gram has `shortest` tokens and is known by its end e: it is text[e - shortest : e].  The ends of equal n-grams
    form a chain from the newest to the oldest, 0 after the last.
    """

    def __init__(self, shortest: int = 2, longest: int = 16) -> None:
        self.shortest, self.longest = shortest, longest
        self._text: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> its newest end
        self._before: list[int] = [0]  # end -> the one before it in its chain

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        text, newest, before, n = self._text, self._newest, self._before, self.shortest
        start = len(text) + 1
        text.extend(tokens)
        for end in range(start, len(text) + 1):
            if end < n:
                before.append(0)
                continue
            ngram = tuple(text[end - n : end])
            before.append(newest.get(ngram, 0))
            newest[ngram] = end

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; all of them if there are no more."""
        text, newest, before, n = self._text, self._newest, self._before, self.shortest
        for end in range(len(text), max(length, n - 1), -1):
            ngram = tuple(text[end - n : end])
            if before[end]:
                newest[ngram] = before[end]
            else:
                del newest[ngram]
        del text[length:], before[length + 1 :]

    def find(self, root: int, most: int, count: int = 2) -> list[Match]:
        """Up to `count` matches of the end of text + root, each continued by `most` tokens.  The root is not kept.

        No two continuations begin with the same token.  The longer match is better, then the more recent one.  A match
        may overlap the end that it equals.  A continuation that reaches the root goes on with what it proposes itself,
        as if that were in the text: "a b c a b" is followed by "c a b c a b ...", period 3.
        """
        text, before = self._text, self._before
        size = len(text)
        if most < 1:
            return []
        end = self._newest.get((*text[max(size + 1 - self.shortest, 0) :], root), 0)
        if not end:
            return []
        last = [*text[max(size + 1 - self.longest, 0) :], root][::-1]
        best: dict[int, tuple[int, int]] = {}  # first token that follows -> length and end of its best match
        for _ in range(CHECKED):
            if not end:
                break
            follower = text[end] if end < size else root
            known = best[follower][0] if follower in best else 0
            if known < self.longest:
                length, limit = self.shortest, min(end, len(last))
                while length < limit and text[end - 1 - length] == last[length]:
                    length += 1
                if length > known:
                    best[follower] = length, end
            end = before[end]
        matches = sorted(best.values(), reverse=True)[: max(count, 0)]
        first = ALONE if len(best) == 1 else BEST
        return [
            Match(length, self._continue(end, root, most), first if i == 0 else OTHER)
            for i, (length, end) in enumerate(matches)
        ]

    def _continue(self, end: int, root: int, most: int) -> list[int]:
        """What follows an n-gram's end: text, root, and then itself."""
        tokens = self._text[end : end + most]
        if len(tokens) < most:
            tokens.append(root)
            period = len(tokens)
            while len(tokens) < most:
                tokens.append(tokens[-period])
        return tokens
