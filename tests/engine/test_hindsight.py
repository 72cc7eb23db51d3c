"""What fixed settings would have done, estimated from what was drafted."""

from __future__ import annotations

import math
import random

import pytest
from worlds import World, curve, decode, decode_fixed

from eagle3_cli.engine.budget import Budget, Machine
from eagle3_cli.engine.costs import CPU_DRAFTER_PRIOR, CPU_PRIOR
from eagle3_cli.engine.hindsight import SHAPES, Hindsight
from eagle3_cli.engine.tree import ROOT, Candidates
from eagle3_cli.settings import TreeShape


def pool_of(*levels: list[float]) -> Candidates:
    """Each level's children hang below the best of the level above; tokens count from 0 in every level."""
    pool, parent = Candidates(), ROOT
    for probabilities in levels:
        parent = pool.add(parent, [(token, math.log(p)) for token, p in enumerate(probabilities)])[0]
    return pool


def learn(seen: Hindsight, tokens: list[int], pool: Candidates) -> None:
    """A drafted round at cost 1."""
    seen.learn(len(tokens), 1.0)
    seen.learn_ranks(tokens, pool)


def test_a_chain_is_a_sum_of_products_of_the_rates_of_best_children():
    seen = Hindsight()
    for tokens in ([0, 0, 9], [0, 1], [1], [9]):
        for _ in range(20):
            learn(seen, tokens, pool_of([0.6, 0.3], [0.5, 0.2]))
    # depth 1: 80 rounds, best child 40, next 20; depth 2: 40 walks, best 20, next 20.  Weights are all one.
    assert seen.acceptance_length(TreeShape(1, 1, 1)) == pytest.approx(1 + 0.5)
    assert seen.acceptance_length(TreeShape(2, 1, 2)) == pytest.approx(1 + 0.5 + 0.25)
    assert seen.acceptance_length(TreeShape(2, 2, 3)) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert seen.acceptance_length(TreeShape(3, 1, 3)) is None  # nobody drafted so deep
    assert seen.tokens == 20 * 7
    assert seen.cost == 80


def test_a_round_after_a_pause_stands_for_the_pause():
    """Easy text is drafted in every round, hard text every tenth token; both are half of the text."""
    seen = Hindsight()
    for _ in range(100):
        learn(seen, [0], pool_of([0.9]))
    for _ in range(10):
        for _ in range(9):
            seen.learn(1, 1.0)
        learn(seen, [9], pool_of([0.9]))
    assert seen.acceptance_length(TreeShape(1, 1, 1)) == pytest.approx(1.5)


def test_the_best_fixed_setting_by_costs():
    seen = Hindsight()
    for _ in range(100):
        learn(seen, [0, 0, 0], pool_of([0.9], [0.9], [0.9]))
    assert seen.best(lambda nodes: 1.0, lambda rows: 0.1)[0] == "chain 3"
    name, rate = seen.best(lambda nodes: 1.0 + nodes, lambda rows: 0.1)
    assert (name, rate) == ("plain", 1.0)
    assert Hindsight().best(lambda nodes: 2.0, lambda rows: 0.1) == ("plain", 1.0)


@pytest.mark.parametrize(("verify", "best"), [({1: 1.0, 8: 1.2, 64: 3.0}, (0.9, 0.6)), (CPU_PRIOR, (0.9, 0.8))])
def test_the_estimate_for_chains_is_what_they_do(verify, best):
    """In a simulated world, the estimated rate of every chain that was drafted is its rate within a tenth."""
    world = World(curve(verify), curve({r: 0.1 * c for r, c in CPU_DRAFTER_PRIOR.items()}), best, noise=0.0)
    budget = Budget(Machine(verify, CPU_DRAFTER_PRIOR))
    decode(world, budget, rounds=2500, seed=random.Random(3).randrange(99))
    checked = 0
    for shape in (s for s in SHAPES if s.width == 1):
        length = budget.hindsight.acceptance_length(shape)
        if length is not None:
            text = decode_fixed(world, shape, rounds=1500)
            assert length == pytest.approx(text.tokens / text.rounds, rel=0.1)
            checked += 1
    assert checked >= 2


def test_the_report_compares_with_the_best_fixed_setting():
    world = World(curve(CPU_PRIOR), curve({r: 0.1 * c for r, c in CPU_DRAFTER_PRIOR.items()}), (0.95, 0.9), noise=0.0)
    budget = Budget(Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR))
    decode(world, budget, rounds=800)
    found = budget.report()["hindsight"]
    assert found["best_fixed"].startswith(("chain", "tree"))
    assert found["over_best_fixed"] == pytest.approx(found["speed_up"] / found["best_fixed_speed_up"])
    assert 0.9 < found["over_best_fixed"] < 1.2
