"""`eagle3 doctor`: is everything there, does the pair fit, how fast is it, and what should be changed?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import click

from .. import doctor as look
from .. import machine
from ..console import Console
from ..doctor import PROBLEM, Finding, verdict
from ..errors import Eagle3Error, FileError, PromptError
from ..settings import Limits, PairSettings, RuntimeSettings, SamplingSettings
from ..versions import bug_report
from . import build
from .answer import Answer, Engine, collect, ignore, loaded
from .options import Command, draft_options, option, pair_options, quiet_option, runtime_options

PROMPT = "Write a short python function that reverses a list, and explain each line of it."
DRAFTED, PLAIN = (1.5, 1.3), (0.7, 1.3)  # seconds of the answers: to warm up and to learn what pays; to be measured
MOST = 256  # tokens of an answer
UNHEALTHY = 1


class Patient(Command):
    """A command that runs whatever is wrong with the configuration file, to tell."""

    def configured(self, ctx: click.Context, args: list[str]) -> dict[str, Any] | None:
        try:
            return super().configured(ctx, args)
        except FileError:
            return None


@click.command(cls=Patient)
@option("Options", "--no-speed", variable="DOCTOR", is_flag=True, help="Do not load the pair and measure its speed.")
@option("Options", "--json", "as_json", is_flag=True, help="Print one JSON document.")
@quiet_option
@pair_options
@draft_options
@runtime_options
@click.pass_obj
def doctor(console: Console, **flags: Any) -> None:
    """Check the installation, this machine and a pair, measure it for five seconds, and say what to change.

    Give the options that you run the pair with. The exit code is 0 if all is well and 1 if something is wrong; what is
    only advice does not change it.

    \b
    Examples:
      eagle3 doctor
      eagle3 doctor --target llama.gguf --draft llama-eagle3.gguf -c 16384
      eagle3 doctor --target llama --no-speed
      eagle3 doctor --json | jq -r '.findings[] | select(.status != "ok") | .remedy'
    """
    console.quiet = flags["quiet"]
    build.refuse_useless_flags(flags)
    runtime, pair = build.runtime_settings(flags), _named(flags)
    facts, findings = bug_report(), []
    for finding in examined(console, pair, runtime, facts, not flags["no_speed"]):
        findings.append(finding)
        if not flags["as_json"]:
            console.text(line(finding))
    console.clear_progress()
    healthy = not any(finding.status == PROBLEM for finding in findings)
    if flags["as_json"]:
        rows = [finding.as_dict() for finding in findings]
        console.document({"ok": healthy, "findings": rows, "versions": facts})
    else:
        console.text(f"{verdict(findings)}\n")
    if not healthy:
        click.get_current_context().exit(UNHEALTHY)


def _named(flags: dict[str, Any]) -> PairSettings | FileError:
    """The pair, or why its files are not known: the demo pair is not installed, or no model has that name.  What is
    wrong with the flags is no finding."""
    try:
        return build.pair_settings(flags)
    except FileError as error:
        return error


def line(finding: Finding) -> str:
    remedy = f"\n{'':9}{finding.remedy}" if finding.remedy else ""
    return f"{finding.status:9}{finding.name}: {finding.said}{remedy}\n"


def examined(
    console: Console, pair: PairSettings | FileError, runtime: RuntimeSettings, facts: dict[str, str], load: bool
) -> Iterator[Finding]:
    """Every finding, as soon as it is known.  Without llama.cpp nothing about models can be told.  facts: as
    `bug_report` has them; load: also measure."""
    found = look.llama_cpp(facts)
    yield found
    yield look.configuration(click.get_current_context().find_root())
    yield look.models()
    yield look.cache()
    if found.status == PROBLEM:
        return
    if isinstance(pair, FileError):
        yield look.fault("pair", pair)
        return
    healthy = True
    for finding in look.before_loading(pair, runtime):
        healthy = healthy and finding.status != PROBLEM
        yield finding
    if healthy and load:
        yield speed(console, pair, runtime)


def speed(console: Console, pair: PairSettings, runtime: RuntimeSettings) -> Finding:
    """The same prompt drafted and plain, each twice: the first answer warms up.  An engine that does not load is a
    finding, too."""
    from ..llama import physical_cores

    disturbed = look.busy(machine.load(), physical_cores())  # asked now: later our own passes count, too
    try:
        drafted = rate(console, pair, runtime, DRAFTED) if pair.drafts else None
        alone = replace(pair, draft=None, lookup=False, no_draft="doctor's comparison", nodes=None)
        plain = rate(console, alone, runtime, PLAIN)
    except Eagle3Error as error:
        return look.fault("speed", error)
    return look.speed(plain, drafted, pair.drafts, disturbed)


def rate(console: Console, pair: PairSettings, runtime: RuntimeSettings, seconds: tuple[float, ...]) -> float | None:
    """Tokens per second of the last of several answers, each of which may take so long."""
    with loaded(pair, runtime, console) as engine:
        sampling = engine.effective(SamplingSettings(temperature=0.0, seed=0))
        prompt = _prompt(engine)
        for number, most in enumerate(seconds):
            console.progress("measuring", number / len(seconds))
            pieces = engine.stream(prompt, sampling, Limits(MOST, ignore_eos=True))
            collect(pieces, Answer(), ignore, _after(most))
        return engine.statistics.tokens_per_second


def _after(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() > ends


def _prompt(engine: Engine) -> list[int]:
    """As it is for a model without a chat template."""
    try:
        return engine.render([{"role": "user", "content": PROMPT}])
    except PromptError:
        return engine.tokenize(PROMPT)
