"""How much to draft: the tree that promises the most emitted tokens per second, round by round.  Pure.

A node's value is the estimated probability that the walk reaches and accepts it.  A round that verifies n nodes emits
1 + the sum of their values, and costs the drafter's passes so far, one pass of the target over n + 1 rows, and what a
round costs besides.  All costs are in passes of the target over one row, so plain decoding, which costs next to nothing
besides, has rate 1, and drafting has to promise `MARGIN` times that.

    cut     n maximises the rate over the candidates, best first
    grow    another level is drafted if the nodes that it can be expected to add raise the best rate
    skip    while the rounds in which the drafter was asked did not pay, it is asked only now and then, so seldom that
            `LOSS` is the share of plain decoding's time that it costs at most

Everything that this needs is learned from the rounds themselves (costs.py, calibration.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..settings import TreeShape
from .calibration import FAINT, LENGTHS, Calibration
from .costs import WIDEST, Curve, Points
from .hindsight import Hindsight
from .lookup import Match
from .threads import Threads
from .tree import ROOT, Candidates

RECENT = 0.05  # share of a new round in what drafting is worth ...
RECENT_PAUSED = 0.2  # ... of one that was drafted after a pause
MARGIN = 1.05  # speculation has to promise so much more than plain decoding: the best of many estimates is a lucky one
MARGIN_ALONE = 1.1  # n-gram matches without a draft, for which no account of losses is kept
LOSS = 0.006  # of plain decoding's time that asking the drafter in vain may cost
HOPELESS = 0.85  # gain below which less is risked
LONGEST_PAUSE = 2048  # plain tokens between two drafted rounds
HOPE_EVERY = 24  # rounds until one is chosen as if unmeasured widths were cheap; doubles each time
PLAIN_FIRST = 4  # drafted rounds after which one row is measured again, so that its cost stays known; ...
PLAIN_EVERY = 64  # ... doubled each time, up to so many
PLAIN_WANTED = 16  # rounds after which one of the first plain rounds after a tree will do for that
WIDTHS = (1, 2, 3, 4, 6, 8, 10)  # rows of a level that are weighed against each other
GIVE_UP = 2  # of them that may be no better than the best before
AHEAD = 3  # levels that are looked ahead
BRANCHES = 3  # children of a node that are foreseen
MOST_BANDS = 12  # that a file may know
BAND = 2048  # tokens of context up to which costs are learned together; the next bands end at 4 and 16 times as many
RESTS = 63  # plain rounds after a plain one in a pause, in which nothing is weighed and learned
USUAL_ROWS = 16  # of a pass of the drafter; more come after a prompt or a pause
REMEMBERED = 8  # newest tokens whose hidden states are captured for the draft after a pause
UNSETTLED = 5  # plain rounds after a tree that take longer than those behind them
EXCESS = 0.1  # share of a new one in what these take longer, in the long run
CAPTURE = 0.02  # of a pass of the target over one row is what capturing its hidden states costs


@dataclass
class Worth:
    """Whether drafting pays, from the rounds that were drafted.

    tokens, cost   of recent ones, on average, with a drafter that has not fallen behind
    lost           by one of them, against plain decoding, what it had to catch up with included
    plain          tokens since the drafter was asked
    """

    tokens: float = 0.0
    cost: float = 0.0
    lost: float = 0.0
    plain: int = 0

    @property
    def gain(self) -> float | None:
        """Tokens per cost, which is 1 in plain decoding; None before the first drafted round."""
        return self.tokens / self.cost if self.cost else None

    @property
    def pause(self) -> int:
        """Plain tokens between two drafted rounds: as many as keep the loss of asking in vain within `LOSS`, and more
        where drafting is far from paying."""
        gain = self.gain
        if gain is None or gain >= MARGIN:
            return 0
        loss = LOSS * min(gain / HOPELESS, 1.0) ** 3
        return min(math.ceil((self.lost + REMEMBERED * CAPTURE) / loss), LONGEST_PAUSE)

    def learn(self, tokens: float, cost: float, lost: float) -> None:
        """A drafted round that was worth so many tokens, at such a cost, and lost so much."""
        share = 1.0 if not self.cost else RECENT_PAUSED if self.plain > 1 else RECENT
        self.lost += max(share, RECENT_PAUSED) * (lost - self.lost)
        self.tokens += share * (tokens - self.tokens)
        self.cost += share * (cost - self.cost)
        self.plain = 0

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "cost": self.cost, "lost": self.lost}

    def restore(self, kept: Any) -> None:
        tokens, cost, lost = (float(kept[name]) for name in ("tokens", "cost", "lost"))
        nothing = tokens == cost == 0  # yet; else a round emits a token or more, and costs a pass or more
        if not ((nothing or (0.5 < tokens < 1000 and 0.5 < cost < 1000)) and abs(lost) < 1000):
            raise ValueError("worth out of range")
        self.tokens, self.cost, self.lost = tokens, cost, lost


class Machine:
    """What was learned about a pair on a machine.

    target, drafter   costs of their batches, at the length of context that `at` was told last
    threads           of the drafter
    besides           what a round in which something is weighed costs outside both models, in passes of the target over
                      one row
    after_tree        (excess, observations) of the first plain rounds after a tree: what they cost more than those
                      behind them, in the same unit.  llama.cpp builds another graph for the first one, and the caches
                      of the processor take several to hold the right data again
    """

    def __init__(self, target: Points, drafter: Points, threads: int = 0) -> None:
        """Priors of both curves, and the most threads that the drafter can have; 0: it has what it has."""
        self._priors, self._most_threads = (target, drafter), threads
        self.forget()

    def forget(self) -> None:
        self._curves = {0: self._new_curves()}
        self.target, self.drafter = self._curves[0]
        self.threads = Threads(self._most_threads)
        self.besides = 0.02
        self.after_tree = [(0.0, 2.0)] * UNSETTLED
        self._calibrations: dict[str, Calibration] = {}
        self._worths: dict[str, Worth] = {}

    def _new_curves(self) -> tuple[Curve, Curve]:
        target, drafter = self._priors
        return Curve(target), Curve(drafter)

    def at(self, context: int) -> None:
        """Costs are those of so many tokens of context.  A band that was never entered starts from the one below."""
        band = 0
        while context >= BAND << 2 * band:
            band += 1
        if band not in self._curves:
            self._curves[band] = self._new_curves()
            known = self._curves[max(b for b in self._curves if b < band)]
            for curve, other in zip(self._curves[band], known, strict=True):
                curve.restore(other.as_dict())
        self.target, self.drafter = self._curves[band]

    def calibration(self, temperature_class: str) -> Calibration:
        return self._calibrations.setdefault(temperature_class, Calibration())

    def worth(self, temperature_class: str) -> Worth:
        """Whether drafting has been paying."""
        return self._worths.setdefault(temperature_class, Worth())

    def as_dict(self) -> dict[str, Any]:
        return {
            "costs": {
                str(band): {"target": target.as_dict(), "drafter": drafter.as_dict()}
                for band, (target, drafter) in self._curves.items()
            },
            "threads": self.threads.as_dict(),
            "besides": self.besides,
            "after_tree": [list(excess) for excess in self.after_tree],
            "calibrations": {name: c.as_dict() for name, c in self._calibrations.items()},
            "worths": {name: w.as_dict() for name, w in self._worths.items()},
        }

    def restore(self, kept: Any) -> None:
        """What `as_dict` gave.  KeyError, TypeError, ValueError or AttributeError for anything else."""
        for band, costs in kept["costs"].items():
            target, drafter = self._curves.setdefault(int(band), self._new_curves())
            target.restore(costs["target"])
            drafter.restore(costs["drafter"])
        if min(self._curves) < 0 or max(self._curves) > MOST_BANDS:
            raise ValueError("context out of range")
        self.threads.restore(kept["threads"])
        besides, after_tree = float(kept["besides"]), [(float(excess), float(n)) for excess, n in kept["after_tree"]]
        if not (0 <= besides < 10 and all(abs(excess) < 10 and n > 0 for excess, n in after_tree)):
            raise ValueError("costs out of range")
        if len(after_tree) != UNSETTLED:
            raise ValueError(f"expected {UNSETTLED} rounds after a tree, got {len(after_tree)}")
        self.besides, self.after_tree = besides, after_tree
        for name, value in kept["calibrations"].items():
            self.calibration(name).restore(value)
        for name, value in kept["worths"].items():
            self.worth(name).restore(value)


class Budget:
    """Decides for one answer at a time; what it learns goes into a `Machine`.

    can_draft   whether there is a drafter
    resting     so many rounds to come are plain unless an n-gram match is `long_enough`: on a small target, weighing
                what cannot pay costs a share of the time, and a few rounds say what all cost
    """

    def __init__(self, machine: Machine, can_draft: bool = True, temperature_class: str = "0") -> None:
        self.machine, self.can_draft = machine, can_draft
        self.kept = [0.7, 0.12, 0.04]  # of a node's value in its best child's, the next one's, ...
        self._since_plain = self._since_hope = 0  # rounds since one row was measured; since a hopeful one
        self._plain_share = 1.0  # of recent rounds
        self._hope_every, self._plain_every = HOPE_EVERY, PLAIN_FIRST
        self.hindsight = Hindsight()
        self._rested = 0
        self._calibration = machine.calibration(temperature_class)
        self._long_enough: float | None = None
        self.begin(temperature_class)

    def begin(self, temperature_class: str, context: int = 0) -> None:
        """Another answer, behind so many tokens of prompt.  In the middle of a pause its first rounds rest, too."""
        machine, before = self.machine, self._calibration
        machine.at(context)
        self._calibration, self._worth = machine.calibration(temperature_class), machine.worth(temperature_class)
        if self._calibration.begin() or self._calibration is not before:
            self._long_enough = None
        self._settling, self._by_tree = 0, False  # plain rounds since a tree, or since the prompt
        self.resting = 0
        if machine.target.knows_one_row:
            self._rest_in_pause()

    def _rest_in_pause(self) -> None:
        self.resting = max(int(min(RESTS, self._pause_left() - REMEMBERED)), 0)

    # ---- costs, in passes of the target over one row

    def verify_cost(self, nodes: int) -> float:
        return self.machine.target.costs[nodes + 1] + self.machine.besides + (self.tree_cost if nodes else 0.0)

    @property
    def tree_cost(self) -> float:
        """What any tree costs in the rounds after it, which are plain as often as rounds have been."""
        cost, share = 0.0, 1.0
        for excess, _ in self.machine.after_tree:
            share *= self._plain_share
            cost += share * excess
        return max(cost, 0.0)

    def _learn_cost(self, nodes: int, seconds: float) -> None:
        self._since_plain += 1
        self._count_round(nodes == 0)
        if nodes:
            self._settling, self._by_tree = 0, True
            self._learn_seconds(nodes + 1, seconds)
        else:
            self._learn_plain(seconds)

    def _count_round(self, plain: bool) -> None:
        self._plain_share += 0.05 * (plain - self._plain_share)

    def _learn_plain(self, seconds: float) -> None:
        """A pass over one row took so long.  The first ones after a tree say what it costs later, those after a prompt
        nothing, but where one row was not measured for long they have to do."""
        machine, at = self.machine, self._settling
        self._settling += 1
        excess, n = machine.after_tree[at] if at < UNSETTLED else (0.0, 0.0)
        known = machine.target.knows_one_row
        if at < (1 if self._since_plain > PLAIN_WANTED else UNSETTLED) and known:
            if self._by_tree:
                found = min(max(seconds / machine.target.seconds - 1.0, -0.5), 1.5)
                machine.after_tree[at] = (excess + max(1 / (n + 1), EXCESS) * (found - excess), n + 1)
            return
        self._learn_seconds(1, seconds / (1.0 + excess) if known else seconds)
        if self._since_plain > self._plain_every:
            self._plain_every = min(2 * self._plain_every, PLAIN_EVERY)
        self._since_plain = 0

    def _learn_seconds(self, rows: int, seconds: float) -> None:
        """Where trees are the rule, a plain pass says what they cost in passes of one row, and so what drafting is
        worth; without that a curve could take the cheapest tree for one row, and go on with it."""
        moved = self.machine.target.learn(rows, seconds, fresh=rows == 1 and self._plain_share < 0.5)
        self._worth.cost *= math.exp(-moved)

    def draft_cost(self, rows: int) -> float:
        """Of one pass of the drafter."""
        target, drafter = self.machine.target, self.machine.drafter
        if target.level is None or drafter.level is None:
            return 0.1 * drafter.costs[rows]
        return drafter.costs[rows] * math.exp(drafter.level - target.level)

    # ---- one round

    def round(
        self,
        limit: TreeShape,
        matches: Sequence[Match] = (),
        ready: bool = True,
        context: int = 0,
        chain: bool = False,
    ) -> Round:
        """The next round.

        limit: most that there is room for.  ready: the drafter can be asked.  context: tokens so far.  chain: the tree
        must not branch, so it is drafted or taken from the only match.
        """
        self.machine.at(context)
        if self._since_plain >= self._plain_every or not self.machine.target.knows_one_row:
            limit, matches = TreeShape(1, 1, 0), ()
        left = self._pause_left()
        asks = ready and limit.nodes > 0 and left <= 0
        made = Round(self, limit, matches, asks, left <= REMEMBERED)
        if matches and asks:
            rate, nodes, _ = made.best_rate()
            gain = self.gain
            if nodes and gain is not None and rate > gain:
                made.asks = False  # what was found for nothing is better than what drafting gives
            elif chain:
                made = Round(self, limit, (), asks, made.captures)
        if made.asks:
            made.threads = self.machine.threads.choose()
        return made

    @property
    def hopes(self) -> bool:
        """Whether this round is one of those that try what was never measured."""
        return self._since_hope >= self._hope_every

    @property
    def expects(self) -> bool:
        """Whether a draft will come so soon that the target's hidden states are wanted now."""
        return self._pause_left() <= REMEMBERED

    def _pause_left(self) -> float:
        """Plain tokens until the drafter may be asked again."""
        return self._worth.pause - self._worth.plain if self.can_draft else math.inf

    def horizon(self, match: Match) -> int:
        """How many tokens of a match are worth weighing; at least the first, to learn from."""
        return max(self._calibration.horizon(match), 1)

    @property
    def long_enough(self) -> float:
        """Tokens of the shortest n-gram match that may pay alone; infinity where none does."""
        if self._long_enough is None:
            self._long_enough = self._shortest_that_pays()
        return self._long_enough

    def _shortest_that_pays(self) -> float:
        costs, calibration = self.machine.target.costs, self._calibration
        fixed = self.machine.besides + self.tree_cost
        for length in LENGTHS:
            value = tokens = 1.0
            for nodes in range(1, WIDEST):
                value *= calibration.looked_up(length + nodes - 1)
                if value < FAINT:
                    break
                tokens += value
                if tokens / (costs[nodes + 1] + fixed) > MARGIN_ALONE:
                    return length
        return math.inf

    def evaluate(self, pool: Candidates) -> list[float]:
        """Of each candidate the estimated probability that it is accepted given that the walk stands at its parent."""
        calibration = self._calibration
        rates = []
        for depth, logp, agreeing, rank in zip(pool.depths, pool.drafted, pool.matched, pool.ranks, strict=True):
            if logp is None:
                rates.append(calibration.looked_up(agreeing, rank))
            elif agreeing:
                rates.append(calibration.both(logp))
            else:
                rates.append(calibration.drafted(depth, logp))
        return rates

    def foresee(self, rates: Sequence[float]) -> None:
        """Take note of the children of one node, by estimated acceptance."""
        best = sorted(rates, reverse=True)[:BRANCHES]
        for i, rate in enumerate(best):
            self.kept[i] += 0.05 * (rate - self.kept[i])

    def learn(self, made: Round, tokens: Sequence[int], nodes: int, seconds: float, besides: float) -> None:
        """What a round emitted and cost.

        tokens   of the walk over its tree of so many nodes
        seconds  of the pass of the target; besides: of the rest, outside both models and the samplers
        """
        target = self.machine.target
        self._learn_cost(nodes, seconds)
        if target.level is not None:
            self.machine.besides += 0.05 * (min(besides / target.seconds, 2.0) - self.machine.besides)
        if made.pool:
            self._learn_acceptance(made.pool, tokens)
            self._long_enough = None
        if made.trial is not None:
            change = self.machine.threads.learn(made.threads, made.trial)
            if change is not None and self.machine.drafter.level is not None:
                self.machine.drafter.level += change
        hoped, cost = self.hopes, self.verify_cost(nodes)
        rested, self._rested = self._rested, 0
        self.hindsight.learn(rested + len(tokens), rested + made.measured + cost)
        if made.asks:
            self.hindsight.learn_ranks(tokens, made.pool)
        self._since_hope += 1
        if hoped:
            self._since_hope, self._hope_every = 0, 2 * self._hope_every
        elif made.asks:
            took = made.measured + (seconds + besides) / target.seconds  # cold code and caches with it
            lost = took - made.expected
            self._worth.learn(made.expected, made.spent + cost, max(lost, LOSS))
        else:
            self._worth.plain += len(tokens)
            if not (nodes or made.captures):
                self._rest_in_pause()

    def rest(self, tokens: int, seconds: float) -> None:
        """A round was plain because of `resting`.  seconds: of its pass of the target."""
        self.resting -= 1
        self._count_round(plain=True)
        if self._settling <= UNSETTLED:
            self._learn_plain(seconds)
        self._worth.plain += tokens
        self._rested += tokens

    def _learn_acceptance(self, pool: Candidates, tokens: Sequence[int]) -> None:
        """Of all candidates whose parent the walk reached."""
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(pool.parents):
            children.setdefault(parent, []).append(i)
        node = ROOT
        for token in tokens:
            for child in children.get(node, ()):
                hit = pool.tokens[child] == token
                self._calibration.learn(
                    pool.depths[child], pool.drafted[child], pool.matched[child], hit, pool.ranks[child]
                )
            found = pool.child(node, token)
            if found is None:
                break
            node = found

    def report(self) -> dict[str, object]:
        """What is known now, for JSON.  Costs are in passes of the target over one row, which take `plain_ms`."""
        target, drafter = self.machine.target, self.machine.drafter
        return {
            "plain_ms": 1e3 * target.seconds if target.seconds else None,
            "verify_cost": {str(n): round(target.costs[n], 3) for n in target.seen},
            "draft_threads": self.machine.threads.best,
            "draft_cost": {str(n): round(self.draft_cost(n), 3) for n in drafter.seen},
            "besides_cost": round(self.machine.besides, 3),
            "gain_of_drafting": self.gain,
            "plain_tokens_between_drafts": self._worth.pause,
            "hindsight": self._in_hindsight(),
        }

    def _in_hindsight(self) -> dict[str, object]:
        """What all rounds so far gained over plain decoding, and what the best fixed setting would have, estimated with
        the same costs."""
        name, best = self.hindsight.best(self.verify_cost, self.draft_cost)
        own = self.hindsight.tokens / self.hindsight.cost if self.hindsight.cost else None
        return {
            "best_fixed": name,
            "best_fixed_speed_up": best,
            "speed_up": own,
            "over_best_fixed": own and own / best,
        }

    @property
    def gain(self) -> float | None:
        """What drafting is worth now: its rate over plain decoding's."""
        return self._worth.gain


