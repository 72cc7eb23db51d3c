"""What a person types in a chat: messages of one line or several, until Ctrl-D.

A capable terminal gets an editor (chat_editor.py).  Where there is none, plain lines are read.  A message has another
line behind a backslash, and from three quotes to three quotes.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from ..console import Console
from ..errors import InputError
from ..prompt import clean
from .chat_commands import QUOTES
from .conversation import never

MARK, MORE = "> ", ". "
BACKSLASH = "\\"

Read = Callable[[], str]


def typed_lines(console: Console, read: Read, stopped: Callable[[], bool] = never) -> Iterator[str]:
    """Messages and commands from the terminal until Ctrl-D; KeyboardInterrupt for a second Ctrl-C in a row.

    read      asks for one; EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C
    stopped   whether there was a Ctrl-C since the last one
    """
    interrupted = False
    while True:
        try:
            text = clean(read(), "your message")
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            console.note("(Ctrl-C again or Ctrl-D leaves)")
            continue
        except (InputError, UnicodeDecodeError) as error:
            console.error(str(error))
            continue
        yield text
        interrupted = stopped()


def reader(console: Console, keep_history: bool) -> Read:
    """What asks for a message: an editor with a history, or plain lines where the terminal cannot do more."""
    if can_edit():
        from .chat_editor import Editor

        return Editor(keep_history).read
    edits = sys.stdout is not None and sys.stdout.isatty()  # else input() would put its mark into the answers
    if edits:
        _line_editing()
    return lambda: plain_message(console, edits)


def can_edit() -> bool:
    """Whether keys can be read one by one, and what is typed be drawn again."""
    if os.name != "nt" and os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    try:
        return all(stream is not None and os.isatty(stream.fileno()) for stream in (sys.stdin, sys.stdout))
    except (OSError, ValueError, io.UnsupportedOperation):  # closed, or no file behind it
        return False


# ---- several lines ----------------------------------------------------------------------------------------


def open_quotes(text: str) -> bool:
    """Whether a message began with three quotes and they are not closed yet."""
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def goes_on(text: str) -> bool:
    """Whether the message has another line.  Within quotes a backslash is no more than that."""
    return open_quotes(text) or (text.endswith(BACKSLASH) and not text.lstrip().startswith(QUOTES))


def joined(text: str, line: str) -> str:
    """A message that goes on, with its next line."""
    return f"{text if open_quotes(text) else text.removesuffix(BACKSLASH)}\n{line}"


# ---- plain lines ------------------------------------------------------------------------------------------


def plain_message(console: Console, edits: bool) -> str:
    """A message from plain lines.  edits: stdout is a terminal, so that `input` may ask."""
    try:
        text = _ask(console, edits, MARK).removesuffix("\n")
        while goes_on(text):
            try:
                text = joined(text, _ask(console, edits, MORE).removesuffix("\n"))
            except EOFError:  # what there is, is the message
                break
    except (EOFError, KeyboardInterrupt):
        console.report("")  # the cursor stands behind the mark
        raise
    return text


def _ask(console: Console, edits: bool, mark: str) -> str:
    if edits:
        return input(mark)
    console.prompt_mark(mark)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _line_editing() -> None:
    """Arrow keys and history in input(), where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401
