"""The draft tree against full growth by the paper, and its sequence ids against plain ancestry."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import depth_first, grow_fully, tokens_to, visible_rows

from eagle3_cli.engine.tree import ROOT, FixedShape, cut, grow, leaf_sequences
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.settings import TreeShape

shapes = st.builds(TreeShape, st.integers(1, 5), st.integers(1, 5), st.integers(1, 24))
# Few distinct values make ties, between siblings and between levels (0.0 keeps a child as probable as its parent).
# Sure children below unsure siblings are what pruning could get wrong.
logps = st.sampled_from([0.0, 0.0, -0.125, -0.25, -0.5, -0.75, -1.0, -1.0, -2.0, -9.0, -1e30])


class Proposals:
    """Children of every path: a fixed pseudo-random choice from the drawn values."""

    def __init__(self, seed: int, values: list[float], most: int) -> None:
        self.seed, self.values, self.most = seed, values, most
        self.levels: list[list[int]] = []

    def children(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        rng = random.Random(f"{self.seed}{path}")
        chosen = sorted((rng.choice(self.values) for _ in range(rng.randint(0, self.most))), reverse=True)
        return [(token, logp) for token, logp in enumerate(chosen)]

    def expand(self, nodes, pool):
        self.levels.append(list(nodes))
        return [self.children(tokens_to(pool, node)) for node in nodes]


proposals = st.builds(Proposals, st.integers(0, 10**6), st.lists(logps, min_size=1, max_size=8), st.integers(0, 5))


def rows_of(tree: DraftTree):
    return list(zip(tree.tokens, tree.parents, tree.depths, tree.logps, strict=True))


@given(proposals, shapes)
@settings(max_examples=300)
def test_grow_equals_full_growth_without_pruning(proposals, shape):
    tree, wanted = grow(proposals.expand, FixedShape(shape)), grow_fully(proposals.children, shape)
    assert rows_of(tree) == rows_of(wanted)


@given(proposals, shapes)
def test_no_level_expands_more_than_width_and_none_more_than_depth(proposals, shape):
    grow(proposals.expand, FixedShape(shape))
    assert proposals.levels[0] == [ROOT]
    assert len(proposals.levels) <= shape.depth
    assert all(1 <= len(level) <= shape.width and level == sorted(level) for level in proposals.levels[1:])


@given(proposals, shapes)
def test_kept_nodes_come_depth_first_with_their_parents(proposals, shape):
    tree = grow(proposals.expand, FixedShape(shape))
    assert len(tree) <= shape.nodes
    assert rows_of(tree) == rows_of(depth_first(tree))
    for node, (parent, depth, logp) in enumerate(zip(tree.parents, tree.depths, tree.logps, strict=True)):
        assert ROOT <= parent < node
        assert depth == (1 if parent == ROOT else tree.depths[parent] + 1)
        assert parent == ROOT or logp <= tree.logps[parent]


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 8))
def test_width_one_expands_one_node_per_level(seed, depth, nodes):
    chain = Proposals(seed, [-0.5, -1.0], 1)
    tree = grow(chain.expand, FixedShape(TreeShape(depth, 1, nodes)))
    assert list(tree.parents) == list(range(-1, len(tree) - 1))


@given(proposals, shapes)
def test_pruning_only_saves_drafter_rows(proposals, shape):
    """What is not expanded could not have had a child in the tree."""
    tree = grow(proposals.expand, FixedShape(shape))
    rows = sum(map(len, proposals.levels))
    inner = {parent for parent in tree.parents if parent != ROOT}
    assert len(inner) + 1 <= rows <= 1 + shape.width * (shape.depth - 1)


def test_a_certain_chain_needs_no_second_row_once_the_budget_is_spent():
    """Two sure children fill a budget of two: nothing below them can be kept."""
    calls = []

    def expand(nodes, pool):
        calls.append(list(nodes))
        return [[(1, -0.1), (2, -0.1)] for _ in nodes]

    grow(expand, FixedShape(TreeShape(8, 10, 2)))
    assert calls == [[ROOT]]


def test_a_node_barely_above_the_last_kept_one_is_still_expanded():
    """Its sure child takes the other one's place."""
    children = {(): [(1, -0.5), (2, -0.5001)], (1,): [(3, 0.0)]}
    tree = grow(
        lambda nodes, pool: [children.get(tokens_to(pool, n), []) for n in nodes], FixedShape(TreeShape(2, 2, 2))
    )
    assert (list(tree.tokens), list(tree.parents)) == ([1, 3], [ROOT, 0])


