"""Conversations from a file of the user's.

A JSONL file holds one conversation per line, in one of these shapes:

    {"messages": [{"role": "system" | "user" | "assistant", "content": "..."}, ...]}
    {"conversations": [{"from": "system" | "human" | "user" | "gpt" | "assistant", "value": "..."}, ...]}
    {"prompt": "..."}, perhaps with the answer as "answer", "completion" or "response"
    "..."                                                 a user's turn

A file that ends in .txt is plain text: every line is one user's turn, as `eagle3 chat` takes piped lines (a turn with
line breaks needs JSONL).  Empty lines are passed over in both.  A fault in the file stops with its line number.  What
is well formed but nothing to learn from is left out and counted: the caller's Counter maps reasons to conversations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, InputError, shown
from ..prompt import clean, decode
from .samples import Conversation

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
ANSWERS = ("answer", "completion", "response")
SHAPES = '{"messages": [...]}, {"conversations": [...]}, {"prompt": "..."} or "..."'
EACH_TURN = "Every turn needs text: mend this line or take it out."

OUT_OF_TURN = "user and assistant do not take turns"


@dataclass(frozen=True)
class ChatSummary:
    """What a file holds.

    conversations   that can be used
    user_turns      of these
    with_system     conversations of these that begin with a system message
    left_out        reason -> conversations
    """

    conversations: int
    user_turns: int
    with_system: int
    left_out: Counter[str]


def summarise_chats(path: Path) -> ChatSummary:
    """Read the whole file once, so that its faults show before any long work."""
    left_out: Counter[str] = Counter()
    conversations = user_turns = with_system = 0
    for conversation in read_chats(path, left_out):
        conversations += 1
        user_turns += sum(message["role"] == "user" for message in conversation)
        with_system += conversation[0]["role"] == "system"
    return ChatSummary(conversations, user_turns, with_system, left_out)


def read_chats(path: Path, left_out: Counter[str]) -> Iterator[Conversation]:
    """The conversations of a file in its order, read as they are asked for.

    Each is: perhaps a system message, then user and assistant in turns, the user first.  FileError names file and line;
    for a file without conversations it comes at the end.
    """
    found = 0
    for where, line in _lines(path):
        conversation = _plain(line) if path.suffix == ".txt" else _parse(where, line)
        if _takes_turns(conversation):
            found += 1
            yield conversation
        else:
            left_out[OUT_OF_TURN] += 1
    if not found:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in left_out.items())
        raise FileError(
            f"{path}: expected at least one conversation, got none{f' ({reasons})' if reasons else ''}.",
            f"Give one conversation per line, as {SHAPES}.",
        )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """("file:number", text) of every line that is not empty."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    line = decode(data, where).strip()
                except InputError as error:
                    raise FileError(error.message, error.hint) from error
                if line:
                    yield where, line
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}.") from error


def _plain(line: str) -> Conversation:
    return [{"role": "user", "content": line}]


def _parse(where: str, line: str) -> Conversation:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = f"Give one conversation per line, as {SHAPES}. Plain text belongs into a file that ends in .txt."
        if line.startswith("["):
            hint = "A JSON list is made into lines by: jq -c '.[]' FILE"
        raise FileError(f"{where}: expected one line of JSON, got {shown(line)}.", hint) from error
    if isinstance(record, str):
        return [{"role": "user", "content": _text(where, "the line", record)}]
    keys = [k for k in ("messages", "conversations", "prompt") if k in record] if isinstance(record, dict) else []
    if len(keys) != 1:
        raise FileError(f"{where}: expected {SHAPES}, got {shown(line)}.", "Convert the file to one of these.")
    if keys[0] == "prompt":
        return _prompt(where, record)
    names = ("role", "content") if keys[0] == "messages" else ("from", "value")
    return _messages(where, keys[0], record[keys[0]], names)


def _prompt(where: str, record: dict[str, Any]) -> Conversation:
    """A user's turn, perhaps with its answer."""
    conversation = [{"role": "user", "content": _text(where, "prompt", record["prompt"])}]
    answers = [key for key in ANSWERS if record.get(key) is not None]
    if len(answers) > 1:
        raise FileError(f"{where}: expected one answer, got {' and '.join(answers)}.", "Leave one of them.")
    for key in answers:
        conversation.append({"role": "assistant", "content": _text(where, key, record[key])})
    return conversation


def _messages(where: str, key: str, records: Any, names: tuple[str, str]) -> Conversation:
    role_name, text_name = names
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise FileError(f"{where}: expected {key} as a list of objects, got {shown(records)}.", EACH_TURN)
    conversation = []
    for number, record in enumerate(records, 1):
        turn = f"turn {number}"
        role = record.get(role_name)
        if not isinstance(role, str) or role not in ROLES:
            raise FileError(
                f"{where}: {turn}: expected {role_name} as one of {', '.join(ROLES)}, got {shown(role)}.",
                "Turns of tools and the like cannot be trained on: take this line out.",
            )
        conversation.append({"role": ROLES[role], "content": _text(where, turn, record.get(text_name))})
    if not any(message["role"] == "user" for message in conversation):
        raise FileError(f"{where}: expected at least one user's turn, got none.", "Mend this line or take it out.")
    return conversation


def _text(where: str, what: str, value: Any) -> str:
    """The text of a turn, which may come in parts of type "text"."""
    if isinstance(value, list) and all(isinstance(v, dict) and isinstance(v.get("text"), str) for v in value):
        value = "".join(v["text"] for v in value)
    if not isinstance(value, str):
        raise FileError(f"{where}: {what}: expected text, got {shown(value)}.", EACH_TURN)
    try:
        text = clean(value, f"{where}: {what}")
    except InputError as error:
        raise FileError(error.message, error.hint) from error
    if not text.strip():
        raise FileError(f"{where}: {what}: expected text, got an empty one.", EACH_TURN)
    return text


def _takes_turns(conversation: Conversation) -> bool:
    roles = [message["role"] for message in conversation]
    turns = roles[1:] if roles[0] == "system" else roles
    return all(role == ("user", "assistant")[i % 2] for i, role in enumerate(turns))
