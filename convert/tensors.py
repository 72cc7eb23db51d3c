"""Tensors of the output: where their rows come from, head permutation, reading in blocks.

Tensors are processed in blocks of rows, so memory stays small whatever the size of a head.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ggml_types import KINDS

BLOCK = 1 << 19  # elements per block of rows; in smaller ones threads mostly wait for Python's lock
# Bytes that Linux maps around an access, aligned: more than a page, so pages before a part come back with it.
FETCHED = max(1 << 16, mmap.PAGESIZE)


@dataclass(frozen=True)
class Planned:
    """One tensor of the output.

    name    in the GGUF
    kind    ggml type, a key of `KINDS`
    source  name in the checkpoint, or a word for where the data was computed from
    dtype   safetensors type of data, in which BF16 is uint16 bit patterns
    data    storage order; row r of the output is data[order[r]] (None: unchanged)
    transform   one phrase for the report
    """

    name: str
    kind: str
    source: str
    dtype: str
    data: NDArray[Any]
    order: NDArray[np.int64] | None = None
    transform: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.data.shape)

    @property
    def nbytes(self) -> int:
        return row_bytes(self.kind, self.shape[-1]) * int(np.prod(self.shape[:-1], dtype=np.int64))

    def read(self, rows: slice) -> NDArray[Any]:
        """Rows of the output, in the source's number type."""
        return self.data[rows] if self.order is None else self.data[self.order[rows]]

    def forget(self, rows: slice) -> None:
        """Give back the memory that reading these rows took, where they are part of a mapped file."""
        if self.order is not None:
            read = self.order[rows]
            rows = slice(int(read.min()), int(read.max()) + 1)
        release(self.data[rows])


def row_bytes(kind: str, n: int) -> int:
    """Bytes of n consecutive elements of a ggml type; n must be whole blocks."""
    return n // KINDS[kind].block * KINDS[kind].size


def rotary_order(heads: int, head_dim: int, rotated: int) -> NDArray[np.int64]:
    """Row order that turns split-half RoPE rows (Hugging Face) into interleaved ones (ggml's NORM type).

    Within each head the pair (j, j + rotated/2) moves to rows (2j, 2j + 1); dimensions from `rotated` on stay.
    Returns int64 [heads * head_dim], the source row of each output row.
    """
    half = np.arange(rotated // 2)
    pairs = np.stack([half, half + rotated // 2], axis=1).reshape(-1)
    within = np.concatenate([pairs, np.arange(rotated, head_dim)])
    return (np.arange(heads)[:, None] * head_dim + within).reshape(-1)


def blocks(tensor: Planned) -> Iterator[slice]:
    """The rows of a tensor from front to back, in blocks of about `BLOCK` elements; a vector is one block."""
    if len(tensor.shape) == 1:
        yield slice(0, tensor.shape[0])
        return
    step = max(1, BLOCK // max(1, tensor.shape[1]))
    for start in range(0, tensor.shape[0], step):
        yield slice(start, min(start + step, tensor.shape[0]))


def release(data: NDArray[Any]) -> None:
    """Give back the memory behind a part of a file that is mapped read-only; the next access fetches it again.

    Without it every page that was ever read counts as memory of this process.  No effect on any other array, nor where
    the system cannot do it.
    """
    owner: Any = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if data.flags.writeable or not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = np.frombuffer(owner, np.uint8).ctypes.data
    start = max(first, data.ctypes.data // FETCHED * FETCHED)
    owner.madvise(mmap.MADV_DONTNEED, start - first, data.ctypes.data + data.nbytes - start)


def to_float32(data: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Values of stored numbers; exact except for F64, of which the too large become infinite."""
    if dtype == "BF16":
        wide = data.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    with np.errstate(over="ignore"):
        return data.astype(np.float32, copy=False)
