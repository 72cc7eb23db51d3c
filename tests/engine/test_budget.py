"""The budget: its cut against every cut, and what it makes of worlds whose costs and texts are known."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import MOST, World, curve, decode, decode_fixed

from eagle3_cli.engine.budget import BAND, LOSS, MARGIN, MARGIN_ALONE, Budget, Machine
from eagle3_cli.engine.costs import CPU_DRAFTER_PRIOR, CPU_PRIOR, CPU_PRIORS, FEW, GPU_PRIOR, MOVED, WIDEST
from eagle3_cli.engine.lookup import ALONE, BEST, Match
from eagle3_cli.engine.tree import ROOT, Candidates, cut
from eagle3_cli.settings import TreeShape

FIXED = [TreeShape(d, 1, d) for d in (1, 2, 3, 4)] + [TreeShape(4, 4, 8), TreeShape(5, 6, 16), TreeShape(6, 6, 32)]
CHEAP, DEAR = curve({1: 0.05, 10: 0.25}), curve({1: 0.1, 10: 0.5})
WORLDS = {
    "Q4_1, easy text": World(curve(CPU_PRIORS["Q4_1"]), CHEAP, (0.97, 0.8)),
    "Q4_1, mixed text": World(curve(CPU_PRIORS["Q4_1"]), DEAR),
    "Q4_0, mixed text": World(curve(CPU_PRIORS["Q4_0"]), CHEAP),
    "Q8_0, hard text": World(curve(CPU_PRIORS["Q8_0"]), DEAR, (0.6, 0.2)),
    "BF16, easy text": World(curve(CPU_PRIORS["BF16"]), CHEAP, (0.97, 0.8)),
    "BF16, mixed text": World(curve(CPU_PRIORS["BF16"]), DEAR),
    "flat": World(curve(GPU_PRIOR), curve({1: 0.05, 10: 0.055})),
    "a cliff at six rows": World(lambda n: 0.01 * (1 + 0.1 * n if n < 6 else 3 + 0.1 * n), CHEAP),
}


def budget(prior=CPU_PRIOR) -> Budget:
    return Budget(Machine(prior, CPU_DRAFTER_PRIOR))


def know_one_row(learning: Budget, seconds: float = 0.01) -> None:
    for _ in range(FEW):
        learning.machine.target.learn(1, seconds)


@pytest.mark.parametrize("name", WORLDS)
def test_it_loses_nothing_and_is_about_as_good_as_the_best_fixed_tree(name):
    """From a prior that knows little of the machine, learning included; mean of four texts."""
    world, prior = WORLDS[name], GPU_PRIOR if name == "flat" else CPU_PRIOR
    over_plain, over_best = 1.0, 1.0
    for seed in range(4):
        plain = decode_fixed(world, None, seed=seed).rate
        best = max(plain, *(decode_fixed(world, shape, seed=seed).rate for shape in FIXED))
        auto = decode(world, budget(prior), rounds=900, seed=seed).rate
        over_plain, over_best = over_plain * auto / plain, over_best * auto / best
    assert over_plain**0.25 >= 0.96
    assert over_best**0.25 >= 0.92


class Slow:
    """Seconds of passes on a machine that has something else to do for so many of them, from the first one that counts
    on."""

    def __init__(self, verify, passes, factor, rows=WIDEST):
        self.verify, self.left, self.factor, self.rows = verify, passes, factor, rows

    def __call__(self, rows):
        self.left -= 1
        return self.verify(rows) * (self.factor if self.left >= 0 and rows <= self.rows else 1.0)


@pytest.mark.parametrize("factor", [1.5, 2.5, 10.0])
@pytest.mark.parametrize("passes", [1, 2, 40])
@pytest.mark.parametrize("name", ["Q8_0, hard text", "Q4_1, mixed text", "Q4_0, mixed text"])
def test_a_slow_start_does_not_make_trees_look_cheap(name, passes, factor):
    """The first passes say what one row takes, and everything is counted in that."""
    world = WORLDS[name]
    plain = decode_fixed(world, None).rate
    learning = budget()
    decode(replace(world, verify=Slow(world.verify, passes, factor)), learning, rounds=passes)
    assert decode(world, learning, rounds=600).rate >= 0.95 * plain


@pytest.mark.parametrize("after", [(0.5, 0.3, 0.2, 0.1, 0.05), (1.0, 0.5, 0.4, 0.2, 0.2)])
def test_what_a_tree_costs_the_rounds_after_it_is_counted(after):
    """Trees that would just pay if the passes of one row after them took no longer than others."""
    world = replace(WORLDS["Q4_0, mixed text"], after=after)
    over_plain, learned = 1.0, []
    for seed in range(4):
        learning = budget()
        over_plain *= decode(world, learning, rounds=1200, seed=seed).rate / decode_fixed(world, None, seed=seed).rate
        learned.append(learning.machine.after_tree)
    assert over_plain**0.25 >= 0.98
    for k in (0, 1):  # from few trees, and first of all there is none
        assert 0.4 * after[k] < sum(excess[k][0] for excess in learned) / 4 < 1.1 * after[k]


def test_when_one_row_becomes_cheaper_than_it_was_trees_are_given_up():
    """As where another program ends that was in the way of plain passes alone."""
    world = WORLDS["Q4_0, mixed text"]
    learning = budget()
    decode(replace(world, verify=lambda rows: max(world.verify(rows), 0.025)), learning, rounds=300)
    assert decode(world, learning, rounds=600).rate >= 0.93 * decode_fixed(world, None).rate


def test_a_prior_of_quite_another_machine_is_overcome():
    world, rates = WORLDS["flat"], []
    for seed in range(5):
        rates.append(decode(world, budget(CPU_PRIORS["Q4_1"]), rounds=2000, seed=seed).rate)
    assert statistics.median(rates) >= 0.8 * max(decode_fixed(world, shape).rate for shape in FIXED)


def test_in_a_hopeless_world_the_drafter_is_hardly_asked():
    world = World(curve(CPU_PRIORS["Q8_0"]), DEAR, (0.3, 0.1))
    text = decode(world, budget(), rounds=1000)
    assert text.drafts * 0.1 < 2 * LOSS * text.rounds + 2


def test_it_comes_back_when_the_text_becomes_easy():
    hopeless, easy = (World(curve(CPU_PRIORS["BF16"]), CHEAP, best) for best in ((0.2, 0.1), (0.97, 0.9)))
    learning = budget()
    asked = decode(hopeless, learning, rounds=400).drafts
    assert asked < 100
    assert decode(easy, learning, rounds=400).drafts > 300


def test_a_cliff_is_not_stepped_over():
    """At most once for each width: the first slow pass over it may have been an accident."""
    world, learning = WORLDS["a cliff at six rows"], budget()
    decode(world, learning, rounds=400)
    sizes = []
    for _ in range(40):
        made = learning.round(MOST)
        made.pool.add(ROOT, [(i, math.log(0.3 - 0.02 * i)) for i in range(8)])
        made.frontier(list(range(8)), 1)
        sizes.append(made.size())
        learning.learn(made, [0] * 3, sizes[-1], world.verify(sizes[-1] + 1), 0.0)
    assert sum(size > 4 for size in sizes) <= 4
    assert max(sizes[-20:]) <= 4


@given(st.lists(st.floats(0.01, 0.99), max_size=24), st.floats(0, 2), st.integers(0, 32), st.booleans())
def test_the_cut_is_the_best_of_all_cuts(probabilities, spent, room, asks):
    learning = budget(CPU_PRIORS["Q4_0"])
    know_one_row(learning)
    made = learning.round(TreeShape(6, 6, 32), ready=asks)
    made.limit = TreeShape(6, 6, room)
    made.pool.add(ROOT, [(i, math.log(p)) for i, p in enumerate(probabilities)])
    made._value()
    made.spent = spent
    rate, nodes, tokens = made.best_rate()
    values = sorted(made.pool.values, reverse=True)
    costs, fixed = learning.machine.target.costs, spent + learning.machine.besides
    rates = [(1 + sum(values[:n])) / (costs[n + 1] + fixed) for n in range(min(len(values), room) + 1)]
    rates[0] *= MARGIN if asks else MARGIN_ALONE  # a tree has to promise more than plain decoding by so much
    assert rate == pytest.approx(max(rates))
    assert rates[nodes] == pytest.approx(rate)
    assert tokens == pytest.approx(1 + sum(values[:nodes]))
    assert len(cut(made.pool, nodes)) == nodes <= room


def test_values_never_rise_along_a_path_wherever_a_node_comes_from():
    learning = budget()
    know_one_row(learning)
    made = learning.round(MOST, [Match(9, [1, 2, 3]), Match(2, [4, 5])])
    made.pool.add(ROOT, [(1, -0.1), (7, -3.0)])
    made.pool.add(0, [(2, -0.01), (8, -5.0)])
    made._value()
    pool = made.pool
    assert all(pool.values[i] <= (1.0 if p == ROOT else pool.values[p]) for i, p in enumerate(pool.parents))
    assert [bool(m) for m in pool.matched] == [True, True, True, True, True, False, False]


def test_a_long_match_is_verified_without_asking_the_drafter():
    learning = budget(CPU_PRIORS["BF16"])
    decode(World(curve(CPU_PRIORS["BF16"]), CHEAP), learning, rounds=100)
    for _ in range(40):  # matches of this length have been right
        learning._calibration.learn(1, None, 12, True)
    made = learning.round(MOST, [Match(12, [5] * 12)])
    assert not made.asks
    assert made.size() >= 6


def test_without_a_drafter_it_is_never_asked():
    learning = Budget(Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR), can_draft=False)
    for i in range(80):
        made = learning.round(MOST, [Match(3, [1, 2])] if i % 2 else [])
        assert not made.asks
        learning.learn(made, [1], made.size(), 0.01, 0.0)
    assert not learning.expects


def test_matches_that_are_never_right_are_no_longer_verified():
    learning = Budget(Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR), can_draft=False)
    sizes = []
    for _ in range(300):
        made = learning.round(MOST, [Match(5, [1, 2, 3])])
        sizes.append(made.size())
        cost = 0.01 * learning.machine.target.costs[sizes[-1] + 1]
        learning.learn(made, [9], sizes[-1], cost, 0.0)
    assert sum(sizes[100:]) <= 3


def test_in_a_pause_short_matches_are_weighed_now_and_then_only():
    learning = Budget(Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR), can_draft=False)
    short, weighed = [Match(2, [1, 2, 3])], 0
    for _ in range(320):
        if learning.resting > 0 and learning.long_enough > 2:
            learning.rest(1, 0.01)
            continue
        made, weighed = learning.round(MOST, short), weighed + 1
        learning.learn(made, [9], made.size(), 0.01 * learning.machine.target.costs[made.size() + 1], 0.0)
    assert weighed < 60


def test_long_matches_that_came_true_are_long_enough_to_end_a_pause():
    learning = Budget(Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR), can_draft=False)
    made = learning.round(MOST)
    learning.learn(made, [9], 0, 0.01, 0.0)
    assert learning.resting
    before = learning.long_enough
    for _ in range(40):
        made = learning.round(MOST, [Match(16, [1] * 16)])
        nodes = made.size()
        learning.learn(made, [1] * (nodes + 1), nodes, 0.01 * learning.machine.target.costs[nodes + 1], 0.0)
    assert learning.long_enough <= 16
    assert learning.long_enough < before or before <= 16
    for _ in range(200):
        made = learning.round(MOST, [Match(16, [1] * 16)])
        nodes = made.size()
        learning.learn(made, [9], nodes, 0.01 * learning.machine.target.costs[nodes + 1], 0.0)
    assert learning.long_enough > 16


def test_a_round_without_room_is_plain():
    made = budget().round(TreeShape(1, 1, 0), [Match(9, [1, 2])])
    assert not made.asks
    assert made.size() == 0


def test_what_was_learned_survives_a_file():
    learning = budget()
    decode(WORLDS["BF16, mixed text"], learning, rounds=200)
    other = Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR)
    other.restore(learning.machine.as_dict())
    again = Budget(other)
    assert again.gain == pytest.approx(learning.gain, rel=0.02)
    pauses = [made.report()["plain_tokens_between_drafts"] for made in (again, learning)]
    assert pauses[0] == pytest.approx(pauses[1], rel=0.1)
    assert list(other.target.costs) == pytest.approx(list(learning.machine.target.costs), rel=MOVED)


def test_candidates_merge_what_both_sources_propose():
    pool = Candidates()
    pool.add_match([1, 2], 4, BEST)
    assert pool.add(ROOT, [(1, -0.5), (3, -1.0)]) == [0, 2]
    assert (pool.drafted[0], pool.matched[0]) == (-0.5, 4)
    assert (pool.drafted[1], pool.matched[1], pool.matched[2]) == (None, 5, 0)
    assert pool.ranks == [BEST, ALONE, ALONE]  # of a chain's tokens the first may be contradicted
    tree = cut(pool, 2)
    assert list(tree.sources) == [3, 1]


def test_costs_are_of_the_context_at_hand_and_a_longer_one_starts_from_the_shorter():
    machine = Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR)
    for _ in range(40):
        machine.target.learn(1, 0.01)
        machine.target.learn(4, 0.015)
    short = machine.target
    machine.at(BAND - 1)
    assert machine.target is short
    machine.at(BAND)
    assert machine.target is not short
    assert machine.target.costs[4] == pytest.approx(short.costs[4], rel=MOVED)
    for _ in range(200):
        machine.target.learn(1, 0.01)
        machine.target.learn(4, 0.03)
    assert machine.target.costs[4] == pytest.approx(3.0, rel=0.05)
    assert short.costs[4] == pytest.approx(1.5, rel=0.05)
    longer = machine.target
    for context, found in ((0, short), (4 * BAND - 1, longer), (4 * BAND, None), (BAND, longer)):
        machine.at(context)
        assert found is None or machine.target is found
    again = Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR)
    again.restore(json.loads(json.dumps(machine.as_dict())))
    again.at(BAND)
    assert again.target.costs[4] == pytest.approx(3.0, rel=0.05)
