"""What a batch costs by its width, learned from the rounds themselves.  Pure.

A cost is a ratio: seconds of a batch of n rows over seconds of a batch of one row.  The seconds of one row drift with
the context, the machine's load and its clock; ratios hardly do.  So a curve keeps a fast estimate of the former and a
slow one of the latter, and starts from a prior curve.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

WIDEST = 256  # rows that a curve answers for
FAST, SLOW = 0.2, 0.05  # shares of a new observation in the level and, in the long run, in a ratio
OUTLIER = math.log(3.0)  # an observation further off is another program's doing, unless it happens again
PATIENCE = 4  # outliers in a row that are believed
UNSEEN = 0.75  # of what is foreseen, a width that was never measured is hoped to cost
SURE = 0.15  # natural log by which a batch of one row has to be off to say something about others
REACH = 0.3  # natural log of the ratio of two widths that learn from each other
TRUSTED = 10.0  # observations of a width that count, at most
MOVED = 0.02  # natural log by which a width has to move before the curve is computed anew: that takes 1 ms ...
UNSURE = 0.5  # observations that a first one counts for which was slower than foreseen
FEW = 3  # ... unless the width was observed so seldom

Points = Mapping[int, float]

_ROWS = np.log(np.arange(1, WIDEST + 1))
_APART = np.abs(_ROWS[:, None] - _ROWS) / REACH
# what widths learn from each other; far from all that was seen, from the nearest
_NEAR = np.exp(-np.square(_APART) / 2) + 1e-9 * np.exp(-_APART)

# Rows -> cost, two AVX-512 cores, a model of 135M weights, by the type of the matrices.
CPU_PRIORS: Mapping[str, Points] = {
    "Q4_1": {1: 1.00, 2: 1.87, 3: 2.31, 4: 2.69, 6: 3.63, 8: 4.01, 12: 5.39, 16: 6.62, 24: 9.63, 32: 12.6, 64: 21.9},
    "Q4_0": {1: 1.00, 2: 1.51, 3: 1.93, 4: 1.95, 6: 2.96, 8: 2.77, 12: 3.64, 16: 4.06, 24: 6.10, 32: 7.54, 64: 11.4},
    "Q8_0": {1: 1.00, 2: 2.17, 3: 2.67, 4: 3.14, 6: 3.83, 8: 3.72, 12: 4.54, 16: 4.72, 24: 6.95, 32: 8.65, 64: 14.3},
    "BF16": {1: 1.00, 2: 1.31, 3: 1.58, 4: 1.81, 6: 2.05, 8: 2.46, 12: 3.15, 16: 3.66, 24: 4.87, 32: 6.23, 64: 9.45},
}
CPU_PRIOR: Points = {1: 1.0, 2: 1.6, 4: 2.2, 8: 3.2, 16: 4.6, 32: 8.4, 64: 14.0}  # other types: in between
GPU_PRIOR: Points = {1: 1.0, 8: 1.05, 64: 1.3, 256: 2.5}
CPU_DRAFTER_PRIOR: Points = {1: 1.0, 2: 1.5, 4: 2.4, 8: 3.6, 16: 6.0, 64: 20.0}  # measured up to 8 rows
GPU_DRAFTER_PRIOR: Points = GPU_PRIOR


class Curve:
    """Costs of batches of 1 to `WIDEST` rows.

    level   natural log of the seconds of one row; None before the first observation
    """

    def __init__(self, prior: Points) -> None:
        self._prior = np.interp(_ROWS, np.log(list(prior)), np.log(list(prior.values())))
        last, before = sorted(prior)[-1], sorted(prior)[-2]
        slope = math.log(prior[last] / prior[before]) / math.log(last / before)
        beyond = math.log(last) < _ROWS
        self._prior[beyond] = math.log(prior[last]) + slope * (_ROWS[beyond] - math.log(last))
        self.level: float | None = None
        self._seen: dict[int, tuple[float, float]] = {}  # rows -> (correction of the prior's log, observations)
        self._outliers = 0
        self._pulled: dict[int, float] = {}  # by how much each width has moved the level since one row was measured
        self._computed: dict[int, tuple[float, float]] = {}  # what the costs were computed from
        self._costs: list[float] | None = None

    @property
    def costs(self) -> Sequence[float]:
        """[WIDEST + 1] cost by rows; the first, of no rows, is 0."""
        if self._costs is None:
            self._computed = dict(self._seen)
            self._costs = [0.0, *np.exp(np.maximum(self._prior + self._corrections(), 0.0)).tolist()]
        return self._costs

    @property
    def hoped(self) -> Sequence[float]:
        """The same, if widths that were never measured cost less than is foreseen."""
        hoped = [UNSEEN * cost for cost in self.costs]
        for rows in [0, 1, *self._seen]:
            hoped[rows] = self.costs[rows]
        return hoped

    @property
    def seconds(self) -> float:
        """Of one row; 0 before the first observation."""
        return math.exp(self.level) if self.level is not None else 0.0

    @property
    def seen(self) -> list[int]:
        """Widths that were measured, ascending."""
        return sorted(self._seen)

    def learn(self, rows: int, seconds: float, fresh: bool = False) -> float:
        """A batch of so many rows took so long.

        A batch of more rows than one moves the level, too, for the machine may have become faster or slower.  When one
        row is measured again and contradicts that, it is taken back, and was these batches' ratio.
        fresh: of one row, right after batches of more: if it is far off it tells what these cost as a ratio, and not
        that the machine has become faster or slower.  Returns by how much one row's natural log moved against theirs.
        """
        if not 1 <= rows <= WIDEST or seconds <= 0:
            return 0.0
        expected = math.log(self.costs[rows])
        if self.level is None:
            self.level = math.log(seconds) - expected
        off = math.log(seconds) - self.level - expected
        correction, count = self._seen.get(rows, (expected - float(self._prior[rows - 1]), 0.0))
        if (count if rows > 1 else count >= FEW) and abs(off) > OUTLIER:
            self._outliers += 1
            if self._outliers > PATIENCE:  # again and again: the machine has changed, not the ratio
                self.level += off
            return 0.0
        self._outliers = 0
        if rows > 1 and count == 0 and off > 0:  # the first one may pay for cold memory; the next one will tell
            self._seen[rows] = (correction, UNSURE)
            return 0.0
        self._seen[rows] = (correction, count + 1)
        if rows == 1:
            return self._learn_level(off, early=count < FEW, fresh=fresh)
        self.level += FAST / 2 * off
        self._pulled[rows] = self._pulled.get(rows, 0.0) + FAST / 2 * off
        step = max(1 / (count + 1), SLOW) * off
        self._seen[rows] = (correction + step, count + 1)
        if count < FEW or abs(correction + step - self._computed[rows][0]) > MOVED:
            self._costs = None
        return 0.0

    def _learn_level(self, off: float, early: bool, fresh: bool) -> float:
        """One row's natural log was off by so much.  early: the first ones may pay for cold memory, so the fastest of
        them counts."""
        assert self.level is not None
        pulled, since = sum(self._pulled.values()), set(self._pulled)
        self._pulled = {}
        if early:
            self.level += min(off, 0.0)
            return self._anchor(min(off, 0.0)) if fresh and abs(off) > SURE else 0.0
        if fresh and abs(off) > SURE:
            self.level += FAST * off
            return self._anchor(FAST * off)
        back = min(max(off, -pulled), 0.0) if pulled > 0 else max(min(off, -pulled), 0.0)
        self.level += back + FAST * (off - back)
        return self._anchor(back, since) if back else 0.0

    def _anchor(self, moved: float, widths: Collection[int] | None = None) -> float:
        """The seconds of these widths, or of all others, stay as they were before one row's moved."""
        for width, (correction, count) in self._seen.items():
            if width > 1 and (widths is None or width in widths):
                self._seen[width] = (correction - moved, count)
        if any(abs(self._seen[w][0] - self._computed.get(w, (math.inf, 0))[0]) > MOVED for w in self._seen):
            self._costs = None
        return moved

    @property
    def knows_one_row(self) -> bool:
        """Whether batches of one row were measured often enough since this was made or restored."""
        return self._seen.get(1, (0.0, 0.0))[1] >= FEW

    def _corrections(self) -> Any:
        """[WIDEST] what is added to the logs of the prior: smooth through what was seen, and at a width that was seen
        often its own."""
        seen = {**self._seen, 1: (0.0, TRUSTED)}
        own = np.array(list(seen)) - 1
        found = np.array([correction for correction, _ in seen.values()])
        counts = np.array([min(count, TRUSTED) for _, count in seen.values()])
        near = _NEAR[:, own] * counts
        smooth = (near * found).sum(1) / near.sum(1)
        smooth[own] += (found - smooth[own]) * counts / (counts + 2.0)
        smooth[0] = 0.0
        return smooth

    # ---- what is kept between programs

    def as_dict(self) -> dict[str, Any]:
        return {"level": self.level, "seen": {str(w): list(v) for w, v in self._seen.items()}}

    def restore(self, kept: Any) -> None:
        """What `as_dict` gave, after a JSON file.  ValueError for anything else."""
        level = None if kept["level"] is None else _number(kept["level"])
        seen = kept["seen"]
        found = {int(w): (_number(v[0]), _number(v[1])) for w, v in seen.items()}
        if (
            not all(1 <= w <= WIDEST and abs(v[0]) < 10 and v[1] >= 0 for w, v in found.items())
            or abs(level or 0.0) > 20
        ):
            raise ValueError("costs out of range")
        # counts are cut, so that a machine that has changed is learned again; one row's seconds at once
        self._seen = {w: (correction, min(count, TRUSTED if w > 1 else 1)) for w, (correction, count) in found.items()}
        self.level, self._costs, self._pulled = level, None, {}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r}")
    return float(value)


def cpu_prior(file_type: str) -> Points:
    """The prior of a target by the type of most of its weights ("Q4_0")."""
    return CPU_PRIORS.get(file_type, CPU_PRIORS["BF16"] if file_type in ("F16", "F32") else CPU_PRIOR)
