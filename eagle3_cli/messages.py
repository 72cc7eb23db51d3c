"""Conversations as lists of messages, checked: from a file, or from a line of one.

    [{"role": "system" | "user" | "assistant", "content": "..."}, ...]
    {"messages": [...]}

The second form is what `/save` of `eagle3 chat` writes and what a line of `eagle3 train --data` may be; other keys of
it are passed over.  A content may come in parts of type "text".
"""

from __future__ import annotations

import json
from typing import Any

from .errors import FileError, InputError, shown
from .prompt import STDIN, clean, read_text, stdin_text

Messages = list[dict[str, str]]

ROLES = ("system", "user", "assistant")
SHAPES = '[{"role": "user", "content": "..."}, ...] or {"messages": [...]}'


def read_messages(name: str, flag: str) -> Messages:
    """The conversation in a file, or in stdin for "-".  flag names the option in errors."""
    where = "stdin" if name == STDIN else f"{flag} {name}"
    text = stdin_text() if name == STDIN else read_text(name, flag)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = f"Give {SHAPES}."
        if str(error).startswith("Extra data"):
            hint = "A file with one conversation per line is for --batch."
        raise FileError(f"{where}: expected one JSON document, got {shown(text)}.", hint) from error
    return checked(value, where)


def checked(value: Any, where: str) -> Messages:
    """The messages of a parsed document.  InputError names the message by its number, from 1."""
    records = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(records, list) or not records:
        raise InputError(f"{where}: expected a list of messages, got {shown(value)}.", f"Give {SHAPES}.")
    return [_message(record, f"{where}: message {number}") for number, record in enumerate(records, 1)]


def _message(record: Any, where: str) -> dict[str, str]:
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object with role and content, got {shown(record)}.")
    role = record.get("role")
    if role not in ROLES:
        raise InputError(f"{where}: expected role as one of {', '.join(ROLES)}, got {shown(role)}.")
    content = record.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        parts = [part.get("text") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else content
    if not isinstance(content, str):
        raise InputError(f"{where}: expected content as text, got {shown(content)}.")
    content = clean(content, where)
    if role == "user" and not content.strip():
        raise InputError(f"{where}: is empty.", "Give some text.")
    return {"role": str(role), "content": content}


def asking(messages: Messages, prompt: str | None, system: str | None, where: str) -> Messages:
    """The conversation with a prompt as its newest message and a system message at its start.  InputError where nothing
    in it is left to be answered."""
    first = [{"role": "system", "content": system}] if system else []
    last = [{"role": "user", "content": prompt}] if prompt is not None else []
    whole = [*first, *messages, *last]
    if whole[-1]["role"] != "user":
        raise InputError(
            f"{where}: expected the last message to be a user's, got {whole[-1]['role']}.",
            "Add the message that is to be answered.",
        )
    return whole


def has_system(messages: Messages) -> bool:
    return any(message["role"] == "system" for message in messages)
