"""Prompt text from arguments, files and stdin, as clean Unicode.

Every text is checked the same way: valid UTF-8, no NUL.  A byte order mark is dropped and CRLF becomes LF, so that
a file saved on Windows gets the same answer.  One line break at the end of a file or of stdin is dropped, as
llama.cpp does: it belongs to the file, not to the prompt.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .errors import FileError, InputError, OptionError

STDIN = "-"
LARGEST = 1 << 26  # bytes of one text that are read; more than any context holds, and less than fills a memory


@dataclass(frozen=True)
class PromptSource:
    """What the command line says about the prompt: PROMPT words, -p, and each -f in order.  piped: a stdin that nobody
    names may belong to it."""

    words: Sequence[str] = ()
    option: str | None = None
    files: Sequence[str] = field(default_factory=tuple)
    piped: bool = True

    @property
    def given(self) -> bool:
        """Whether any of the three is there."""
        return bool(self.words or self.option is not None or self.files)

    @property
    def reads_stdin(self) -> bool:
        """Whether one of them names it."""
        return STDIN in self.files or (self.option is None and not self.files and tuple(self.words) == (STDIN,))


def read_prompt(source: PromptSource, waiting: Callable[[], None] = lambda: None) -> str:
    """The prompt: stdin or files first, then -p or the PROMPT words, joined by a blank line.

    stdin is read for `-f -`, for the word `-`, and where it is piped and neither -p nor -f was given: with those a
    pipe that never ends (cron, ssh, a shell loop) must not stop the command.  waiting is called if it makes us wait.
    """
    if source.words and source.option is not None:
        raise OptionError("-p: the prompt is already given as an argument.", "Give it once.")
    parts = [stdin_text() if name == STDIN else read_text(name, "-f") for name in source.files]
    words = source.option if source.option is not None else " ".join(source.words)
    if source.option is None and not source.files:
        if words == STDIN:
            parts, words = [stdin_text()], ""
        elif source.piped:
            parts = [piped_text(waiting)]
    parts.append(clean(words, "the prompt"))
    if not source.files and source.option is None and not source.words and not parts[0]:
        raise OptionError("no prompt.", 'Give it as an argument, with -p or -f, or pipe it in: eagle3 generate "Hello"')
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt.strip():
        raise InputError("the prompt is empty.", "Give some text.")
    return prompt


def stdin_text() -> str:
    """All of stdin, asked for by name; on a terminal until Ctrl-D."""
    if sys.stdin is None:
        raise FileError("stdin: is closed.", "Pipe the prompt in, or use -p.")
    return _without_last_break(decode(_stdin_bytes(), "stdin"))


def piped_text(waiting: Callable[[], None] = lambda: None) -> str:
    """stdin if something other than a terminal is connected to it, else nothing."""
    if not stdin_is_piped():
        return ""
    if not _ready(sys.stdin):
        waiting()
    return stdin_text()


def stdin_is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def stdin_lines() -> Iterator[str]:
    """Lines of a piped stdin as they arrive, without their line breaks."""
    if sys.stdin is None:
        return
    for number in itertools.count(1):
        where = f"stdin, line {number}"
        line = _limited(sys.stdin.buffer.readline, where)
        if not line:
            return
        yield _without_last_break(decode(line, where))


def read_text(name: str, flag: str) -> str:
    """A file's text.  flag names the option in errors."""
    where = f"{flag} {name}"
    try:
        with Path(name).open("rb") as file:
            data = _limited(file.read, where)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FileError(f"{where}: {getattr(error, 'strerror', None) or error}.") from error
    return _without_last_break(decode(data, where))


def decode(data: bytes, where: str) -> str:
    """bytes -> clean text; where names them in errors."""
    try:
        return clean(data.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: expected UTF-8 text, got byte 0x{data[error.start]:02x} at offset {error.start}.",
            "Convert it first, for example with iconv -t UTF-8.",
        ) from error


def clean(text: str, where: str) -> str:
    """The text with LF line breaks, or an error for what no tokenizer can take."""
    if "\0" in text:
        raise InputError(f"{where}: expected text, got a NUL character at offset {text.index(chr(0))}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of an argument that were no UTF-8
        raise InputError(f"{where}: expected UTF-8 text, got other bytes at offset {error.start}.") from error
    return text.replace("\r\n", "\n")


def _stdin_bytes() -> bytes:
    return _limited(sys.stdin.buffer.read, "stdin")


def _limited(read: Callable[[int], bytes], where: str) -> bytes:
    """What there is to read; InputError where it is more than any prompt, as of a program that never ends."""
    try:
        data = read(LARGEST + 1)
    except OSError as error:
        raise FileError(f"{where}: {error.strerror or error}.") from error
    if len(data) > LARGEST:
        raise InputError(f"{where}: expected at most {LARGEST >> 20} MiB of text, got more.", "Give a shorter text.")
    return data


def _without_last_break(text: str) -> str:
    return text[:-1] if text.endswith("\n") else text


def _ready(stream: IO[str], seconds: float = 1.0) -> bool:
    """Whether a read would return at once; True where the system cannot tell."""
    import select

    try:
        return bool(select.select([stream], [], [], seconds)[0])
    except (OSError, ValueError):
        return True
