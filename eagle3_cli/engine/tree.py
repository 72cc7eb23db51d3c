"""The dynamic draft tree of EAGLE-2: grown by path probability, cut to a budget.  Pure; no model in sight.

Source: EAGLE-2 (Li et al. 2024), section 4, expansion and reranking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..settings import TreeShape
from .types import DraftTree

ROOT = -1

Children = Sequence[tuple[int, float]]
"""Of one node: (token, natural log of its probability under the drafter, given the path), best first."""

Expand = Callable[[Sequence[int], "Candidates"], Sequence[Children]]
"""Run the drafter on some nodes (ROOT, or indices of candidates); children of each, in the same order."""


@dataclass
class Candidates:
    """Every node proposed so far, in level order; the fields are those of `DraftTree`."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def add(self, parent: int, children: Children) -> None:
        depth, path = (1, 0.0) if parent == ROOT else (self.depths[parent] + 1, self.logps[parent])
        for token, logp in children:
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth)
            self.logps.append(path + min(logp, 0.0))

    def __len__(self) -> int:
        return len(self.tokens)


def grow(expand: Expand, shape: TreeShape) -> DraftTree:
    """Grow level by level from the root's children, then keep the `shape.nodes` most probable nodes.

    At each level the `shape.width` most probable nodes are expanded, but none that cannot have a descendant in the
    final tree: a path probability never rises, so a node that is not above the last kept one now is never a parent
    of a kept one.  The result is the same as without that rule, with fewer drafter rows.
    """
    pool = Candidates()
    frontier = [ROOT]
    for depth in range(1, shape.depth + 1):
        start = len(pool)
        for node, children in zip(frontier, expand(frontier, pool), strict=True):
            pool.add(node, children)
        if depth < shape.depth:
            frontier = _frontier(pool, start, shape)
        if not frontier:
            break
    return cut(pool, shape.nodes)


def _frontier(pool: Candidates, start: int, shape: TreeShape) -> list[int]:
    """The most probable nodes of the newest level that can still matter, in level order."""
    bar = sorted(pool.logps, reverse=True)[shape.nodes - 1] if len(pool) >= shape.nodes else float("-inf")
    alive = [i for i in range(start, len(pool)) if pool.logps[i] > bar]
    alive.sort(key=lambda i: -pool.logps[i])
    return sorted(alive[: shape.width])


def cut(pool: Candidates, nodes: int) -> DraftTree:
    """The `nodes` most probable candidates as a tree, depth first, the more probable child first.

    A parent is at least as probable as its child and comes earlier, and ties go to the earlier candidate, so a parent
    is kept whenever its child is.
    """
    best = sorted(range(len(pool)), key=lambda i: -pool.logps[i])[:nodes]
    children: dict[int, list[int]] = {}
    for i in best:
        children.setdefault(pool.parents[i], []).append(i)
    kept: list[int] = []
    waiting = children.get(ROOT, [])[::-1]
    while waiting:
        node = waiting.pop()
        kept.append(node)
        waiting.extend(children.get(node, [])[::-1])
    index = {ROOT: ROOT} | {old: new for new, old in enumerate(kept)}
    return DraftTree(
        tokens=[pool.tokens[i] for i in kept],
        parents=[index[pool.parents[i]] for i in kept],
        depths=[pool.depths[i] for i in kept],
        logps=[pool.logps[i] for i in kept],
    )


def leaf_sequences(tree: DraftTree) -> list[list[int]]:
    """For the root and then each node: the ids of the leaves below it (a leaf's own id for a leaf), ascending.

    These are the sequence ids that make a flat KV cache attend like a tree: a cell is seen by exactly the rows that
    share a sequence with it.  Ids count from 0 in the order of the leaves.  The tree has at least one node.
    """
    inner = set(tree.parents)
    below: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for sequence, leaf in enumerate(i for i in range(len(tree)) if i not in inner):
        node = leaf
        while node != ROOT:
            below[node + 1].append(sequence)
            node = tree.parents[node]
        below[0].append(sequence)
    return below
