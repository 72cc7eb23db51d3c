"""From samples to a table: medians over repeats, ratios against plain decoding of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from .run import Sample


@dataclass(frozen=True)
class Row:
    """One contender at one temperature.

    task                of the prompts; None: all prompts of the run
    tokens_per_second   median over repeats of (tokens / seconds over all prompts); low and high are the extremes
    speed_up            median over repeats of that rate / plain's rate in the same repeat
    acceptance_length   tau: emitted tokens per round, over all repeats; the first token of an answer has no round
    other_share         share of decode time outside llama.cpp calls, None where it is not known
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
    other = [s.other_s for s in mine if s.other_s is not None]
    return Row(
        contender=contender,
        temperature=temperature,
        tokens_per_second=statistics.median(rates.values()),
        low=min(rates.values()),
        high=max(rates.values()),
        speed_up=statistics.median(rates[repeat] / plain[repeat] for repeat in rates),
        acceptance_length=sum(len(s.tokens) - 1 for s in mine) / rounds if rounds else 1.0,
        other_share=sum(other) / sum(s.seconds for s in mine) if other else None,
    )


def _rates(samples: Sequence[Sample]) -> dict[int, float]:
    """Repeat -> tokens per second over all of its prompts."""
    repeats = dict.fromkeys(s.repeat for s in samples)
    return {r: _rate([s for s in samples if s.repeat == r]) for r in repeats}


def _rate(samples: Sequence[Sample]) -> float:
    return sum(len(s.tokens) - 1 for s in samples) / max(sum(s.seconds for s in samples), 1e-9)


def as_markdown(table: Sequence[Row]) -> str:
    """A table, with a column for the task where rows have one."""
    tasks = any(row.task is not None for row in table)
    columns = "temperature | contender | tau | tokens/s (low-high) | against plain | outside llama.cpp |"
    lines = [f"|{' task |' * tasks} {columns}", f"|{'---|' * (6 + tasks)}"]
    for row in table:
        other = "" if row.other_share is None else f"{row.other_share:.1%}"
        speed = f"{row.tokens_per_second:.1f} ({row.low:.1f}-{row.high:.1f})"
        cells = [f"{row.temperature:g}", row.contender, f"{row.acceptance_length:.2f}", speed, f"{row.speed_up:.2f}x"]
        lines.append(f"| {' | '.join([*([row.task or ''] * tasks), *cells, other])} |")
    return "\n".join(lines)


def in_words(means: Mapping[float, Mapping[str, float]]) -> str:
    """Whether speculation pays, a line per temperature, from speed-ups by contender."""
    lines = []
    for temperature, ratios in means.items():
        others = {name: ratio for name, ratio in ratios.items() if name not in ("plain", "auto")}
        line = f"temperature {temperature:g}:"
        if "auto" in ratios:
            line += f" auto decodes {ratios['auto']:.2f} times as fast as plain decoding;"
        if others:
            best = max(others, key=lambda name: others[name])
            line += f" the best fixed setting is {best} with {others[best]:.2f}"
            if others[best] < 1.0:
                line += ", so speculation loses at every fixed setting"
        lines.append(line.rstrip(";") + ".")
    return "\n".join(lines)


def means_as_markdown(means: Mapping[float, Mapping[str, float]]) -> str:
    """A table of what `geometric_mean` returns."""
    lines = ["| temperature | contender | against plain, geometric mean over tasks |", "|---|---|---|"]
    for temperature, ratios in means.items():
        lines += [f"| {temperature:g} | {contender} | {ratio:.2f}x |" for contender, ratio in ratios.items()]
    return "\n".join(lines)


def as_dicts(table: Sequence[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in table]
