"""`eagle3 bench`: the same prompts answered plainly, with chains and trees, and by llama.cpp's own server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..errors import Eagle3Error, OptionError
from ..settings import TreeShape
from ..versions import versions
from .build import pair_settings, runtime_settings
from .options import Command, feedback_option, option, pair_options, quiet_option, runtime_options

if TYPE_CHECKING:
    from ..bench.check import CheckResult
    from ..bench.prompts import Prompt
    from ..bench.run import BenchSettings

GAP_LIMIT = 1.0  # logits move by up to 0.9 where kernels of different batch widths round differently (Q4_1)
OPTIONS = "Options"


@click.command(cls=Command)
@pair_options
@option(
    OPTIONS,
    "--shape",
    "shapes",
    multiple=True,
    variable=False,
    metavar="DEPTH,WIDTH,NODES",
    help="A draft tree to measure; repeatable. Default: 3,1,3 4,4,8 5,6,16 8,10,60.",
)
@option(OPTIONS, "--temp", "temperatures", multiple=True, type=float, variable=False, help="Default: 0 and 1.")
@option(OPTIONS, "-n", "--max-tokens", type=int, default=96, show_default=True, variable=False, help="Per answer.")
@option(OPTIONS, "--repeats", type=int, default=3, show_default=True, variable=False, help="Rounds of all prompts.")
@option(
    OPTIONS,
    "--task",
    "tasks",
    multiple=True,
    variable=False,
    metavar="NAME",
    help="Built-in prompts: mixed, the default; chat, code, mathematics, summarising, rewriting; all for these five."
    " Repeatable.",
)
@option(
    OPTIONS,
    "--prompts",
    metavar="JSONL",
    variable=False,
    help='Lines {"prompt": "..."} instead of the built-in ones, with a "task" to group them by if you like.',
)
@option(OPTIONS, "--against", metavar="PROGRAM", variable=False, help="llama-server to measure with the same files.")
@option(OPTIONS, "--draft-max", multiple=True, type=int, variable=False, help="Its drafts per round. Default: 1, 2, 3.")
@option(OPTIONS, "--check", is_flag=True, variable=False, help="Compare greedy answers with plain decoding instead.")
@option(OPTIONS, "--gap", type=float, default=GAP_LIMIT, show_default=True, variable=False, help="With --check: largest"
        " logit gap at a first difference that still passes.")  # fmt: skip
@option(OPTIONS, "--json", "as_json", is_flag=True, variable=False, help="Print one JSON document.")
@feedback_option
@runtime_options
@quiet_option
@click.pass_obj
def bench(console: Console, **flags: Any) -> None:
    """Measure what speculation brings on this machine.

    All contenders answer every prompt in turn within one run, so that a machine that gets slower or faster hits all
    alike; rates are medians over the repeats. Run it on an idle machine.

    \b
    Examples:
      eagle3 bench
      eagle3 bench --shape 2,2,3 --shape 4,4,8 --temp 0
      eagle3 bench --target llama.gguf --draft llama-eagle3.gguf --against ./llama-server
      eagle3 bench --task all
      eagle3 bench --check
      eagle3 bench --target llama.gguf --draft llama-eagle3.gguf --feedback pre
    """
    from ..bench.prompts import load_prompts
    from ..bench.run import Contenders

    console.quiet = flags["quiet"]
    if flags["prompts"] and flags["tasks"]:
        raise OptionError("--task: names built-in prompts, which --prompts replaces.", "Leave one of them out.")
    prompts = load_prompts(Path(flags["prompts"]) if flags["prompts"] else None, flags["tasks"] or ("mixed",))
    settings = _settings(flags)
    with Contenders(settings) as contenders:
        for note in contenders.engine.notes:
            console.note(note)
        if flags["check"]:
            _check(console, contenders, prompts, flags)
        else:
            _measure(console, contenders, prompts, flags["as_json"])


def _settings(flags: dict[str, Any]) -> BenchSettings:
    from ..bench.run import SHAPES, BenchSettings

    pair = pair_settings({**flags, "draft_depth": None, "draft_width": None, "draft_tokens": None, "no_lookup": False})
    if pair.draft is None:
        given = "--no-draft" if flags["no_draft"] else "--draft lookup"
        raise OptionError(f"{given}: leaves no drafter to measure.", "Give --draft a GGUF, or leave it out.")
    if flags["repeats"] < 1 or flags["max_tokens"] < 2:
        raise OptionError("--repeats, --max-tokens: expected at least 1 and 2.")
    return BenchSettings(
        target=pair.target,
        draft=pair.draft,
        runtime=runtime_settings(flags),
        feedback=pair.feedback,
        shapes=tuple(_shape(text) for text in flags["shapes"]) or SHAPES,
        temperatures=flags["temperatures"] or (0.0, 1.0),
        repeats=flags["repeats"],
        max_tokens=flags["max_tokens"],
        against=Path(flags["against"]) if flags["against"] else None,
        draft_max=flags["draft_max"] or (1, 2, 3),
    )


def _shape(text: str) -> TreeShape:
    try:
        depth, width, nodes = (int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--shape: expected DEPTH,WIDTH,NODES, got {text}.", "For example 4,4,8.") from None
    return TreeShape(depth, width, nodes)


def _measure(console: Console, contenders: Any, prompts: tuple[Prompt, ...], as_json: bool) -> None:
    from ..bench.report import as_dicts, as_markdown, by_task, geometric_mean, in_words, means_as_markdown, rows
    from ..bench.run import run

    samples = list(run(contenders, prompts, lambda done, total: console.progress("answers", done / total)))
    console.clear_progress()
    table, tasks = rows(samples), by_task(samples)
    means = geometric_mean(tasks)
    if as_json:
        found = {"rows": as_dicts(table), "tasks": as_dicts(tasks), "geometric_mean": means}
        console.document({**found, "settings": contenders.engine.settings, "versions": versions()})
    elif len({prompt.task for prompt in prompts}) > 1:
        console.text(f"{as_markdown(tasks)}\n\n{means_as_markdown(means)}\n\n{in_words(means)}\n")
    else:
        console.text(f"{as_markdown(table)}\n\n{in_words(geometric_mean(table))}\n")


def _check(console: Console, contenders: Any, prompts: tuple[Prompt, ...], flags: dict[str, Any]) -> None:
    from ..bench.check import check

    s = contenders.settings
    result = check(contenders, prompts, s.shapes, s.max_tokens)
    if flags["as_json"]:
        console.document(result.as_dict())
    else:
        console.text(_describe(result))
    if result.largest_gap > flags["gap"]:
        raise Eagle3Error(
            f"check: the largest logit gap at a first difference is {result.largest_gap:.4f}, over {flags['gap']:g}.",
            "That is no near-tie. Please report it with the output of `eagle3 --version`.",
        )


def _describe(result: CheckResult) -> str:
    lines = [
        f"{d.task}, prompt {d.prompt}, {d.shape}:"
        f" token {d.position} is {d.drafted} instead of {d.plain}, logit gap {d.gap:.5f}"
        for d in result.differences
    ]
    same = result.answers - len(result.differences)
    lines.append(f"{same} of {result.answers} answers equal plain decoding; largest gap {result.largest_gap:.5f}")
    return "\n".join(lines) + "\n"
