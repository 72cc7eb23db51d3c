"""How near `auto` comes to the best: to a policy that knows which proposed tokens are right, and to one that knows how
often they are.

    python benchmarks/ceiling.py bf16.gguf --costs-of widened-bf16.gguf --prompts-per-task 10

At every token of plain decoding's answers the drafter grows the largest tree, and n-gram matches are looked for.  How
far each goes on as the answer did is what an oracle would verify there, and nothing else: k proposed tokens cost one
pass over k + 1 rows and, unless they are a match, k passes of the drafter over one row.  Which rounds to make of that
is solved exactly, from the end of the answer.  What a round costs besides, and the rounds after a tree, count for
nothing.  No policy that proposes from the same two sources can be faster with these costs; a real one does not know the
answer.

The second policy knows no more of a token than `auto` does: the drafter's probability, its depth, how much of the text
a match agrees with.  But for each class of these it knows beforehand how often such tokens came true in this very task,
and what everything costs; it chooses the nodes that promise most at a rate that is the best of many tried.  `auto` has
to learn all that while it decodes; its own column replays the same answers with the same costs (replay.py), when it has
seen all of them once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from replay import Costs, Recorded, Replay, in_rounds
from script import exit_code

from eagle3_cli.bench.prompts import NAMES, TASKS
from eagle3_cli.console import Console
from eagle3_cli.demo import demo_drafter
from eagle3_cli.engine import Engine, load_engine
from eagle3_cli.engine.calibration import DEPTHS, LOWEST, class_of, logit
from eagle3_cli.engine.lookup import Lookup, Match, common_length
from eagle3_cli.engine.sampler import Sampler, with_seed
from eagle3_cli.engine.tree import ROOT, Candidates, FixedShape
from eagle3_cli.engine.types import NO_TREE, DraftTree
from eagle3_cli.engine.verify import verify
from eagle3_cli.settings import PairSettings, RuntimeSettings, SamplingSettings, TreeShape, check_range

LARGEST = TreeShape(8, 10, 60)
LONGEST_MATCH = 32
TIMES = 7  # that a width is measured
WIDE = 6  # rows of a drafter's level whose cost is measured
TEMPERATURES = (0.0, 1.0)
COLUMNS = ("task", "temperature", "foretold by the tree", "by a match", "auto", "with known rates", "at most")
NO_TOKEN = -1  # that no tree proposes
RATES = [0.9 + 0.02 * i for i in range(100)]  # tokens per pass that a round is measured against, all of them tried

Kind = tuple[object, ...]
"""All that is known of a proposed token before it is verified: where it comes from, and a class of its probability."""


@dataclass(frozen=True)
class Node:
    """A proposed token, behind its parent in the list.

    parent   its index, or ROOT
    depth    1 for a child of the root; 0 where a match proposes it, so that no pass of the drafter is needed
    came     whether the answer went there
    """

    parent: int
    depth: int
    kind: Kind
    came: bool


@dataclass(frozen=True)
class Position:
    """How many tokens behind this one the drafter's tree, and the best n-gram match, foretold; all proposals of both;
    and the same as the budget sees it."""

    drafted: int
    matched: int
    nodes: Sequence[Node] = ()
    recorded: Recorded | None = None


def fewest_passes(answer: Sequence[Position], costs: Costs) -> float:
    """Cost of the best rounds that emit one token for every position."""
    least = [0.0] * (len(answer) + 1)  # cost of emitting what is behind each position
    for at in range(len(answer) - 1, -1, -1):
        here, room = answer[at], len(answer) - at - 1
        options = [costs.verify[0] + least[at + 1]]
        for k in range(1, min(max(here.drafted, here.matched), room, len(costs.verify) - 1) + 1):
            drafting = 0.0 if k <= here.matched else k * costs.step
            options.append(costs.verify[k] + drafting + least[at + k + 1])
        least[at] = min(options)
    return least[0]


def came_true(answers: Sequence[Sequence[Position]]) -> dict[Kind, float]:
    """How often a proposal of a kind was right where the answer had come to its parent."""
    seen: dict[Kind, list[bool]] = {}
    for position in (each for answer in answers for each in answer):
        for node in position.nodes:
            if node.parent == ROOT or position.nodes[node.parent].came:
                seen.setdefault(node.kind, []).append(node.came)
    return {kind: statistics.mean(outcomes) for kind, outcomes in seen.items()}


class Option(NamedTuple):
    """A round: tokens that it promises, what it costs, and the tokens that it emits in fact."""

    promised: float
    cost: float
    emitted: int


def options(position: Position, rates: Mapping[Kind, float], costs: Costs) -> list[Option]:
    """The rounds that there are here, the plain one first."""
    nodes, values = position.nodes, list[float]()
    for node in nodes:
        values.append(rates.get(node.kind, 0.0) * (1.0 if node.parent == ROOT else values[node.parent]))
    order = sorted(range(len(nodes)), key=lambda i: -values[i])
    found = [Option(1.0, costs.verify[0], 1)]
    for depth in range(max((node.depth for node in nodes), default=0) + 1):
        promised, emitted = 1.0, 1
        taken = [i for i in order if nodes[i].depth <= depth][: len(costs.verify) - 1]
        for n, i in enumerate(taken, 1):
            promised, emitted = promised + values[i], emitted + nodes[i].came
            found.append(Option(promised, costs.verify[n] + depth * costs.step, emitted))
    return found


def best_round(there: Sequence[Option], against: float, room: int) -> tuple[int, float]:
    """Tokens that the most promising round emits, at most one more than there is room for, and what it costs.  A pass
    could emit so many tokens `against` it elsewhere."""
    best = max(there, key=lambda option: option.promised - against * option.cost)
    return min(best.emitted, room + 1), best.cost


def with_known_rates(answers: Sequence[Sequence[Position]], costs: Costs) -> float:
    """Speed-up over plain decoding."""
    rates, tokens = came_true(answers), sum(map(len, answers))
    there = [[options(position, rates, costs) for position in answer] for answer in answers]

    def passes(against: float) -> float:
        return sum(in_rounds(answer, lambda here, room: best_round(here, against, room)) for answer in there)

    return max(tokens / passes(against) for against in RATES)


def foretold(tree: DraftTree, future: Sequence[int]) -> int:
    """How many tokens of the future lie on a path of the tree."""
    tokens = iter(future)
    return len(verify(tree, lambda node: next(tokens, NO_TOKEN), lambda token: False).accepted)


def positions(engine: Engine, prompt: Sequence[int], sampling: SamplingSettings, most: int) -> list[Position]:
    """Of plain decoding's answer, without its first token, which belongs to the prompt."""
    decoder, drafter, target = engine.decoder, engine.decoder.drafter, engine.decoder.target
    assert drafter is not None
    decoder.truncate(0)
    decoder.prefill(prompt)
    sampler, lookup = Sampler(decoder.model, with_seed(sampling), prompt, decoder.cells), Lookup()
    lookup.extend(prompt)
    tokens: list[int] = []
    trees: list[DraftTree] = []
    matches: list[list[Match]] = []
    pools: list[Candidates] = []
    root = _draw(engine, sampler)
    while len(tokens) < most and not decoder.model.is_end(root):
        shape = FixedShape(LARGEST)
        trees.append(drafter.draft(root, shape))
        matches.append(lookup.find(root, LONGEST_MATCH))
        pools.append(shape.pool)
        lookup.extend([root])
        target.verify(root, NO_TREE)
        token = _draw(engine, sampler)
        decoder.commit([root], target.commit([]))
        tokens.append(token)
        root = token
    sampler.close()
    found = []
    for at, (tree, several, pool) in enumerate(zip(trees, matches, pools, strict=True)):
        agreeing = (common_length(match.tokens, tokens[at:]) for match in several)
        nodes = _nodes(pool, several, tokens[at:])
        recorded = Recorded(len(prompt) + at, pool, several, tokens[at:])
        found.append(Position(foretold(tree, tokens[at:]), max(agreeing, default=0), nodes, recorded))
    return found


