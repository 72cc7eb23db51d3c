"""manifest.json of a folder of shards: whose states they are, and which shards are whole."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..convert.json_files import read_json
from ..convert.output import replacing
from ..errors import FileError

VERSION = 1  # of the format described in shards.py
MANIFEST = "manifest.json"
AGAIN = "Delete the folder and capture again."
_NAME = re.compile(r"shard-\d{5,}\.safetensors")
_OTHER = "Capture into another folder, or delete this one."


@dataclass(frozen=True)
class TargetId:
    """What tells one target from another.

    path         as given when it was captured; not compared, for files may move
    size         bytes of its file, or of all weight files of a folder
    first_mib    sha256 of the first MiB of the (first) weight file
    tokenizer    sha256 of the tokenizer's fields or files, without the chat template
    """

    path: str
    size: int
    first_mib: str
    tokenizer: str


@dataclass(frozen=True)
class Header:
    """What all shards of a folder have in common.

    aux_layers   the layers whose inputs `hidden` holds (llama.cpp's convention)
    width        Ht
    vocab        number of the target's token ids
    template     sha256 of the chat template; empty where the target has none
    engine       what computed the states, with its number type ("llama.cpp", "transformers bfloat16")
    """

    target: TargetId
    aux_layers: tuple[int, int, int]
    width: int
    vocab: int
    template: str
    engine: str


@dataclass(frozen=True)
class ShardEntry:
    """One finished shard: its file's name, size and sha256, and what it holds."""

    file: str
    bytes: int
    sha256: str
    samples: int
    tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Manifest:
    """complete: every sample was captured; False while a capture runs or after one was killed."""

    header: Header
    shards: tuple[ShardEntry, ...] = ()
    complete: bool = False

    @property
    def samples(self) -> int:
        return sum(entry.samples for entry in self.shards)

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.shards)

    @property
    def answer_tokens(self) -> int:
        return sum(entry.answer_tokens for entry in self.shards)


def read_manifest(folder: Path) -> Manifest:
    """FileError where it is missing, damaged, or of a format that only a newer eagle3 reads."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileError(f"{folder}: expected captured states, found no {MANIFEST}.", "Capture the target's states.")
    values = read_json(path)
    version = values.pop("version", None)
    if version != VERSION:
        newer = type(version) is int and version > VERSION
        hint = "Update eagle3." if newer else AGAIN
        raise FileError(f"{path}: expected format version {VERSION}, got {version!r}.", hint)
    try:
        header = _parse(Header, values["header"])
        shards = tuple(_parse(ShardEntry, entry) for entry in values["shards"])
        if not all(_NAME.fullmatch(entry.file) for entry in shards):
            raise ValueError("a shard has the name of another file")
        return Manifest(header, shards, _typed("bool", values["complete"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: damaged: {type(error).__name__}: {error}.", AGAIN) from error


def _parse(kind: Any, values: Any) -> Any:
    """A dataclass from its JSON object, with exactly its keys and types."""
    if not isinstance(values, dict) or values.keys() != {f.name for f in fields(kind)}:
        raise ValueError(f"expected the keys of a {kind.__name__}")
    return kind(**{f.name: _typed(str(f.type), values[f.name]) for f in fields(kind)})


def _typed(kind: str, value: Any) -> Any:
    if kind == "TargetId":
        return _parse(TargetId, value)
    if kind.startswith("tuple"):
        if not isinstance(value, list) or len(value) != 3:
            raise ValueError(f"expected three numbers, got {value!r}")
        return tuple(_typed("int", v) for v in value)
    if type(value).__name__ != kind or (kind == "int" and value < 0):
        raise ValueError(f"expected {kind}, got {value!r}")
    return value


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps({"version": VERSION, **asdict(manifest)}, indent=1) + "\n"
    write_whole(folder / MANIFEST, text.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Complete or not at all: not even a power cut leaves the name without its content."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_header(folder: Path, found: Header, wanted: Header) -> None:
    """FileError that says in what the states of a folder differ from those wanted."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in _COMPARED]
    pairs += [(f"target {name}", getattr(found.target, name), getattr(wanted.target, name)) for name in _OF_TARGET]
    differences = [f"{name.replace('_', ' ')} {_short(b)} wanted, {_short(a)} found" for name, a, b in pairs if a != b]
    if differences:
        raise FileError(f"{folder}: holds states of another capture: {'; '.join(differences)}.", _OTHER)


_COMPARED = ("aux_layers", "width", "vocab", "template", "engine")
_OF_TARGET = ("size", "first_mib", "tokenizer")


def _short(value: Any) -> str:
    """Digests by their first digits."""
    return (value[:12] or "none") if isinstance(value, str) and len(value) in (0, 64) else str(value)
