"""From samples to a table: medians over repeats, ratios against plain decoding of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .run import Sample


@dataclass(frozen=True)
class Row:
    """One contender at one temperature.

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


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row per temperature and contender, in the order of the run.  Needs a contender named "plain"."""
    keys = dict.fromkeys((s.temperature, s.contender) for s in samples)
    return [_row(samples, temperature, contender) for temperature, contender in keys]


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
    lines = [
        "| temperature | contender | tau | tokens/s (low-high) | against plain | outside llama.cpp |",
        "|---|---|---|---|---|---|",
    ]
    for row in table:
        other = "" if row.other_share is None else f"{row.other_share:.1%}"
        speed = f"{row.tokens_per_second:.1f} ({row.low:.1f}-{row.high:.1f})"
        cells = [f"{row.temperature:g}", row.contender, f"{row.acceptance_length:.2f}", speed, f"{row.speed_up:.2f}x"]
        lines.append(f"| {' | '.join([*cells, other])} |")
    return "\n".join(lines)


def as_dicts(table: Sequence[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in table]
