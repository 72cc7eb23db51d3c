"""Reopening what was written and comparing every key and every tensor with its source, while the disk catches up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from ..errors import FileError
from .encode import decode, floats
from .ggml_types import KINDS
from .gguf_header import Field, GgufFile, TensorInfo, read_gguf
from .parallel import in_order
from .plan import Key, same_value
from .tensors import Planned, blocks, release

# Largest relative error of rounding to nearest: half a unit in the last place, doubled for good measure.
RELATIVE = {"F16": 2.0**-10, "BF16": 2.0**-7}
SMALLEST = {"F16": 2.0**-24, "BF16": 2.0**-133}  # spacing of the subnormals


def check_gguf(path: Path, keys: tuple[Key | Field, ...], tensors: tuple[Planned, ...]) -> None:
    """Compare the file with what it should hold and flush it to the disk: afterwards it is right and safe.

    FileError, naming the key or tensor, when anything differs; OSError when it cannot be flushed.
    """
    with _flushing(path):
        file = read_gguf(path)
        _check_keys(file, keys)
        _check_tensors(file, tensors)


@contextlib.contextmanager
def _flushing(path: Path) -> Iterator[None]:
    """Flush a file meanwhile: that keeps the disk busy and comparing the processor."""
    with path.open("r+b") as file, ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(os.fsync, file.fileno())
        yield
        flushed.result()


def _check_keys(file: GgufFile, keys: tuple[Key | Field, ...]) -> None:
    expected = {k.name for k in keys} | {"general.architecture"}
    if file.fields.keys() != expected or file.value("general.architecture") != "eagle3":
        raise _fault("the keys", sorted(expected ^ file.fields.keys()))
    for key in keys:
        stored = file.fields[key.name]
        if not (stored.raw == key.raw if isinstance(key, Field) else same_value(key, stored.value)):
            raise _fault(f"key {key.name}", stored.value)


def _check_tensors(file: GgufFile, tensors: tuple[Planned, ...]) -> None:
    if list(file.tensors) != [t.name for t in tensors]:
        raise _fault("the list of tensors", list(file.tensors))
    data = np.memmap(file.path, dtype=np.uint8, mode="r")
    steps = [step for tensor in tensors for step in _steps(tensor, file.tensors[tensor.name], data)]
    with contextlib.closing(in_order(_check_rows, steps)) as checked:
        for step, same in zip(steps, checked, strict=True):
            if not same:
                rows = f"rows {step.rows.start} to {step.rows.stop - 1}"
                raise _fault(f"tensor {step.tensor.name}", f"other values in {rows}")


@dataclass(frozen=True)
class _Step:
    """Rows of a tensor and the bytes that the file holds for them."""

    tensor: Planned
    rows: slice
    stored: NDArray[np.uint8]


def _steps(tensor: Planned, info: TensorInfo, data: NDArray[np.uint8]) -> list[_Step]:
    if info.shape != tensor.shape or info.type != GGMLQuantizationType[tensor.kind]:
        raise _fault(f"tensor {tensor.name}", f"{GGMLQuantizationType(info.type).name} {list(info.shape)}")
    end = info.offset + tensor.nbytes
    if end > len(data):
        raise _fault(f"tensor {tensor.name}", f"an end at byte {end} of {len(data)}")
    stored = np.asarray(data[info.offset : end])
    width = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    return [_Step(tensor, rows, stored[rows.start * width : rows.stop * width]) for rows in blocks(tensor)]


def _check_rows(step: _Step) -> bool:
    same = _equal(step.tensor.read(step.rows), step.stored, step.tensor.dtype, step.tensor.kind)
    step.tensor.forget(step.rows)
    release(step.stored)
    return same


def _equal(source: NDArray[Any], stored: NDArray[np.uint8], dtype: str, kind: str) -> bool:
    """Whether stored bytes mean the source's values: exactly where the type holds them, else within its rounding."""
    source = np.ascontiguousarray(source).reshape(-1)
    if dtype == kind or kind == "I64":
        word = f"<u{source.itemsize}"  # as integers: a NaN differs from itself
        return np.array_equal(source.view(word), stored.view(word))
    wanted, got = floats(source, dtype), decode(stored, kind)
    if kind == "F32":
        return np.array_equal(wanted, got)
    if not KINDS[kind].scales:
        rounded = np.flatnonzero(got != wanted)  # few, where BF16 becomes F16; a NaN is among them
        if rounded.size < got.size // 8:
            got, wanted = got[rounded], wanted[rounded]
    error = np.abs(np.subtract(got, wanted, out=got), out=got)
    size = np.abs(wanted, out=None if dtype == "F32" else wanted)  # F32 is the source itself, not a copy
    if KINDS[kind].scales:
        error, size = _block_maxima(error, KINDS[kind].block), _block_maxima(size, KINDS[kind].block)
    return bool((error <= _tolerance(size, kind)).all())  # false for NaN, too


def _block_maxima(values: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """values.reshape(-1, block).max(axis=1) for a power of two, nine times as fast; NaN where a block holds one."""
    while block > 1:
        values, block = np.maximum(values[0::2], values[1::2]), block // 2
    return values


def _tolerance(size: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Largest allowed error of an element, from its magnitude; in a quantised type from the largest of its block."""
    if KINDS[kind].scales:
        relative, absolute = 1.01 * KINDS[kind].error, KINDS[kind].reach * SMALLEST["F16"]
    else:
        relative, absolute = RELATIVE[kind], SMALLEST[kind]
    bound = np.multiply(size, np.float32(relative))
    return np.add(bound, np.float32(absolute), out=bound)


def _fault(what: str, found: object) -> FileError:
    return FileError(
        f"the converted file does not match its source: {what} reads back as {found}.",
        "Nothing was kept. Is the disk healthy? Otherwise please report this.",
    )
