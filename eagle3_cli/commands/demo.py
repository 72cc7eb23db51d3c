"""`eagle3 demo`: the same prompt with and without the drafter, with honest numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..settings import Limits, PairSettings, RuntimeSettings, SamplingSettings
from . import build
from .answer import Answer, collect, loaded
from .generate import ignore, messages
from .options import Command, draft_options, option, quiet_option, raw_output_option, runtime_options

if TYPE_CHECKING:
    from ..engine.types import Statistics

SHOWN = {"draft_tokens": 3, "draft_depth": 2, "draft_width": 2}  # what is drafted unless a flag says otherwise
PROMPT = "Write a short python function that reverses a list."


@dataclass(frozen=True)
class Run:
    """gap: how far apart the two logits were where this answer first left the one it was compared with."""

    answer: Answer
    statistics: Statistics
    gap: float | None = None


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
@raw_output_option
@draft_options
@runtime_options
@click.pass_obj
def demo(console: Console, words: tuple[str, ...], **flags: Any) -> None:
    """Answer with and without the drafter, and compare.

    Streams an answer of the small pair that comes with eagle3, then lets the same model answer alone. Always
    the likeliest token, so both answers should be the same text. The numbers go to stderr. The tree is a fixed one of 3
    nodes, to show drafting even where it does not pay; --draft-tokens auto chooses.

    \b
    Examples:
      eagle3 demo
      eagle3 demo "Write a poem about the sea." -n 300
      eagle3 demo --draft-tokens 16 --threads 2
    """
    console.quiet, console.raw = flags["quiet"], flags["raw_output"]
    flags = {**flags, "target": None, "draft": None, "no_draft": False, "lora": (), "lora_scaled": ()}
    build.refuse_useless_flags(flags)
    if not any(build.typed(name) for name in SHOWN):  # auto would draft nothing where nothing pays
        flags = {**flags, **SHOWN}
    pair = build.pair_settings(flags)
    task = Task(
        " ".join(words) or PROMPT,
        build.runtime_settings(flags),
        build.limits({**flags, "stop": (), "ignore_eos": False}),
    )
    drafted = answer(task, pair, console, show=True)
    console.note("the same prompt without the drafter ...")
    plain = answer(
        task,
        replace(pair, draft=None, lookup=False, no_draft="the demo's comparison"),
        console,
        show=False,
        other=drafted.answer,
    )
    console.report(comparison(drafted, plain))


@dataclass(frozen=True)
class Task:
    prompt: str
    runtime: RuntimeSettings
    limits: Limits


def answer(task: Task, pair: PairSettings, console: Console, show: bool, other: Answer | None = None) -> Run:
    """Load, answer, close: the two runs share nothing but the files.  other: an answer to compare with."""
    said = Answer()
    with loaded(pair, task.runtime, console) as engine:
        sampling = engine.effective(SamplingSettings(temperature=0.0, seed=0))
        tokens = engine.render(messages(task.prompt, None))
        try:
            collect(engine.stream(tokens, sampling, task.limits), said, console.text if show else ignore)
        finally:
            console.end_text()
        statistics, gap = engine.statistics, None
        place = first_difference(said.tokens, other.tokens) if other else None
        if other and place is not None and place < min(len(said.tokens), len(other.tokens)):
            gap = engine.logit_gap([*tokens, *said.tokens[:place]], said.tokens[place], other.tokens[place])
        return Run(said, statistics, gap)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or is there in one only; None for equal answers."""
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if len(a) == len(b) == place else place


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
    return "\n".join([*lines, _agreement(drafted, plain)])


def _speed(tokens_per_second: float | None) -> str:
    return "too short to measure" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"


def _ratio(ratio: float) -> str:
    if ratio >= 1.0:
        return f"ratio:            {ratio:.2f} times as fast with the drafter (one run each)"
    return (
        f"ratio:            {ratio:.2f}, slower with the drafter (one run each); `eagle3 generate` decodes plainly here"
    )


def _agreement(drafted: Run, plain: Run) -> str:
    place = first_difference(drafted.answer.tokens, plain.answer.tokens)
    if place is None:
        return f"answers:          identical, {len(plain.answer.tokens)} tokens"
    apart = "" if plain.gap is None else f" Here their logits were {plain.gap:.2f} apart."
    return (
        f"answers:          differ from token {place + 1} on. The usual reason is two nearly equally likely tokens:"
        f" llama.cpp rounds differently when it checks several tokens at once.{apart} See `eagle3 bench --check`."
    )
