"""`eagle3 chat`: turns on a terminal, or one turn per line of a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import click

from ..console import Console
from ..errors import InputError, PromptError
from ..interrupt import gentle_interrupt
from ..prompt import clean, stdin_is_piped, stdin_lines
from ..settings import Limits, SamplingSettings
from . import build
from .answer import Answer, Engine, collect, loaded, summary
from .options import Command, answer_options, option, quiet_option, system_option

MARK = "> "
COMMANDS = {"/exit": "leave", "/reset": "forget the conversation", "/help": "this list"}
OVERFLOW = ("stop", "drop")
ANSWER_SHARE = 4  # with --overflow drop an answer gets this part of the context, or --max-tokens if that is less


@dataclass
class Conversation:
    """The messages so far and the engine that answers them.

    person    somebody types, so a first Ctrl-C ends an answer only
    overflow  what happens when it no longer fits into the context: "stop" or "drop"
    stopped   it ended the last answer; another one leaves
    """

    engine: Engine
    console: Console
    sampling: SamplingSettings
    limits: Limits
    system: str | None = None
    person: bool = True
    overflow: str = "stop"
    stopped: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, text: str) -> None:
        """Answer one message.  What was said before an interruption stays in the history.

        A message for which there is no room is forgotten: said to a person, PromptError for a pipe.
        """
        self.messages.append({"role": "user", "content": text})
        answer, ended = Answer(), never
        self.stopped = False
        try:
            with gentle_interrupt(lambda: bool(answer.tokens)) if self.person else nullcontext(never) as ended:
                pieces = self.engine.stream(self._prompt(), self.sampling, self.limits)
                collect(pieces, answer, self.console.text, ended)
                self.stopped = answer.finish_reason is None and ended()
        except PromptError as error:
            self.messages.pop()
            if not self.person:
                raise
            self.console.error(error.message, error.hint)
            return
        except KeyboardInterrupt:
            if ended() or not self.person:  # the second one
                raise
            self.stopped = True
        finally:
            self.console.end_text()
        self._remember(answer, self.stopped)

    def _prompt(self) -> list[int]:
        """The conversation's token ids, which leave room for an answer; for more room old turns may be dropped."""
        cells, messages = self.engine.settings["ctx_size"], self.messages
        prompt = self.engine.render(messages)
        dropped = 0
        if self.overflow == "drop":
            room = min(self.limits.max_tokens or cells, max(cells // ANSWER_SHARE, 1))
            while len(prompt) + room > cells and (shorter := without_oldest_turn(messages)):
                messages, dropped = shorter, dropped + 1
                prompt = self.engine.render(messages)
        if len(prompt) >= cells:
            raise self._no_room(len(prompt), cells)
        if dropped:
            self.messages = messages
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            self.console.report(f"(dropped the oldest {turns}: the context holds {cells} tokens)")
        return prompt

    def _no_room(self, tokens: int, cells: int) -> PromptError:
        """What to say when so many tokens are too many."""
        newest = self.messages
        while shorter := without_oldest_turn(newest):
            newest = shorter
        alone = len(self.engine.render(newest))
        if alone >= cells:
            what = "your message and the system message" if self.system else "your message"
            return PromptError(
                f"{what}: expected at most {cells - 1} tokens (the context holds {cells}), got {alone}.",
                "Shorten it, or raise --ctx-size.",
            )
        return PromptError(
            f"the conversation is full: expected at most {cells - 1} tokens (the context holds {cells}), got {tokens}.",
            "/reset starts over, --overflow drop forgets the oldest turns, --ctx-size sets a larger context.",
        )

    def _remember(self, answer: Answer, interrupted: bool) -> None:
        if interrupted and not answer.text:
            self.messages.pop()
            self.console.note("(stopped before the answer began; your message is dropped; Ctrl-C again leaves)")
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        if interrupted:
            self.console.note("(stopped) Ctrl-C again leaves.")
        elif answer.finish_reason == "length" and len(answer.tokens) != self.limits.max_tokens:
            next_time = "/reset starts over" if self.overflow == "stop" else "the next message drops the oldest turns"
            self.console.note(f"(the context is full; {next_time})")
        if self.person:
            self.console.note(summary(self.engine.statistics))


def without_oldest_turn(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The messages without the oldest user message and what answered it, the system message kept; empty where there is
    but one turn."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [*messages[: starts[0]], *messages[starts[1] :]] if len(starts) > 1 else []


@click.command(cls=Command)
@system_option
@option(
    "Options",
    "--overflow",
    type=click.Choice(OVERFLOW),
    default="stop",
    show_default=True,
    help="When the conversation no longer fits into the context: stop, or drop the oldest turns.",
)
@quiet_option
@answer_options
@click.pass_obj
def chat(console: Console, **flags: Any) -> None:
    """Talk with a model. Each line is a message; the conversation is remembered.

    Ctrl-C ends an answer, a second Ctrl-C or Ctrl-D leaves. /reset forgets the conversation, /exit leaves. When lines
    are piped in, each is a message and only the answers are printed.

    \b
    Examples:
      eagle3 chat
      eagle3 chat --target llama.gguf --draft llama-eagle3.gguf --system "Answer briefly."
      echo "Tell me a joke" | eagle3 chat
    """
    console.quiet, console.raw = flags["quiet"], flags["raw_output"]
    build.refuse_useless_flags(flags)
    sampling, limits = build.sampling_settings(flags), build.limits(flags)
    pair, runtime = build.pair_settings(flags), build.runtime_settings(flags)
    person = sys.stdin is not None and not stdin_is_piped()
    with loaded(pair, runtime, console) as engine:
        conversation = Conversation(engine, console, sampling, limits, flags["system"], person, flags["overflow"])
        if person:
            console.note(f"{pair.target.name}: Ctrl-C ends an answer, Ctrl-D leaves, /help lists the commands.")
        for line in typed_lines(console, lambda: conversation.stopped) if person else stdin_lines():
            if not _obey(line.strip(), conversation):
                break


def _obey(line: str, conversation: Conversation) -> bool:
    """Run a command or answer a message; False ends the chat."""
    conversation.stopped = False
    if line == "/exit":
        return False
    if line == "/reset":
        conversation.reset()
        conversation.console.note("(forgotten)")
    elif line == "/help":
        conversation.console.report("\n".join(f"{name}  {text}" for name, text in COMMANDS.items()))
    elif re.fullmatch(r"/[a-z]+", line):
        message = f"{line}: no such command. There are {', '.join(COMMANDS)}."
        if not conversation.person:
            raise InputError(message)
        conversation.console.error(message)
    elif line:
        conversation.turn(line)
    return True


def never() -> bool:
    return False


def typed_lines(console: Console, stopped: Callable[[], bool] = never) -> Iterator[str]:
    """Lines from the terminal until Ctrl-D; KeyboardInterrupt for a second Ctrl-C in a row.  stopped: was there one
    since the last line?"""
    edits = sys.stdout is not None and sys.stdout.isatty()  # else input() would put its mark into the answers
    if edits:
        _line_editing()
    interrupted = False
    while True:
        try:
            line = clean(_ask(console, edits), "your message")
        except EOFError:
            console.report("")
            return
        except KeyboardInterrupt:
            console.report("")
            if interrupted:
                raise
            interrupted = True
            console.note("(Ctrl-C again or Ctrl-D leaves)")
            continue
        except (InputError, UnicodeDecodeError) as error:
            console.error(str(error))
            continue
        yield line
        interrupted = stopped()


def _ask(console: Console, edits: bool) -> str:
    if edits:
        return input(MARK)
    console.prompt_mark(MARK)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _line_editing() -> None:
    """Arrow keys and history in input(), where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401
