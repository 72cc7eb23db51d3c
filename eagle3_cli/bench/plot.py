"""The figure of a run: speed-up by task, acceptance by depth, and what passes cost by rows.

The same numbers give the same bytes, with one version of matplotlib.  The background is white and part of the figure,
so that it reads the same on a dark page; all numbers are in the description that the SVG carries beside its title.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from ..convert.output import check_folder, replacing
from ..errors import FileError, OptionError
from .breakdown import Costs
from .report import Row

STYLE: Any = {
    "svg.hashsalt": "eagle3",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.color": "#1a1a1a",
    "axes.labelcolor": "#1a1a1a",
    "axes.edgecolor": "#444444",
    "xtick.color": "#1a1a1a",
    "ytick.color": "#1a1a1a",
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}
COLOURS = ("#0b62a4", "#c4501b", "#2e7d32", "#8e3b8c", "#b58900", "#00838f", "#6d4c41", "#546e7a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "xx")  # of the contenders behind the first eight, the next eight, ...
DASHES: Any = ("-", "--", ":", "-.")  # by temperature
FEW_BARS = 24  # that have room for their numbers
TITLE = "Speculative decoding: speed-up, acceptance and costs of a run of eagle3 bench"
LONGEST = 40  # characters of a contender's name in the figure
LONGEST_TASK = 14


def check(path: Path) -> None:
    """Before anything is measured: OptionError or FileError unless a figure can be written there."""
    if path.suffix.lower() != ".svg":
        raise OptionError(f"--plot: expected a file name that ends in .svg, got {path}.")
    if path.is_dir():
        raise FileError(f"--plot: {path}: is a directory, expected a file name.")
    check_folder(path, "--plot")


def draw(path: Path, table: Sequence[Row], tasks: Sequence[Row], learned: Costs | None) -> None:
    """Write the figure, complete or not at all.

    table     rows over all prompts, for the acceptance
    tasks     rows by task, for the speed-ups; those of `table` where no task has any
    FileError where the file cannot be written.
    """
    tasks = tasks or table
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's own style is
        mpl.rcParams.update({**STYLE, "text.parse_math": False})  # a task may be called $x$
        text = _svg(_figure(table, tasks, learned), describe(table, tasks, learned))
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(text)
    except OSError as error:
        raise FileError(f"--plot: {path}: cannot be written: {error.strerror or error}.") from error


def describe(table: Sequence[Row], tasks: Sequence[Row], learned: Costs | None) -> str:
    """All numbers of the figure, in words."""
    parts = ["Top: tokens per second over plain decoding."]
    for row in tasks:
        if row.contender != "plain":
            task = f"{row.task}, " if row.task is not None else ""
            parts.append(f"{task}temperature {row.temperature:g}: {row.contender} {row.speed_up:.2f}.")
    parts.append("Bottom left: acceptance at depth 1, 2, 3, ...")
    for row in table:
        if row.accepted_by_depth:
            rates = ", ".join("none" if c.rate is None else f"{c.rate:.2f}" for c in row.accepted_by_depth)
            parts.append(f"{row.contender} at temperature {row.temperature:g}: {rates}.")
    parts.append("Bottom right: cost of a pass by rows, in passes of the target over one row.")
    for name, curve in _curves(learned).items():
        parts.append(f"{name}: {', '.join(f'{rows} rows {cost:.2f}' for rows, cost in curve.items())}.")
    return _printable(" ".join(parts))


def _svg(figure: Figure, description: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Title": TITLE, "Date": None, "Creator": None})
    ending = b"</title>"
    return file.getvalue().replace(ending, ending + f"\n <desc>{escape(description)}</desc>".encode(), 1)


def _figure(table: Sequence[Row], tasks: Sequence[Row], learned: Costs | None) -> Figure:
    figure = Figure(figsize=(10.4, 8.0))
    figure.subplots_adjust(0.075, 0.07, 0.98, 0.85, wspace=0.18, hspace=0.42)
    grid = figure.add_gridspec(2, 2)
    names = [name for name in dict.fromkeys(row.contender for row in (*tasks, *table)) if name != "plain"]
    looks = {name: i for i, name in enumerate(names)}
    top = figure.add_subplot(grid[0, :])
    _speed_ups(top, tasks, looks)
    _acceptance(figure.add_subplot(grid[1, 0]), table, looks)
    _costs(figure.add_subplot(grid[1, 1]), learned)
    if names:
        figure.legend(*top.get_legend_handles_labels(), loc="upper center", ncols=min(len(names), 4), frameon=False)
    return figure


def _speed_ups(axes: Axes, tasks: Sequence[Row], looks: Mapping[str, int]) -> None:
    """A group of bars per temperature and task; plain decoding is the line at 1."""
    rows = [row for row in tasks if row.contender != "plain"]
    groups = list(dict.fromkeys((row.temperature, row.task) for row in tasks))
    width = 0.84 / max(len(looks), 1)
    for name, look in looks.items():
        mine = [row for row in rows if row.contender == name]
        x = [groups.index((row.temperature, row.task)) + (look - (len(looks) - 1) / 2) * width for row in mine]
        colour, hatch = COLOURS[look % len(COLOURS)], HATCHES[look // len(COLOURS) % len(HATCHES)]
        bars = axes.bar(
            x, [row.speed_up for row in mine], 0.92 * width, color=colour, hatch=hatch, label=_short(name), zorder=2
        )
        if len(rows) <= FEW_BARS:
            axes.bar_label(bars, fmt="%.2f", fontsize=9, padding=1)
    axes.axhline(1.0, color="#1a1a1a", linewidth=1.2, linestyle="--", zorder=3)
    axes.set_xticks(range(len(groups)), [_group(*group) for group in groups], fontsize=9)
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.02, y=0.12)
    axes.set_ylabel("times plain decoding")
    axes.set_title("tokens per second, by task; dashed: plain decoding", fontsize=10)


def _acceptance(axes: Axes, table: Sequence[Row], looks: Mapping[str, int]) -> None:
    """Colours and markers by contender, dashes by temperature."""
    axes.set_title("acceptance by depth", fontsize=10)
    axes.set_xlabel("depth")
    axes.set_ylabel("accepted of tried")
    axes.set_ylim(0.0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    found = [row for row in table if row.accepted_by_depth]
    temperatures = list(dict.fromkeys(row.temperature for row in found))
    dashes = {t: DASHES[i % len(DASHES)] for i, t in enumerate(temperatures)}
    for row in found:
        look, counts = looks[row.contender], [count for count in row.accepted_by_depth if count.tried]
        axes.plot(
            [count.depth for count in counts],
            [count.accepted / count.tried for count in counts],
            color=COLOURS[look % len(COLOURS)],
            marker=MARKERS[look % len(MARKERS)],
            linestyle=dashes[row.temperature],
        )
    if len(temperatures) > 1:
        lines = [Line2D([], [], color="#1a1a1a", linestyle=dashes[t], label=f"temperature {t:g}") for t in temperatures]
        axes.legend(handles=lines, frameon=False)
    if not found:
        _nothing(axes, "nothing was drafted")


def _costs(axes: Axes, learned: Costs | None) -> None:
    axes.set_title("cost of a pass, as auto's budget knows it", fontsize=10)
    axes.set_xlabel("rows")
    axes.set_ylabel("passes of the target over one row")
    curves = {name: curve for name, curve in _curves(learned).items() if curve}
    if not curves:
        _nothing(axes, "auto has measured nothing")
        return
    for name, colour, marker, dashes in (("target", COLOURS[0], "o", "-"), ("drafter", COLOURS[1], "s", "--")):
        curve = curves.get(name, {})
        axes.plot(list(curve), list(curve.values()), color=colour, marker=marker, linestyle=dashes, label=name)
    widest = max(max(curve) for curve in curves.values())
    ticks = [2**power for power in range(widest.bit_length())]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(tick) for tick in ticks])
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False)


def _nothing(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center")


def _curves(learned: Costs | None) -> dict[str, Mapping[int, float]]:
    if learned is None:
        return {}
    return {"target": dict(sorted(learned.verify.items())), "drafter": dict(sorted(learned.draft.items()))}


def _group(temperature: float, task: str | None) -> str:
    words = f"temp {temperature:g}"
    return words if task is None else f"{_short(task, LONGEST_TASK)}\n{words}"


def _short(name: str, longest: int = LONGEST) -> str:
    name = _printable(name)
    return name if len(name) <= longest else f"{name[: longest - 3]}..."


def _printable(text: str) -> str:
    """XML has no control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
