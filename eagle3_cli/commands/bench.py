"""`eagle3 bench`: the same prompts answered plainly, with chains and trees, and by llama.cpp's own server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..errors import Eagle3Error, OptionError
from ..settings import TreeShape, check_range
from ..versions import versions
from .build import pair_settings, runtime_settings, typed
from .options import Command, feedback_option, option, pair_options, quiet_option, runtime_options

if TYPE_CHECKING:
    from ..bench.check import CheckResult
    from ..bench.projection import CostCurve
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
    variable="BENCH",
    metavar="DEPTH,WIDTH,NODES",
    help="A draft tree to measure; repeatable. Default: 3,1,3 4,4,8 5,6,16 8,10,60.",
)
@option(OPTIONS, "--temp", "temperatures", multiple=True, type=float, variable="BENCH", help="Default: 0 and 1.")
@option(OPTIONS, "-n", "--max-tokens", type=int, default=96, show_default=True, variable="BENCH", help="Per answer.")
@option(OPTIONS, "--repeats", type=int, default=3, show_default=True, variable="BENCH", help="Rounds of all prompts.")
@option(
    OPTIONS,
    "--task",
    "tasks",
    multiple=True,
    variable="BENCH",
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
@option(
    OPTIONS,
    "--against",
    metavar="URL|PROGRAM",
    variable="BENCH",
    help="llama-server to measure in the same run: started with the same files, or running at http://HOST:PORT.",
)
@option(
    OPTIONS,
    "--against-type",
    "against_types",
    multiple=True,
    variable="BENCH",
    metavar="NAME",
    help="Its speculation, for a PROGRAM: none, draft-eagle3, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod,"
    " ngram-cache, or several joined by +. Repeatable. Default: all but ngram-map-k4v.",
)
@option(OPTIONS, "--draft-max", multiple=True, type=int, variable="BENCH", help="Drafts per round of its draft-eagle3."
        " Default: 1, 2, 3.")  # fmt: skip
@option(OPTIONS, "--check", is_flag=True, variable=False, help="Compare greedy answers with plain decoding instead.")
@option(OPTIONS, "--gap", type=float, default=GAP_LIMIT, show_default=True, variable="BENCH", help="With --check:"
        " largest logit gap at a first difference that still passes.")  # fmt: skip
@option(OPTIONS, "--plot", metavar="SVG", variable=False, help="Draw speed-up by task, acceptance by depth and costs.")
@option(
    OPTIONS,
    "--cost-curve",
    metavar="JSON",
    variable=False,
    help="Also say what the fixed trees would bring, by projection, on a machine with the costs in this file.",
)
@option(OPTIONS, "--json", "as_json", is_flag=True, help="Print one JSON document.")
@feedback_option
@runtime_options
@quiet_option
@click.pass_obj
def bench(console: Console, **flags: Any) -> None:
    """Measure what speculation brings on this machine.

    All contenders answer every prompt in turn within one run, so that a machine that gets slower or faster hits all
    alike; rates are medians over the repeats. Run it on an idle machine.

    It also says how often tokens were accepted by depth, what drafted them, what a pass costs by its rows, and how far
    the chosen trees are from the best fixed one.

    \b
    A cost curve holds the costs of passes by rows, in passes of the target over one row, which take plain_ms:
      {"plain_ms": 30, "verify": {"1": 1.0, "64": 1.3}, "draft": {"1": 0.05, "16": 0.06}}

    \b
    Examples:
      eagle3 bench
      eagle3 bench --shape 2,2,3 --shape 4,4,8 --temp 0
      eagle3 bench --target llama.gguf --draft llama-eagle3.gguf --against ./llama-server
      eagle3 bench --against ./llama-server --against-type none --against-type draft-eagle3+ngram-simple
      eagle3 bench --task all --plot bench.svg
      eagle3 bench --temp 0 --cost-curve gpu.json
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
    extras = _extras(flags, settings)
    with Contenders(settings) as contenders:
        for note in contenders.engine.notes:
            console.note(note)
        if flags["check"]:
            _check(console, contenders, prompts, flags)
        else:
            _measure(console, contenders, prompts, extras, flags["as_json"])


