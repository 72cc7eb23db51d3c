"""Seconds that a budget is told instead of the clock's, so that tests of what it does with them do not depend on the
machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def tell_seconds(
    budget: Any,
    patch: pytest.MonkeyPatch,
    verify: Callable[[int], float] = lambda nodes: 0.01 + 1e-5 * nodes,
    drafting: Callable[[float], float] = lambda usual: usual,
    drafter_level: float = -12.0,
) -> None:
    """Passes of the target take what `verify` says of a tree's nodes, by default next to nothing for a node; those of
    the drafter what `drafting` makes of what they usually take, one row exp(drafter_level) seconds."""
    learn, rest = budget.learn, budget.rest

    def told(made: Any, tokens: Any, nodes: int, *_: float) -> None:
        made.measured = made.spent = drafting(made.spent)
        learn(made, tokens, nodes, verify(nodes), 0.0)

    patch.setattr(budget, "learn", told)
    patch.setattr(budget, "rest", lambda tokens, _: rest(tokens, verify(0)))
    patch.setattr(budget.machine.drafter, "learn", lambda rows, seconds: None)
    budget.machine.drafter.level = drafter_level
