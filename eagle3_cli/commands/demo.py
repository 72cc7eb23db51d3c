"""`eagle3 demo`: the same prompt with and without the drafter, with honest numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..settings import Limits, PairSettings, RuntimeSettings, SamplingSettings
from . import build
from .answer import Answer, collect, loaded
from .generate import ignore, messages
from .options import Command, draft_options, option, quiet_option, runtime_options

if TYPE_CHECKING:
    from ..engine.types import Statistics

PROMPT = "Explain in simple words why the sky is blue."


@dataclass(frozen=True)
class Run:
    answer: Answer
    statistics: Statistics


@click.command(cls=Command)
@click.argument("words", nargs=-1, metavar="[PROMPT]...")
@option(
    "Options",
    "-n",
    "--max-tokens",
    type=int,
    default=160,
    show_default=True,
    metavar="N",
    help="Most tokens of the answer; -1: the context.",
)
@quiet_option
@draft_options
@runtime_options
@click.pass_obj
def demo(console: Console, words: tuple[str, ...], **flags: Any) -> None:
    """Answer with and without the drafter, and compare.

    Streams an answer of the small pair that comes with eagle3, then lets the same model answer alone. Always
    the likeliest token, so both answers should be the same text. The numbers go to stderr.

    \b
    Examples:
      eagle3 demo
      eagle3 demo "Write a poem about the sea." -n 300
      eagle3 demo --draft-tokens 16 --threads 2
    """
    console.quiet = flags["quiet"]
    flags = {**flags, "target": None, "draft": None, "no_draft": False}
    build.refuse_useless_flags(flags)
    pair = build.pair_settings(flags)
    task = Task(
        " ".join(words) or PROMPT,
        build.runtime_settings(flags),
        build.limits({**flags, "stop": (), "ignore_eos": False}),
    )
    drafted = answer(task, pair, console, show=True)
    console.note("the same prompt without the drafter ...")
    plain = answer(task, replace(pair, draft=None, no_draft="the demo's comparison"), console, show=False)
    console.report(comparison(drafted, plain))


@dataclass(frozen=True)
class Task:
    prompt: str
    runtime: RuntimeSettings
    limits: Limits


def answer(task: Task, pair: PairSettings, console: Console, show: bool) -> Run:
    """Load, answer, close: the two runs share nothing but the files."""
    said = Answer()
    with loaded(pair, task.runtime, console) as engine:
        sampling = engine.effective(SamplingSettings(temperature=0.0, seed=0))
        tokens = engine.render(messages(task.prompt, None))
        try:
            collect(engine.stream(tokens, sampling, task.limits), said, console.text if show else ignore)
        finally:
            console.end_text()
        return Run(said, engine.statistics)


def comparison(drafted: Run, plain: Run) -> str:
    """The lines at the end: speeds, acceptance length, ratio, whether the answers agree."""
    fast, slow = drafted.statistics.tokens_per_second, plain.statistics.tokens_per_second
    tau = drafted.statistics.acceptance_length
    lines = [
        f"with drafter:     {_speed(fast)}" + (f", acceptance length {tau:.2f}" if tau else ""),
        f"without drafter:  {_speed(slow)}",
    ]
    if fast and slow:
        lines.append(_ratio(fast / slow))
    if not drafted.statistics.enabled:
        lines.append(f"drafting was off: {drafted.statistics.reason or 'no reason given'}")
    return "\n".join([*lines, _agreement(drafted.answer.tokens, plain.answer.tokens)])


def _speed(tokens_per_second: float | None) -> str:
    return "too short to measure" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"


def _ratio(ratio: float) -> str:
    if ratio >= 1.0:
        return f"ratio:            {ratio:.2f} times as fast with the drafter (one run each)"
    return f"ratio:            {ratio:.2f}, slower with the drafter (one run each); on this machine plain decoding wins"


def _agreement(drafted: list[int], plain: list[int]) -> str:
    if drafted == plain:
        return f"answers:          identical, {len(plain)} tokens"
    place = next((i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b), None)
    place = min(len(drafted), len(plain)) if place is None else place
    return (
        f"answers:          differ from token {place + 1} on. The usual reason is two nearly equally likely tokens: "
        "llama.cpp rounds a quantised model differently when it checks several tokens at once"
    )
