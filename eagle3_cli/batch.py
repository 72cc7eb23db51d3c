"""Many prompts from one JSONL file: what a line asks for.

    {"prompt": "..."} or {"messages": [...]}, perhaps with
    "id"             text or a whole number, repeated in the answer
    "system"         system message
    "json_schema"    an object, or its text
    "max_tokens", "stop", "ignore_eos", "temperature", "top_k", "seed", "grammar" and every other name of
    SamplingSettings and Limits: for this line alone

A null is as if the key were not there.  Each line is checked alone, so that one fault does not stop the others.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from .errors import FileError, InputError, shown
from .messages import Messages, asking, checked, has_system
from .prompt import LARGEST, STDIN, clean, decode
from .settings import Limits, SamplingSettings

S = TypeVar("S", SamplingSettings, Limits)

_UNSET = {"max_tokens": -1, "seed": -1}  # what stands for None, as for the flags


# ---- lines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line that is not empty.  index: its number among these, from 0.  where: "FILE:NUMBER" for messages.  data:
    without its line break."""

    index: int
    where: str
    data: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def read_lines(name: str) -> Iterator[Line]:
    """The lines of a file, or of stdin for "-", as they are asked for.  FileError where it cannot be read."""
    if name == STDIN:
        if sys.stdin is None:
            raise FileError("stdin: is closed.", "Pipe the prompts in, or name a file.")
        yield from _lines(sys.stdin.buffer, "stdin")
        return
    try:
        with Path(name).open("rb") as file:
            yield from _lines(file, name)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FileError(f"--batch {name}: {getattr(error, 'strerror', None) or error}.") from error


def _lines(file: IO[bytes], where: str) -> Iterator[Line]:
    index = 0
    for number in itertools.count(1):
        data = file.readline(LARGEST + 1)
        if not data:
            return
        if len(data) > LARGEST:
            raise FileError(f"{where}:{number}: expected at most {LARGEST >> 20} MiB in a line, got more.")
        data = data.rstrip(b"\r\n")
        if data.strip():
            yield Line(index, f"{where}:{number}", data)
            index += 1


def digests(name: str) -> list[str] | None:
    """Of every line of a file that can be read twice; None for stdin, a pipe and the like.

    FileError for a file without a line.
    """
    if not can_look_ahead(name):
        return None
    found = [line.digest for line in read_lines(name)]
    if not found:
        raise nothing_in(name)
    return found


def nothing_in(name: str) -> FileError:
    where = "stdin" if name == STDIN else f"--batch {name}"
    return FileError(f"{where}: expected at least one line, got none.", 'Give one {"prompt": "..."} per line.')


def can_look_ahead(name: str) -> bool:
    """Whether lines can be read before they are due: not from a pipe, whose writer may wait for an answer."""
    if name == STDIN:
        return False
    try:
        return stat.S_ISREG(os.stat(name).st_mode)
    except (OSError, ValueError):  # reading it will say what is wrong
        return True


# ---- what a line asks for ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defaults:
    """What holds for a line that does not say otherwise.  raw: prompts go to the model without the chat template."""

    sampling: SamplingSettings
    limits: Limits
    system: str | None = None
    raw: bool = False


@dataclass(frozen=True)
class Task:
    """prompt: text for --raw, else the conversation that the chat template gets."""

    prompt: str | Messages
    sampling: SamplingSettings
    limits: Limits


def record_of(line: Line) -> dict[str, Any]:
    """The line's object, with no key whose value is null.  InputError for anything else."""
    text = decode(line.data, line.where)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{line.where}: expected one line of JSON, got {shown(text)}.") from error
    if not isinstance(record, dict):
        raise InputError(f'{line.where}: expected an object with "prompt" or "messages", got {shown(record)}.')
    for key in record:
        if key not in KEYS:
            close = [name for name in KEYS if key and name.startswith(key)] or difflib.get_close_matches(key, KEYS, n=1)
            raise InputError(
                f"{line.where}: unknown key {shown(key)}.",
                f"Did you mean {close[0]}?" if close else f"There are {', '.join(KEYS)}.",
            )
    return {key: value for key, value in record.items() if value is not None}


