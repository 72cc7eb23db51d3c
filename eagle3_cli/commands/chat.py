"""`eagle3 chat`: turns on a terminal, or one turn per line of a pipe.

chat_input.py     what is typed; chat_editor.py: the editor on a capable terminal
chat_commands.py  what a line does: a message or a command; chat_settings.py, chat_stats.py: /set and /stats
chat_model.py     the loaded pair, and another one in its place
chat_show.py      what an answer looks like
conversation.py   the messages and the turns
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..errors import OptionError
from ..prompt import stdin_is_piped, stdin_lines
from . import build
from .answer import Engine
from .chat_commands import Commands
from .chat_input import reader, typed_lines
from .chat_model import LoadedPair
from .chat_show import display
from .conversation import Conversation
from .options import Command, answer_options, hide_thinking_option, option, quiet_option, system_option
from .trace_option import trace_option

if TYPE_CHECKING:
    from ..trace import Trace

OVERFLOW = ("stop", "drop")


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
@option("Options", "--markdown", is_flag=True, help="Draw the Markdown of answers, block by block; on a terminal.")
@option(
    "Options",
    "--show-drafts",
    is_flag=True,
    help="On a terminal: tokens that the drafter had proposed in green, those of n-gram matches in cyan; with NO_COLOR"
    " underlined and bold.",
)
@hide_thinking_option
@option("Options", "--no-history", is_flag=True, help="Keep nothing of what is typed in the cache directory.")
@trace_option
@quiet_option
@answer_options
@click.pass_obj
def chat(console: Console, **flags: Any) -> None:
    """Talk with a model. Each line is a message; the conversation is remembered.

    A line that ends in a backslash goes on in the next one, Alt-Enter begins a new line, and what is pasted or stands
    between two \"\"\" is one message. Ctrl-C ends an answer, a second Ctrl-C or Ctrl-D leaves.

    /help lists the commands: /retry, /undo and /edit change what was said, /save and /load keep it in a file, /set and
    /model change how it goes on. When lines are piped in, each is a message or a command and only the answers are
    printed.

    \b
    Examples:
      eagle3 chat
      eagle3 chat --target llama.gguf --draft llama-eagle3.gguf --system "Answer briefly."
      eagle3 chat --show-drafts --trace chat.html
      echo "Tell me a joke" | eagle3 chat
    """
    console.quiet, console.raw = flags["quiet"], flags["raw_output"]
    build.refuse_useless_flags(flags)
    person = sys.stdin is not None and not stdin_is_piped()
    if not person and build.typed("no_history"):
        raise OptionError("--no-history: has no effect where lines are piped in.", "Leave it out.")
    sampling, limits, show = build.sampling_settings(flags), build.limits(flags), display(console, flags)
    with LoadedPair(flags, console) as pair:
        conversation = Conversation(
            pair.engine, console, show, sampling, limits, flags["system"], person, flags["overflow"],
            _trace(flags["trace"], pair.engine),
        )  # fmt: skip
        commands = Commands(conversation, pair)
        if person:
            name = pair.settings.target.name
            console.note(f"{name}: Ctrl-C ends an answer, Ctrl-D leaves, /help lists the commands.")
            if show.legend:
                console.note(show.legend)
            lines = typed_lines(console, reader(console, not flags["no_history"]), lambda: conversation.stopped)
        else:
            lines = stdin_lines()
        for line in lines:
            if not commands.obey(line):
                break


def _trace(path: Path | None, engine: Engine) -> Trace | None:
    """The page of the whole conversation, where one is wanted."""
    if path is None:
        return None
    from ..trace import Trace

    return Trace(path, engine.decoder.model)
