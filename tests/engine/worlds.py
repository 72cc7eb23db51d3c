"""Worlds for tests of the budget: a text that is easy and hard by turns, a drafter that is right as often as it says,
and machines on which batches cost what they cost.  Seconds are counted, not measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle3_cli.engine.budget import Budget, Machine
from eagle3_cli.engine.calibration import temperature_class
from eagle3_cli.engine.costs import CPU_DRAFTER_PRIOR, CPU_PRIOR, Points
from eagle3_cli.engine.tree import ROOT, Candidates, FixedShape, Policy, cut, grow
from eagle3_cli.engine.types import NO_TREE, DraftTree
from eagle3_cli.settings import TreeShape

MOST = TreeShape(6, 6, 32)


@dataclass(frozen=True)
class World:
    """verify, draft   seconds of a pass over so many rows
    best   probability of the drafter's best child where the text is easy and where it is hard
    stay   probability that the text stays as it is from one token to the next
    honest how often a child of probability p is right, over p
    noise  standard deviation of a pass's seconds, as a share
    after  what the first passes over one row after a tree take longer, as shares
    """

    verify: Callable[[int], float]
    draft: Callable[[int], float]
    best: tuple[float, float] = (0.9, 0.4)
    stay: float = 0.9
    honest: float = 0.9
    noise: float = 0.05
    after: tuple[float, ...] = ()


class Text:
    """Decoding of one text.  Right tokens are 0; a drafter's child number i is right or not by its probability."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.easy = True
        self.since_tree = len(world.after)
        self.seconds, self.tokens, self.rounds, self.drafts = 0.0, 0, 0, 0

    def _cost(self, seconds: float) -> float:
        cost = seconds * max(0.2, self.rng.gauss(1.0, self.world.noise))
        self.seconds += cost
        return cost

    def draft(self, policy: Policy) -> DraftTree:
        """Grows a tree; of a right node's children at most one is right (token 0)."""
        self.drafts += 1
        coming: list[bool] = []
        easy = self.easy
        for _ in range(MOST.depth + 1):
            coming.append(easy)
            easy = easy if self.rng.random() < self.world.stay else not easy
        right: dict[int, bool] = {ROOT: True}

        def expand(nodes: Sequence[int], pool: Candidates) -> list[list[tuple[int, float]]]:
            policy.drafted(len(nodes), self._cost(self.world.draft(len(nodes))))
            found = []
            for node in nodes:
                depth = 0 if node == ROOT else pool.depths[node]
                found.append(self._children(coming[depth], right.get(node, False), len(pool)))
            # which of them are right is known by their token
            start = len(pool)
            for children in found:
                for token, _ in children:
                    right[start] = token == 0
                    start += 1
            return found

        return grow(expand, policy)

    def _children(self, easy: bool, right: bool, salt: int) -> list[tuple[int, float]]:
        import math

        p = min(max(self.rng.gauss(self.world.best[0 if easy else 1], 0.1), 0.05), 0.99)
        shares = [p, (1 - p) * 0.5, (1 - p) * 0.25]
        at, hit = self.rng.random(), None
        for i, share in enumerate(shares):
            at -= share * self.world.honest
            if at < 0:
                hit = i
                break
        return [(0 if right and hit == i else 1 + i, math.log(share)) for i, share in enumerate(shares)]

    def verify(self, tree: DraftTree, pool: Candidates | None = None) -> tuple[list[int], float]:
        """(Tokens emitted: 0 where a candidate was right, kept or not, else 9; seconds)."""
        after = self.world.after[self.since_tree : self.since_tree + 1] if not tree else ()
        self.since_tree = 0 if tree else self.since_tree + 1
        cost = self._cost(self.world.verify(len(tree) + 1) * (1.0 + sum(after)))
        tokens, node = [], ROOT
        while True:
            following = [i for i, parent in enumerate(tree.parents) if parent == node and tree.tokens[i] == 0]
            if not following:
                break
            tokens.append(0)
            node = following[0]
        place = ROOT
        for _ in tokens:
            place = pool.child(place, 0) if pool else ROOT
        tokens.append(9 if pool is None or pool.child(place, 0) is None else 0)
        for _ in tokens:
            self.easy = self.easy if self.rng.random() < self.world.stay else not self.easy
        self.tokens += len(tokens)
        self.rounds += 1
        return tokens, cost

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def decode_fixed(world: World, shape: TreeShape | None, rounds: int = 600, seed: int = 0) -> Text:
    """With the same tree in every round; None: plainly."""
    text = Text(world, seed)
    for _ in range(rounds):
        text.verify(NO_TREE if shape is None else text.draft(FixedShape(shape)))
    return text


def decode(world: World, budget: Budget | None = None, rounds: int = 600, seed: int = 0) -> Text:
    """With a budget that chooses."""
    budget = budget or Budget(Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR))
    budget.begin(temperature_class(0.0))
    text = Text(world, seed)
    for _ in range(rounds):
        policy = budget.round(MOST)
        tree = text.draft(policy) if policy.asks else cut(policy.pool, policy.size())
        tokens, seconds = text.verify(tree, policy.pool)
        budget.learn(policy, tokens, len(tree), seconds, 0.0)
    return text


def curve(points: Points) -> Callable[[int], float]:
    """Seconds of a pass by rows: 10 ms times the cost, straight between two points."""
    import numpy as np

    return lambda rows: 0.01 * float(np.interp(rows, list(points), list(points.values())))
