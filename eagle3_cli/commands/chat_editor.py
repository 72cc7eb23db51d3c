"""The editor of a chat's messages: prompt_toolkit with our keys, commands, files and history.

    Enter                  sends; but not within three quotes, and behind a backslash it begins a new line
    Alt-Enter, Esc Enter   begin a new line
    Tab                    completes commands, their settings, and files
    Up, Down, Ctrl-R       what was typed before
    Ctrl-X Ctrl-E          goes on in $VISUAL or $EDITOR

What is pasted is inserted as it is, with its line breaks.  Import this module late.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import CompleteStyle

from ..completion import of_value
from ..history import NAME, HistoryFile
from ..interrupt import Terminated, raising
from .chat_commands import ALIASES, COMMANDS, FORCE
from .chat_input import BACKSLASH, MARK, MORE, open_quotes
from .chat_settings import KINDS


class Editor:
    """Asks for one message after the other.  keep_history: in the user's cache directory, for other chats.

    streams   the terminal's input and output; None: stdin and stdout
    """

    def __init__(self, keep_history: bool, streams: tuple[Input, Output] | None = None) -> None:
        given, shown = streams or (None, None)
        self._session: PromptSession[str] = PromptSession(
            MARK,
            multiline=True,
            prompt_continuation=MORE,
            key_bindings=_keys(),
            completer=_Words(),
            complete_style=CompleteStyle.READLINE_LIKE,
            history=_history() if keep_history else InMemoryHistory(),
            enable_suspend=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            input=given,
            output=shown,
        )

    def read(self) -> str:
        """The next message.  EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C, Terminated for SIGTERM and SIGHUP."""
        with _handlers_kept():
            return self._session.prompt(pre_run=self._leave_at_signals)

    def _leave_at_signals(self) -> None:
        """The event loop would report an exception that a handler raises in one of its callbacks, and go on."""
        loop = asyncio.get_running_loop()
        for number in raising():
            if number != signal.SIGINT:  # the session's own
                with suppress(NotImplementedError):  # Windows
                    loop.add_signal_handler(number, self._leave, number)

    def _leave(self, number: int) -> None:
        app = self._session.app
        if app.is_running and not app.is_done:
            app.exit(exception=Terminated(number))


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """The event loop puts the system's handlers in the place of ours when it ends."""
    before = {number: signal.getsignal(number) for number in raising()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- keys -------------------------------------------------------------------------------------------------


def _keys() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # and not in the line of a search

    @keys.add("enter", filter=typing)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if open_quotes(buffer.text):
            buffer.insert_text("\n")
        elif buffer.document.text_before_cursor.endswith(BACKSLASH):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


# ---- Tab --------------------------------------------------------------------------------------------------


def wanted(line: str) -> tuple[str, str]:
    """What could stand at the end of a line, and the beginning of it that is there.

    "command"; "setting"; "file" for one name, blanks and all; "model" for one of several words; "" for nothing.
    """
    name, space, argument = line.partition(" ")
    if not line.startswith("/") or "\n" in line:
        return "", ""
    if not space:
        return "command", line
    command = COMMANDS.get(name)
    takes = command.takes if command else ""
    if takes == "file":
        return takes, argument.removeprefix(FORCE).lstrip() if argument.startswith(f"{FORCE} ") else argument.lstrip()
    words = argument.split(" ")
    return (takes, words[-1]) if takes == "model" or (takes and len(words) == 1) else ("", "")


class _Words(Completer):
    """Commands, settings, files and models."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        kind, word = wanted(document.text_before_cursor)
        if kind == "file":
            for found in self._files.get_completions(Document(word), complete_event):
                folder = "/" if found.display_text.endswith("/") else ""
                yield Completion(found.text + folder, display=found.display)
            return
        for whole in _candidates(kind, word):
            if whole.startswith(word):
                yield Completion(whole, start_position=-len(word))


def _candidates(kind: str, word: str) -> Iterable[str]:
    if kind == "command":
        return [*COMMANDS, *ALIASES]
    if kind == "setting":
        return KINDS
    return [item.value for item in of_value("GGUF", word, names=True)] if kind == "model" else []


# ---- history ----------------------------------------------------------------------------------------------


class _Kept(History):
    """prompt_toolkit's view of the file."""

    def __init__(self, file: HistoryFile) -> None:
        super().__init__()
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._file.read())

    def store_string(self, string: str) -> None:
        self._file.add(string)


def _history() -> History:
    from ..engine.learned import cache_folder

    return _Kept(HistoryFile(cache_folder() / NAME))
