"""Writing the GGUF: the header through the gguf package, the tensors by blocks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from .encode import encode
from .gguf_header import Field
from .parallel import in_order
from .plan import Key
from .tensors import Planned, blocks

ALIGNMENT = 32  # bytes; GGUF's default
Progress = Callable[[str, int, int], None]  # tensor name, bytes done, bytes in total
Step = tuple[Planned, slice]  # a tensor and some of its rows


class _Writer(GGUFWriter):
    """A GGUFWriter that also takes a raw `Field`, so that a tokenizer is copied byte by byte."""

    def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
        if isinstance(val, Field):
            return val.raw
        return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))


def encode_rows(step: Step) -> NDArray[np.uint8]:
    tensor, rows = step
    return encode(tensor.read(rows), tensor.dtype, tensor.kind, tensor.source)


def write_gguf(
    path: Path,
    keys: tuple[Key | Field, ...],
    tensors: tuple[Planned, ...],
    progress: Progress,
    architecture: str = "eagle3",
    encoder: Callable[[Step], NDArray[np.uint8]] = encode_rows,
) -> None:
    """Write a complete GGUF, encoded by all cores in blocks of rows.  `check_gguf` flushes it to the disk."""
    _write_header(path, keys, tensors, architecture)
    total, done = sum(t.nbytes for t in tensors), 0
    steps = [(tensor, rows) for tensor in tensors for rows in blocks(tensor)]
    with path.open("ab") as file, contextlib.closing(in_order(encoder, steps)) as encoded:
        _pad(file)
        for (tensor, rows), data in zip(steps, encoded, strict=True):
            file.write(data.data)
            tensor.forget(rows)
            if rows.stop == tensor.shape[0]:
                _pad(file)
            done += data.nbytes
            progress(tensor.name, done, total)


def _write_header(path: Path, keys: tuple[Key | Field, ...], tensors: tuple[Planned, ...], architecture: str) -> None:
    writer = _Writer(path, architecture)  # adds general.architecture
    for key in keys:
        if isinstance(key, Field):
            writer.add_key_value(key.name, key, GGUFValueType.ARRAY)
        else:
            items = GGUFValueType[key.items] if key.items else None
            writer.add_key_value(key.name, key.value, GGUFValueType[key.kind], items)
    for t in tensors:
        # the element type only matters to gguf for uint8, which it takes for a shape in bytes
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, GGMLQuantizationType[t.kind])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _pad(file: Any) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
