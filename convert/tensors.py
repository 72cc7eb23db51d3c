"""Tensor transforms: head permutation, conversion between number types, and the plan of what is written.

Tensors are processed in blocks of rows, so memory stays small whatever the size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

BLOCK = 1 << 22  # elements per block of rows
Q8_BLOCK = 32  # elements that share a scale
FLOATS = ("F32", "F16", "BF16", "F64")
OUTTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


@dataclass(frozen=True)
class Planned:
    """One tensor of the output.

    name    in the GGUF
    kind    ggml type: F32, F16, BF16, Q8_0 or I64
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


def row_bytes(kind: str, n: int) -> int:
    """Bytes of n consecutive elements of a ggml type."""
    if kind == "Q8_0":
        return n // Q8_BLOCK * (2 + Q8_BLOCK)
    return n * {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}[kind]


def rotary_order(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Row order that turns split-half RoPE rows (Hugging Face) into interleaved ones (ggml's NORM type).

    Within each head the pair (j, j + head_dim/2) moves to rows (2j, 2j + 1).  Returns int64 [heads * head_dim], the
    source row of each output row.
    """
    half = np.arange(head_dim // 2)
    within = np.stack([half, half + head_dim // 2], axis=1).reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + within).reshape(-1)


def blocks(tensor: Planned) -> Iterator[tuple[slice, NDArray[Any]]]:
    """(rows, data) of a tensor from front to back, in output order and the source's number type; 1-D is one block."""
    if len(tensor.shape) == 1:
        yield slice(0, tensor.shape[0]), tensor.data if tensor.order is None else tensor.data[tensor.order]
        return
    step = max(1, BLOCK // max(1, tensor.shape[1]))
    for start in range(0, tensor.shape[0], step):
        rows = slice(start, min(start + step, tensor.shape[0]))
        yield rows, tensor.data[rows] if tensor.order is None else tensor.data[tensor.order[rows]]


def to_float32(data: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Values of stored numbers; exact except for F64."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return data.astype(np.float32)


def encode(data: NDArray[Any], dtype: str, kind: str, name: str) -> NDArray[Any]:
    """Numbers in the source's type as the bytes of a ggml type; the same type passes through unchanged.

    CheckpointError, naming the tensor, for NaN, infinity, and values that the type cannot hold.
    """
    if kind == "I64":
        return np.ascontiguousarray(data, dtype="<i8")
    values = to_float32(data, dtype)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}: holds NaN or infinite values.", "The checkpoint is damaged.")
    if dtype == kind:
        return np.ascontiguousarray(data)
    result = _encode(np.ascontiguousarray(values), kind)
    if not np.isfinite(decode(result, kind)).all():
        raise CheckpointError(
            f"{name}: its largest value {np.abs(values).max():g} does not fit into {kind}.",
            "Use --outtype bf16 or f32.",
        )
    return result


def _encode(values: NDArray[np.float32], kind: str) -> NDArray[Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "F16":
            return values.astype("<f2")
        return values if kind == "F32" else quantize(values, GGMLQuantizationType[kind])


def decode(data: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """float32 values of encoded rows, in the shape of the tensor."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind in ("F32", "F16"):
        return data.view(np.float32 if kind == "F32" else np.float16).astype(np.float32, copy=False)
    if kind == "BF16":
        return to_float32(data.view(np.uint16), "BF16")
    return dequantize(data.view(np.uint8), GGMLQuantizationType[kind])
