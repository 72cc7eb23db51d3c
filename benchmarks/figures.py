"""The two figures of `reproduce.py`, drawn from what is in results.json alone.

The same numbers give the same bytes, with one version of matplotlib.  The background is white and part of the figure,
so that it reads the same on a dark page; the curves differ in markers and dashes as well as in colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from eagle3_cli.bench.plot import STYLE
from eagle3_cli.convert.output import replacing

FIGURES = {"n_alpha": "n_alpha.svg", "data_scaling": "data_scaling.svg"}  # part of results.json -> file
LINES = (("#0b62a4", "o", "-"), ("#c4501b", "s", "--"), ("#2e7d32", "^", "-."))  # colour, marker, dashes
SETS = {"unseen": "unseen prompts", "held_out": "held-out samples"}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every part that the results have; the files, in order."""
    makers = {"n_alpha": _n_alpha, "data_scaling": _data_scaling}
    written = []
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's own style is
        mpl.rcParams.update(STYLE)
        for part, name in FIGURES.items():
            if part in results:
                figure, title = makers[part](results[part])
                _write(figure, title, folder / name)
                written.append(folder / name)
    return written


def _write(figure: Figure, title: str, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="svg", metadata={"Title": title, "Date": None, "Creator": None})


def _n_alpha(part: Mapping[str, Any]) -> tuple[Figure, str]:
    """Acceptance against n on the unseen prompts, at all positions and at those that a round reaches."""
    figure = Figure(figsize=(8.4, 3.7))
    figure.subplots_adjust(0.08, 0.14, 0.98, 0.91, wspace=0.08)
    everywhere, reached = figure.subplots(1, 2, sharey=True)
    panels = (
        (everywhere, "n_alpha_everywhere", "every position of the answers"),
        (reached, "n_alpha", "where the drafted tokens before were right"),
    )
    for axes, key, title in panels:
        for head, line in zip(part["heads"], LINES, strict=True):
            rates = head["unseen"][key]
            _curve(axes, range(len(rates)), rates, head["title"], line)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("estimated features in the input, n")
        axes.xaxis.set_major_locator(FixedLocator(range(len(part["heads"][0]["unseen"][key]))))
    everywhere.set_ylim(bottom=0.0)
    everywhere.set_ylabel("acceptance of one drafted token, n-\N{GREEK SMALL LETTER ALPHA}")
    everywhere.legend(frameon=False)
    return figure, "Acceptance at chain step n of heads trained on the same data for as many steps"


def _data_scaling(part: Mapping[str, Any]) -> tuple[Figure, str]:
    """Acceptance length against tokens of training data, on a logarithmic scale."""
    figure = Figure(figsize=(5.6, 3.7))
    figure.subplots_adjust(0.13, 0.18, 0.97, 0.91)
    axes = figure.subplots()
    heads = part["heads"]
    tokens = [head["tokens"] for head in heads]
    for (name, label), line in zip(SETS.items(), LINES, strict=False):
        _curve(axes, tokens, [head[name]["tau"] for head in heads], label, line)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(tokens))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{_short(head['tokens'])}\n{head['title']}" for head in heads])
    axes.set_xlabel("tokens of training data")
    axes.set_ylabel(f"acceptance length, chain of {part['chain']}")
    rule = "the same number of epochs" if part["rule"] == "epochs" else "the same number of optimiser steps"
    axes.set_title(f"every head: {rule}", fontsize=10)
    axes.legend(frameon=False)
    return figure, f"Acceptance length against training data, {rule}"


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float | None], label: str, line: tuple[str, str, str]) -> None:
    """A value that is not known leaves a gap; a curve without any is left out."""
    colour, marker, dashes = line
    if any(value is not None for value in y):
        known = [math.nan if value is None else value for value in y]
        axes.plot(x, known, color=colour, marker=marker, linestyle=dashes, label=label)


def _short(count: int) -> str:
    """Three digits: 940, 37.5k, 3M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