def _nodes(pool: Candidates, matches: Sequence[Match], future: Sequence[int]) -> list[Node]:
    """What both sources propose, as the budget sees it."""
    for match in matches:
        pool.add_match(match.tokens, match.length, match.rank)
    nodes: list[Node] = []
    for i, (token, parent, depth) in enumerate(zip(pool.tokens, pool.parents, pool.depths, strict=True)):
        right = depth <= len(future) and token == future[depth - 1]
        logp, agreeing = pool.drafted[i], pool.matched[i]
        kind: Kind
        if logp is None:
            kind = ("match", pool.ranks[i], class_of(agreeing))
        else:
            kind = ("both",) if agreeing else ("drafter", min(depth, DEPTHS))
            kind += (max(round(logit(logp) - LOWEST), 0),)
        came = right and (parent == ROOT or nodes[parent].came)
        nodes.append(Node(parent, 0 if agreeing else depth, kind, came))
    return nodes


def _draw(engine: Engine, sampler: Sampler) -> int:
    target = engine.decoder.target
    return target.argmax(ROOT) if sampler.is_argmax else sampler.draw(target.context, target.logits_row(ROOT))


def measured(engine: Engine) -> Costs:
    """Medians; the drafter's step from chains, of which a longer one has more passes over one row, and its further rows
    from a second level of `WIDE`."""
    decoder, drafter = engine.decoder, engine.decoder.drafter
    assert drafter is not None
    decoder.prefill(list(range(100, 200)))
    root = 7
    seconds: list[list[float]] = [[] for _ in range(LONGEST_MATCH + 1)]
    for _ in range(TIMES):
        for k, taken in enumerate(seconds):
            tokens, parents, depths = range(20, 20 + k), range(-1, k - 1), range(1, k + 1)
            chain = DraftTree(tokens, parents, depths, [0.0] * k, [1] * k)
            began = time.perf_counter()
            decoder.target.verify(root, chain)
            taken.append(time.perf_counter() - began)
            decoder.truncate(len(decoder.committed))
    one = statistics.median(seconds[0])

    def drafting(shape: TreeShape) -> float:
        """Seconds of the drafter in growing a tree."""
        taken = []
        for _ in range(TIMES):
            decoder.prefill(list(range(100, 200)))
            before = drafter.seconds
            drafter.draft(root, FixedShape(shape))
            taken.append(drafter.seconds - before)
        return statistics.median(taken)

    step = (drafting(TreeShape(6, 1, 6)) - drafting(TreeShape(2, 1, 2))) / 4
    level = drafting(TreeShape(2, WIDE, LARGEST.nodes)) - drafting(TreeShape(1, 1, 1))
    verify_costs = [statistics.median(taken) / one for taken in seconds]
    return Costs(verify_costs, step / one, max(level - step, 0.0) / one / (WIDE - 1))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 bad input, 130 Ctrl-C."""
    console, args = Console(), _parser().parse_args(argv)
    return exit_code(console, lambda: _run(args, console))


def _run(args: argparse.Namespace, console: Console) -> None:
    check_range("--prompts-per-task", args.prompts_per_task, 1, min(len(TASKS[name]) for name in NAMES))
    check_range("--max-tokens", args.max_tokens, 2)
    for temperature in args.temp or ():
        check_range("--temp", temperature, 0)
    runtime = RuntimeSettings(ctx_size=1024, threads=args.threads)
    pair = PairSettings(args.target, args.draft, depth=LARGEST.depth, width=LARGEST.width, nodes=LARGEST.nodes)
    with load_engine(replace(pair, target=args.costs_of or args.target), runtime) as engine:
        costs = measured(engine)
    curve = ", ".join(f"{k + 1} rows {costs.verify[k]:.2f}" for k in (1, 2, 3, 4, 6, 8, 12, 16))
    console.text(f"Costs: {curve}; a drafter step {costs.step:.3f}, each further row {costs.wider:.3f}.\n\n")
    console.text(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n")
    with load_engine(pair, runtime) as engine:
        for temperature in args.temp or TEMPERATURES:
            answers = {name: _answers(engine, name, temperature, args) for name in NAMES}
            console.text("".join(_lines(answers, temperature, costs)))


def _answers(engine: Engine, name: str, temperature: float, args: argparse.Namespace) -> list[list[Position]]:
    """Plain decoding's, to the first prompts of a task."""
    answers = []
    for i, text in enumerate(TASKS[name][: args.prompts_per_task]):
        prompt = engine.render([{"role": "user", "content": text}])
        answers.append(positions(engine, prompt, SamplingSettings(temperature=temperature, seed=i), args.max_tokens))
    return answers


