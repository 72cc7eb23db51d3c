"""A strict, quick reader of GGUF metadata and tensor tables.

`gguf.GGUFReader` makes several numpy arrays per vocabulary entry (seconds for a large one); the converter only needs
a few values and the raw bytes of the tokenizer's fields.  Format: ggml/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DEPTH = 4  # of nested arrays; real files have none


@dataclass(frozen=True)
class Field:
    """One key.  raw is the value as stored, from its type number on; value is decoded (a long array is its length)."""

    name: str
    type: int
    raw: bytes
    value: Any
    count: int  # elements of an array, otherwise 1


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table.  shape in numpy order (rows first); offset in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    path: Path
    size: int
    fields: dict[str, Field]
    tensors: dict[str, TensorInfo]

    def value(self, name: str, default: Any = None) -> Any:
        return self.fields[name].value if name in self.fields else default


class _Truncated(Exception):
    """The metadata ends before it should."""


def pack(name: str, kind: str, values: Any) -> Field:
    """A field of our own: one value, or a list of them.  kind is GGUF's name of the type; text items are bytes."""
    code = {"STRING": STRING, "FLOAT32": 6, "INT32": 5, "UINT32": 4, "BOOL": 7}[kind]
    if not isinstance(values, list):
        head = struct.pack("<I", code)
        raw = _pack_text(values.encode()) if code == STRING else struct.pack("<" + SCALARS[code], values)
        return Field(name, code, head + raw, values, 1)
    head = struct.pack("<IIQ", ARRAY, code, len(values))
    if code == STRING:
        return Field(name, ARRAY, head + b"".join(map(_pack_text, values)), None, len(values))
    return Field(name, ARRAY, head + struct.pack(f"<{len(values)}{SCALARS[code]}", *values), None, len(values))


def _pack_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table of a GGUF file.  FileError when it is missing, truncated or no GGUF."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise FileError(f"{path}: not a GGUF file (it does not start with 'GGUF').", "Give a .gguf model.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Scan(path, data).file(size)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (_Truncated, struct.error) as error:
        raise FileError(f"{path}: the GGUF metadata is truncated or damaged.", "Download the file again.") from error


class _Scan:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.pos = path, data, 4

    def file(self, size: int) -> GgufFile:
        version = self.scalar("I")
        if version not in (2, 3):
            raise FileError(
                f"{self.path}: GGUF version {version}, expected 2 or 3 in little-endian order.",
                "Convert the model again with a current llama.cpp.",
            )
        n_tensors, n_fields = self.scalar("Q"), self.scalar("Q")
        fields: dict[str, Field] = {}
        for _ in range(n_fields):
            field = self.field()
            if field.name in fields:
                raise FileError(f"{self.path}: the key {field.name!r} occurs twice.", "Download the file again.")
            fields[field.name] = field
        infos = [self.tensor() for _ in range(n_tensors)]
        align = fields["general.alignment"].value if "general.alignment" in fields else 32
        if type(align) is not int or align <= 0:
            raise FileError(f"{self.path}: general.alignment: expected a positive number, got {align!r}.")
        start = -(-self.pos // align) * align
        tensors = {i.name: TensorInfo(i.name, i.shape, i.type, start + i.offset) for i in infos}
        if len(tensors) != n_tensors:
            raise FileError(f"{self.path}: two tensors have the same name.")
        return GgufFile(self.path, size, fields, tensors)

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.pos)[0]
        self.pos += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.pos:
            raise _Truncated
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def field(self) -> Field:
        name = self.text()
        start = self.pos
        kind = self.scalar("I")
        value, count = self.value(kind, 0)
        return Field(name, kind, self.data[start : self.pos], value, count)

    def value(self, kind: int, depth: int) -> tuple[Any, int]:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind]), 1
        if kind == STRING:
            return self.text(), 1
        if kind != ARRAY or depth >= MAX_DEPTH:
            raise FileError(f"{self.path}: a key has the unknown GGUF type {kind}.", "Update eagle3.")
        return self.array(depth)

    def array(self, depth: int) -> tuple[Any, int]:
        """The elements of a short numeric array, otherwise None: vocabularies are only skipped over."""
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            raw = self.take(count * struct.calcsize("<" + SCALARS[kind]))
            return (list(struct.unpack(f"<{count}{SCALARS[kind]}", raw)) if count <= 4096 else None), count
        for _ in range(count):
            if kind == STRING:
                (length,) = struct.unpack_from("<Q", self.data, self.pos)
                self.pos += 8 + length
                if self.pos > len(self.data):
                    raise _Truncated
            else:
                self.value(kind, depth + 1)
        return None, count

    def tensor(self) -> TensorInfo:
        name, n_dims = self.text(), self.scalar("I")
        if n_dims > 8:
            raise _Truncated
        shape = tuple(reversed([self.scalar("Q") for _ in range(n_dims)]))
        kind, offset = self.scalar("I"), self.scalar("Q")
        return TensorInfo(name, shape, kind, offset)
