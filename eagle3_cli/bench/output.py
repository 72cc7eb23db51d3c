"""What a run found, as text for people and as a document for programs.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import breakdown, projection, report
from .breakdown import Costs
from .projection import CostCurve
from .report import Row
from .run import Sample


@dataclass(frozen=True)
class Results:
    """table     rows over all prompts
    tasks     rows by task
    learned   costs of passes on this machine; None where they are not known
    curve     assumed costs of another machine; None: no projection
    """

    table: Sequence[Row]
    tasks: Sequence[Row]
    learned: Costs | None
    curve: CostCurve | None = None


def results(samples: Sequence[Sample], curve: CostCurve | None = None) -> Results:
    return Results(report.rows(samples), report.by_task(samples), breakdown.costs(samples), curve)


def as_text(found: Results, several_tasks: bool) -> str:
    """Tables, then in words what they say, then the projection."""
    means = report.geometric_mean(found.tasks if several_tasks else found.table)
    fixed = {row.contender for row in found.table if row.shape is not None}
    parts = [report.as_markdown(found.tasks if several_tasks else found.table)]
    parts.append(report.means_as_markdown(means) if several_tasks else "")
    parts.append(breakdown.in_tables(found.table, found.learned))
    parts.append(report.in_words(means, fixed))
    if found.curve is not None:
        parts.append(projection.as_markdown(projection.project(found.table, found.curve), found.curve))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_dict(found: Results) -> dict[str, Any]:
    curve = found.curve
    return {
        "rows": report.as_dicts(found.table),
        "tasks": report.as_dicts(found.tasks),
        "geometric_mean": report.geometric_mean(found.tasks),
        "costs": breakdown.as_dict(found.learned),
        "projection": projection.as_dict(projection.project(found.table, curve), curve) if curve else None,
    }
