"""Look into a GGUF before llama.cpp loads it: is it whole, is it a drafter, do target and drafter fit?

llama.cpp aborts the process on several kinds of files that the checks here refuse with a message.  The header
is read by ggml's own parser (gguf.h), which takes milliseconds where a Python parser takes seconds.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FileError, PairError
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
_F32, _I64 = 0, 27  # enum ggml_type
_NOT_FOR_MATRICES = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}  # no kernel multiplies these
_MOST_LAYERS = 512  # LLAMA_MAX_LAYERS


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
            raise FileError(f"{path}: its GGUF header is damaged: {recent_log() or 'no reason given'}.", _AGAIN)
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
            raise FileError(f"{self.path}: truncated: expected at least {expected} bytes, got {size}.", _AGAIN)

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

    def need(self, key: str, kind: type) -> Any:
        """A value that must be there and of that Python type; FileError otherwise."""
        value = self.get(key)
        if not isinstance(value, kind):
            found = "nothing" if value is None else f"{type(value).__name__} {value!r}"
            raise FileError(f"{self.path}: expected {key} as {kind.__name__}, got {found}.", _AGAIN)
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

    def int64(self, name: str) -> np.ndarray:
        """The values of an I64 tensor."""
        i = _find_tensor(self._gguf, name.encode())
        if i < 0 or _tensor_type(self._gguf, i) != _I64:
            raise FileError(f"{self.path}: expected a tensor {name} of type I64.", _AGAIN)
        count = _tensor_size(self._gguf, i) // 8
        return np.fromfile(self.path, "<i8", count, offset=_data_offset(self._gguf) + _tensor_offset(self._gguf, i))

    def close(self) -> None:
        if self._gguf:
            _free(self._gguf)
            self._gguf = None

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_AGAIN = "Download or convert the file again."


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter's GGUF says of itself.

    aux_layers     the three target layers whose *inputs* it reads (llama.cpp's convention)
    target_width   Ht, floats of one hidden state of the target
    width          H, floats of one fused feature
    d2t            int64 [Vd] absolute target ids that the head scores, ascending or not; None for all of them
    """

    path: Path
    aux_layers: tuple[int, int, int]
    target_width: int
    width: int
    d2t: np.ndarray | None


def read_drafter(path: Path, target: Path) -> DrafterInfo:
    """Check a drafter file against its target, by their headers alone.

    Raises FileError for a file that is no whole EAGLE-3 drafter, PairError for a drafter of another target.
    """
    with GgufFile(path) as draft, GgufFile(target) as wanted:
        info = _drafter_info(draft)
        _check_pair(draft, info, wanted)
        return info


def check_target(path: Path) -> None:
    """FileError unless the file is a whole GGUF that can be a target."""
    with GgufFile(path) as file:
        arch = file.need("general.architecture", str)
        if arch == "eagle3":
            raise FileError(f"{path}: is an EAGLE-3 drafter, but was given as the target.", "Give it as --draft.")
        if not file.count_strings("tokenizer.ggml.tokens"):
            raise FileError(f"{path}: has no vocabulary (tokenizer.ggml.tokens).", _AGAIN)
        layers = file.need(f"{arch}.block_count", int)
        if not 1 <= layers <= _MOST_LAYERS:
            raise FileError(f"{path}: expected {arch}.block_count from 1 to {_MOST_LAYERS}, got {layers}.", _AGAIN)


def _drafter_info(draft: GgufFile) -> DrafterInfo:
    arch = draft.need("general.architecture", str)
    if arch != "eagle3":
        raise FileError(
            f"{draft.path}: is no EAGLE-3 drafter: expected general.architecture eagle3, got {arch}.",
            "Convert a drafter checkpoint with `eagle3 convert`, or leave --draft out and give --no-draft.",
        )
    layers = draft.need("eagle3.target_layers", list)
    if len(set(layers)) != 3 or len(layers) != 3 or not all(isinstance(i, int) and i >= 1 for i in layers):
        raise FileError(f"{draft.path}: expected three different eagle3.target_layers from 1 on, got {layers}.", _AGAIN)
    blocks = draft.need("eagle3.block_count", int)
    if blocks != 1:
        raise FileError(f"{draft.path}: expected one decoder layer, got eagle3.block_count {blocks}.")
    _check_heads(draft)
    width = draft.need("eagle3.embedding_length", int)
    target_width = draft.need("eagle3.target_hidden_size", int)
    if draft.shape("fc.weight") != (3 * target_width, width):
        raise FileError(
            f"{draft.path}: expected fc.weight [{3 * target_width}, {width}], got {draft.shape('fc.weight')}.", _AGAIN
        )
    _check_types(draft)
    d2t = draft.int64("d2t") if draft.shape("d2t") else None
    if d2t is not None and not len(d2t):
        raise FileError(f"{draft.path}: its d2t is empty; expected at least one token.", _AGAIN)
    return DrafterInfo(draft.path, (layers[0], layers[1], layers[2]), target_width, width, d2t)


