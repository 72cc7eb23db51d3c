"""Reading JSON strictly: an object, in UTF-8, with no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import FileError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.  FileError when it is missing, no UTF-8, no JSON, or no object."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    return parse_json(path, raw, "JSON")


def parse_json(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """The object in raw bytes of a file; `what` names the part of the file in messages."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise FileError(f"{path}: unreadable {what}: {error}.", "Download the file again.") from error
    if not isinstance(value, dict):
        raise FileError(f"{path}: {what}: expected an object, got {type(value).__name__}.")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return result
