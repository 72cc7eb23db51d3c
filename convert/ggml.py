"""ggml's own conversion between number types: the same bytes as llama.cpp's quantiser.

The library is reached by ctypes, which releases the GIL.  It asserts what it is promised instead of returning errors,
so every promise is kept here: whole blocks, contiguous memory, finite values.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..llama import function
from .ggml_types import KINDS

_ptr, _int64 = ctypes.c_void_p, ctypes.c_int64
_to_float = ctypes.CFUNCTYPE(None, _ptr, _ptr, _int64)


class _TypeTraits(ctypes.Structure):
    """struct ggml_type_traits of ggml.h, as far as it is read here."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", _int64),
        ("blck_size_interleave", _int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _to_float),
    ]


_quantize_chunk = function(
    "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, _ptr, _ptr, _int64, _int64, _int64, _ptr
)
_type_traits = function("ggml_get_type_traits", ctypes.POINTER(_TypeTraits), ctypes.c_int)
# The same numbers as ggml_quantize_chunk and ggml_fp16_to_fp32_row give one by one, with vector instructions
_to_half = function("ggml_cpu_fp32_to_fp16", None, _ptr, _ptr, _int64)
_from = {
    "F16": function("ggml_cpu_fp16_to_fp32", None, _ptr, _ptr, _int64),
    "BF16": function("ggml_cpu_bf16_to_fp32", None, _ptr, _ptr, _int64),
}


def quantise(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """The bytes of rows in a ggml type, [rows * bytes of a row].

    values  float32 [rows, columns] or [columns], finite; columns must be whole blocks of the type
    Equal to gguf.quants.quantize, and to what llama_model_quantize makes of the same rows in F32.
    """
    values = np.ascontiguousarray(values)
    columns, block = values.shape[-1], KINDS[kind].block
    if columns % block:
        raise ValueError(f"rows of {columns} are no whole blocks of {kind}")
    result = np.empty(values.size // block * KINDS[kind].size, np.uint8)
    if not values.size:
        return result
    if kind == "F16":
        _to_half(values.ctypes.data, result.ctypes.data, values.size)
    else:
        rows = values.size // columns
        _quantize_chunk(KINDS[kind].number, values.ctypes.data, result.ctypes.data, 0, rows, columns, None)
    return result


def dequantise(data: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """float32 [elements] of whole rows in F16, BF16 or a quantised type, whatever the shape and type of the array."""
    data = np.ascontiguousarray(data)
    values = np.empty(data.nbytes // KINDS[kind].size * KINDS[kind].block, np.float32)
    convert = _from.get(kind) or _type_traits(KINDS[kind].number)[0].to_float
    convert(data.ctypes.data, values.ctypes.data, values.size)
    return values
