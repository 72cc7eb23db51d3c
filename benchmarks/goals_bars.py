"""The goals of the project for speed, each with its bar and what the results of goals.py say about it.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]
"""What goals_measure.py makes for one target, read back from JSON; its duel as "duel", None where there is none."""
Means = Mapping[str, float]
"""Contender -> speed-up over plain decoding, geometric mean over tasks."""

AGAIN = "plain, again"  # a duel's third contender: plain decoding once more
DEMO, WIDENED = "q4_1", "widened-bf16"
STEP_MS, PLAIN_MS = 0.9, 8.0  # a drafter pass over one row, where plain decoding takes so long for a token


@dataclass(frozen=True)
class Figure:
    """One measured value, and where: target, task, temperature."""

    where: str
    value: float


@dataclass(frozen=True)
class Goal:
    """A bar that every figure has to reach.

    most      the bar is the most that is allowed, not the least
    allowed   what still counts, for noise; None: the bar itself
    shown     how bar and values are written
    """

    name: str
    bar: float
    figures: tuple[Figure, ...]
    most: bool = False
    allowed: float | None = None
    shown: str = "{:.3f}x"

    def reached(self, figure: Figure, bar: float) -> bool:
        return figure.value <= bar if self.most else figure.value >= bar

    @property
    def worst(self) -> Figure | None:
        choose = max if self.most else min
        return choose(self.figures, key=lambda figure: figure.value) if self.figures else None

    def row(self) -> str:
        """Goal, where the figure is worst, bar, that figure, and whether all figures reach the bar."""
        bar = f"at {'most' if self.most else 'least'} {self.shown.format(self.bar)}"
        if self.allowed is not None:
            bar += f" ({self.shown.format(self.allowed)} for noise)"
        if self.worst is None:
            return cells(self.name, "", bar, "not measured", "")
        count = sum(self.reached(figure, self.bar) for figure in self.figures)
        if count == len(self.figures):
            said = "yes"
        elif self.allowed is not None and self.reached(self.worst, self.allowed):
            said = "yes, within noise"
        else:
            said = "no" if len(self.figures) == 1 else f"no: {count} of {len(self.figures)}"
        return cells(self.name, self.worst.where, bar, self.shown.format(self.worst.value), said)


def goals(results: Sequence[Result]) -> list[Goal]:
    """Every goal with what these results say about it."""
    found = [
        Goal(
            "auto against plain decoding, each target, task and temperature",
            1.0,
            tuple(_never_slower(results)),
            False,
            0.98,
        ),
        Goal("auto against the best fixed chain or tree", 0.97, tuple(_against(results, "fixed"))),
        Goal("auto against the best of llama-server", 1.0, tuple(_against(results, "server"))),
    ]
    for temperature in (0.0, 1.0):
        figures = tuple(_against(results, "server drafter", temperature))
        found.append(Goal(f"auto against llama-server's best draft-eagle3, temperature {temperature:g}", 1.15, figures))
    wide = [result for result in results if result["target"] == WIDENED]
    for temperature, bar in ((0.0, 1.4), (1.0, 1.2)):
        figures = tuple(_auto_means(wide, temperature))
        found.append(Goal(f"auto against plain decoding, widened BF16, temperature {temperature:g}", bar, figures))
    for task in ("rewriting", "code"):
        figures = tuple(_by_task(wide, task, 0.0))
        found.append(Goal(f"auto against plain decoding, widened BF16, {task}, temperature 0", 2.0, figures))
    name = f"a drafter pass over one row, scaled to {PLAIN_MS:g} ms a token"
    found.append(Goal(name, STEP_MS, tuple(_steps(results)), True, None, "{:.2f} ms"))
    found.append(
        Goal("plain decoding against llama-server without speculation", 0.97, tuple(_plain_to_server(results)))
    )
    found.append(Goal("plain decoding against llama-bench", 0.97, tuple(_plain_to_bench(results))))
    share, ms = tuple(_overhead(results, "share")), tuple(_overhead(results, "ms_per_round"))
    found.append(Goal("auto's decode time outside llama.cpp, temperature 0", 0.03, share, True, None, "{:.1%}"))
    found.append(Goal("the same a round", 0.3, ms, True, None, "{:.2f} ms"))
    return found


def kind(contender: str) -> str:
    """plain, auto, fixed, server, or "server drafter" for the server with nothing but draft-eagle3."""
    if contender in ("plain", "auto", AGAIN):
        return contender
    if contender.startswith("llama-server"):
        return "server drafter" if contender.startswith("llama-server draft-eagle3 ") else "server"
    return "fixed"


def best(means: Means, of: str) -> tuple[str, float] | None:
    """The fastest contender of a kind, "server" with all of the server's; None where none was measured."""
    names = [name for name in means if kind(name) == of or (of == "server" and kind(name).startswith(of))]
    return max(((name, means[name]) for name in names), key=lambda pair: pair[1], default=None)


def means_of(results: Sequence[Result], only: float | None = None) -> Iterator[tuple[Result, str, Means]]:
    """(result, where, means) for each target and temperature."""
    for result in results:
        for temperature, means in result["geometric_mean"].items():
            if only is None or float(temperature) == only:
                yield result, f"{result['label']}, temperature {float(temperature):g}", means


def _never_slower(results: Sequence[Result]) -> Iterator[Figure]:
    """By task, from the duel where there is one: it has more prompts."""
    return _by_task([{**result, **result["duel"]} if result["duel"] else result for result in results])


def _by_task(results: Sequence[Result], task: str | None = None, only: float | None = None) -> Iterator[Figure]:
    for result in results:
        for row in result["tasks"]:
            if row["contender"] == "auto" and task in (None, row["task"]) and only in (None, row["temperature"]):
                where = f"{result['label']}, {row['task']}, temperature {row['temperature']:g}"
                yield Figure(where, row["speed_up"])


def _against(results: Sequence[Result], of: str, only: float | None = None) -> Iterator[Figure]:
    for _, where, means in means_of(results, only):
        rival = best(means, of)
        if rival:
            yield Figure(f"{where}: {rival[0]}", means["auto"] / rival[1])


def _auto_means(results: Sequence[Result], only: float) -> Iterator[Figure]:
    for _, where, means in means_of(results, only):
        yield Figure(where, means["auto"])


def _plain_to_server(results: Sequence[Result]) -> Iterator[Figure]:
    for _, where, means in means_of(results):
        if "llama-server plain" in means:
            yield Figure(where, 1 / means["llama-server plain"])


def _plain_to_bench(results: Sequence[Result]) -> Iterator[Figure]:
    for result in results:
        if result["llama_bench"]:
            yield Figure(result["label"], result["llama_bench"]["ratio"])


def _steps(results: Sequence[Result]) -> Iterator[Figure]:
    for result in results:
        if result["target"] == DEMO:
            step, plain = result["drafter_step"]["ms"], result["drafter_step"]["plain_ms"]
            where = f"{result['label']}: {step:.2f} ms where plain decoding takes {plain:.2f}"
            yield Figure(where, step * PLAIN_MS / plain)


def _overhead(results: Sequence[Result], name: str) -> Iterator[Figure]:
    for result in results:
        for found in result["overhead"]:
            if found["contender"] == "auto" and found["temperature"] == 0.0:
                yield Figure(result["label"], found[name])


def cells(*texts: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(texts)} |"
