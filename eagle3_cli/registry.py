"""Names for pairs: after `eagle3 models add llama --target ... --draft ...`, `--target llama` means both files.

They are kept in models.json in the configuration folder, with absolute paths:

    {"format": 1, "models": {"llama": {"target": "/models/llama.gguf", "draft": "/models/llama-eagle3.gguf"}}}

A draft is a drafter's path, "lookup" or null.  The file appears complete or not at all, and who changes it locks out
everybody else who does.

A registered name wins over a file of that name in the current folder: what a command means must not depend on where it
runs.  ./llama is always the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .convert.output import replacing
from .errors import FileError, InputError, brief, shown
from .folders import config_folder, file_bytes

FORMAT = 1
LOOKUP = "lookup"  # as a draft: n-gram matches alone
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
REPAIR = "Correct it, or remove it and add the models again."


@dataclass(frozen=True)
class Registered:
    """target   absolute path
    draft    absolute path, "lookup", or None: this model answers without a drafter
    """

    target: str
    draft: str | None

    @property
    def missing(self) -> list[str]:
        """Files of it that are not there."""
        files = [self.target, *([self.draft] if self.draft and self.draft != LOOKUP else [])]
        return [file for file in files if not os.path.isfile(file)]


def registry_file() -> Path:
    return config_folder() / "models.json"


def is_name(text: str) -> bool:
    """Whether a model could be registered under this; a GGUF's file name is none, so it is never taken for one."""
    return bool(NAME.fullmatch(text)) and not text.endswith(".gguf") and text != LOOKUP


def check_name(name: str) -> None:
    if not is_name(name):
        raise InputError(
            f"{name}: expected a name of at most 64 of a-z, 0-9, dot, dash and underscore that starts with a letter or"
            " digit and is neither lookup nor a GGUF's.",
            "For example llama-3.1-8b.",
        )


def find(text: str) -> Registered | None:
    """The model registered under this name; None for everything else, a path above all."""
    return read().get(text) if is_name(text) else None


def target_path(text: str) -> Path:
    """The file that a --target means: a registered model's, or the file named."""
    model = find(text)
    return Path(model.target) if model else Path(text).expanduser()


def read() -> dict[str, Registered]:
    """Every registered model by its name.  FileError where the file cannot be used."""
    path = registry_file()
    try:
        value = json.loads(file_bytes(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected JSON: {error}.", REPAIR) from error
    return _models(path, value)


def _models(path: Path, value: Any) -> dict[str, Registered]:
    if not isinstance(value, dict) or not isinstance(value.get("models"), dict):
        raise FileError(f'{path}: expected {{"format": {FORMAT}, "models": {{...}}}}, got something else.', REPAIR)
    if value.get("format") != FORMAT:
        raise FileError(
            f"{path}: expected format {FORMAT}, got {shown(value.get('format'))}.", "Use the eagle3 that wrote it."
        )
    return {name: _model(path, name, fields) for name, fields in value["models"].items()}


def _model(path: Path, name: str, fields: Any) -> Registered:
    if not is_name(name):
        raise FileError(f"{path}: {brief(name)}: expected the name of a model.", REPAIR)
    if not isinstance(fields, dict) or not {"target", "draft"} == fields.keys():
        raise FileError(f"{path}: {name}: expected the keys target and draft.", REPAIR)
    target, draft = fields["target"], fields["draft"]
    if not (isinstance(target, str) and os.path.isabs(target)):
        raise FileError(f"{path}: {name}: target: expected an absolute path, got {shown(target)}.", REPAIR)
    if not (draft is None or draft == LOOKUP or (isinstance(draft, str) and os.path.isabs(draft))):
        raise FileError(
            f'{path}: {name}: draft: expected an absolute path, "lookup" or null, got {shown(draft)}.', REPAIR
        )
    return Registered(target, draft)


@contextlib.contextmanager
def changed() -> Iterator[dict[str, Registered]]:
    """Every registered model by its name, to be changed; written when the block ends well.  Waits for other processes
    that are changing them."""
    path = registry_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name("models.lock"), os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        _lock(lock)
        models = read()
        yield models
        _write(path, models)
    finally:
        os.close(lock)


def _lock(handle: int) -> None:
    """The system drops the lock with the handle, however the process ends."""
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)


def _write(path: Path, models: Mapping[str, Registered]) -> None:
    value = {"format": FORMAT, "models": {name: asdict(models[name]) for name in sorted(models)}}
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> FileError:
    return FileError(f"{path}: cannot be written: {error.strerror or error}.", "XDG_CONFIG_HOME names another folder.")
