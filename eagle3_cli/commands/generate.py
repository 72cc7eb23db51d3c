"""`eagle3 generate`: one prompt, one answer; with --batch many of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..errors import Eagle3Error, OptionError, shown
from ..logprobs import MOST
from ..markdown import code_blocks
from ..messages import Messages, asking, has_system, read_messages
from ..prompt import STDIN, PromptSource, read_prompt
from ..settings import MAX_SEQUENCES, as_dict, check_range
from . import build
from .answer import Answer, Engine, collect, ignore, loaded, summary, thoughtful, usage, watching
from .options import (
    TEXT,
    Command,
    DraftTokens,
    answer_options,
    hide_thinking_option,
    option,
    quiet_option,
    system_option,
)
from .trace_option import trace_option

if TYPE_CHECKING:
    from ..engine.types import Piece
    from ..trace import Trace

INPUT, MANY = "Prompt", "Many prompts"
_LINE = '{"prompt": "..."} or {"messages": [...]}'

_USELESS: list[build.Useless] = [
    (("output", "parallel"), lambda f: f["batch"] is None, "without --batch", "batch"),
    (
        ("as_json",),
        lambda f: f["batch"] is not None,
        "with --batch, which prints one JSON document per line anyway",
        "batch",
    ),
    (("trace", "extract", "extract_last"), lambda f: f["batch"] is not None, "with --batch", "batch"),
    (("extract", "extract_last"), lambda f: f["as_json"], "with --json", "as_json"),
    (("extract",), lambda f: f["extract_last"], "with --extract-last", "extract_last"),
    (("logprobs",), lambda f: not f["as_json"] and f["batch"] is None, "without --json or --batch", "as_json"),
    (("hide_thinking", "messages"), lambda f: f["raw"], "with --raw, which leaves the chat template out", "raw"),
]


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
@option(
    INPUT,
    "--messages",
    variable=False,
    metavar="FILE",
    help="A conversation to go on with, as JSON, as /save of eagle3 chat writes it; - is stdin. The prompt, if there"
    " is one, is its newest message.",
)
@option(MANY, "--batch", variable=False, metavar="FILE", help=f"A file with one {_LINE} per line; - is stdin.")
@option(
    MANY,
    "-o",
    "--output",
    variable=False,
    metavar="FILE",
    help="One JSON document per answer, in the same order; a file that is unfinished is continued. Default: stdout.",
)
@option(
    MANY,
    "--parallel",
    type=DraftTokens(),
    metavar="auto|N",
    help="Prompts that are answered at a time, without a drafter; auto, the default: several where that is faster and"
    " -n says how much room they need.",
)
@system_option
@option("Options", "--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@option("Options", "--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
@option("Options", "-x", "--extract", is_flag=True, help="Print the answer's first code block alone, once it is whole.")
@option("Options", "--extract-last", "--xl", is_flag=True, help="The same of the last one.")
@option(
    "Options",
    "--logprobs",
    type=int,
    metavar="N",
    help=f"In the JSON: the probability of every token, and of the N likeliest at its place; 0 to {MOST}.",
)
@hide_thinking_option
@option("Options", "--stats", is_flag=True, help="Speed and acceptance on stderr.")
@trace_option
@quiet_option
@answer_options
@click.pass_obj
def generate(console: Console, words: tuple[str, ...], **flags: Any) -> None:
    """Answer one prompt, or every line of a file.

    The prompt is the arguments, -p or -f. Text that is piped in goes before the arguments, with a blank line
    between; with -p, -f or --messages stdin is read only for "-f -". Windows line breaks become \\n.

    With --batch each line is a prompt, perhaps with "id", "system" and settings of its own ("max_tokens",
    "temperature", "seed", ...). A line that fails does not stop the others. The same command continues a file that was
    interrupted.

    \b
    Examples:
      eagle3 generate "Why is the sky blue?"
      cat notes.txt | eagle3 generate "Summarise:"
      eagle3 generate -f notes.txt -p "Summarise:" -n 200 --temp 0
      eagle3 generate "Three colours" --json-schema @colours.json --json | jq .text
      eagle3 generate -x "A bash script that counts files" > count.sh
      eagle3 generate --messages chat.json "And in one sentence?"
      eagle3 generate --batch prompts.jsonl -o answers.jsonl -n 200
      eagle3 generate --raw "Once upon a time" --target llama.gguf --draft llama-eagle3.gguf --stats
    """
    console.quiet, console.raw = flags["quiet"], flags["raw_output"]
    build.refuse_useless_flags(flags, _USELESS)
    if flags["logprobs"] is not None:
        check_range("--logprobs", flags["logprobs"], 0, MOST)
    if flags["batch"] is not None:
        _answer_batch(console, words, flags)
    else:
        _answer_one(console, words, flags)


# ---- one answer -------------------------------------------------------------------------------------------


def _answer_one(console: Console, words: tuple[str, ...], flags: Mapping[str, Any]) -> None:
    sampling, limits = build.sampling_settings(flags), build.limits(flags)
    pair, runtime = build.pair_settings(flags), build.runtime_settings(flags)
    prompt = _prompt(console, words, flags)
    as_json, hidden, extract = flags["as_json"], flags["hide_thinking"], flags["extract"] or flags["extract_last"]
    likeliest = flags["logprobs"] if as_json else None

    with loaded(pair, runtime, console) as engine:
        tokens = engine.tokenize(prompt) if isinstance(prompt, str) else engine.render(prompt)
        sampling = engine.effective(sampling)
        answer = Answer() if isinstance(prompt, str) else thoughtful(engine, tokens)
        trace = _traced(flags["trace"], engine, pair.target.name, prompt)
        pieces = engine.stream(tokens, sampling, limits, *watching(console, likeliest, trace.round if trace else None))
        show = ignore if as_json or extract else console.text
        aside = ignore if as_json or hidden else console.aside
        try:
            collect(seen_by(trace, pieces) if trace else pieces, answer, show, aside=aside)
            if trace:
                trace.end(engine.statistics)
        finally:
            console.end_text()
            if trace and answer.tokens:  # also of an answer that was interrupted
                trace.write()
        if extract:
            console.text(_code(answer.text, -1 if flags["extract_last"] else 0))
            console.end_text()
        if as_json:
            how = {"raw": flags["raw"], "system": _system(prompt), "logprobs": likeliest}
            facts = {**answer.thoughts(hidden), **answer.logprobs(engine, likeliest)}
            console.document(document(answer, engine, facts, {**as_dict(sampling), **as_dict(limits), **how}))
        if flags["stats"]:
            console.report(summary(engine.statistics))


def _code(text: str, which: int) -> str:
    blocks = code_blocks(text)
    if not blocks:
        raise Eagle3Error(f"--extract: expected a code block in the answer, got {shown(text)}.", "Ask for one.")
    return blocks[which]


def _prompt(console: Console, words: tuple[str, ...], flags: Mapping[str, Any]) -> str | Messages:
    """The text for --raw, else the conversation."""
    name = flags["messages"]
    source = PromptSource(words, flags["prompt"], flags["files"], piped=name is None)
    waiting = "reading the start of the prompt from stdin (with -p it is not read)"
    if name is None:
        text = read_prompt(source, lambda: console.note(waiting))
        return text if flags["raw"] else messages(text, flags["system"])
    if name == STDIN and source.reads_stdin:
        raise OptionError("--messages -: stdin is the prompt already.", "Give one of them as a file.")
    given = read_messages(name, "--messages")
    system = flags["system"]
    if has_system(given):
        if system and build.typed("system"):
            raise OptionError(
                f"--system: the conversation in --messages {name} has a system message of its own.",
                "Leave one of them out.",
            )
        system = None
    where = "stdin" if name == STDIN else f"--messages {name}"
    return asking(given, read_prompt(source) if source.given else None, system, where)


def messages(prompt: str, system: str | None) -> Messages:
    return asking([], prompt, system, "the prompt")


def _system(prompt: str | Messages) -> str | None:
    """The system message that was used."""
    first = None if isinstance(prompt, str) else prompt[0]
    return first["content"] if first and first["role"] == "system" else None


def _traced(path: Path | None, engine: Engine, title: str, prompt: str | Messages) -> Trace | None:
    """A trace that has begun, where there should be one."""
    if path is None:
        return None
    from ..trace import Trace

    trace = Trace(path, engine.decoder.model)
    trace.begin(title, prompt if isinstance(prompt, str) else prompt[-1]["content"])
    return trace


def seen_by(trace: Trace, pieces: Iterator[Piece]) -> Generator[Piece, None, None]:
    """The same pieces, each shown to the trace first."""
    try:
        for piece in pieces:
            trace.piece(piece)
            yield piece
    finally:
        if isinstance(pieces, Generator):
            pieces.close()


def document(answer: Answer, engine: Engine, facts: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON document.  facts: what was asked for beside the text.  settings: of this call, with the seed that was
    used."""
    from ..versions import versions

    statistics = engine.statistics
    return {
        "text": answer.text,
        **facts,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "usage": usage(statistics),
        "timings": statistics.timings(),
        "speculative": statistics.speculative(),
        "settings": {**engine.settings, **settings},
        "versions": versions(),
    }


