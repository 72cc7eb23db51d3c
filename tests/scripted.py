"""Drafters that follow a script, for tests of the loop: they know nothing of features and need no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from reference import depth_first

from eagle3_cli.engine.tree import ROOT, Policy
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.settings import TreeShape

Propose = Callable[[list[int], TreeShape], DraftTree]
"""(all tokens so far, the root last; the most that fits) -> a tree."""


class ScriptedDrafter:
    """A `Drafter` that keeps the committed tokens and asks `propose` for trees."""

    def __init__(self, propose: Propose) -> None:
        self.propose = propose
        self.committed: list[int] = []
        self.drafts = 0
        self.seconds = 0.0

    @property
    def ready(self) -> bool:
        return bool(self.committed)

    def extend(self, tokens: Sequence[int], features: Any) -> None:
        self.committed.extend(tokens)

    def draft(self, root: int, policy: Policy) -> DraftTree:
        self.drafts += 1
        return self.propose([*self.committed, root], policy.limit)

    def truncate(self, past: int) -> int:
        del self.committed[past:]
        return past


def tree_of(nodes: list[tuple[int, int, int]], ranks: Sequence[int] = ()) -> DraftTree:
    """A tree of (token, parent, depth), parents first; the later listed the less probable, or by the given ranks."""
    tokens, parents, depths = zip(*nodes, strict=True) if nodes else ((), (), ())
    return depth_first(DraftTree(tokens, parents, depths, [-float(r) for r in ranks or range(len(nodes))]))


def perfect(answer: Sequence[int]) -> Propose:
    """Knows what the target will say (prompt and answer), and hides it among wrong siblings where the budget allows."""

    def propose(so_far: list[int], shape: TreeShape) -> DraftTree:
        nodes: list[tuple[int, int, int]] = []
        coming = answer[len(so_far) : len(so_far) + min(shape.depth, shape.nodes)]
        wrong = min(shape.width - 1, (shape.nodes - len(coming)) // max(1, len(coming)))
        parent = ROOT
        for depth, token in enumerate(coming, 1):
            nodes += [((token + 1 + i) % 256, parent, depth) for i in range(wrong)]
            nodes.append((token, parent, depth))
            parent = len(nodes) - 1
        return tree_of(nodes)

    return propose


def constant(token: int) -> Propose:
    """A chain of one token."""

    def propose(so_far: list[int], shape: TreeShape) -> DraftTree:
        n = min(shape.depth, shape.nodes)
        return tree_of([(token, i - 1, i + 1) for i in range(n)])

    return propose


def random_trees(answer: Sequence[int], seed: int) -> Propose:
    """Trees of any form in which some path is right for a random number of tokens."""
    rng = random.Random(seed)

    def propose(so_far: list[int], shape: TreeShape) -> DraftTree:
        room = rng.randint(0, shape.nodes)
        nodes: list[tuple[int, int, int]] = []
        right = answer[len(so_far) : len(so_far) + min(room, shape.depth, rng.randint(0, shape.depth))]
        path = [ROOT]
        for depth, token in enumerate(right, 1):
            nodes.append((token, path[-1], depth))
            path.append(len(nodes) - 1)
        while len(nodes) < room:
            parent = rng.choice([ROOT, *range(len(nodes))])
            depth = 1 if parent == ROOT else nodes[parent][2] + 1
            token = rng.randrange(256)
            if depth <= shape.depth and all((token, parent) != node[:2] for node in nodes):
                nodes.append((token, parent, depth))
        rank = list(range(len(nodes)))
        rng.shuffle(rank)
        return tree_of(nodes, rank)

    return propose