def _settings(flags: dict[str, Any]) -> BenchSettings:
    from ..bench.run import SHAPES, BenchSettings

    pair = pair_settings({**flags, "draft_depth": None, "draft_width": None, "draft_tokens": None, "no_lookup": False})
    if pair.draft is None:
        given = "--no-draft" if flags["no_draft"] else f"--draft {flags['draft']}" if flags["draft"] else "--target"
        raise OptionError(f"{given}: leaves no drafter to measure.", "Give --draft a GGUF, or leave it out.")
    if flags["repeats"] < 1 or flags["max_tokens"] < 2:
        raise OptionError("--repeats, --max-tokens: expected at least 1 and 2.")
    return BenchSettings(
        target=pair.target,
        draft=pair.draft,
        runtime=runtime_settings(flags),
        feedback=pair.feedback,
        shapes=tuple(map(TreeShape.parse, flags["shapes"])) or SHAPES,
        temperatures=flags["temperatures"] or (0.0, 1.0),
        repeats=flags["repeats"],
        max_tokens=flags["max_tokens"],
        against=flags["against"],
        against_types=_against_types(flags),
        draft_max=tuple(dict.fromkeys(flags["draft_max"])) or (1, 2, 3),
    )


def _against_types(flags: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """The types of speculation to start a server with.  OptionError for one that cannot be, and for flags without
    effect."""
    from ..bench.server import DEFAULT_TYPES, DRAFTER, is_url, speculation

    types = tuple(dict.fromkeys(speculation(name) for name in flags["against_types"] or DEFAULT_TYPES))
    against, drafts = flags["against"], any(DRAFTER in each for each in types)
    why = None if against else "without --against"
    if against and is_url(against):
        why = "with a URL: the server there has its own settings"
    for flag, name in (("--against-type", "against_types"), ("--draft-max", "draft_max")):
        if typed(name) and why:
            raise OptionError(f"{flag}: has no effect {why}.", "Leave it out, or name the program with --against.")
    if typed("draft_max") and not drafts:
        raise OptionError(f"--draft-max: has no effect without --against-type {DRAFTER}.", "Leave it out, or add that.")
    for most in flags["draft_max"]:
        check_range("--draft-max", most, 1)
    return types


@dataclass(frozen=True)
class _Extras:
    """draw    as `plot.draw`, its path given; None: no figure
    curve   costs to project with; None: no projection
    """

    draw: Callable[..., None] | None
    curve: CostCurve | None


def _extras(flags: dict[str, Any], settings: BenchSettings) -> _Extras:
    """Whatever is wrong with the files is said here, before anything is measured."""
    from ..bench.projection import load

    for name, given in (("--plot", flags["plot"]), ("--cost-curve", flags["cost_curve"])):
        if given is not None and flags["check"]:
            raise OptionError(f"{name}: has no effect with --check.", "Leave one of them out.")
    draw = _drawing(Path(flags["plot"])) if flags["plot"] is not None else None
    return _Extras(draw, load(Path(flags["cost_curve"]), settings.shapes) if flags["cost_curve"] is not None else None)


def _drawing(path: Path) -> Callable[..., None]:
    try:
        from ..bench.plot import check, draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        hint = "Run: pip install 'eagle3[figures]', or leave --plot out."
        raise OptionError("--plot: needs matplotlib, which is not installed.", hint) from error
    check(path)
    return partial(draw, path)


def _measure(console: Console, contenders: Any, prompts: tuple[Prompt, ...], extras: _Extras, as_json: bool) -> None:
    """Print, then draw: a disk that is full by then does not cost the numbers."""
    from ..bench.output import as_dict, as_text, results
    from ..bench.run import pinned, run

    samples = list(run(contenders, prompts, lambda done, total: console.progress("answers", done / total)))
    console.clear_progress()
    found = results(samples, extras.curve)
    if as_json:
        facts = {"run": pinned(contenders.settings, prompts), "settings": contenders.engine.settings}
        facts |= {"against": contenders.against} if contenders.against else {}
        console.document({**as_dict(found), **facts, "versions": versions()})
    else:
        console.text(as_text(found, several_tasks=len({prompt.task for prompt in prompts}) > 1))
    if extras.draw:
        extras.draw(found.table, found.tasks, found.learned)


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
        f"{d.task}, prompt {d.prompt}, {d.contender}:"
        f" token {d.position} is {d.drafted} instead of {d.plain}, logit gap {d.gap:.5f}"
        for d in result.differences
    ]
    same = result.answers - len(result.differences)
    lines.append(f"{same} of {result.answers} answers equal plain decoding; largest gap {result.largest_gap:.5f}")
    return "\n".join(lines) + "\n"
