"""How many threads the drafter's passes run on, learned from their seconds.  Pure.

The drafter is one layer: what more threads save can be less than what waking them costs.  Now and then a round is
drafted with another number; its seconds against what they usually are decide.
"""

from __future__ import annotations

import math
import statistics

FIRST = 8  # drafted rounds until another number is tried; after all were tried often enough, the wait doubles
LONGEST = 512
TRIALS = 3  # of a number before it is judged, by the median
KEPT = 5  # of its newest trials
FASTER = math.log(0.95)  # a number has to be so much faster to be taken


class Threads:
    """choices   numbers of threads, ascending: 1, and `most` halved again and again; 0 alone: nothing to choose
    best      the one in use
    """

    def __init__(self, most: int) -> None:
        self.choices = tuple(sorted({most >> i for i in range(most.bit_length())} or {0}))
        self.best = most
        self._trials: dict[int, list[float]] = {}
        self._wait, self._left, self._tried = FIRST, FIRST, 0

    def choose(self) -> int:
        """For the next drafted round."""
        others = [n for n in self.choices if n != self.best]
        self._left -= 1
        if not others or self._left > 0:
            return self.best
        chosen = others[self._tried % len(others)]
        self._tried += 1
        if self._tried % (TRIALS * len(others)) == 0:
            self._wait = min(2 * self._wait, LONGEST)
        self._left = self._wait
        return chosen

    def learn(self, threads: int, off: float) -> float | None:
        """A round with another number took exp(off) times what rounds with the best one take.  Where that makes it the
        best, the natural log of what it takes by the median; else None."""
        trials = self._trials.setdefault(threads, [])
        trials.append(off)
        del trials[:-KEPT]
        median = statistics.median(trials)
        if len(trials) < TRIALS or median > FASTER:
            return None
        self.best, self._trials, self._tried = threads, {}, 0
        return median

    def as_dict(self) -> dict[str, int]:
        return {"best": self.best}

    def restore(self, kept: object) -> None:
        """What `as_dict` gave.  ValueError or TypeError for anything else."""
        if not isinstance(kept, dict) or kept.get("best") not in self.choices:
            raise ValueError(f"expected one of {self.choices} threads, got {kept!r}")
        self.best = int(kept["best"])
