"""docs/benchmarks.md and the README's sentence, from the results of goals.py alone.  Pure.

A result is what goals_measure.py makes for one target; every figure here is one of its numbers or a ratio of two.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from goals_bars import AGAIN, WIDENED, Result, best, cells, goals, means_of

from eagle3_cli.errors import FileError

OPENING, CLOSING = "<!-- benchmark -->", "<!-- /benchmark -->"
WIDTH = 120
RUNS = """\
Written by `make benchmarks` (`benchmarks/goals.py`); every figure of the tables is in the JSON files that it keeps.
Each target has an interleaved run: every contender answers every prompt in turn, so that a machine whose speed drifts
hits all alike. Rates are medians of the repeats. Only ratios within one run mean anything. In a second run, the duel,
auto answers more prompts beside plain decoding alone, which takes part twice: what it differs from itself is noise."""
CONTENDERS = """\
`plain` decodes without a drafter; `auto` is the default, with a budget that had learned nothing before the run;
`chain N` and `tree N` draft N nodes in every round; `llama-server` has the same two files, token ids, threads, context
and flash attention. Ratios are rates over plain decoding's in the same run, means are geometric over the tasks, tau is
the number of tokens that a pass of the target emits."""


def document(results: Sequence[Result], machine: str | None, notes: str) -> str:
    """The whole page.

    results   in the order of the page; at least one
    machine   in words; None: as the results have it
    notes     Markdown that is put at the end as it is
    """
    machines = dict.fromkeys([machine] if machine else [result["settings"]["machine"] for result in results])
    versions = dict.fromkeys(_versions(result) for result in results)
    parts = [
        "# Benchmarks",
        RUNS,
        "\n".join(f"- Machine: {each}." for each in machines) + "\n" + "\n".join(f"- {each}." for each in versions),
        CONTENDERS,
        "## Goals",
        _wrapped(
            "Where a goal is about several targets, tasks or temperatures, the row shows the worst of them, and the"
            " last column how many reach the bar. Targets measured: "
            + ", ".join(_title(result) for result in results)
            + "."
        ),
        _table(("goal", "where", "bar", "measured", "reached"), [goal.row() for goal in goals(results)]),
        *(part for result in results for part in _section(result)),
        notes.strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _versions(result: Result) -> str:
    found, server = result["settings"]["versions"], result["settings"]["against"]["version"]
    names = ("eagle3", "llama-cpp-python", "python", "numpy")
    return ", ".join(f"{name} {found[name]}" for name in names) + f"; llama-server {server}"


def _title(result: Result) -> str:
    return f"{result['label']} ({result['about']})" if result["about"] else str(result["label"])


def _section(result: Result) -> Iterator[str]:
    yield f"## {_title(result)}"
    yield _wrapped(_about_run(result))
    yield _overhead(result)
    yield from _duel(result)
    rates = {(row["temperature"], row["contender"]): row for row in result["rows"]}
    for temperature, means in result["geometric_mean"].items():
        t = float(temperature)
        lines = []
        for name, ratio in means.items():
            row = rates[t, name]
            speed = f"{row['tokens_per_second']:.1f} ({row['low']:.1f}-{row['high']:.1f})"
            lines.append(cells(name, f"{row['acceptance_length']:.2f}", speed, f"{ratio:.2f}x"))
        yield f"### {result['label']}, temperature {t:g}"
        yield _table(("contender", "tau", "tokens/s (low-high)", "against plain, mean over tasks"), lines)
        yield _table(("task", "plain, tokens/s", "auto", "best fixed", "best of llama-server"), _tasks(result, t))


def _tasks(result: Result, temperature: float) -> list[str]:
    lines = []
    for task in result["settings"]["tasks"]:
        rows = {r["contender"]: r for r in result["tasks"] if (r["task"], r["temperature"]) == (task, temperature)}
        if not rows:
            lines.append(cells(task, "no rate: some answers are one token", "", "", ""))
            continue
        ratios = {name: row["speed_up"] for name, row in rows.items()}
        rivals = (best(ratios, of) for of in ("fixed", "server"))
        told = ("" if rival is None else f"{rival[1]:.2f}x, {_short(rival[0])}" for rival in rivals)
        lines.append(cells(task, f"{rows['plain']['tokens_per_second']:.1f}", f"{ratios['auto']:.2f}x", *told))
    return lines


def _duel(result: Result) -> Iterator[str]:
    """auto beside plain decoding alone, and what plain decoding differs from itself."""
    duel = result["duel"]
    if not duel:
        return
    s = duel["settings"]
    yield _wrapped(
        f"The duel: the first {s['prompts_per_task']} prompts of each task, {s['run']['max_tokens']} tokens an answer,"
        f" {s['run']['repeats']} repeats, {duel['seconds'] / 60:.0f} minutes."
    )
    rows = {(row["temperature"], row["task"], row["contender"]): row for row in duel["tasks"]}
    lines = []
    for temperature, task in dict.fromkeys(key[:2] for key in rows):
        plain, auto, again = (rows[temperature, task, name] for name in ("plain", "auto", AGAIN))
        ratios = (f"{row['speed_up']:.3f}x" for row in (auto, again))
        rate, tau = f"{plain['tokens_per_second']:.1f}", f"{auto['acceptance_length']:.2f}"
        lines.append(cells(task, f"{temperature:g}", rate, tau, *ratios))
    for temperature, means in duel["geometric_mean"].items():
        lines.append(
            cells("all, mean", f"{float(temperature):g}", "", "", f"{means['auto']:.3f}x", f"{means[AGAIN]:.3f}x")
        )
    yield _table(("task", "temperature", "plain, tokens/s", "tau of auto", "auto", "plain, again"), lines)


def _short(contender: str) -> str:
    return contender.removeprefix("llama-server ")


def _about_run(result: Result) -> str:
    s, step, bench = result["settings"], result["drafter_step"], result["llama_bench"]
    text = (
        f"Prompts: the first {s['prompts_per_task']} of {', '.join(s['tasks'])} each. Tokens an answer:"
        f" {s['run']['max_tokens']}. Repeats: {s['run']['repeats']}. Threads: {s['threads']}. Context: {s['ctx_size']}."
        f" Time: {result['seconds'] / 60:.0f} minutes. A drafter pass over one row takes {step['ms']:.2f} ms"
        f" ({step['low']:.2f} to {step['high']:.2f}), plain decoding {step['plain_ms']:.2f} ms a token."
    )
    if bench:
        text += (
            f" Beside llama-bench, {bench['tokens']} tokens in a cache for as many: plain decoding"
            f" {bench['ours']:.1f} tokens/s, llama-bench {bench['theirs']:.1f}."
        )
    return text


def _overhead(result: Result) -> str:
    head = ("contender", "temperature", "decode time outside llama.cpp", "a round")
    lines = [
        cells(o["contender"], f"{o['temperature']:g}", f"{o['share']:.1%}", f"{o['ms_per_round']:.2f} ms")
        for o in result["overhead"]
    ]
    return _table(head, lines)


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join([cells(*head), "|" + "---|" * len(head), *lines])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


# ---- the README -----------------------------------------------------------------------------------------


def sentence(results: Sequence[Result], machine: str | None) -> str:
    """What the README says of speed: the widened BF16 target at temperature 0.  FileError where it is not measured.

    machine   in words; None: as the result has it
    """
    for result, _, means in means_of([result for result in results if result["target"] == WIDENED], 0.0):
        told = [f"the best fixed setting ({name}) gives {ratio:.2f}" for name, ratio in _some(best(means, "fixed"))]
        told += [f"llama.cpp's server ({_short(name)}) {ratio:.2f}" for name, ratio in _some(best(means, "server"))]
        return _wrapped(
            f"With the cost of a target of {result['about'].split(' weights')[0]} weights in BF16 it decodes"
            f" {means['auto']:.2f} times as fast as without a drafter at temperature 0, where {' and '.join(told)}"
            f" ({machine or result['settings']['machine']}; [docs/benchmarks.md](docs/benchmarks.md))."
        )
    raise FileError(
        f"--readme: expected a result for {WIDENED} at temperature 0, got none.", f"Add --target {WIDENED}."
    )


def _some(pair: tuple[str, float] | None) -> list[tuple[str, float]]:
    return [pair] if pair else []


def replaced(path: str, text: str, said: str) -> str:
    """The text with what stands between its two comments replaced.  FileError unless it has both, once, in order."""
    before, opening, rest = text.partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not opening or not closing or OPENING in after or CLOSING in before + after:
        raise FileError(f"{path}: expected {OPENING} and {CLOSING} once each, in this order.", "Put them there.")
    return f"{before}{OPENING}\n{said}\n{CLOSING}{after}"
