"""What fixed settings would have done with the text that was decoded, estimated from the drafted rounds.  Pure.

Of every node that the walk reached, it is known which of the drafter's children came true: the best, the next best, or
none.  A fixed chain follows best children, so its acceptance length is a sum of products of these rates.  A fixed tree
is taken as the best one that looks at ranks and depths alone; a dynamic one looks at probabilities too and accepts
more, so for trees the estimate is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..settings import TreeShape
from .tree import ROOT, Candidates

RANKS = 4  # best children of a node that are told apart
ENOUGH = 20.0  # tokens that rounds at a depth have to stand for
SHAPES = tuple(TreeShape(n, 1, n) for n in (1, 2, 3, 4, 5, 6)) + tuple(
    TreeShape(*shape) for shape in ((2, 2, 3), (3, 3, 5), (4, 4, 8), (5, 6, 16), (6, 8, 32), (8, 10, 60))
)  # what is tried in hindsight


class Hindsight:
    """Rates by depth and rank.  tokens, cost: of all rounds, cost in passes of the target over one row."""

    def __init__(self) -> None:
        self.tokens = self.cost = 0.0
        self._reached: list[float] = []  # [depth - 1] weight of walks that stood there with drafted children
        self._hits: list[list[float]] = []  # [depth - 1][rank]
        self._since = 0.0  # tokens since the last drafted round: a drafted one after a pause stands for all of them

    def learn(self, tokens: int, cost: float) -> None:
        """A round emitted so many tokens at such a cost."""
        self.tokens += tokens
        self.cost += cost
        self._since += tokens

    def learn_ranks(self, tokens: Sequence[int], pool: Candidates) -> None:
        """The drafter was asked in that round, and these are its candidates."""
        weight, self._since = self._since / len(tokens), 0.0
        node = ROOT
        for depth, token in enumerate(tokens):
            ranked = self._ranked(pool, node)
            if not ranked:
                return
            if len(self._reached) == depth:
                self._reached.append(0.0)
                self._hits.append([0.0] * RANKS)
            self._reached[depth] += weight
            rank = ranked.index(token) if token in ranked else None
            if rank is not None:
                self._hits[depth][rank] += weight
            found = pool.child(node, token)
            if found is None:
                return
            node = found

    @staticmethod
    def _ranked(pool: Candidates, parent: int) -> list[int]:
        """Tokens of the drafter's best children of a node."""
        found = [
            (-logp, pool.tokens[i])
            for i, (mother, logp) in enumerate(zip(pool.parents, pool.drafted, strict=True))
            if mother == parent and logp is not None
        ]
        return [token for _, token in sorted(found)[:RANKS]]

    def acceptance_length(self, shape: TreeShape) -> float | None:
        """Emitted tokens per round of a fixed shape; None where too few rounds were drafted so deep."""
        values, level = [], [1.0]
        for depth in range(shape.depth):
            if depth >= len(self._reached) or self._reached[depth] < ENOUGH:
                return None
            rates = [hits / self._reached[depth] for hits in self._hits[depth][: shape.width]]
            level = sorted((v * rate for v in level for rate in rates), reverse=True)[: shape.width]
            values += level
        return 1.0 + sum(sorted(values, reverse=True)[: shape.nodes])

    def best(self, verify_cost: Callable[[int], float], draft_cost: Callable[[int], float]) -> tuple[str, float]:
        """(name, tokens per cost) of the best fixed setting, plain decoding among them."""
        name, rate = "plain", 1.0
        for shape in SHAPES:
            length = self.acceptance_length(shape)
            if length is not None:
                passes = draft_cost(1) + (shape.depth - 1) * draft_cost(shape.width)
                found = length / (verify_cost(shape.nodes) + passes)
                if found > rate:
                    name, rate = shape.name, found
        return name, rate
