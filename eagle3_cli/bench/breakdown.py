"""What a row of the table does not say: acceptance by depth, where tokens came from, what a pass costs by its width."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from .report import WIDTH, Row
from .run import Sample

DEEPEST = 9  # depths that a table has columns for; --json has all
FEW = 20  # a rate of fewer tries stands in brackets


@dataclass(frozen=True)
class Costs:
    """What the budget of `auto` knows at the end of a run, with what it learned in earlier ones.

    plain_ms   milliseconds of a pass of the target over one row
    verify     rows -> cost of a pass of the target, in passes of the target over one row; widths that were measured
    draft      rows -> cost of a pass of the drafter, in the same unit
    """

    plain_ms: float
    verify: Mapping[int, float]
    draft: Mapping[int, float]


def costs(samples: Sequence[Sample]) -> Costs | None:
    """Of the last sample that has a budget; None where there is none, or where it has measured nothing."""
    found = [s.budget for s in samples if s.budget is not None]
    if not found or found[-1]["plain_ms"] is None:
        return None
    verify, draft = (
        {int(rows): float(cost) for rows, cost in found[-1][name].items()} for name in ("verify_cost", "draft_cost")
    )
    return Costs(float(found[-1]["plain_ms"]), verify, draft)


def in_tables(table: Sequence[Row], learned: Costs | None) -> str:
    """All that is known beside the rows, a paragraph each; empty where nothing is.  table: rows over all prompts."""
    parts = [_depths(table), _n_alpha(table), _sources(table), _costs(learned) if learned else ""]
    return "\n\n".join(part for part in parts if part)


def as_dict(learned: Costs | None) -> dict[str, object] | None:
    return None if learned is None else asdict(learned)


def _depths(table: Sequence[Row]) -> str:
    title = "Acceptance by depth: rounds that matched a child there, of those whose walk stood right above it."
    return _by_columns(title, [row for row in table if row.accepted_by_depth], lambda d: f"{d + 1}")


def _n_alpha(table: Sequence[Row]) -> str:
    title = "n-alpha: acceptance in a chain after n features that the drafter estimated itself."
    return _by_columns(title, [row for row in table if row.n_alpha], lambda n: f"{n}-alpha")


def _rate(accepted: int, tried: int) -> str:
    """Empty where nothing was tried."""
    if not tried:
        return ""
    return f"{accepted / tried:.2f}" if tried >= FEW else f"({accepted / tried:.2f})"


def _by_columns(title: str, found: Sequence[Row], name: Callable[[int], str]) -> str:
    """A column per depth, whose name is made of its number from 0."""
    if not found:
        return ""
    cells = [[_rate(c.accepted, c.tried) for c in row.accepted_by_depth] for row in found]
    deepest = max(map(len, cells))
    columns = min(deepest, DEEPEST)
    if any(cell.startswith("(") for line in cells for cell in line[:columns]):
        title += f" In brackets: fewer than {FEW} tries."
    if deepest > columns:
        title += f" {deepest - columns} deeper columns are in --json."
    names = " | ".join(name(column) for column in range(columns))
    lines = [*textwrap.wrap(title, WIDTH), "", f"| temperature | contender | {names} |", "|" + "---|" * (2 + columns)]
    for row, line in zip(found, cells, strict=True):
        shown = [*line, *[""] * columns][:columns]
        lines.append(f"| {row.temperature:g} | {row.contender} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _sources(table: Sequence[Row]) -> str:
    """Of the chosen trees; fixed ones have no source but the drafter."""
    lines = [
        f"| {row.temperature:g} | {name} | {count['drafted']} | {count['accepted']} |"
        for row in table
        if row.contender == "auto"
        for name, count in row.sources.items()
    ]
    if not lines:
        return ""
    title = "Nodes of auto's trees by what proposed them: the drafter, an n-gram match (lookup), or both."
    return "\n".join([title, "", "| temperature | source | drafted | accepted |", "|---|---|---|---|", *lines])


def _costs(learned: Costs) -> str:
    title = (
        f"Cost of a pass by rows, in passes of the target over one row ({learned.plain_ms:.2f} ms), as auto's budget"
        " knows it after the run:"
    )
    curves = {"target": learned.verify, "drafter": learned.draft}
    return "\n".join([*textwrap.wrap(title, WIDTH), "", *(_curve(*curve) for curve in curves.items() if curve[1])])


def _curve(name: str, curve: Mapping[int, float]) -> str:
    points = ", ".join(f"{rows}:\N{NO-BREAK SPACE}{cost:.2f}" for rows, cost in sorted(curve.items()))
    wrapped = textwrap.wrap(f"- {name}, rows: cost: {points}", WIDTH, subsequent_indent="  ", break_long_words=False)
    return "\n".join(wrapped).replace("\N{NO-BREAK SPACE}", " ")
