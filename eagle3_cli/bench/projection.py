"""What fixed trees would bring on a machine with other costs: this run's acceptance with the costs of a file.

A projection and no measurement: it takes for granted that acceptance does not depend on the machine, and that a round
costs nothing besides the passes of both models.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError, brief, shown
from ..prompt import read_text
from ..settings import TreeShape
from .report import WIDTH, Row

FIELDS = ("plain_ms", "verify", "draft")
EXAMPLE = '{"plain_ms": 30, "verify": {"1": 1.0, "64": 1.3}, "draft": {"1": 0.05, "16": 0.06}}'
_ROWS = re.compile(r"[1-9][0-9]{0,3}")


@dataclass(frozen=True)
class CostCurve:
    """Assumed costs of a machine, in passes of the target over one row.

    path       of the file
    plain_ms   milliseconds of such a pass
    verify, draft   rows -> cost of a pass of the target and of the drafter, ascending, 1 row first; linear in between
    """

    path: Path
    plain_ms: float
    verify: Mapping[int, float]
    draft: Mapping[int, float]


@dataclass(frozen=True)
class Projected:
    """One contender at one temperature on the assumed machine.

    acceptance_length   tau, as it was measured in this run
    verify_rows         mean rows of a pass of the target
    cost                of a round, in passes of the target over one row; draft_cost is the drafter's part of it
    tokens_per_second   while decoding
    speed_up            over plain decoding on that machine
    """

    contender: str
    temperature: float
    acceptance_length: float
    verify_rows: float
    cost: float
    draft_cost: float
    tokens_per_second: float
    speed_up: float


# ---- the file ----


def load(path: Path, shapes: Sequence[TreeShape]) -> CostCurve:
    """The costs of a JSON file like `EXAMPLE`.

    FileError for one that is not like it, and for one whose curves end before the rows that a shape can need.
    """
    text = read_text(str(path), "--cost-curve")
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except _DuplicateError as error:
        raise _wrong(path, str(error), "one value", "several", "Keep one of them.") from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "the file", "JSON", str(error)) from error
    if not isinstance(found, dict):
        raise _wrong(path, "the file", "a JSON object", found)
    for name in [*FIELDS, *found]:
        if name not in FIELDS:
            raise _wrong(path, name, f"only the fields {', '.join(FIELDS)}", "this one", "Remove it.")
        if name not in found:
            raise _wrong(path, name, "a value", "none", "Add it.")
    plain_ms = _positive(path, "plain_ms", found["plain_ms"])
    curve = CostCurve(path, plain_ms, *(_points(path, name, found[name]) for name in ("verify", "draft")))
    if curve.verify[1] != 1.0:
        raise _wrong(path, 'verify."1"', "1", curve.verify[1], "Costs are in passes of the target over one row.")
    for shape in shapes:
        _check_reach(curve, "verify", shape, shape.nodes + 1)
        _check_reach(curve, "draft", shape, max(_draft_rows(shape, min(shape.depth, shape.nodes) + 1), default=1))
    return curve


class _DuplicateError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateError(next(name for name in names if names.count(name) > 1))
    return found


def _points(path: Path, name: str, found: Any) -> dict[int, float]:
    if not isinstance(found, dict):
        raise _wrong(path, name, 'an object of rows and costs, {"1": ..., ...}', found)
    for rows in found:
        if not _ROWS.fullmatch(rows):
            raise _wrong(path, name, "rows as whole numbers from 1 to 9999", rows)
    points = {int(rows): _positive(path, f'{name}."{rows}"', cost) for rows, cost in found.items()}
    if 1 not in points:
        raise _wrong(path, name, "a cost of 1 row", f"rows {', '.join(found)}" if found else "none", 'Add "1".')
    return dict(sorted(points.items()))


def _positive(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(path, name, "a number above 0", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0.0 < number < math.inf:
        raise _wrong(path, name, "a finite number above 0", value)
    return number


def _check_reach(curve: CostCurve, name: str, shape: TreeShape, rows: float) -> None:
    last = max(getattr(curve, name))
    if rows > last:
        given = f"{shape.depth},{shape.width},{shape.nodes}"
        hint = f"Add a width of {rows:g} or more, or choose other shapes with --shape."
        raise _wrong(curve.path, name, f"costs up to {rows:g} rows for --shape {given}", f"up to {last}", hint)


def _wrong(path: Path, name: str, expected: str, got: Any, hint: str | None = None) -> FileError:
    found = brief(got, 60) if isinstance(got, str) else shown(got)
    return FileError(f"--cost-curve: {path}: {name}: expected {expected}, got {found}.", hint or f"Like {EXAMPLE}.")


# ---- the projection ----


def project(table: Sequence[Row], curve: CostCurve) -> list[Projected]:
    """Every fixed shape of the run, after plain decoding at the same temperature.  table: rows over all prompts."""
    plain = {row.temperature: row.acceptance_length for row in table if row.contender == "plain"}
    return [
        _projected(row, curve, plain[row.temperature])
        for row in table
        if row.contender == "plain" or (row.shape is not None and row.rounds)
    ]


def _projected(row: Row, curve: CostCurve, plain_tau: float) -> Projected:
    """plain_tau: of plain decoding; a little below 1, because the end token is no part of an answer but has a round."""
    sizes = row.rounds_by_nodes or {0: 1}
    rounds = sum(sizes.values())
    verify = sum(count * _cost(curve.verify, nodes + 1) for nodes, count in sizes.items()) / rounds
    draft = 0.0
    if row.shape is not None:
        passes = _draft_rows(row.shape, row.acceptance_length)
        draft = row.draft_rounds / row.rounds * sum(_cost(curve.draft, rows) for rows in passes)
    per_cost = row.acceptance_length / (verify + draft)
    return Projected(
        contender=row.contender,
        temperature=row.temperature,
        acceptance_length=row.acceptance_length,
        verify_rows=1 + sum(nodes * count for nodes, count in sizes.items()) / rounds,
        cost=verify + draft,
        draft_cost=draft,
        tokens_per_second=1e3 * per_cost / curve.plain_ms,
        speed_up=per_cost / plain_tau,
    )


def _draft_rows(shape: TreeShape, first: float) -> list[float]:
    """Rows of each of the drafter's passes in one round, at most.

    The engine does not count passes by rows, so this is an upper bound: a pass for each level that a tree of so many
    nodes can have, over `width` rows or as many as can have a child in it.  Less is drafted where nodes fall out early.
    first: rows of the first pass, which takes the tokens of the round before: tau of them on average.  The up to 16
    tokens of a prompt that an answer's first pass takes are left out.
    """
    levels = min(shape.depth, shape.nodes)
    later = [float(min(shape.width, shape.nodes - level)) for level in range(1, levels)]
    return [first, *later] if levels else []


def _cost(points: Mapping[int, float], rows: float) -> float:
    return float(np.interp(rows, list(points), list(points.values())))


def as_markdown(projected: Sequence[Projected], curve: CostCurve) -> str:
    title = (
        f"Projection, not a measurement: this run's acceptance with the costs of {curve.path}, where a pass of the"
        f" target over one row takes {curve.plain_ms:g} ms. A round is taken to cost nothing besides both models'"
        " passes; those of the drafter are an upper bound. The drafter's column is its share of the cost."
    )
    lines = [
        *textwrap.wrap(title, WIDTH),
        "",
        "| temperature | contender | tau | rows verified | cost of a round | drafter | tokens/s | against plain |",
        "|" + "---|" * 8,
    ]
    for p in projected:
        numbers = f"{p.acceptance_length:.2f} | {p.verify_rows:.1f} | {p.cost:.2f} | {p.draft_cost / p.cost:.1%}"
        lines.append(
            f"| {p.temperature:g} | {p.contender} | {numbers} | {p.tokens_per_second:.1f} | {p.speed_up:.2f}x |"
        )
    return "\n".join(lines)


def as_dict(projected: Sequence[Projected], curve: CostCurve) -> dict[str, object]:
    """For JSON: the assumed costs and what follows from them."""
    return {"is": "a projection, not a measurement", "costs": asdict(curve), "rows": [asdict(p) for p in projected]}
