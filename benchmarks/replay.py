"""Replay recorded answers: in how many passes the budget of `auto` would have made them.  Costs are told, not
measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from eagle3_cli.engine.budget import Budget, Machine, Round
from eagle3_cli.engine.calibration import temperature_class
from eagle3_cli.engine.costs import CPU_DRAFTER_PRIOR, CPU_PRIOR
from eagle3_cli.engine.lookup import Match
from eagle3_cli.engine.tree import ROOT, Candidates, Children, cut, grow
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.engine.verify import verify
from eagle3_cli.settings import TreeShape

Position = TypeVar("Position")

UNIT = 0.05  # seconds of a pass of the target over one row; the budget does not mind which


@dataclass(frozen=True)
class Costs:
    """In passes of the target over one row.

    verify   [k]: a pass over k + 1 rows
    step     a pass of the drafter over one row
    wider    what each further row of such a pass costs
    """

    verify: Sequence[float]
    step: float
    wider: float = 0.0

    def draft(self, rows: int) -> float:
        return self.step + self.wider * (rows - 1)


@dataclass(frozen=True)
class Recorded:
    """One token of an answer, as the root of a round.

    past      tokens of prompt and answer before it
    pool      what the drafter proposes behind it in the largest tree
    matches   what followed earlier in the text
    future    the tokens behind it
    """

    past: int
    pool: Candidates
    matches: Sequence[Match]
    future: Sequence[int]

    def children(self, path: Sequence[int]) -> Children:
        """What the drafter proposes behind a path of tokens from the root, best first."""
        node: int | None = ROOT
        for token in path:
            node = None if node is None else self.pool.child(node, token)
        found = zip(self.pool.tokens, self.pool.parents, self.pool.drafted, strict=True)
        children = [(token, logp) for token, parent, logp in found if parent == node and logp is not None]
        return sorted(children, key=lambda child: -child[1])


def in_rounds(answer: Sequence[Position], make: Callable[[Position, int], tuple[int, float]]) -> float:
    """Cost of an answer in rounds.  make(position, tokens behind the next one): (tokens that it emits, cost)."""
    at, cost = 0, 0.0
    while at < len(answer):
        emitted, spent = make(answer[at], len(answer) - at - 1)
        at, cost = at + emitted, cost + spent
    return cost


class Replay:
    """A budget that answers one recorded answer after the other, and learns from each.

    largest   no tree is larger; at most as many nodes as there are costs for
    """

    def __init__(self, costs: Costs, temperature: float, largest: TreeShape) -> None:
        self.costs, self.temperature_class = costs, temperature_class(temperature)
        self.largest = replace(largest, nodes=min(largest.nodes, len(costs.verify) - 1))
        self.budget = Budget(Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR), temperature_class=self.temperature_class)

    def answer(self, records: Sequence[Recorded]) -> float:
        """Its cost, in passes of the target over one row."""
        self.budget.begin(self.temperature_class, records[0].past)
        return in_rounds(records, self._round)

    def _round(self, here: Recorded, room: int) -> tuple[int, float]:
        """(tokens, cost) of a round, as engine/loop.py makes it.  room: tokens that the answer has behind the next."""
        budget, largest = self.budget, self.largest
        longest = max((match.length for match in here.matches), default=0)
        if budget.resting > 0 and longest < budget.long_enough:
            budget.rest(1, UNIT)
            return 1, self.costs.verify[0]
        limit = TreeShape(max(min(largest.depth, room), 1), largest.width, min(largest.nodes, room and largest.nodes))
        matches = [replace(match, tokens=match.tokens[: min(room, limit.nodes)]) for match in here.matches if room]
        policy = budget.round(limit, matches, context=here.past)
        tree, drafting = self._grown(here, policy) if policy.asks else (cut(policy.pool, policy.size()), 0.0)
        future = iter(here.future)
        verdict = verify(tree, lambda node: next(future), lambda token: False)
        verifying = self.costs.verify[len(tree)]
        budget.learn(policy, verdict.tokens, len(tree), UNIT * verifying, 0.0)
        return len(verdict.tokens), verifying + drafting

    def _grown(self, here: Recorded, policy: Round) -> tuple[DraftTree, float]:
        cost = 0.0

        def expand(nodes: Sequence[int], pool: Candidates) -> list[Children]:
            nonlocal cost
            spent = self.costs.draft(len(nodes))
            cost += spent
            policy.drafted(len(nodes), UNIT * spent)
            return [here.children(_path(pool, node)) for node in nodes]

        return grow(expand, policy), cost


def _path(pool: Candidates, node: int) -> list[int]:
    """Tokens from the root to a node."""
    tokens = []
    while node != ROOT:
        tokens.append(pool.tokens[node])
        node = pool.parents[node]
    return tokens[::-1]
