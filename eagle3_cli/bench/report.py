"""From samples to a table: medians over repeats, ratios against plain decoding of the same run."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest

from ..engine.types import SOURCES
from ..settings import TreeShape
from .run import Sample

WIDTH = 118  # columns of prose


@dataclass(frozen=True)
class DepthCount:
    """Rounds whose walk stood right above this depth with children to match, and those of them that matched one.

    depth   1 for children of the root
    """

    depth: int
    accepted: int
    tried: int

    @property
    def rate(self) -> float | None:
        return self.accepted / self.tried if self.tried else None


@dataclass(frozen=True)
class Row:
    """One contender at one temperature.

    task                of the prompts; None: all prompts of the run
    tokens_per_second   median over repeats of (tokens / seconds over all prompts); low and high are the extremes
    speed_up            median over repeats of that rate / plain's rate in the same repeat
    acceptance_length   tau: emitted tokens per round, over all repeats; the first token of an answer has no round
    other_share         share of decode time outside llama.cpp calls, None where it is not known
    drafter_share       the same of passes of the drafter
    shape               the tree of every round; None where it is chosen, or where there is none
    accepted_by_depth   depths 1, 2, 3, ...; empty where nothing was drafted or the counts are not known
    sources             drafter, lookup or both -> nodes that they "drafted" and that were "accepted"; only those that
                        drafted any
    rounds, draft_rounds   passes of the target after the first token, and those that asked the drafter
    rounds_by_nodes     nodes of a tree -> rounds with such a tree
    """

    contender: str
    temperature: float
    tokens_per_second: float
    low: float
    high: float
    speed_up: float
    acceptance_length: float
    other_share: float | None
    task: str | None = None
    drafter_share: float | None = None
    shape: TreeShape | None = None
    accepted_by_depth: tuple[DepthCount, ...] = ()
    sources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rounds: int = 0
    draft_rounds: int = 0
    rounds_by_nodes: Mapping[int, int] = field(default_factory=dict)

    @property
    def n_alpha(self) -> tuple[float | None, ...] | None:
        """Of a chain: acceptance after n = 0, 1, 2, ... estimated features; None for other trees and without counts.

        Depth n + 1 of a chain rests on the root's feature, which is exact, and on n that the drafter estimated.  So
        n-alpha is the acceptance at depth n + 1 given that the walk stood at depth n: the positions that a round
        reaches, not all positions of a text.
        """
        if self.shape is None or self.shape.width != 1 or not self.accepted_by_depth:
            return None
        return tuple(count.rate for count in self.accepted_by_depth)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row per temperature and contender, in the order of the run.  Needs a contender named "plain"."""
    keys = dict.fromkeys((s.temperature, s.contender) for s in samples)
    return [_row(samples, temperature, contender) for temperature, contender in keys]


def by_task(samples: Sequence[Sample]) -> list[Row]:
    """One row per temperature, task and contender, in the order of the run.  A task is left out at a temperature where
    some contender has no rate in some repeat, because all of its answers there are one token or none."""
    found = []
    for temperature, task in dict.fromkeys((s.temperature, s.task) for s in samples):
        mine = [s for s in samples if s.temperature == temperature and s.task == task]
        contenders = dict.fromkeys(s.contender for s in mine)
        rates = [rate for name in contenders for rate in _rates([s for s in mine if s.contender == name]).values()]
        if min(rates) > 0:
            found += [replace(_row(mine, temperature, contender), task=task) for contender in contenders]
    return found


def geometric_mean(table: Sequence[Row]) -> dict[float, dict[str, float]]:
    """Temperature -> contender -> geometric mean of the speed-ups in its rows: one per task, as of `by_task`."""
    means: dict[float, dict[str, float]] = {}
    for temperature, contender in dict.fromkeys((row.temperature, row.contender) for row in table):
        ratios = [row.speed_up for row in table if (row.temperature, row.contender) == (temperature, contender)]
        means.setdefault(temperature, {})[contender] = statistics.geometric_mean(ratios)
    return means


