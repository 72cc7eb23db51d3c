"""What was typed in earlier chats, kept in the user's cache directory for the arrow keys.

One JSON string per line, the newest last.  The file belongs to the user alone, and a link in its place is not followed.
It only saves typing: a file that is damaged or not ours counts for nothing, and what cannot be written is not kept.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .convert.output import replacing

NAME = "chat_history.jsonl"
LARGEST = 1 << 20  # bytes that are read; a larger file is cut to them
LONGEST = 1 << 14  # characters of an entry: what is longer was pasted, and is not looked for again
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class HistoryFile:
    """The entries in a file.  Chats may share it: each adds whole lines at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[str]:
        """The entries, the newest last."""
        try:
            handle = os.open(self.path, os.O_RDONLY | _FLAGS)
            with open(handle, "rb") as file:
                size = _own_file(handle)
                file.seek(max(0, size - LARGEST))
                lines = file.read(LARGEST).split(b"\n")
        except OSError:
            return []
        if size > LARGEST:
            del lines[0]  # a part of one
            with suppress(OSError), replacing(self.path, 0o600) as temporary:
                temporary.write_bytes(b"\n".join(lines))
        return _entries(lines)

    def add(self, text: str) -> None:
        """Keep one more entry."""
        if len(text) > LONGEST:
            return
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, 0o600)
            with open(handle, "ab", buffering=0) as file:
                _own_file(handle)
                file.write(json.dumps(text).encode() + b"\n")


def _own_file(handle: int) -> int:
    """The size of an open file.  OSError for whatever is no ordinary file or belongs to somebody else.  One that others
    may read becomes private."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("is no ordinary file")
    if os.name == "posix":
        if found.st_uid != os.geteuid():
            raise OSError("belongs to another user")
        if found.st_mode & 0o077:
            os.fchmod(handle, 0o600)
    return found.st_size


def _entries(lines: Sequence[bytes]) -> list[str]:
    """The strings among the lines; what is no JSON string, or has half a character, is passed over."""
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, str):
                entry.encode()
                found.append(entry)
    return found
