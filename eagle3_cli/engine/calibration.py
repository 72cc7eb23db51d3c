"""From what a candidate looks like to how often the target takes it, learned from the rounds.  Pure.

A drafter's probability is binned over its logit, apart for the first levels of the tree; what an n-gram match proposes
over the number of tokens before it that agree, apart for matches that others contradict.  Each bin counts how often the
candidate was the token that came, given that the walk stood at its parent.  Counts are bounded, so old text fades.
Between the middles of two bins of a drafter a rate is interpolated, and an outcome counts for both.

Texts differ in how much they repeat themselves, so within an answer the logits of all n-gram rates shift together.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from .lookup import ALONE, BEST, OTHER, Match

DEPTHS = 3  # classes of depth: 1, 2, 3 and deeper
LOWEST, MIDDLES = -5.0, 11  # logit at the middle of the first bin; one bin per unit
LENGTHS = (2, 3, 4, 5, 6, 8, 10, 13, 16, 20)  # fewest agreeing tokens of the classes
BY_LENGTH = (0.5, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 0.95)  # priors of a match that is alone
BY_RANK = {ALONE: 1.0, BEST: 0.6, OTHER: 0.3}  # shares of them
SHIFT, MOST_SHIFT = 0.3, 2.0  # of an outcome that a text shifts its logits by, and the most in all
FIRST_SHIFT = -0.3  # rates are learned where texts repeat themselves; a new one has yet to show that it does
FAINT = 0.05  # paths of an n-gram match that are less probable are not worth weighing
STRENGTH = 6.0  # observations that a bin's prior is worth
MEMORY = 200.0  # observations that a bin remembers
ALMOST = 1e-6  # probabilities stay so far from 0 and 1


class Bins:
    """Rates by class.  priors: before anything was seen."""

    def __init__(self, priors: Sequence[float]) -> None:
        self.rates = list(priors)
        self._hits = [rate * STRENGTH for rate in priors]
        self._counts = [STRENGTH] * len(priors)

    def learn(self, index: int, hit: bool, weight: float = 1.0) -> None:
        hits, count = self._hits[index] + weight * hit, self._counts[index] + weight
        if count > MEMORY:
            hits, count = hits * MEMORY / count, MEMORY
        self._hits[index], self._counts[index] = hits, count
        self.rates[index] = hits / count

    def as_list(self) -> list[list[float]]:
        return [[round(h, 4), round(n, 4)] for h, n in zip(self._hits, self._counts, strict=True)]

    def restore(self, kept: Any) -> None:
        """What `as_list` gave.  ValueError or TypeError for anything else."""
        found = [(float(hits), float(count)) for hits, count in kept]
        if len(found) != len(self.rates):
            raise ValueError(f"expected {len(self.rates)} bins, got {len(found)}")
        if not all(0 <= hits <= count and STRENGTH / 2 <= count <= 2 * MEMORY for hits, count in found):
            raise ValueError("counts out of range")
        self._hits, self._counts = [hits for hits, _ in found], [count for _, count in found]
        self.rates = [hits / count for hits, count in found]


class Calibration:
    """Acceptance given the parent: of drafted tokens, of looked-up ones, and of those that both propose."""

    def __init__(self) -> None:
        middles = [_probability(LOWEST + i) for i in range(MIDDLES)]
        # a drafter is a little too sure of itself; what an n-gram match confirms is missed half as often
        self._drafted = [Bins([0.9 * p for p in middles]) for _ in range(DEPTHS)]
        self._both = Bins([1 - 0.5 * (1 - 0.9 * p) for p in middles])
        self._looked_up = [Bins([share * p for p in BY_LENGTH]) for share in BY_RANK.values()]
        self._shift = FIRST_SHIFT  # of all n-gram logits ...
        self._odds = math.exp(-FIRST_SHIFT)  # ... and what it multiplies the odds against them by

    def begin(self) -> bool:
        """Another text.  Does that change what matches are worth?"""
        shifted, self._shift = self._shift != FIRST_SHIFT, FIRST_SHIFT
        self._odds = math.exp(-FIRST_SHIFT)
        return shifted

    def drafted(self, depth: int, logp: float) -> float:
        """Of a child at this depth whose log probability, given the path, is logp."""
        return _between(self._drafted[min(depth, DEPTHS) - 1].rates, logp)

    def both(self, logp: float) -> float:
        """Of a child that an n-gram match proposes, too."""
        return _between(self._both.rates, logp)

    def looked_up(self, agreeing: int, rank: int = ALONE) -> float:
        """Of a child that only an n-gram match proposes, which agrees with so many tokens before it."""
        rate = self._looked_up[rank].rates[class_of(agreeing)]
        return rate / (rate + (1.0 - rate) * self._odds) if rate else 0.0

    def horizon(self, match: Match) -> int:
        """How many tokens of a match are worth weighing."""
        value, rank = 1.0, match.rank
        for tokens in range(len(match.tokens)):
            value *= self.looked_up(match.length + tokens, rank)
            if value < FAINT:
                return tokens
            rank = ALONE
        return len(match.tokens)

    def learn(self, depth: int, logp: float | None, agreeing: int, hit: bool, rank: int = ALONE) -> None:
        """Whether a candidate was the token that came.  logp: None where the drafter did not propose it; agreeing: 0
        where no n-gram match did."""
        if logp is None:
            shift = self._shift + SHIFT * (hit - self.looked_up(agreeing, rank))
            self._shift = min(max(shift, -MOST_SHIFT), MOST_SHIFT)
            self._odds = math.exp(-self._shift)
            self._looked_up[rank].learn(class_of(agreeing), hit)
            return
        bins = self._both if agreeing else self._drafted[min(depth, DEPTHS) - 1]
        low, share = _place(logp)
        bins.learn(low, hit, 1.0 - share)
        bins.learn(low + 1, hit, share)

    def as_dict(self) -> dict[str, Any]:
        drafted, looked_up = ([bins.as_list() for bins in part] for part in (self._drafted, self._looked_up))
        return {"drafted": drafted, "both": self._both.as_list(), "looked_up": looked_up}

    def restore(self, kept: Any) -> None:
        """What `as_dict` gave.  KeyError, TypeError or ValueError for anything else."""
        for part, values in ((self._drafted, kept["drafted"]), (self._looked_up, kept["looked_up"])):
            for bins, value in zip(part, values, strict=True):
                bins.restore(value)
        self._both.restore(kept["both"])


def _probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def logit(logp: float) -> float:
    """Of a probability, given its natural log; finite."""
    p = min(max(math.exp(min(logp, 0.0)), ALMOST), 1 - ALMOST)
    return math.log(p / (1 - p))


def _place(logp: float) -> tuple[int, float]:
    """The bin below a log probability, and how far it is on the way to the next one."""
    place = min(max(logit(logp) - LOWEST, 0.0), MIDDLES - 1.0)
    low = min(int(place), MIDDLES - 2)
    return low, place - low


def _between(rates: Sequence[float], logp: float) -> float:
    low, share = _place(logp)
    return rates[low] + share * (rates[low + 1] - rates[low])


def class_of(agreeing: int) -> int:
    """Which of `LENGTHS` a match belongs to that agrees with so many tokens."""
    return max(bisect_right(LENGTHS, agreeing) - 1, 0)


def temperature_class(temperature: float) -> str:
    """Which calibration an answer uses: acceptance depends on how the target is sampled."""
    if temperature <= 0:
        return "0"
    return min(("0.4", "0.8", "1.2"), key=lambda name: abs(math.log(temperature / float(name))))
