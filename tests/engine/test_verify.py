"""The verification rule by exact enumeration: every draw, with fractions, on a vocabulary of five tokens.

The checker must also be able to fail: rules that are biased in well-known ways fail it.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Choose, Law, law_of_plain_sampling, law_of_rule, probability, tokens_to

from eagle3_cli.engine.tree import ROOT, FixedShape, grow
from eagle3_cli.engine.types import DraftTree, Verdict
from eagle3_cli.engine.verify import verify
from eagle3_cli.settings import TreeShape

P = [Fraction(n, 100) for n in (40, 30, 15, 10, 5)]
VOCAB = range(len(P))


def fixed(path: tuple[int, ...]) -> Law:
    """The same law after every path."""
    return dict(enumerate(P))


def stateful(path: tuple[int, ...]) -> Law:
    """A law that depends on the whole path, like a penalty or a grammar: some tokens become impossible."""
    turn = (3 * sum(path) + 2 * len(path)) % len(P)
    law = {token: P[(token + turn) % len(P)] * (0 if path and token == path[-1] else 1) for token in VOCAB}
    total = sum(law.values())
    return {token: p / total for token, p in law.items()}


def never(token: int) -> bool:
    return False


def our_rule(tree: DraftTree, law, choose: Choose) -> list[int]:
    return list(verify(tree, lambda node: choose(law(node)), never).tokens)


def is_exact(rule, tree: DraftTree, target=stateful, length: int = 3) -> bool:
    return law_of_rule(rule, tree, target, length) == law_of_plain_sampling(target, length)


def flat(*children: int) -> DraftTree:
    return DraftTree(children, [ROOT] * len(children), [1] * len(children), [-float(i) for i in range(len(children))])


TWO_LEVELS = DraftTree([1, 0, 3, 3, 2, 1], [-1, 0, 0, -1, 3, 3], [1, 2, 2, 1, 2, 2], [-1, -3, -3, -2, -4, -5])


# --- the law --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [fixed, stateful])
@pytest.mark.parametrize("tree", [DraftTree(), flat(1, 3), flat(*VOCAB), flat(4), TWO_LEVELS])
def test_every_tree_emits_the_target_law(tree, target):
    assert is_exact(our_rule, tree, target)


@st.composite
def small_trees(draw):
    """Trees over the vocabulary, siblings distinct, chosen by anything but the draw."""

    def expand(nodes, pool):
        children = st.lists(st.sampled_from(VOCAB), max_size=3, unique=True)
        values = st.floats(-3, 0)
        return [sorted(((t, draw(values)) for t in draw(children)), key=lambda c: -c[1]) for _ in nodes]

    return grow(
        expand, FixedShape(TreeShape(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 7))))
    )


@given(small_trees())
@settings(max_examples=40)
def test_any_tree_chosen_before_the_draw_emits_the_target_law(tree):
    assert is_exact(our_rule, tree, stateful, 4)


def test_acceptance_at_depth_one_is_the_mass_of_the_children():
    def accepts(choose):
        return bool(verify(flat(1, 3), lambda node: choose(fixed(())), never).accepted)

    assert probability(accepts) == P[1] + P[3]


def test_acceptance_at_depth_two_is_the_mass_of_both_levels():
    def accepts_two(choose):
        tree = TWO_LEVELS
        return len(verify(tree, lambda node: choose(stateful(tokens_to(tree, node))), never).accepted) == 2

    law = stateful(())
    wanted = law[1] * (stateful((1,))[0] + stateful((1,))[3]) + law[3] * (stateful((3,))[2] + stateful((3,))[1])
    assert probability(accepts_two) == wanted


def test_a_token_the_target_never_says_is_never_emitted():
    """After 1 the stateful law forbids 1; a drafter that insists on it changes nothing."""
    insistent = DraftTree([1, 1], [-1, 0], [1, 2], [-0.1, -0.2])
    law = law_of_rule(our_rule, insistent, stateful, 2)
    assert all(tokens[0] != tokens[1] for tokens in law)
    assert is_exact(our_rule, insistent)


# --- the same law as EAGLE's own loop, and rules that are wrong ----------------------------------------------------


def _children(tree: DraftTree, node: int) -> list[int]:
    return [i for i, parent in enumerate(tree.parents) if parent == node]


def _coin(choose: Choose, p: Fraction) -> bool:
    return bool(choose({True: p, False: 1 - p}))


def eagle_rule(tree: DraftTree, law, choose: Choose) -> list[int]:
    """EAGLE's evaluate_posterior: try each child, zero and renormalise after a rejection, then draw the residual."""
    tokens, node = [], ROOT
    while True:
        residual = dict(law(node))
        for child in _children(tree, node):
            token = tree.tokens[child]
            if residual[token] and _coin(choose, residual[token]):
                tokens.append(token)
                node = child
                break
            residual[token] = Fraction(0)
            total = sum(residual.values())
            residual = {t: p / total for t, p in residual.items()} if total else residual
        else:
            return [*tokens, choose(residual)]


def without_zeroing(tree: DraftTree, law, choose: Choose) -> list[int]:
    """Biased: after all children were rejected, draws from the full law again."""
    for child in _children(tree, ROOT):
        if _coin(choose, law(ROOT)[tree.tokens[child]]):
            return [tree.tokens[child]]
    return [choose(law(ROOT))]


