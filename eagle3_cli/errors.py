"""The one error tree.  `__main__` prints `error: <message>` and `hint: <hint>` and exits with `exit_code`.

A message says where, what was expected and what was found; the hint says what to do.  Anything that is not
an `Eagle3Error` is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import json
from typing import Any

_SHOWN = 60  # characters of what was found


class Eagle3Error(Exception):
    """Something failed that the user can be told about in one message."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(Eagle3Error):
    """What the user gave cannot be used: a file, an option, a prompt."""

    exit_code = 2


class OptionError(InputError):
    """An option is out of range, or has no effect where it was given."""


class FileError(InputError):
    """A file is missing, truncated, or not what it should be."""


class PairError(InputError):
    """Target and drafter do not belong together."""


class CheckpointError(InputError):
    """A drafter checkpoint cannot be converted; the message names the tensor or key."""


class PromptError(InputError):
    """A prompt does not fit into the context."""


class BackendError(InputError):
    """The installed llama.cpp has no such backend."""


class LlamaError(Eagle3Error):
    """llama.cpp returned an error code; the message carries its last log lines."""


class BusyError(Eagle3Error):
    """A loaded pair was asked for a second answer before the first had ended (Python alone)."""


def shown(value: Any) -> str:
    """The beginning of what was found, for messages: text in quotation marks, anything else as JSON."""
    if isinstance(value, str):
        return repr(brief(value, _SHOWN))
    try:
        return brief(json.dumps(value, default=str, ensure_ascii=False), _SHOWN)
    except RecursionError:
        return "something deeply nested"


def brief(text: str, most: int = 100) -> str:
    """The beginning of a text, which ends in ... where there is more."""
    return text if len(text) <= most else f"{text[:most]}..."