# ---- many answers -----------------------------------------------------------------------------------------


def _answer_batch(console: Console, words: tuple[str, ...], flags: Mapping[str, Any]) -> None:
    source = PromptSource(words, flags["prompt"], flags["files"])
    if source.given or flags["messages"] is not None:
        raise OptionError("--batch: the prompts are the lines of its file.", "Leave the other prompt out.")
    from ..batch import Defaults
    from .batch import Batch, answer_all
    from .batch_answers import How

    system = None if flags["raw"] else flags["system"]
    how = How(
        Defaults(build.sampling_settings(flags), build.limits(flags), system, flags["raw"]),
        build.runtime_settings(flags),
        flags["logprobs"],
        flags["hide_thinking"],
        _at_once(flags),
    )
    batch = Batch(flags["batch"], flags["output"] or STDIN, build.pair_settings(flags), how, flags["stats"])
    answer_all(console, batch)


def _at_once(flags: Mapping[str, Any]) -> int | None:
    """Prompts at a time; None: as many as pay.  Lines of a pipe are answered as they come."""
    from ..batch import can_look_ahead

    number = flags["parallel"]
    if number is not None:
        check_range("--parallel", number, 1, MAX_SEQUENCES)
    if can_look_ahead(flags["batch"]) and not flags["lora"] and not flags["lora_scaled"]:
        return int(number) if number is not None else None
    if number not in (None, 1) and build.typed("parallel"):
        why = "with --lora" if flags["lora"] or flags["lora_scaled"] else "where --batch is no file"
        raise OptionError(f"--parallel: has no effect {why}.", "Leave it out.")
    return 1
