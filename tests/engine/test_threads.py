"""The drafter's number of threads, learned."""

from __future__ import annotations

import math
import random

import pytest

from eagle3_cli.engine.threads import FIRST, LONGEST, TRIALS, Threads


def decode(threads: Threads, seconds: dict[int, float], rounds: int, noise: float = 0.1) -> list[int]:
    """The numbers chosen in so many drafted rounds that take so many seconds."""
    rng, usual, chosen = random.Random(1), seconds[threads.best], []
    for _ in range(rounds):
        chosen.append(threads.choose())
        if chosen[-1] != threads.best:
            took = seconds[chosen[-1]] * math.exp(rng.gauss(0, noise))
            change = threads.learn(chosen[-1], math.log(took / usual))
            if change is not None:
                usual *= math.exp(change)
    return chosen


def test_choices_are_halves():
    assert Threads(16).choices == (1, 2, 4, 8, 16)
    assert Threads(6).choices == (1, 3, 6)
    assert Threads(1).choices == (1,)
    assert Threads(0).choices == (0,)


@pytest.mark.parametrize("most", [0, 1])
def test_nothing_is_tried_where_nothing_can_be_chosen(most):
    threads = Threads(most)
    assert {threads.choose() for _ in range(2000)} == {most}


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 0.8, 2: 1.0}, 1),
        ({1: 1.5, 2: 1.0}, 2),
        ({1: 3.0, 2: 1.6, 4: 0.9, 8: 1.2, 16: 2.0}, 4),
    ],
)
def test_the_fastest_is_found_and_kept(seconds, best):
    threads = Threads(max(seconds))
    chosen = decode(threads, seconds, 1500)
    assert threads.best == best
    assert chosen[-400:].count(best) > 380


def test_trying_what_loses_gets_rare():
    chosen = decode(Threads(2), {1: 2.0, 2: 1.0}, 5000)
    tried = [i for i, n in enumerate(chosen) if n == 1]
    assert tried[:TRIALS] == [FIRST - 1 + FIRST * i for i in range(TRIALS)]
    assert len(tried) < 5000 / LONGEST + 8 * TRIALS


def test_what_differs_little_is_left_alone():
    threads = Threads(2)
    decode(threads, {1: 0.98, 2: 1.0}, 3000, noise=0.01)
    assert threads.best == 2


def test_it_survives_a_file():
    threads = Threads(4)
    decode(threads, {1: 0.5, 2: 0.9, 4: 1.0}, 300)
    again = Threads(4)
    again.restore(threads.as_dict())
    assert again.best == threads.best == 1
    for kept in ({"best": 3}, {"best": "1"}, {}, None, 1):
        with pytest.raises(ValueError, match="threads"):
            Threads(4).restore(kept)