def without_renormalising(tree: DraftTree, law, choose: Choose) -> list[int]:
    """Biased: later children are accepted with their raw probability."""
    rest = dict(law(ROOT))
    for child in _children(tree, ROOT):
        token = tree.tokens[child]
        if _coin(choose, law(ROOT)[token]):
            return [token]
        rest[token] = Fraction(0)
    return [choose({t: p / sum(rest.values()) for t, p in rest.items()})]


def argmax_child_first(tree: DraftTree, law, choose: Choose) -> list[int]:
    """Biased ("typical acceptance"): the target's favourite child is always accepted if it is likely enough."""
    likely = [tree.tokens[c] for c in _children(tree, ROOT) if law(ROOT)[tree.tokens[c]] >= Fraction(1, 4)]
    return [max(likely, key=lambda t: law(ROOT)[t])] if likely else [choose(law(ROOT))]


def children_chosen_after_peeking(tree: DraftTree, law, choose: Choose) -> list[int]:
    """Biased: a draw that matches no child is taken back once."""
    token = choose(law(ROOT))
    return [token if token in tree.tokens else choose(law(ROOT))]


def drops_the_bonus_token(tree: DraftTree, law, choose: Choose) -> list[int]:
    """Biased: after a rejection the round emits nothing new and the next one draws again."""
    verdict = verify(tree, lambda node: choose(law(node)), never)
    return list(verdict.tokens[: len(verdict.accepted)])


def test_the_walk_has_the_law_of_the_eagle_loop():
    assert law_of_rule(eagle_rule, TWO_LEVELS, stateful, 3) == law_of_rule(our_rule, TWO_LEVELS, stateful, 3)


@pytest.mark.parametrize(
    "rule",
    [
        without_zeroing,
        without_renormalising,
        argmax_child_first,
        children_chosen_after_peeking,
        drops_the_bonus_token,
    ],
)
def test_a_biased_rule_fails_the_checker(rule):
    assert not is_exact(rule, flat(1, 3), fixed)


# --- bookkeeping ------------------------------------------------------------------------------------------------


def walk(tree: DraftTree, script: list[int], ends=never) -> tuple[Verdict, list[int]]:
    """Verdict when the target says `script`, and the nodes that were drawn at."""
    asked: list[int] = []

    def draw(node: int) -> int:
        asked.append(node)
        return script[len(asked) - 1]

    return verify(tree, draw, ends), asked


EIGHT = DraftTree(  # 0 -> 2 -> 5 is not a prefix of the batch
    tokens=[10, 11, 12, 13, 14, 15, 16, 12],
    parents=[-1, 0, 0, 2, 3, 2, -1, 6],
    depths=[1, 2, 2, 3, 4, 3, 1, 2],
    logps=[-1.0, -1.1, -1.2, -1.3, -1.4, -1.5, -1.6, -1.7],
)


def test_an_accepted_path_need_not_be_a_prefix_of_the_batch():
    verdict, asked = walk(EIGHT, [10, 12, 15, 99])
    assert list(verdict.tokens) == [10, 12, 15, 99]
    assert list(verdict.accepted) == [0, 2, 5]
    assert asked == [ROOT, 0, 2, 5]


def test_a_cousin_with_the_drawn_token_is_no_child():
    verdict, _ = walk(EIGHT, [16, 11])  # 11 hangs under node 0, not under node 6
    assert (list(verdict.tokens), list(verdict.accepted)) == ([16, 11], [6])


def test_the_same_token_under_two_parents_is_two_nodes():
    assert list(walk(EIGHT, [16, 12, 1])[0].accepted) == [6, 7]


def test_plain_decoding_draws_one_token():
    assert walk(DraftTree(), [3]) == (Verdict([3], []), [ROOT])


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_the_walk_stops_at_the_first_ending_token_and_draws_nothing_behind_it(at):
    script = [10, 12, 15, 99]
    verdict, asked = walk(EIGHT, script, ends=lambda token: token == script[at])
    assert list(verdict.tokens) == script[: at + 1]
    assert list(verdict.accepted) == [0, 2, 5][: at + 1]
    assert len(asked) == at + 1


def test_ends_is_asked_once_per_emitted_token_in_order():
    heard: list[int] = []
    walk(EIGHT, [10, 12, 15, 99], ends=lambda token: heard.append(token) is not None)
    assert heard == [10, 12, 15, 99]


@given(small_trees(), st.lists(st.sampled_from(VOCAB), min_size=4, max_size=4), st.sets(st.sampled_from(VOCAB)))
def test_accepted_nodes_are_a_path_that_spells_the_emitted_tokens(tree, script, ending):
    verdict, asked = walk(tree, script, ends=lambda token: token in ending)
    tokens, accepted = list(verdict.tokens), list(verdict.accepted)
    assert tokens == script[: len(tokens)]
    assert [tree.tokens[node] for node in accepted] == tokens[: len(accepted)]
    assert [tree.parents[node] for node in accepted] == [ROOT, *accepted][: len(accepted)]
    assert asked == [ROOT, *accepted][: len(tokens)]
    stopped = tokens[-1] in ending
    assert len(tokens) - len(accepted) in ((0, 1) if stopped else (1,))
    assert not ending & set(tokens[:-1])
