"""What a line of a chat does: it is a message, or a command that begins with a slash."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from .. import sessions
from ..errors import FileError, InputError, brief
from ..interrupt import gentle_interrupt
from ..prompt import clean, read_text
from . import chat_settings, chat_stats
from .conversation import Conversation

if TYPE_CHECKING:
    from .chat_model import LoadedPair

QUOTES = '"""'
FORCE = "--force"
NO_SYSTEM = "none"


# ---- from a line to what it asks for ----------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """arguments: as the list of commands shows them.  takes: what its argument is for the Tab key."""

    text: str
    arguments: str = ""
    takes: str = ""


COMMANDS = {
    "/help": Command("this list"),
    "/system": Command(f"show or change the system message; {NO_SYSTEM}: without one", "[TEXT]"),
    "/reset": Command("forget the conversation (also /clear)"),
    "/read": Command("put a file's text before the next message", "FILE", "file"),
    "/retry": Command("answer the last message again"),
    "/undo": Command("take the last message and its answer back"),
    "/edit": Command("change the last message in $VISUAL or $EDITOR, and answer that"),
    "/save": Command("keep the conversation in a JSON file; alone: in the same one again", f"[{FORCE}] [FILE]", "file"),
    "/load": Command("go on with a conversation that was saved", "FILE", "file"),
    "/stats": Command("the last answer in numbers"),
    "/set": Command("show the settings, or change one", "[NAME VALUE]", "setting"),
    "/model": Command("show the models, or load others and keep the conversation", "[TARGET [DRAFT]]", "model"),
    "/exit": Command("leave (also /quit, /bye)"),
}
ALIASES = {"/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}
HELP = [f"{f'{name} {command.arguments}'.rstrip():24}  {command.text}" for name, command in COMMANDS.items()]
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)
ALIKE = 0.8  # from here on an unknown command with text behind it is a slip, and not the beginning of a message


@dataclass(frozen=True)
class Said:
    """A message."""

    text: str


@dataclass(frozen=True)
class Called:
    """A command with its argument, the name as in COMMANDS."""

    name: str
    argument: str


def parse(line: str, quotes: bool) -> Said | Called | None:
    """What a line, or several that belong together, asks for; None: nothing.

    quotes: a text in three quotes is a message whatever it says.
    InputError for a command that does not exist, or takes nothing and got something.
    """
    text = line.strip("\n").rstrip()
    if quotes and (quoted := _quoted(text)) is not None:
        return Said(quoted) if quoted.strip() else None
    match = _COMMAND.fullmatch(text.strip())
    if match is None:
        return Said(text if "\n" in text else text.strip()) if text.strip() else None
    name, argument = ALIASES.get(match[1], match[1]), (match[2] or "").strip()
    hint = f"{QUOTES}{text.strip()[:20]} ...{QUOTES} is a message whatever it says." if quotes and argument else None
    if name in COMMANDS:
        if argument and not COMMANDS[name].arguments:
            raise InputError(f"{name}: expected nothing behind it, got {brief(argument, 40)}.", hint)
        return Called(name, argument)
    alike = difflib.get_close_matches(match[1], [*COMMANDS, *ALIASES], n=1, cutoff=ALIKE)
    if argument and not alike:
        return Said(text)
    raise InputError(f"{match[1]}: no such command. There are {', '.join(COMMANDS)}.", hint)


def _quoted(text: str) -> str | None:
    """What stands in three quotes, where that is all."""
    body = text.strip()
    inside = body[len(QUOTES) : -len(QUOTES)]
    if len(body) < 2 * len(QUOTES) or not (body.startswith(QUOTES) and body.endswith(QUOTES)) or QUOTES in inside:
        return None
    return inside.strip("\n")


# ---- doing it ---------------------------------------------------------------------------------------------


