"""Reading safetensors checkpoints: one file, a directory, or a sharded index.

Nothing is loaded: a `StoredTensor` is a view into a memory map.  The header is checked strictly, so that whatever
passes here can be read later without surprises.  Format: huggingface/safetensors, README ("Format").
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import FileError

MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
INDEX_SUFFIX = ".safetensors.index.json"

# Storage type of each dtype.  numpy has no bfloat16 and no float8, so those stay bit patterns; BOOL stays bytes
# because a byte other than 0 or 1 is undefined behaviour for np.bool_.
DTYPES: dict[str, str] = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E5M2": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1",
    "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the checkpoint stores it.

    data    in the storage type of `DTYPES[dtype]` and in `shape`; BF16 is uint16 bit patterns.  Read-only, mapped.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    data: NDArray[Any]


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint by name, and where they came from (`folder` is where config.json belongs)."""

    path: Path
    folder: Path
    tensors: dict[str, StoredTensor]


def open_checkpoint(source: Path) -> Checkpoint:
    """Open a .safetensors file, a .safetensors.index.json, or a directory that holds one of them.

    Raises FileError that names the file when something is missing, truncated, or not what it should be.
    """
    if not os.path.exists(source):  # Path.exists raises for a name that is too long
        raise FileError(f"{source}: no such file or directory.", "Give the folder of a downloaded EAGLE-3 checkpoint.")
    path = _pick(source) if source.is_dir() else source
    if path.name.endswith(".json"):
        tensors = _open_index(path)
    elif path.suffix == ".safetensors":
        tensors = open_file(path)
    else:
        raise FileError(
            f"{path}: expected a .safetensors file, its {INDEX_SUFFIX[1:]} or a directory.",
            "PyTorch .bin and .pt files cannot be read yet: save the checkpoint as safetensors.",
        )
    if not tensors:
        raise FileError(f"{path}: the checkpoint holds no tensors.", "Download it again.")
    return Checkpoint(path, path.parent, tensors)


def _pick(folder: Path) -> Path:
    """The checkpoint inside a directory; transformers' order: one file first, then the index."""
    for name in ("model.safetensors", "model" + INDEX_SUFFIX):
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob("*" + INDEX_SUFFIX)) or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(p.name for p in found)
        raise FileError(f"{folder}: several checkpoints and no model{INDEX_SUFFIX}: {names}.", "Name one file.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise FileError(
            f"{folder}: expected model.safetensors, found only PyTorch .bin or .pt files.",
            "These cannot be read yet: save the checkpoint as safetensors.",
        )
    raise FileError(
        f"{folder}: no model.safetensors and no model{INDEX_SUFFIX} in this directory.",
        "Give the folder of a downloaded EAGLE-3 checkpoint.",
    )


def _open_index(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a sharded checkpoint.  Index and shards must name exactly the same tensors."""
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FileError(f"{path}: expected a 'weight_map' of tensor names to file names.", "Download the index again.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not shard.endswith(".safetensors") or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise FileError(f"{path}: expected the name of a .safetensors file beside the index, got {shard!r}.")
        if not (path.parent / shard).is_file():
            raise FileError(f"{path.parent / shard}: this shard is named by {path.name} but missing.", "Download it.")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        stored = open_file(path.parent / shard)
        listed = {name for name, file in weight_map.items() if file == shard}
        if missing := sorted(listed - stored.keys()):
            raise FileError(f"{path.parent / shard}: {path.name} places {missing[0]!r} here, but it is not there.")
        if extra := sorted(stored.keys() - listed):
            raise FileError(f"{path.parent / shard}: holds {extra[0]!r}, which {path.name} does not place here.")
        tensors.update(stored)
    return tensors


def open_file(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one .safetensors file, memory-mapped, in file order."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            entries, start = _read_header(path, file, size)
        data = np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    spans = [_entry(path, name, entry) for name, entry in entries.items()]
    _check_layout(path, spans, size - start)
    return {
        name: StoredTensor(name, dtype, shape, path, _view(data[start + a : start + b], dtype, shape))
        for name, dtype, shape, a, b in spans
    }


def _view(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(data).view(DTYPES[dtype]).reshape(shape)


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header's tensor entries (unchecked) and the offset in bytes at which the data starts."""
    first = file.read(8)
    if len(first) < 8:
        raise FileError(f"{path}: expected a safetensors header, got a file of {size} bytes.", "Download it again.")
    (length,) = struct.unpack("<Q", first)
    if length > min(MAX_HEADER, size - 8):
        raise FileError(
            f"{path}: the header claims {length} bytes, but the file has {size - 8} after its length field.",
            "The file is truncated or not safetensors (a Git LFS pointer?). Download it again.",
        )
    header = _parse_json(path, file.read(length), "safetensors header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError(f"{path}: safetensors header: expected '__metadata__' to map text to text.")
    return header, 8 + length


def _entry(path: Path, name: str, entry: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    """(name, dtype, shape, begin, end) of one header entry, offsets in bytes from the start of the data."""
    where = f"{path}: safetensors header, tensor {name!r}"
    if not name or not name.isprintable():
        raise FileError(f"{where}: expected a printable name.")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileError(f"{where}: expected dtype, shape and data_offsets.", "Download the file again.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileError(f"{where}: unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}.")
    if not _naturals(shape) or len(shape) > 8:
        raise FileError(f"{where}: expected a shape of at most 8 sizes, got {shape!r}.")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FileError(f"{where}: expected data_offsets [begin, end], got {offsets!r}.")
    expected = prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != expected:
        raise FileError(f"{where}: {dtype} {shape} has {expected} bytes, data_offsets {offsets[1] - offsets[0]}.")
    return name, dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_layout(path: Path, spans: list[tuple[str, str, tuple[int, ...], int, int]], size: int) -> None:
    """The tensors cover the data without holes or overlaps, as the format demands."""
    end = 0
    for name, _, _, a, b in sorted(spans, key=lambda s: (s[3], s[4])):
        if a != end:
            raise FileError(f"{path}: tensor {name!r} starts at byte {a} of the data, expected {end}.")
        end = b
    if end != size:
        raise FileError(
            f"{path}: the header describes {end} bytes of data, the file holds {size}.",
            "The file is truncated or has been appended to. Download it again.",
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.  FileError when it is missing, no UTF-8, no JSON, or no object."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.") from error
    return _parse_json(path, raw, "JSON")


def _parse_json(path: Path, raw: bytes, what: str) -> dict[str, Any]:
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