def id_of(record: dict[str, Any], where: str) -> str | int | None:
    found = record.get("id")
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    return _text(f"{where}: id", found)


def task_of(record: dict[str, Any], where: str, defaults: Defaults) -> Task:
    """InputError for values that cannot be used; those of the settings do not name the line."""
    prompt = _prompt(record, where, defaults)
    if "json_schema" in record:
        record = {**record, "grammar": _schema(record, where)}
    return Task(prompt, _changed(defaults.sampling, record, where), _changed(defaults.limits, record, where))


def _prompt(record: dict[str, Any], where: str, defaults: Defaults) -> str | Messages:
    given = [key for key in ("prompt", "messages") if key in record]
    if len(given) != 1:
        raise InputError(f'{where}: expected either "prompt" or "messages", got {" and ".join(given) or "none"}.')
    if defaults.raw and ("messages" in record or "system" in record):
        key = "messages" if "messages" in record else "system"
        raise InputError(f"{where}: {key} needs the chat template, which --raw leaves out.", "Give prompt alone.")
    system = _text(f"{where}: system", record["system"]) if "system" in record else defaults.system
    if "messages" in record:
        messages = checked(record["messages"], where)
        own = has_system(messages)
        if own and "system" in record:
            raise InputError(f"{where}: system is given twice, alone and in messages.", "Give it once.")
        return asking(messages, None, None if own else system, where)
    text = _text(f"{where}: prompt", record["prompt"])
    if not text.strip():
        raise InputError(f"{where}: the prompt is empty.", "Give some text.")
    return text if defaults.raw else asking([], text, system, where)


def _schema(record: dict[str, Any], where: str) -> str:
    """GBNF for the line's schema."""
    from .llama import schema_to_gbnf

    if "grammar" in record:
        raise InputError(f"{where}: json_schema cannot be used with grammar.", "Leave one of them out.")
    schema = record["json_schema"]
    if not isinstance(schema, (str, dict)):
        raise InputError(f"{where}: json_schema: expected an object or its text, got {shown(schema)}.")
    return schema_to_gbnf(schema if isinstance(schema, str) else json.dumps(schema))


# ---- settings ---------------------------------------------------------------------------------------------


def _changed(settings: S, record: dict[str, Any], where: str) -> S:
    """The settings with what the record says of them."""
    changes: dict[str, Any] = {}
    for field in fields(settings):
        if field.name in record:
            value = record[field.name]
            unset = field.name in _UNSET and value == _UNSET[field.name]
            changes[field.name] = None if unset else _READERS[str(field.type)](f"{where}: {field.name}", value)
    return replace(settings, **changes)


def _number(where: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise InputError(f"{where}: expected a number, got {shown(value)}.")


def _whole(where: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    raise InputError(f"{where}: expected a whole number, got {shown(value)}.")


def _switch(where: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise InputError(f"{where}: expected true or false, got {shown(value)}.")


def _text(where: str, value: Any) -> str:
    if isinstance(value, str):
        return clean(value, where)
    raise InputError(f"{where}: expected text, got {shown(value)}.")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(clean(text, where) for text in value)
    raise InputError(f"{where}: expected text or a list of texts, got {shown(value)}.")


def _biases(where: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Of {"15043": -1.5}; null bans the token."""
    if not (
        isinstance(value, dict) and all(token.isascii() and token.isdigit() and len(token) < 12 for token in value)
    ):
        raise InputError(f"{where}: expected an object of token ids and biases, got {shown(value)}.",
                         'For example {"15043": -1.5}; null bans a token.')  # fmt: skip
    banned = float("-inf")
    return tuple((int(token), banned if bias is None else _number(where, bias)) for token, bias in value.items())


# type of a setting -> what reads it
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "float": _number,
    "int": _whole,
    "int | None": _whole,
    "bool": _switch,
    "str | None": _text,
    "tuple[str, ...]": _texts,
    "tuple[tuple[int, float], ...]": _biases,
}
_SETTINGS = [field.name for kind in (SamplingSettings, Limits) for field in fields(kind)]
KEYS = ("prompt", "messages", "id", "system", "json_schema", *_SETTINGS)
