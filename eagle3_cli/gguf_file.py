"""Look into a GGUF before llama.cpp loads it: is it whole, and what does its header say?

The header is read by ggml's own parser (gguf.h), which takes milliseconds where a Python parser takes seconds.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FileError
from .llama import function, recent_log

_SCALARS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
    12: ("f64", ctypes.c_double),
}
_STRING, _ARRAY = 8, 9
F32, I64 = 0, 27  # enum ggml_type
_NUMPY = {F32: "<f4", I64: "<i8"}

AGAIN = "Download or convert the file again."
MOST_PARTS = 2**16 - 1  # of a split model: llama.cpp counts them in 16 bits


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_ptr, _id, _text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
_open = function("gguf_init_from_file", _ptr, _text, _InitParams)
_free = function("gguf_free", None, _ptr)
_find_key = function("gguf_find_key", _id, _ptr, _text)
_kv_type = function("gguf_get_kv_type", ctypes.c_int, _ptr, _id)
_val_str = function("gguf_get_val_str", _text, _ptr, _id)
_arr_type = function("gguf_get_arr_type", ctypes.c_int, _ptr, _id)
_arr_n = function("gguf_get_arr_n", ctypes.c_size_t, _ptr, _id)
_arr_data = function("gguf_get_arr_data", _ptr, _ptr, _id)
_arr_str = function("gguf_get_arr_str", _text, _ptr, _id, ctypes.c_size_t)
_values = {t: function(f"gguf_get_val_{name}", c, _ptr, _id) for t, (name, c) in _SCALARS.items()}
_data_offset = function("gguf_get_data_offset", ctypes.c_size_t, _ptr)
_n_tensors = function("gguf_get_n_tensors", _id, _ptr)
_find_tensor = function("gguf_find_tensor", _id, _ptr, _text)
_tensor_name = function("gguf_get_tensor_name", _text, _ptr, _id)
_tensor_ne = function("gguf_get_tensor_ne", ctypes.POINTER(ctypes.c_int64), _ptr, _id)
_tensor_type = function("gguf_get_tensor_type", ctypes.c_int, _ptr, _id)
_type_name = function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
_tensor_offset = function("gguf_get_tensor_offset", ctypes.c_size_t, _ptr, _id)
_tensor_size = function("gguf_get_tensor_size", ctypes.c_size_t, _ptr, _id)


class GgufFile:
    """The header of one GGUF: keys, and the tensors' names, shapes (ggml order) and places.

    FileError if the file is missing, is no GGUF, or ends before its last tensor does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_magic()
        self._gguf = _open(os.fsencode(path), _InitParams(True, None))
        if not self._gguf:
            raise FileError(f"{path}: its GGUF header is damaged: {recent_log() or 'no reason given'}.", AGAIN)
        self._check_length()

    def _check_magic(self) -> None:
        if not self.path.is_file():
            what = "is a directory" if self.path.is_dir() else "no such file"
            raise FileError(f"{self.path}: {what}; expected a GGUF file.")
        try:
            with self.path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read: {error.strerror}.") from error
        if magic != b"GGUF":
            raise FileError(f"{self.path}: not a GGUF file: expected it to begin with b'GGUF', got {magic!r}.")

    def _check_length(self) -> None:
        size = self.path.stat().st_size
        tensors = range(_n_tensors(self._gguf))
        ends = [_tensor_offset(self._gguf, i) + _tensor_size(self._gguf, i) for i in tensors]
        expected = _data_offset(self._gguf) + max(ends, default=0)
        if size < expected:
            raise FileError(f"{self.path}: truncated: expected at least {expected} bytes, got {size}.", AGAIN)

    def get(self, key: str) -> Any:
        """A value: number, bool, str, or an array of numbers; None if absent.  See `strings` for text arrays."""
        i = _find_key(self._gguf, key.encode())
        if i < 0:
            return None
        kind = _kv_type(self._gguf, i)
        if kind == _STRING:
            return _val_str(self._gguf, i).decode("utf-8", "replace")
        if kind != _ARRAY:
            return _values[kind](self._gguf, i)
        item = _arr_type(self._gguf, i)
        if item not in _SCALARS:
            return None
        count, address = _arr_n(self._gguf, i), _arr_data(self._gguf, i)
        return list((_SCALARS[item][1] * count).from_address(address)) if count else []

    def has(self, key: str) -> bool:
        """Is there a value of any type?"""
        return bool(_find_key(self._gguf, key.encode()) >= 0)

    def need(self, key: str, kind: type) -> Any:
        """A value that must be there and of exactly that Python type (a bool is no int); FileError otherwise."""
        value = self.get(key)
        if type(value) is not kind:
            found = "nothing" if value is None else f"{type(value).__name__} {value!r}"
            raise FileError(f"{self.path}: expected {key} as {kind.__name__}, got {found}.", AGAIN)
        return value

    def count_strings(self, key: str) -> int:
        """Length of a text array; 0 if absent or of another type."""
        i = _find_key(self._gguf, key.encode())
        if i < 0 or _kv_type(self._gguf, i) != _ARRAY or _arr_type(self._gguf, i) != _STRING:
            return 0
        return int(_arr_n(self._gguf, i))

    def strings(self, key: str) -> list[bytes]:
        """A text array as bytes; empty if absent or of another type."""
        i = _find_key(self._gguf, key.encode())
        return [_arr_str(self._gguf, i, j) for j in range(self.count_strings(key))]

    def names(self) -> list[str]:
        return [_tensor_name(self._gguf, i).decode("utf-8", "replace") for i in range(_n_tensors(self._gguf))]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor in ggml's order (row length first), at least two numbers; None if absent."""
        i = _find_tensor(self._gguf, name.encode())
        if i < 0:
            return None
        ne = list(_tensor_ne(self._gguf, i)[:4])
        while len(ne) > 2 and ne[-1] == 1:
            ne.pop()
        return tuple(ne)

    def type(self, name: str) -> int | None:
        """ggml type of a tensor; None if absent."""
        i = _find_tensor(self._gguf, name.encode())
        return None if i < 0 else int(_tensor_type(self._gguf, i))

    @property
    def part(self) -> tuple[int, int]:
        """Which part of how many of a split model this is, counted from 1; (1, 1) for a whole one."""
        count = self.need("split.count", int) if self.has("split.count") else 1
        if count > MOST_PARTS:
            raise FileError(f"{self.path}: expected split.count up to {MOST_PARTS}, got {count}.", AGAIN)
        return (self.need("split.no", int) + 1, count) if count > 1 else (1, 1)

    def values(self, name: str, kind: int) -> np.ndarray:
        """The values of a tensor that must be there and of that ggml type, F32 or I64, one after the other."""
        i = _find_tensor(self._gguf, name.encode())
        if i < 0 or _tensor_type(self._gguf, i) != kind:
            raise FileError(f"{self.path}: expected a tensor {name} of type {'F32' if kind == F32 else 'I64'}.", AGAIN)
        dtype = np.dtype(_NUMPY[kind])
        count = _tensor_size(self._gguf, i) // dtype.itemsize
        return np.fromfile(self.path, dtype, count, offset=_data_offset(self._gguf) + _tensor_offset(self._gguf, i))

    def close(self) -> None:
        if self._gguf:
            _free(self._gguf)
            self._gguf = None

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main_type(paths: Sequence[Path]) -> str:
    """The type that most of the weights in these files have, as llama.cpp writes it in upper case: "Q4_0"."""
    counts: Counter[int] = Counter()
    for path in paths:
        with GgufFile(path) as file:
            for name in file.names():
                counts[file.type(name) or F32] += math.prod(file.shape(name) or ())
    return _type_name(counts.most_common(1)[0][0]).decode().upper() if counts else "none"