class Commands:
    """Does what lines ask for.  What a person gets wrong is said, and the chat goes on; in a pipe it ends the chat."""

    def __init__(self, conversation: Conversation, pair: LoadedPair) -> None:
        self.conversation, self.pair = conversation, pair
        self.console = conversation.console
        self.file = ""  # where the conversation was saved, or came from
        self.before: list[str] = []  # texts of files that go before the next message
        self._does: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: self.console.report("\n".join(HELP)),
            "/system": self._system,
            "/reset": self._reset,
            "/read": self._read,
            "/retry": self._retry,
            "/undo": self._undo,
            "/edit": self._edit,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/set": self._set,
            "/model": self._model,
        }

    def obey(self, line: str) -> bool:
        """Run a command or answer a message; False ends the chat."""
        talk = self.conversation
        talk.stopped = False
        try:
            asked = parse(line, quotes=talk.person)
            if isinstance(asked, Called):
                if asked.name == "/exit":
                    return False
                self._does[asked.name](asked.argument)
        except InputError as error:
            if not talk.person:
                raise
            self.console.error(error.message, error.hint)
            return True
        if isinstance(asked, Said):
            text, self.before = "\n\n".join([*self.before, asked.text]), []
            talk.turn(text)
        return True

    def _system(self, text: str) -> None:
        talk = self.conversation
        if not text:
            self.console.report(talk.system or "(no system message)")
            return
        talk.instruct(None if text == NO_SYSTEM else _quoted(text) or text)
        self.console.note("(the system message is changed)" if talk.system else "(no system message)")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.before = []
        self.console.note("(forgotten)")

    def _read(self, name: str) -> None:
        if not name:
            raise InputError("/read: expected the name of a file.", "For example /read notes.txt.")
        text = read_text(name, "/read")
        if not text.strip():
            raise InputError(f"/read {name}: is empty.")
        self.before.append(text)
        self.console.note(f"({len(text)} characters of {name} go before the next message)")

    def _retry(self, _: str) -> None:
        sampling = self.conversation.sampling
        if sampling.greedy or sampling.seed is not None:
            why = "temperature is 0" if sampling.greedy else "the seed is fixed"
            self.console.note(f"(the answer will be the same: {why}; /set changes it)")
        self.conversation.retry()

    def _undo(self, _: str) -> None:
        text = self.conversation.undo()
        first, *more = text.split("\n")
        self.console.note(f"(taken back: {first[:60]}{' ...' if more or len(first) > 60 else ''})")

    def _edit(self, _: str) -> None:
        talk = self.conversation
        if not talk.person:
            raise InputError("/edit: needs somebody at a terminal.")
        last = [message["content"] for message in talk.messages if message["role"] == "user"][-1:]
        text = edited("".join(last))
        if text is None or not text.strip():
            self.console.note("(nothing was changed)")
        else:
            talk.rephrase(text)

    def _save(self, argument: str) -> None:
        force, name = _forced(argument)
        name = name or self.file
        if not name:
            raise InputError("/save: expected the name of a file.", "For example /save chat.json.")
        turns = sessions.save(name, self.conversation.messages, replace=force or name == self.file)
        self.file = name
        self.console.note(f"(saved {turns} turn{'' if turns == 1 else 's'} in {name})")

    def _load(self, name: str) -> None:
        if not name:
            raise InputError("/load: expected the name of a file.", "For example /load chat.json.")
        messages = sessions.load(name, "/load")
        self.file = name
        self.console.note(f"({len(messages)} messages from {name})")
        self.conversation.resume(messages)

    def _stats(self, _: str) -> None:
        talk = self.conversation
        self.console.report("\n".join(
            chat_stats.report(talk.engine.statistics, talk.engine.settings["ctx_size"], talk.turns)
        ))  # fmt: skip

    def _set(self, argument: str) -> None:
        talk, words = self.conversation, argument.split()
        if not words:
            self.console.report("\n".join(chat_settings.listing(talk.sampling, talk.limits)))
            return
        if len(words) != 2:
            raise InputError(f"/set: expected a name and a value, got {argument}.", "For example /set temperature 0.5.")
        talk.sampling, talk.limits, said = chat_settings.changed(words[0], words[1], talk.sampling, talk.limits)
        self.console.note(f"({said})")

    def _model(self, words: str) -> None:
        talk = self.conversation
        if not words:
            self.console.report(self.pair.description)
            return
        try:
            self.pair.change(words)
        finally:  # where the other pair could not be loaded, this one was loaded again
            talk.engine = self.pair.engine
            if talk.trace is not None:
                talk.trace.vocabulary = talk.engine.decoder.model
        self.console.note(f"({self.pair.description}; the conversation goes on)")


def _forced(argument: str) -> tuple[bool, str]:
    """Whether the argument of /save begins with --force, and the rest of it."""
    first, _, rest = argument.partition(" ")
    return (True, rest.strip()) if first == FORCE else (False, argument)


def edited(text: str) -> str | None:
    """The text as the user's editor leaves it, None where nothing was saved.  InputError where it fails.

    Ctrl-C belongs to the editor meanwhile.
    """
    with gentle_interrupt():
        try:
            found = click.edit(text, extension=".md")
        except click.ClickException as error:
            raise InputError(f"/edit: {error.format_message()}.", "Set VISUAL or EDITOR to your editor.") from error
        except OSError as error:
            raise FileError(f"/edit: {error.filename}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise InputError("/edit: expected UTF-8 text from the editor.") from error
    return None if found is None else clean(found, "/edit").rstrip("\n")
