"""A conversation kept in a file: one line of JSON, {"messages": [{"role": ..., "content": ...}, ...]}.

`eagle3 generate --messages` answers such a file, and `eagle3 train --data` learns from it; several of them joined are
one file for training.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from .convert.output import replacing
from .errors import FileError, InputError
from .messages import Messages, read_messages
from .prompt import STDIN

TURNS = ("user", "assistant")


def kept(messages: Messages) -> Messages:
    """What a file takes of a conversation: turns that have an answer with text in it, behind the system message."""
    first = [message for message in messages[:1] if message["role"] == "system" and message["content"].strip()]
    said = [message for message in messages if message["role"] != "system"]
    turns = [turn for turn in zip(said[::2], said[1::2], strict=False) if all(m["content"].strip() for m in turn)]
    return [*first, *(message for turn in turns for message in turn)]


def save(name: str, messages: Messages, replace: bool) -> int:
    """Write the file, complete or not at all; returns the number of turns in it.

    replace: it may take the place of another one.  InputError where there is nothing to keep, FileError where the file
    exists or cannot be written.
    """
    path = Path(os.path.expanduser(name))
    whole = kept(messages)
    turns = sum(message["role"] == "user" for message in whole)
    if not turns:
        raise InputError("there is nothing to save: no message has an answer yet.")
    if path.suffix == ".txt":  # `train --data` takes every line of it for a message
        raise FileError(f"{path}: expected another ending than .txt, it will hold JSON.", "For example .json.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError(f"{path}: is a folder or a device, expected the name of a file.")
    if os.path.lexists(path) and not replace:
        raise FileError(f"{path}: exists.", "Give another name, or put --force before it to replace the file.")
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"messages": whole}, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}.") from error
    return turns


def load(name: str, command: str) -> Messages:
    """The messages of a file: perhaps the system's, then user and assistant in turns, the user first.  FileError or
    InputError names the command, the file and the message."""
    path = os.path.expanduser(name)
    if path == STDIN:
        raise InputError(f"{command}: expected a file, got -.", "Messages are typed while stdin is read.")
    messages = read_messages(path, command)
    first = int(messages[0]["role"] == "system")
    for number, message in enumerate(messages[first:]):
        wanted = TURNS[number % 2]
        if message["role"] != wanted:
            raise InputError(
                f"{command} {path}: message {number + first + 1}: expected role {wanted}, got {message['role']}.",
                "Behind a system message, user and assistant take turns.",
            )
    if len(messages) == first:
        raise InputError(f"{command} {path}: expected a user's message, got a system message alone.")
    return messages