def _row(samples: Sequence[Sample], temperature: float, contender: str) -> Row:
    mine = [s for s in samples if s.temperature == temperature and s.contender == contender]
    rates = _rates(mine)
    plain = _rates([s for s in samples if s.temperature == temperature and s.contender == "plain"])
    rounds = sum(s.rounds for s in mine)
    seconds = sum(s.seconds for s in mine)
    other = [s.other_s for s in mine if s.other_s is not None]
    drafter = [s.drafter_s for s in mine if s.drafter_s is not None]
    return Row(
        contender=contender,
        temperature=temperature,
        tokens_per_second=statistics.median(rates.values()),
        low=min(rates.values()),
        high=max(rates.values()),
        speed_up=statistics.median(rates[repeat] / plain[repeat] for repeat in rates),
        acceptance_length=sum(len(s.tokens) - 1 for s in mine) / rounds if rounds else 1.0,
        other_share=sum(other) / seconds if other else None,
        drafter_share=sum(drafter) / seconds if drafter else None,
        shape=mine[0].shape,
        accepted_by_depth=_by_depth(mine),
        sources=_sources(mine),
        rounds=rounds,
        draft_rounds=sum(s.draft_rounds for s in mine),
        rounds_by_nodes=dict(sorted(_sum(s.sizes for s in mine).items())),
    )


def _by_depth(samples: Sequence[Sample]) -> tuple[DepthCount, ...]:
    """Up to the deepest depth where anything was tried."""
    tried, accepted = (
        [sum(of_depth) for of_depth in zip_longest(*counts, fillvalue=0)]
        for counts in ([s.depth_tried for s in samples], [s.depth_accepted for s in samples])
    )
    while tried and not tried[-1]:
        tried.pop()
    return tuple(DepthCount(d + 1, accepted[d], tried[d]) for d in range(len(tried)))


def _sources(samples: Sequence[Sample]) -> dict[str, dict[str, int]]:
    drafted, accepted = _sum(s.drafted_from for s in samples), _sum(s.accepted_from for s in samples)
    return {
        name: {"drafted": drafted[source], "accepted": accepted[source]}
        for source, name in SOURCES.items()
        if drafted[source]
    }


def _sum(counts: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for mapping in counts:
        total.update(mapping)
    return total


def _rates(samples: Sequence[Sample]) -> dict[int, float]:
    """Repeat -> tokens per second over all of its prompts."""
    repeats = dict.fromkeys(s.repeat for s in samples)
    return {r: _rate([s for s in samples if s.repeat == r]) for r in repeats}


def _rate(samples: Sequence[Sample]) -> float:
    return sum(len(s.tokens) - 1 for s in samples) / max(sum(s.seconds for s in samples), 1e-9)


def as_markdown(table: Sequence[Row]) -> str:
    """A table, with a column for the task where rows have one.  The last two columns are shares of decode time."""
    tasks = any(row.task is not None for row in table)
    columns = "temperature | contender | tau | tokens/s (low-high) | against plain | drafter | outside llama.cpp |"
    lines = [f"|{' task |' * tasks} {columns}", f"|{'---|' * (7 + tasks)}"]
    for row in table:
        shares = ["" if share is None else f"{share:.1%}" for share in (row.drafter_share, row.other_share)]
        speed = f"{row.tokens_per_second:.1f} ({row.low:.1f}-{row.high:.1f})"
        cells = [f"{row.temperature:g}", row.contender, f"{row.acceptance_length:.2f}", speed, f"{row.speed_up:.2f}x"]
        lines.append(f"| {' | '.join([*([row.task or ''] * tasks), *cells, *shares])} |")
    return "\n".join(lines)


def in_words(means: Mapping[float, Mapping[str, float]], fixed: Collection[str]) -> str:
    """Whether speculation pays, and in hindsight how good the chosen trees were, a line per temperature.

    means   speed-ups by contender, as of `geometric_mean`
    fixed   names of the contenders with a fixed tree
    """
    lines = []
    for temperature, ratios in means.items():
        others = {name: ratio for name, ratio in ratios.items() if name in fixed}
        said = []
        if "auto" in ratios:
            said.append(f"auto decodes {ratios['auto']:.2f} times as fast as plain decoding")
        if others:
            best = max(others, key=lambda name: others[name])
            said.append(f"the best fixed setting is {best} with {others[best]:.2f}")
            if others[best] < 1.0:
                said[-1] += ", so speculation loses at every fixed setting"
            if "auto" in ratios:
                said.append(f"auto / best fixed: {ratios['auto'] / others[best]:.2f}")
        if said:
            line = f"temperature {temperature:g}: {'; '.join(said)}."
            lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def means_as_markdown(means: Mapping[float, Mapping[str, float]]) -> str:
    """A table of what `geometric_mean` returns."""
    lines = ["| temperature | contender | against plain, geometric mean over tasks |", "|---|---|---|"]
    for temperature, ratios in means.items():
        lines += [f"| {temperature:g} | {contender} | {ratio:.2f}x |" for contender, ratio in ratios.items()]
    return "\n".join(lines)


def as_dicts(table: Sequence[Row]) -> list[dict[str, object]]:
    """For JSON: the fields of each row, and its `n_alpha`."""
    return [{**asdict(row), "n_alpha": row.n_alpha} for row in table]
