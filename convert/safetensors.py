"""Reading safetensors files.  The header is checked strictly, so that whatever passes here can be read later without
surprises.  Format: huggingface/safetensors, README ("Format").
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import FileError
from .checkpoint import StoredTensor
from .json_files import parse_json

MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation

# Storage type of each dtype.  numpy has no bfloat16 and no float8, so those stay bit patterns; BOOL stays bytes
# because a byte other than 0 or 1 is undefined behaviour for np.bool_.
DTYPES: dict[str, str] = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E5M2": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1",
    "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip


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
    header = parse_json(path, file.read(length), "safetensors header")
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
