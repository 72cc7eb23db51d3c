"""Numbers of a checkpoint as the bytes of a ggml type, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .ggml import dequantise, quantise
from .ggml_types import KINDS
from .tensors import to_float32

# The smallest magnitudes that round to infinity, halfway between the largest number and the next power of two.
TOO_LARGE = {"F32": 2.0**128 - 2.0**103, "BF16": 2.0**128 - 2.0**119, "F16": 65520.0}
HALF_LARGEST = 65504.0  # of float16, the type of every scale

# Unsigned integers of a float type's size, and the bits of its magnitude, whose order is that of the integers.
MAGNITUDES = {
    "F32": ("<u4", 2**31 - 1),
    "F16": ("<u2", 2**15 - 1),
    "BF16": ("<u2", 2**15 - 1),
    "F64": ("<u8", 2**63 - 1),
}
WIDER = {"F32": "The checkpoint is damaged.", "BF16": "Use --outtype f32."}


def encode(data: NDArray[Any], dtype: str, kind: str, name: str) -> NDArray[np.uint8]:
    """Rows in the source's type as the bytes of a ggml type, [bytes]; the same type passes through unchanged.

    CheckpointError, naming the tensor, for NaN, infinity, and values that the type cannot hold.
    """
    if kind == "I64":
        return np.ascontiguousarray(data, dtype="<i8").reshape(-1).view(np.uint8)
    largest = magnitude(data, dtype)
    if not np.isfinite(largest):
        raise CheckpointError(f"{name}: holds NaN or infinite values.", "The checkpoint is damaged.")
    if dtype == kind:
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if largest >= TOO_LARGE.get(kind, HALF_LARGEST * KINDS[kind].reach):
        raise _too_large(name, largest, kind)
    values = floats(data, dtype)
    result = values.reshape(-1).view(np.uint8) if kind == "F32" else quantise(values, kind)
    if not _scales_are_finite(result, kind):
        raise _too_large(name, largest, kind)
    return result


def decode(data: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """float32 [elements] of encoded rows; exact."""
    return data.reshape(-1).view(np.float32) if kind == "F32" else dequantise(data, kind)


def floats(data: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """`to_float32`, in less time for what most checkpoints hold."""
    return dequantise(data, dtype).reshape(data.shape) if dtype in ("F16", "BF16") else to_float32(data, dtype)


def magnitude(data: NDArray[Any], dtype: str) -> float:
    """The largest absolute value, from the bit patterns; infinite or NaN if any value is."""
    if not data.size:
        return 0.0
    unsigned, mask = MAGNITUDES[dtype]
    bits = np.bitwise_and(np.ascontiguousarray(data).view(unsigned), np.dtype(unsigned).type(mask)).max(keepdims=True)
    return float(to_float32(bits, dtype).item() if dtype == "BF16" else bits.view(data.dtype).item())


def _scales_are_finite(encoded: NDArray[np.uint8], kind: str) -> bool:
    """Whether no float16 scale overflowed; then every decoded value is finite, too."""
    half_words = encoded.view("<u2").reshape(-1, KINDS[kind].size // 2) if KINDS[kind].scales else encoded
    return all(np.isfinite(half_words[:, at // 2].view(np.float16)).all() for at in KINDS[kind].scales)


def _too_large(name: str, largest: float, kind: str) -> CheckpointError:
    hint = WIDER.get(kind, "Use --outtype bf16 or f32.")
    return CheckpointError(f"{name}: its largest value {largest:g} does not fit into {kind}.", hint)
