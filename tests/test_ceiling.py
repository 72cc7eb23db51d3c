"""What the best policy could gain: against every way of cutting an answer into rounds."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest

from eagle3_cli.engine import load_engine
from eagle3_cli.engine.lookup import Match
from eagle3_cli.engine.tree import Candidates
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
ceiling = importlib.import_module("ceiling")
Costs, Node, Position, Recorded, Replay, ROOT, fewest_passes, foretold = (
    getattr(ceiling, name)
    for name in ("Costs", "Node", "Position", "Recorded", "Replay", "ROOT", "fewest_passes", "foretold")
)


def every_way(answer, costs, at=0):
    """Cost of the best of all sequences of rounds, one by one."""
    if at == len(answer):
        return 0.0
    found = []
    for k in range(len(answer) - at):
        if k <= max(answer[at].drafted, answer[at].matched):
            drafting = 0.0 if k <= answer[at].matched else k * costs.step
            found.append(costs.verify[k] + drafting + every_way(answer, costs, at + k + 1))
    return min(found)


@pytest.mark.parametrize("seed", range(30))
def test_the_fewest_passes_are_those_of_the_best_of_all_ways(seed):
    rng = random.Random(seed)
    answer = [Position(rng.choice((0, 0, 1, 2, 4)), rng.choice((0, 0, 0, 3))) for _ in range(rng.randint(1, 9))]
    costs = Costs([1.0 + rng.random() * k for k in range(10)], 0.2 * rng.random())
    assert fewest_passes(answer, costs) == pytest.approx(every_way(answer, costs))


def test_nothing_foretold_is_plain_decoding():
    assert fewest_passes([Position(0, 0)] * 7, Costs([1.0, 1.1], 0.1)) == 7.0


def test_a_proposal_that_costs_more_than_it_saves_is_not_verified():
    answer = [Position(1, 0), Position(0, 0)]
    assert fewest_passes(answer, Costs([1.0, 1.5], 0.4)) == pytest.approx(1.9)
    assert fewest_passes(answer, Costs([1.0, 1.5], 0.6)) == 2.0
    assert fewest_passes([Position(1, 1), Position(0, 0)], Costs([1.0, 1.5], 0.6)) == 1.5  # a match is free


def test_how_far_a_tree_foretells():
    tree = DraftTree([5, 6, 7, 8], [-1, 0, 0, -1], [1, 2, 2, 1], [0.0] * 4, [1] * 4)
    assert [foretold(tree, future) for future in ([5, 7, 9], [5, 6], [5], [6], [])] == [2, 2, 1, 0, 0]


def test_positions_are_those_of_plain_decoding(tiny_target, tiny_drafters, monkeypatch):
    """A drafter that knows most of the target foretells most; the answer is plain decoding's."""
    pair = PairSettings(tiny_target.path, tiny_drafters["good"].path, depth=8, width=10, nodes=60)
    greedy = SamplingSettings(temperature=0.0)
    prompt = [5, 9, 200, 17]
    seen = []
    monkeypatch.setattr(ceiling, "foretold", lambda tree, future: seen.append(list(future)) or foretold(tree, future))
    with load_engine(pair, RuntimeSettings(ctx_size=256, threads=1)) as engine:
        found = ceiling.positions(engine, prompt, greedy, 20)
        pieces = list(engine.stream(prompt, greedy, Limits(21, ignore_eos=True)))
    tokens = [piece.token for piece in pieces]
    assert seen[0] == tokens[1 : 1 + len(found)]
    assert sum(each.drafted for each in found) > len(found)


# ---- a policy that knows how often a kind of proposal is right

SURE, UNSURE, COPIED = ("drafter", 1, 9), ("drafter", 1, 2), ("match", 0, 5)


def chain(kind, came, depth=1):
    """One node for each outcome, each behind the one before."""
    return [Node(i - 1 if i else ROOT, depth and depth + i, kind, hit) for i, hit in enumerate(came)]


def test_a_kind_comes_true_where_the_answer_came_to_its_parent():
    answers = [[Position(1, 0, chain(SURE, [True, False, False]))], [Position(0, 0, chain(UNSURE, [False]))]]
    assert ceiling.came_true(answers) == {SURE: 0.5, UNSURE: 0.0}


def test_a_round_verifies_what_promises_more_than_the_rest_of_the_answer():
    costs = Costs([1.0, 1.4, 1.8], 0.1)

    def best_round(position, rates, costs, against, room):
        return ceiling.best_round(ceiling.options(position, rates, costs), against, room)

    node = Position(1, 0, chain(SURE, [True]))
    assert best_round(node, {SURE: 0.9}, costs, 1.0, room=5) == (2, pytest.approx(1.5))
    assert best_round(node, {SURE: 0.4}, costs, 1.0, room=5) == (1, 1.0)
    assert best_round(node, {SURE: 0.6}, costs, 1.0, room=5) == (2, pytest.approx(1.5))
    assert best_round(node, {SURE: 0.6}, costs, 1.3, room=5) == (1, 1.0)  # other rounds emit more meanwhile
    assert best_round(node, {SURE: 0.9}, costs, 1.0, room=0) == (1, pytest.approx(1.5))  # the answer ends
    match = Position(0, 1, chain(COPIED, [True], depth=0))
    assert best_round(match, {COPIED: 0.6}, costs, 1.3, room=5) == (2, 1.4)  # asks no drafter