def _lines(answers: Mapping[str, list[list[Position]]], temperature: float, costs: Costs) -> list[str]:
    """Of the table: every task, and the means of what the policies gain over plain decoding."""
    auto = _replayed(answers, temperature, costs)
    lines, gains = [], []
    for name, several in answers.items():
        every = [each for answer in several for each in answer]
        most = len(every) / sum(fewest_passes(answer, costs) for answer in several)
        gains.append((auto[name], with_known_rates(several, costs), most))
        foretold_by = statistics.mean(p.drafted for p in every), statistics.mean(p.matched for p in every)
        lines.append(_line(name, temperature, [f"{number:.2f}" for number in foretold_by], gains[-1]))
    means = [statistics.geometric_mean(column) for column in zip(*gains, strict=True)]
    return [*lines, _line("all, mean", temperature, ["", ""], means)]


def _line(name: str, temperature: float, foretold_by: Sequence[str], gains: Sequence[float]) -> str:
    return f"| {' | '.join((name, f'{temperature:g}', *foretold_by, *(f'{gain:.2f}x' for gain in gains)))} |\n"


def _replayed(answers: Mapping[str, list[list[Position]]], temperature: float, costs: Costs) -> dict[str, float]:
    """What `auto` gains in each task, the second time that it sees them all."""
    replay, gains = Replay(costs, temperature, LARGEST), dict[str, float]()
    for _ in range(2):
        for name, several in answers.items():
            records = [[each.recorded for each in answer if each.recorded is not None] for answer in several]
            gains[name] = sum(map(len, records)) / sum(map(replay.answer, records))
    return gains


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", type=Path, metavar="GGUF", help="the model that answers")
    add("--draft", type=Path, default=demo_drafter(), metavar="GGUF", help="its drafter (default: the bundled one)")
    add("--costs-of", type=Path, metavar="GGUF", help="a target whose passes are measured instead, as a widened one")
    add("--prompts-per-task", type=int, default=10, metavar="N", help="of each of the five tasks (default: 10)")
    add("--temp", type=float, action="append", help="repeatable (default: 0 and 1)")
    add("-n", "--max-tokens", type=int, default=48, help="per answer (default: 48)")
    add("-t", "--threads", type=int, default=0, help="default: the physical cores")
    return parser


if __name__ == "__main__":
    sys.exit(main())