def test_no_children_at_all_make_an_empty_tree():
    assert len(grow(lambda nodes, pool: [[] for _ in nodes], FixedShape(TreeShape(4, 4, 8)))) == 0


def test_a_rounding_error_above_probability_one_does_not_lift_a_child_over_its_parent():
    tree = grow(lambda nodes, pool: [[(7, 1e-6)] for _ in nodes], FixedShape(TreeShape(3, 1, 2)))
    assert list(tree.logps) == [0.0, 0.0]
    assert list(tree.parents) == [-1, 0]


def test_ties_go_to_the_earlier_node():
    tree = grow(lambda nodes, pool: [[(1, -1.0), (2, -1.0), (3, -1.0)] for _ in nodes], FixedShape(TreeShape(1, 1, 2)))
    assert list(tree.tokens) == [1, 2]


# --- sequence ids --------------------------------------------------------------------------------------------


@st.composite
def trees(draw, most=24):
    """Any tree, not only those that `grow` makes."""
    parents, depths, logps = [], [], []
    for node in range(draw(st.integers(1, most))):
        parent = draw(st.integers(ROOT, node - 1))
        parents.append(parent)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        logps.append((0.0 if parent == ROOT else logps[parent]) - draw(st.sampled_from([0.0, 0.5, 1.0])))
    return depth_first(DraftTree(list(range(len(parents))), parents, depths, logps))


def rows_seen(tree: DraftTree) -> np.ndarray:
    """What a unified KV cache makes of sequence ids: a row sees a cell that shares a sequence with it, at most as late.

    llama.cpp masks by the row's own sequences: one shared id is enough, and positions must not lie ahead.
    """
    below = [set(ids) for ids in leaf_sequences(tree)]
    position = [0, *tree.depths]
    n = len(below)
    return np.array([[bool(below[i] & below[j]) and position[j] <= position[i] for j in range(n)] for i in range(n)])


@given(trees())
def test_sequences_let_every_row_see_exactly_its_ancestors(tree):
    assert (rows_seen(tree) == visible_rows(tree)).all()


@given(trees())
def test_there_are_as_many_sequences_as_leaves_and_the_root_is_in_all(tree):
    below = leaf_sequences(tree)
    leaves = set(range(len(tree))) - set(tree.parents)
    assert below[0] == list(range(len(leaves)))
    assert sorted(below[leaf + 1] for leaf in leaves) == [[s] for s in range(len(leaves))]


@given(trees())
def test_sequence_sets_only_shrink_along_a_path(tree):
    below = leaf_sequences(tree)
    for node, parent in enumerate(tree.parents):
        assert set(below[node + 1]) <= set(below[parent + 1])
    for parent, children in Counter(tree.parents).items():
        if children > 1:
            assert len(below[parent + 1]) >= children


@given(trees())
def test_sequence_zero_goes_along_first_children_and_the_others_follow_in_order(tree):
    below = leaf_sequences(tree)
    first_leaf = next(i for i in range(len(tree)) if i not in tree.parents)
    assert [node for node in range(len(tree)) if 0 in below[node + 1]] == list(range(first_leaf + 1))
    assert [ids for ids in below if len(ids) == 1 and ids[0] > 0] == sorted(
        ids for ids in below if len(ids) == 1 and ids[0] > 0
    )


def test_a_kept_parent_is_never_missing_from_a_cut():
    from eagle3_cli.engine.tree import Candidates

    pool = Candidates()
    pool.add(ROOT, [(5, -0.2), (6, -0.2)])
    pool.add(1, [(7, 0.0)])
    tree = cut(pool, 2)
    assert (list(tree.tokens), list(tree.parents)) == ([5, 6], [ROOT, ROOT])
    tree = cut(pool, 3)
    assert (list(tree.tokens), list(tree.parents)) == ([5, 6, 7], [ROOT, ROOT, 1])


@pytest.mark.parametrize("nodes", [1, 2, 59, 60, 255])
def test_the_largest_trees_keep_within_their_budget(nodes):
    proposals = Proposals(3, [-0.1, -0.7, -1.5, -3.0], 10)
    assert len(grow(proposals.expand, FixedShape(TreeShape(8, 10, nodes)))) <= nodes
