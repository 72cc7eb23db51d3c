"""LoRA adapters on the target: checked by their headers, then loaded beside its weights and set on its context.

llama.cpp adds scale * alpha / rank * B A to a weight wherever that weight is used.  The drafter still reads the hidden
states that come out, so it needs no adapter of its own; it only proposes.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .context import Context
from .errors import FileError, LlamaError, PairError
from .gguf_file import AGAIN, GgufFile
from .llama import Model, forget_log, function, recent_log
from .model_files import NOT_FOR_MATRICES
from .settings import Lora

PARTS = (".lora_a", ".lora_b")

_init = function("llama_adapter_lora_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_free = function("llama_adapter_lora_free", None, ctypes.c_void_p)
_set = function(
    "llama_set_adapters_lora",
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_float),
)


def check_lora(path: Path, target: Path) -> None:
    """FileError unless the file is a whole LoRA adapter, PairError unless it fits the target, by their headers.

    llama.cpp asserts on keys of another type, and dies in the first pass on matrices that it has no kernel for.
    """
    with GgufFile(path) as file, GgufFile(target) as model:
        for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
            found = file.get(key)
            if found != wanted:
                raise FileError(
                    f"{path}: is no LoRA adapter: expected {key} {wanted}, got {found}.",
                    "Convert one with llama.cpp's convert_lora_to_gguf.py.",
                )
        if file.has("adapter.alora.invocation_tokens"):
            raise FileError(f"{path}: is an activated LoRA, which works from some token on; expected a plain one.")
        alpha = file.need("adapter.lora.alpha", float)
        if not math.isfinite(alpha):
            raise FileError(f"{path}: expected adapter.lora.alpha as a finite number, got {alpha}.", AGAIN)
        ours, theirs = (each.need("general.architecture", str) for each in (file, model))
        if ours != theirs:
            raise PairError(
                f"{path}: was made for a {ours} model, but {target.name} is a {theirs} model.",
                "Use an adapter that was trained on this target.",
            )
        for name in file.names():
            _check_matrix(file, name, model)


def _check_matrix(file: GgufFile, name: str, model: GgufFile) -> None:
    weight = next((name[: -len(part)] for part in PARTS if name.endswith(part)), None)
    if weight is None:
        return  # llama.cpp refuses the names that it does not know
    kind = file.type(name)
    if kind in NOT_FOR_MATRICES:
        raise FileError(
            f"{file.path}: expected {name} in a floating-point or quantised type, got {NOT_FOR_MATRICES[kind]}.", AGAIN
        )
    ours, theirs = file.shape(name), model.shape(weight)
    if ours and theirs and ours[2:] != theirs[2:]:
        raise PairError(f"{file.path}: {name} has shape {list(ours)}, but {weight} has {list(theirs)}.", AGAIN)


class Adapter:
    """A loaded adapter.  Load it before the contexts, for they reserve room for it; free it before the model."""

    def __init__(self, model: Model, lora: Lora) -> None:
        self.scale = lora.scale
        forget_log()
        self.handle: Any = _init(model.handle, os.fsencode(lora.path))
        if not self.handle:
            raise FileError(f"{lora.path}: llama.cpp cannot use it: {recent_log() or 'no reason given'}.")

    def close(self) -> None:
        if self.handle:
            _free(self.handle)
            self.handle = None


def adapt(context: Context, adapters: Sequence[Adapter]) -> None:
    """Use exactly these adapters in a context."""
    count = len(adapters)
    handles = (ctypes.c_void_p * count)(*(adapter.handle for adapter in adapters))
    scales = (ctypes.c_float * count)(*(adapter.scale for adapter in adapters))
    code = _set(context.handle, handles, count, scales)
    if code:
        raise LlamaError(f"{context.name}: llama.cpp could not use the LoRA adapters (code {code}).")
