"""Reopening what was written and comparing every key and every tensor with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from ..errors import FileError
from .gguf_header import Field, TensorInfo, read_gguf
from .plan import Key, same_value
from .tensors import Q8_BLOCK, Planned, blocks, decode, row_bytes, to_float32

# Largest relative error of rounding to nearest: half a unit in the last place, doubled for good measure.
RELATIVE = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
SMALLEST = {"F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133}  # spacing of the subnormals


def check_gguf(path: Path, keys: tuple[Key | Field, ...], tensors: tuple[Planned, ...]) -> None:
    """FileError, naming the key or tensor, when the file does not hold what it should."""
    file = read_gguf(path)
    expected = {k.name for k in keys} | {"general.architecture"}
    if file.fields.keys() != expected or file.value("general.architecture") != "eagle3":
        raise _fault("the keys", sorted(expected ^ file.fields.keys()))
    for key in keys:
        stored = file.fields[key.name]
        if not (stored.raw == key.raw if isinstance(key, Field) else same_value(key, stored.value)):
            raise _fault(f"key {key.name}", stored.value)
    if list(file.tensors) != [t.name for t in tensors]:
        raise _fault("the list of tensors", list(file.tensors))
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for tensor in tensors:
        _check_tensor(tensor, file.tensors[tensor.name], data)


def _check_tensor(tensor: Planned, info: TensorInfo, data: NDArray[np.uint8]) -> None:
    if info.shape != tensor.shape or info.type != GGMLQuantizationType[tensor.kind]:
        raise _fault(f"tensor {tensor.name}", f"{GGMLQuantizationType(info.type).name} {list(info.shape)}")
    if info.offset + tensor.nbytes > len(data):
        raise _fault(f"tensor {tensor.name}", f"an end at byte {info.offset + tensor.nbytes} of {len(data)}")
    width = row_bytes(tensor.kind, tensor.shape[-1])
    stored = np.asarray(data[info.offset : info.offset + tensor.nbytes]).reshape(-1, width)
    for rows, source in blocks(tensor):
        part = stored[rows] if len(tensor.shape) > 1 else stored[0]
        if not _equal(source, part, tensor):
            raise _fault(f"tensor {tensor.name}", f"other values in rows {rows.start} to {rows.stop - 1}")


def _equal(source: NDArray[Any], stored: NDArray[np.uint8], tensor: Planned) -> bool:
    """Whether stored bytes mean the source's values: exactly where the type holds them, else within its rounding."""
    if tensor.kind == "I64":
        return np.array_equal(source, stored.view("<i8"))
    if tensor.dtype == tensor.kind:
        return np.ascontiguousarray(source).tobytes() == stored.tobytes()
    wanted, got = to_float32(source, tensor.dtype), decode(stored, tensor.kind).reshape(source.shape)
    if tensor.kind == "F32":
        return np.array_equal(wanted, got)
    return bool(np.all(np.abs(got - wanted) <= _tolerance(wanted, tensor.kind)))


def _tolerance(wanted: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Largest allowed difference of each element."""
    if kind != "Q8_0":
        return np.abs(wanted) * np.float32(RELATIVE[kind]) + np.float32(SMALLEST[kind])
    # half a step of 1/127 of the block's largest value, and the rounding of that step to float16
    largest = np.abs(wanted).reshape(-1, Q8_BLOCK).max(axis=1, keepdims=True)
    step = largest * np.float32(1.01 * (0.5 / 127 + 2.0**-11)) + np.float32(127 * 2.0**-24)
    return np.broadcast_to(step, (step.shape[0], Q8_BLOCK)).reshape(wanted.shape)


def _fault(what: str, found: object) -> FileError:
    return FileError(
        f"the converted file does not match its source: {what} reads back as {found}.",
        "Nothing was kept. Is the disk healthy? Otherwise please report this.",
    )