def _check_heads(draft: GgufFile) -> None:
    """llama.cpp asserts on these instead of reporting them."""
    heads = draft.need("eagle3.attention.head_count", int)
    kv_heads = draft.get("eagle3.attention.head_count_kv")
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise FileError(f"{draft.path}: {heads} attention heads cannot share {kv_heads} key/value heads.", _AGAIN)
    key, value = draft.get("eagle3.attention.key_length"), draft.get("eagle3.attention.value_length")
    if key != value:
        raise FileError(f"{draft.path}: expected keys as long as values, got {key} and {value}.", _AGAIN)
    head = draft.need("eagle3.embedding_length", int) // heads if key is None else key
    rotated = draft.get("eagle3.rope.dimension_count")
    rotated = head if rotated is None else rotated
    if not isinstance(rotated, int) or rotated % 2 or not 2 <= rotated <= head:
        raise FileError(
            f"{draft.path}: expected an even eagle3.rope.dimension_count from 2 to {head}, got {rotated}.", _AGAIN
        )


def _check_types(draft: GgufFile) -> None:
    """llama.cpp loads these and dies in the first pass."""
    for name in draft.names():
        kind = draft.type(name)
        if ("norm" in name or "rope_freqs" in name) and kind != _F32:
            raise FileError(f"{draft.path}: expected {name} as F32, got ggml type {kind}.", _AGAIN)
        if name != "d2t" and kind in _NOT_FOR_MATRICES:
            raise FileError(
                f"{draft.path}: expected {name} in a floating-point or quantised type, got {_NOT_FOR_MATRICES[kind]}.",
                _AGAIN,
            )


def _check_pair(draft: GgufFile, info: DrafterInfo, target: GgufFile) -> None:
    arch = target.need("general.architecture", str)
    width = target.need(f"{arch}.embedding_length", int)
    n_layer = target.need(f"{arch}.block_count", int)
    hint = "Use the drafter that was trained for this target."
    if info.target_width != width:
        raise PairError(
            f"{draft.path}: made for target width {info.target_width}, but {target.path.name} has {width}.", hint
        )
    if max(info.aux_layers) > n_layer:
        raise PairError(
            f"{draft.path}: reads target layer {max(info.aux_layers)}, but {target.path.name} has {n_layer}.", hint
        )
    _check_vocabulary(draft, info, target, hint)
    own = draft.shape("token_embd.weight")
    if own is None and info.width != width:
        raise PairError(
            f"{draft.path}: has no token embeddings of its own and cannot borrow the target's: expected width"
            f" {info.width}, got {width}.",
            "Convert the checkpoint again; it must contain embed_tokens.weight.",
        )


def _check_vocabulary(draft: GgufFile, info: DrafterInfo, target: GgufFile, hint: str) -> None:
    ours, theirs = draft.strings("tokenizer.ggml.tokens"), target.strings("tokenizer.ggml.tokens")
    if len(ours) != len(theirs):
        raise PairError(
            f"{draft.path}: has a vocabulary of {len(ours)} tokens, but {target.path.name} has {len(theirs)}.", hint
        )
    if ours != theirs:
        i = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        raise PairError(f"{draft.path}: its token {i} is {ours[i]!r}, but {target.path.name} has {theirs[i]!r}.", hint)
    own = draft.shape("token_embd.weight")
    if own is not None and own != (info.width, len(theirs)):
        raise PairError(
            f"{draft.path}: expected token_embd.weight [{info.width}, {len(theirs)}], got {list(own)}.", hint
        )
    head = draft.shape("output.weight")
    candidates = len(theirs) if info.d2t is None else len(info.d2t)
    if head is None and (info.d2t is not None or info.width != info.target_width):
        raise PairError(f"{draft.path}: has no output.weight and cannot borrow the target's head.", _AGAIN)
    if head is not None and head != (info.width, candidates):
        raise PairError(f"{draft.path}: expected output.weight [{info.width}, {candidates}], got {list(head)}.", _AGAIN)
    if info.d2t is not None and not (info.d2t.min() >= 0 and info.d2t.max() < len(theirs)):
        raise PairError(
            f"{draft.path}: d2t names token {info.d2t.min()} to {info.d2t.max()}, but {target.path.name} has"
            f" {len(theirs)} tokens.",
            "Convert the checkpoint again; d2t must hold absolute ids.",
        )
