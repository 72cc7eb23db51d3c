"""The dynamic draft tree of EAGLE-2: grown by path probability, cut to a budget.  Pure; no model in sight.

Source: EAGLE-2 (Li et al. 2024), section 4, expansion and reranking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..settings import TreeShape
from .lookup import ALONE
from .types import DRAFTED, LOOKED_UP, NO_TREE, DraftTree

ROOT = -1

Children = Sequence[tuple[int, float]]
"""Of one node: (token, natural log of its probability under the drafter, given the path), best first."""

Expand = Callable[[Sequence[int], "Candidates"], Sequence[Children]]
"""Run the drafter on some nodes (ROOT, or indices of candidates); children of each, in the same order."""


class Candidates:
    """Every node proposed so far, a parent before its children.

    tokens, parents, depths   as of `DraftTree`
    logps      natural log of the path probability under the drafter, of what it proposed
    drafted    natural log of a node's probability given its parent; None where the drafter did not propose it
    matched    how many tokens before the node the n-gram match agrees with that proposes it; 0 for none
    ranks      the match's rank, for its first token
    values     what `cut` sorts by; never rises from parent to child.  The same list as `logps` unless it is replaced
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.logps: list[float] = []
        self.drafted: list[float | None] = []
        self.matched: list[int] = []
        self.ranks: list[int] = []
        self.values = self.logps
        self._index: dict[tuple[int, int], int] = {}

    def add(self, parent: int, children: Children) -> list[int]:
        """What the drafter proposes after a node; the candidates' indices."""
        path = 0.0 if parent == ROOT else self.logps[parent]
        found = []
        for token, logp in children:
            own = min(logp, 0.0)
            node = self._index.get((parent, token))
            if node is None:
                node = self._append(parent, token)
            self.drafted[node] = own
            self.logps[node] = path + own
            found.append(node)
        return found

    def add_match(self, tokens: Sequence[int], length: int, rank: int = ALONE) -> None:
        """A chain from the root on: how the text went on where its last `length` tokens occurred before."""
        parent = ROOT
        for agreeing, token in enumerate(tokens, length):
            node = self._index.get((parent, token))
            if node is None:
                node = self._append(parent, token)
                self.ranks[node] = rank if parent == ROOT else ALONE
            self.matched[node] = max(self.matched[node], agreeing)
            parent = node

    def _append(self, parent: int, token: int) -> int:
        node = self._index[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.logps.append(float("-inf"))
        self.drafted.append(None)
        self.matched.append(0)
        self.ranks.append(ALONE)
        return node

    def child(self, parent: int, token: int) -> int | None:
        return self._index.get((parent, token))

    def __len__(self) -> int:
        return len(self.tokens)


class Policy(Protocol):
    """How far one tree grows.

    limit   most levels, rows of a level and nodes
    pool    the candidates; n-gram matches are in it before the drafter is asked
    asks    whether the drafter is to be asked
    threads of its passes; 0: as many as its contexts have
    """

    limit: TreeShape
    pool: Candidates
    asks: bool
    threads: int

    def frontier(self, level: Sequence[int], depth: int) -> Sequence[int]:
        """Which of the newest level's nodes are expanded next, ascending; none: the tree is grown.

        level   what the drafter proposed last, at this depth
        """

    def size(self) -> int:
        """How many candidates are kept."""

    def drafted(self, rows: int, seconds: float) -> None:
        """The drafter made a pass over so many rows, which took so long."""


class FixedShape:
    """EAGLE-2's policy.  At each level the `width` most probable nodes are expanded, but none that cannot have a
    descendant in the final tree: a path probability never rises, so a node that is not above the last kept one now is
    never a parent of a kept one.  The result is the same as without that rule, with fewer drafter rows."""

    def __init__(self, shape: TreeShape) -> None:
        self.limit, self.pool, self.asks, self.threads = shape, Candidates(), True, 0

    def frontier(self, level: Sequence[int], depth: int) -> Sequence[int]:
        if depth >= self.limit.depth:
            return ()
        logps, nodes = self.pool.logps, self.limit.nodes
        bar = sorted(logps, reverse=True)[nodes - 1] if len(logps) >= nodes else float("-inf")
        alive = [i for i in level if logps[i] > bar]
        alive.sort(key=lambda i: -logps[i])
        return sorted(alive[: self.limit.width])

    def size(self) -> int:
        return self.limit.nodes

    def drafted(self, rows: int, seconds: float) -> None:
        pass


def grow(expand: Expand, policy: Policy) -> DraftTree:
    """Grow level by level from the root's children, then keep the best nodes."""
    pool = policy.pool
    frontier: Sequence[int] = [ROOT]
    depth = 0
    while frontier:
        depth += 1
        level: list[int] = []
        for node, children in zip(frontier, expand(frontier, pool), strict=True):
            level += pool.add(node, children)
        frontier = policy.frontier(level, depth)
    return cut(pool, policy.size())


def cut(pool: Candidates, nodes: int) -> DraftTree:
    """The `nodes` most valuable candidates as a tree, depth first, the more valuable child first.

    A parent is at least as valuable as its child and comes earlier, and ties go to the earlier candidate, so a parent
    is kept whenever its child is.
    """
    if nodes < 1:
        return NO_TREE
    values = pool.values
    best = sorted(range(len(pool)), key=lambda i: -values[i])[:nodes]
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
        sources=[(pool.drafted[i] is not None) * DRAFTED + (pool.matched[i] > 0) * LOOKED_UP for i in kept],
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
