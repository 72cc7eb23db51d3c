"""Writing the GGUF: into a temporary file beside the output, checked, then renamed.

Whatever happens, Ctrl-C included, the output either does not change or is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from ..errors import FileError
from .gguf_header import Field
from .plan import Key
from .tensors import Planned, blocks, encode

ALIGNMENT = 32  # bytes; GGUF's default
Progress = Callable[[str, int, int], None]  # tensor name, bytes done, bytes in total


class _Writer(GGUFWriter):
    """A GGUFWriter that also takes a raw `Field`, so that a tokenizer is copied byte by byte."""

    def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
        if isinstance(val, Field):
            return val.raw
        return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))


@contextlib.contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A temporary path in the output's folder; on a clean exit it replaces the output, otherwise it is removed.

    A symbolic link at the output is replaced, not followed.
    """
    handle, name = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".part", dir=output.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(output.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename durable where the system can (a folder cannot be opened on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_space(output: Path, size: int) -> None:
    """FileError when the disk cannot hold size bytes more; better known before than after an hour."""
    free = shutil.disk_usage(output.parent).free
    if free < size:
        raise FileError(f"{output.parent}: {size / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free.")


def write_gguf(path: Path, keys: tuple[Key | Field, ...], tensors: tuple[Planned, ...], progress: Progress) -> None:
    """Write a complete GGUF and flush it to the disk.  Tensors are encoded block by block."""
    _write_header(path, keys, tensors)
    total, done = sum(t.nbytes for t in tensors), 0
    with path.open("ab") as file:
        _pad(file)
        for tensor in tensors:
            for _, data in blocks(tensor):
                encoded = encode(data, tensor.dtype, tensor.kind, tensor.source)
                file.write(np.ascontiguousarray(encoded).data)
                done += encoded.nbytes
                progress(tensor.name, done, total)
            _pad(file)
        file.flush()
        os.fsync(file.fileno())


def _write_header(path: Path, keys: tuple[Key | Field, ...], tensors: tuple[Planned, ...]) -> None:
    writer = _Writer(path, "eagle3")  # adds general.architecture
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
