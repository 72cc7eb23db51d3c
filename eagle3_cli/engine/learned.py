"""What was learned about a pair on this machine, kept in the user's cache directory from one program to the next.

One small JSON file per pair, backend, threads, types and version of llama.cpp.  It only saves learning it again: a file
that is missing, damaged or of another format counts for nothing, and one that cannot be written is not.  Programs may
share the folder: each replaces a file by a whole one, and the last one stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..convert.output import replacing
from ..folders import cache_folder, file_bytes
from .budget import Machine

FORMAT = 3
_READ = 1 << 20  # bytes of a model that tell it from others, with its size


def place(models: Mapping[str, Path | None], settings: Mapping[str, Any]) -> Path:
    """The file of these models under these settings."""
    facts = {name: path and _fingerprint(path) for name, path in models.items()}
    text = json.dumps({**facts, **settings}, sort_keys=True)
    return cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def _fingerprint(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.sha256(file.read(_READ)).hexdigest()]


def recall(path: Path, machine: Machine) -> bool:
    """Put what a file holds into a machine that knows nothing yet.  False, and it still knows nothing, where there is
    no file that can be used."""
    try:
        if not path.is_file():
            return False
        kept = json.loads(file_bytes(path).decode("utf-8"))
        if kept["format"] != FORMAT:
            return False
        machine.restore(kept["machine"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        machine.forget()
        return False
    return True


def keep(path: Path, machine: Machine) -> str | None:
    """Write the file, complete or not at all.  What stood in the way, None where nothing did."""
    text = json.dumps({"format": FORMAT, "machine": machine.as_dict()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, "utf-8")
    except OSError as error:
        return error.strerror or str(error)
    return None