class Round:
    """The policy of one round's tree (see tree.py, `Policy`).

    asks      whether the drafter is to be asked
    threads   of the drafter's passes
    captures  whether the target's hidden states of this round are wanted
    spent     cost of the drafter's passes so far, as it usually is
    measured  the same, as it was
    expected  tokens that the chosen tree is expected to emit
    """

    def __init__(self, budget: Budget, limit: TreeShape, matches: Sequence[Match], asks: bool, captures: bool) -> None:
        self._budget, self.limit, self.asks, self.captures = budget, limit, asks, captures
        self.pool = Candidates()
        for match in matches:
            self.pool.add_match(match.tokens[: budget.horizon(match)], match.length, match.rank)
        self.spent = self.measured = 0.0
        self.expected = 1.0
        self.threads = budget.machine.threads.best
        self._usually = self._took = 0.0  # seconds of the drafter's passes
        target = budget.machine.target
        self._costs = target.hoped if budget.hopes else target.costs
        self._margin = MARGIN if asks else MARGIN_ALONE
        self._ranked: list[float] = []  # values, best first
        if matches:
            self._value()

    def _value(self) -> None:
        """Values of all candidates, from their rates."""
        pool, rates = self.pool, self._budget.evaluate(self.pool)
        values: list[float] = []
        for parent, rate in zip(pool.parents, rates, strict=True):
            values.append(rate if parent == ROOT else values[parent] * rate)
        pool.values = values
        self._ranked = sorted(values, reverse=True)
        self._rates = rates

    def best_rate(self) -> tuple[float, int, float]:
        """(tokens per cost, nodes, tokens) of the best cut of the candidates."""
        return self._best(self._ranked, self.spent)

    def _best(self, ranked: Sequence[float], spent: float) -> tuple[float, int, float]:
        costs, fixed = self._costs, spent + self._budget.machine.besides
        best, size, most, tokens = self._margin / (costs[1] + fixed), 0, 1.0, 1.0
        fixed += self._budget.tree_cost
        for n, value in enumerate(ranked[: self.limit.nodes], start=1):
            tokens += value
            rate = tokens / (costs[n + 1] + fixed)
            if rate > best:
                best, size, most = rate, n, tokens
        return best, size, most

    def drafted(self, rows: int, seconds: float) -> None:
        """Costs are taken from the curve, not from this pass: one slow pass says nothing about the next level.  A pass
        that catches up with much text is not a round's usual cost."""
        budget = self._budget
        self.spent += budget.draft_cost(rows if rows <= USUAL_ROWS else 1)
        drafter = budget.machine.drafter
        if self.threads == budget.machine.threads.best and rows <= USUAL_ROWS:
            drafter.learn(rows, seconds)
        self._usually += drafter.seconds * drafter.costs[min(rows, WIDEST)]
        self._took += seconds
        self.measured += seconds / budget.machine.target.seconds if budget.machine.target.seconds else 0.0

    @property
    def trial(self) -> float | None:
        """Natural log of what the drafter's passes took over what they usually take, if they had another number of
        threads than usual."""
        if self.threads == self._budget.machine.threads.best or not (self._usually > 0 and self._took > 0):
            return None
        return math.log(self._took / self._usually)

    def frontier(self, level: Sequence[int], depth: int) -> Sequence[int]:
        self._value()
        pool = self.pool
        for parent in {pool.parents[i] for i in level}:
            self._budget.foresee([self._rates[i] for i in level if pool.parents[i] == parent])
        if depth >= self.limit.depth or not level:
            return ()
        by_value = sorted(level, key=lambda i: -pool.values[i])
        rows = self._rows_that_pay([pool.values[i] for i in by_value[: self.limit.width]], self.limit.depth - depth)
        return sorted(by_value[:rows])

    def _rows_that_pay(self, values: Sequence[float], levels: int) -> int:
        """How many of the newest level's nodes are worth expanding; 0: none.  values: theirs, best first."""
        budget, best, rows = self._budget, self.best_rate()[0], 0
        first, *others = budget.kept
        rows_tried = 0
        for tried, width in enumerate(w for w in WIDTHS if w <= len(values)):
            if tried >= rows_tried + GIVE_UP:
                break
            spent, ranked, leading = self.spent, list(self._ranked), list(values[:width])
            for _ in range(min(AHEAD, levels)):
                spent += budget.draft_cost(width)
                ranked += [value * share for value in leading for share in others]
                leading = [value * first for value in leading]
                ranked += leading
                ranked.sort(reverse=True)
                rate = self._best(ranked, spent)[0]
                if rate > best:
                    best, rows, rows_tried = rate, width, tried
        return rows

    def size(self) -> int:
        if not self.pool:
            return 0
        _, nodes, self.expected = self.best_rate()
        return nodes
