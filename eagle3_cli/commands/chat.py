"""`eagle3 chat`: turns on a terminal, or one turn per line of a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import click

from ..console import Console
from ..errors import InputError
from ..interrupt import gentle_interrupt
from ..prompt import clean, stdin_is_piped, stdin_lines
from ..settings import Limits, SamplingSettings
from . import build
from .answer import Answer, Engine, collect, loaded, summary
from .options import Command, answer_options, quiet_option, system_option

MARK = "> "
COMMANDS = {"/exit": "leave", "/reset": "forget the conversation", "/help": "this list"}


@dataclass
class Conversation:
    """The messages so far and the engine that answers them.  person: somebody types, so Ctrl-C ends an answer only."""

    engine: Engine
    console: Console
    sampling: SamplingSettings
    limits: Limits
    system: str | None = None
    person: bool = True
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, text: str) -> None:
        """Answer one message.  What was said before an interruption stays in the history."""
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        interrupted = False
        try:
            with gentle_interrupt() if self.person else nullcontext(lambda: False) as ended:
                pieces = self.engine.stream(self.engine.render(self.messages), self.sampling, self.limits)
                collect(pieces, answer, self.console.text, ended)
                interrupted = answer.finish_reason is None and ended()
        except KeyboardInterrupt:
            if not self.person:
                raise
            interrupted = True
        finally:
            self.console.end_text()
        self._remember(answer, interrupted)

    def _remember(self, answer: Answer, interrupted: bool) -> None:
        if interrupted and not answer.text:
            self.messages.pop()
            self.console.note("(stopped before the answer began; your message is dropped)")
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        if interrupted:
            self.console.note("(stopped)")
        elif answer.finish_reason == "length" and not self.limits.max_tokens:
            self.console.note("(the context is full; /reset starts over)")
        if self.person:
            self.console.note(summary(self.engine.statistics))


@click.command(cls=Command)
@system_option
@quiet_option
@answer_options
@click.pass_obj
def chat(console: Console, **flags: Any) -> None:
    """Talk with a model. Each line is a message; the conversation is remembered.

    Ctrl-C ends an answer, Ctrl-D (or Ctrl-C twice at the prompt) leaves. /reset forgets the conversation, /exit
    leaves. When lines are piped in, each is a message and only the answers are printed.

    \b
    Examples:
      eagle3 chat
      eagle3 chat --target llama.gguf --draft llama-eagle3.gguf --system "Answer briefly."
      echo "Tell me a joke" | eagle3 chat
    """
    console.quiet = flags["quiet"]
    build.refuse_useless_flags(flags)
    sampling, limits = build.sampling_settings(flags), build.limits(flags)
    pair, runtime = build.pair_settings(flags), build.runtime_settings(flags)
    person = sys.stdin is not None and not stdin_is_piped()
    with loaded(pair, runtime, console) as engine:
        conversation = Conversation(engine, console, sampling, limits, flags["system"], person)
        if person:
            console.note(f"{pair.target.name}: Ctrl-C ends an answer, Ctrl-D leaves, /help lists the commands.")
        for line in typed_lines(console) if person else stdin_lines():
            if not _obey(line.strip(), conversation):
                break


def _obey(line: str, conversation: Conversation) -> bool:
    """Run a command or answer a message; False ends the chat."""
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


def typed_lines(console: Console) -> Iterator[str]:
    """Lines from the terminal until Ctrl-D; KeyboardInterrupt for a second Ctrl-C in a row."""
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
        interrupted = False
        yield line


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