@pytest.mark.parametrize("seed", range(10))
def test_who_knows_rates_gains_less_than_who_knows_the_answer(seed):
    """Up to plain decoding where no proposal is right."""
    rng = random.Random(seed)
    costs = Costs([1.0, 1.3, 1.5, 1.7], 0.05)
    answers = []
    for _ in range(6):
        drafts = [[rng.random() < (0.8 if sure else 0.2) for _ in range(2)] for sure in (i % 2 for i in range(20))]
        answers.append(
            [
                Position(2 if all(hits) else int(hits[0]), 0, chain(SURE if i % 2 else UNSURE, [hits[0], all(hits)]))
                for i, hits in enumerate(drafts)
            ]
        )
    known = ceiling.with_known_rates(answers, costs)
    fewest = sum(fewest_passes(answer, costs) for answer in answers)
    assert 1.0 < known < sum(map(len, answers)) / fewest
    wrong = [[Position(0, 0, chain(SURE, [False, False]))] * 10]
    assert ceiling.with_known_rates(wrong, costs) == 1.0


def test_kinds_of_proposals(tiny_target, tiny_drafters):
    """Of the drafter, of a match, and of both; they come true as the answer of plain decoding goes."""
    pair = PairSettings(tiny_target.path, tiny_drafters["good"].path, depth=8, width=10, nodes=60)
    with load_engine(pair, RuntimeSettings(ctx_size=256, threads=1)) as engine:
        found = ceiling.positions(engine, [5, 9, 200, 17] * 4, SamplingSettings(temperature=2.0, seed=1), 40)
    assert {node.kind[0] for each in found for node in each.nodes} == {"drafter", "match", "both"}
    for each in found:
        assert sum(node.came for node in each.nodes) >= max(each.drafted, min(each.matched, 1))
        assert all(node.parent == ROOT or each.nodes[node.parent].came for node in each.nodes if node.came)
        assert all((node.depth == 0) == (node.kind[0] != "drafter") for node in each.nodes)


# ---- the budget, replayed

CHEAP = Costs([1.0 + 0.02 * k for k in range(33)], 0.02)
DEAR = Costs([1.0 + k for k in range(33)], 0.5)


def recorded(length, right, matched=0):
    """An answer of so many tokens; the drafter proposes a chain of 8 at each, all right or all wrong, and a match as
    many tokens as `matched`."""
    text, records = list(range(10, 10 + length)), []
    for at in range(length):
        pool, parent = Candidates(), ROOT
        for token in text[at : at + 8]:
            (parent,) = pool.add(parent, [(token if right else 5, -0.05)])
        following = [Match(20, text[at : at + matched])] if matched else []
        records.append(Recorded(30 + at, pool, following, text[at:]))
    return records


def test_a_drafter_that_is_right_is_asked_and_verified():
    replay = Replay(CHEAP, 0.0, ceiling.LARGEST)
    costs = [replay.answer(recorded(64, right=True)) for _ in range(6)]
    assert costs[-1] < 64 / 4
    assert costs[-1] >= 64 / 9  # no round emits more than its 8 nodes and the next token


def test_a_drafter_that_is_wrong_costs_little():
    replay = Replay(DEAR, 1.0, ceiling.LARGEST)
    costs = [replay.answer(recorded(64, right=False)) for _ in range(20)]
    assert 64 <= costs[-1] < 66


def test_a_match_costs_no_pass_of_the_drafter():
    """Each further row costs a third of a pass: matches of 12 tokens pay, drafts at a whole pass each do not."""
    costs = Costs([1.0 + 0.3 * k for k in range(33)], 1.0)
    without = Replay(costs, 0.0, ceiling.LARGEST)
    replay = Replay(costs, 0.0, ceiling.LARGEST)
    for _ in range(8):
        plain, copied = (each.answer(recorded(64, False, n)) for each, n in ((without, 0), (replay, 12)))
    assert copied < 0.7 * plain


def test_a_replay_stays_within_the_answer():
    for length in range(1, 12):
        assert Replay(CHEAP, 0.0, ceiling.LARGEST).answer(recorded(length, True, 9)) <= 1.5 * length


def test_children_are_those_of_the_path():
    pool = Candidates()
    _, other = pool.add(ROOT, [(1, -0.2), (2, -2.0)])
    pool.add(other, [(4, -1.0), (3, -0.5)])
    pool.add_match([7], 5)
    here = Recorded(0, pool, [], [])
    assert here.children([]) == [(1, -0.2), (2, -2.0)]
    assert here.children([2]) == [(3, -0.5), (4, -1.0)]
    assert here.children([1]) == here.children([9]) == here.children([9, 4]) == []
