"""`eagle3 generate`: one prompt, one answer."""

from __future__ import annotations

from typing import Any

import click

from ..console import Console
from ..prompt import PromptSource, read_prompt
from ..settings import Limits, SamplingSettings, as_dict
from . import build
from .answer import Answer, Engine, collect, loaded, summary
from .options import TEXT, Command, answer_options, option, quiet_option, system_option

INPUT = "Prompt"


@click.command(cls=Command)
@click.argument("words", nargs=-1, metavar="[PROMPT]...")
@option(INPUT, "-p", "--prompt", variable=False, type=TEXT, metavar="TEXT", help="The prompt; stdin is not read.")
@option(
    INPUT,
    "-f",
    "--file",
    "files",
    variable=False,
    multiple=True,
    metavar="FILE",
    help="Text before the prompt; - is stdin; repeatable.",
)
@system_option
@option("Options", "--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@option("Options", "--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
@option("Options", "--stats", is_flag=True, help="Speed and acceptance on stderr.")
@quiet_option
@answer_options
@click.pass_obj
def generate(console: Console, words: tuple[str, ...], **flags: Any) -> None:
    """Answer one prompt.

    The prompt is the arguments, -p or -f. Text that is piped in goes before the arguments, with a blank line
    between; with -p or -f stdin is read only for "-f -". Windows line breaks become \\n.

    \b
    Examples:
      eagle3 generate "Why is the sky blue?"
      cat notes.txt | eagle3 generate "Summarise:"
      eagle3 generate -f notes.txt -p "Summarise:" -n 200 --temp 0
      eagle3 generate "Three colours" --json-schema @colours.json --json | jq .text
      eagle3 generate --raw "Once upon a time" --target llama.gguf --draft llama-eagle3.gguf --stats
    """
    console.quiet, console.raw = flags["quiet"], flags["raw_output"]
    build.refuse_useless_flags(flags)
    sampling, limits = build.sampling_settings(flags), build.limits(flags)
    pair, runtime = build.pair_settings(flags), build.runtime_settings(flags)
    waiting = "reading the start of the prompt from stdin (with -p it is not read)"
    prompt = read_prompt(PromptSource(words, flags["prompt"], flags["files"]), lambda: console.note(waiting))
    system, as_json = None if flags["raw"] else flags["system"], flags["as_json"]

    with loaded(pair, runtime, console) as engine:
        tokens = engine.tokenize(prompt) if flags["raw"] else engine.render(messages(prompt, system))
        sampling = engine.effective(sampling)
        answer = Answer()
        try:
            collect(engine.stream(tokens, sampling, limits), answer, ignore if as_json else console.text)
        finally:
            console.end_text()
        if as_json:
            console.document(document(answer, engine, sampling, limits, {"raw": flags["raw"], "system": system}))
        if flags["stats"]:
            console.report(summary(engine.statistics))


def messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def ignore(_text: str) -> None:
    """Show nothing: the JSON document comes at the end, and only if all went well."""


def document(
    answer: Answer, engine: Engine, sampling: SamplingSettings, limits: Limits, prompt: dict[str, Any]
) -> dict[str, Any]:
    """The JSON document.  sampling: with the seed that was used.  prompt: how the prompt was made."""
    from ..versions import versions

    statistics = engine.statistics
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": statistics.prompt_tokens,
            "completion_tokens": statistics.completion_tokens,
        },
        "timings": statistics.timings(),
        "speculative": statistics.speculative(),
        "settings": {**engine.settings, **as_dict(sampling), **as_dict(limits), **prompt},
        "versions": versions(),
    }
