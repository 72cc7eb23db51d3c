"""Which GPUs a pair is on, and which of the target's tensors stay elsewhere.

llama.cpp puts whole layers on the GPUs in their order, as much on each as it has free memory for.  A model of many
experts reads few of them for a token, so a GPU that cannot hold them all does best with everything else.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import OptionError
from .gguf_file import GgufFile
from .llama import device_addresses, function, lib
from .model_files import target_files
from .settings import EVERY_LAYER, RuntimeSettings

_SPLIT_MODES = {"layer": lib.LLAMA_SPLIT_MODE_LAYER, "row": lib.LLAMA_SPLIT_MODE_ROW}
_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch)?exps\."
_MOST_OVERRIDES = 4096  # that llama.cpp takes

_ptr = ctypes.c_void_p
_buffer_type = function("ggml_backend_dev_buffer_type", _ptr, _ptr)
_buffer_name = function("ggml_backend_buft_name", ctypes.c_char_p, _ptr)


class _Override(ctypes.Structure):
    """Mirrors `struct llama_model_tensor_buft_override` of llama.h."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p)]


@dataclass(frozen=True)
class Placement:
    """What llama.cpp is told beside the devices.  Of the drafter everything but the overrides.

    split      its number for how several GPUs share a model; None: its default
    shares     of the GPUs, in their order; empty: by their free memory
    main_gpu   the GPU among them that holds what is not split; None: its default
    overrides  (regular expression of tensor names, address of a buffer type), the first that matches counts
    """

    split: int | None = None
    shares: tuple[float, ...] = ()
    main_gpu: int | None = None
    overrides: tuple[tuple[str, int], ...] = ()

    def apply(self, params: Any) -> Any:
        """Fill llama_model_params; what is returned has to live until the model is loaded."""
        if self.split is not None:
            params.split_mode = self.split
        if self.main_gpu is not None:
            params.main_gpu = self.main_gpu
        shares = (ctypes.c_float * int(lib.llama_max_devices()))(*self.shares)
        if self.shares:
            params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        told = [_Override(pattern.encode(), buffer) for pattern, buffer in self.overrides]
        overrides = (_Override * (len(told) + 1))(*told)
        if self.overrides:
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        return shares, overrides


def placement(runtime: RuntimeSettings, target: Path, backend: str) -> Placement:
    """What the settings mean for this target.  backend: names of the devices, as `choose_devices` gives them.
    OptionError for what has no effect here, names no buffer, or matches no tensor."""
    gpus = backend.split(",") if backend != "cpu" else []
    if not gpus:
        _refuse_without_gpu(runtime)
    if runtime.tensor_split and len(runtime.tensor_split) != len(gpus):
        raise OptionError(
            f"--tensor-split: expected {len(gpus)} numbers, one for each of {', '.join(gpus)}, got"
            f" {len(runtime.tensor_split)}."
        )
    return Placement(
        _SPLIT_MODES.get(runtime.split_mode or ""),
        runtime.tensor_split,
        runtime.main_gpu if runtime.split_mode == "row" else None,
        _overrides(runtime, target),
    )


def _refuse_without_gpu(runtime: RuntimeSettings) -> None:
    given = {
        "--split-mode": runtime.split_mode,
        "--tensor-split": runtime.tensor_split,
        "--main-gpu": runtime.main_gpu,
        "--cpu-moe": runtime.cpu_moe == EVERY_LAYER,
        "--n-cpu-moe": (runtime.cpu_moe or 0) > 0,
    }
    for flag, value in given.items():
        if value not in (None, (), False):
            raise OptionError(f"{flag}: has no effect, for no layer is on a GPU.", "Leave it out.")


def _overrides(runtime: RuntimeSettings, target: Path) -> tuple[tuple[str, int], ...]:
    if not (runtime.override_tensor or runtime.cpu_moe):
        return ()
    names, known = _tensor_names(target), buffers()
    overrides = [_override(text, names, known, target) for text in runtime.override_tensor]
    overrides += [(pattern, known["CPU"]) for pattern in _experts(runtime.cpu_moe, names, target)]
    if len(overrides) >= _MOST_OVERRIDES:
        raise OptionError(f"--override-tensor: expected fewer than {_MOST_OVERRIDES}, got {len(overrides)}.")
    return tuple(overrides)


def _override(text: str, names: Sequence[str], known: Mapping[str, int], target: Path) -> tuple[str, int]:
    pattern, _, buffer = text.partition("=")
    if buffer not in known:
        raise OptionError(f"--override-tensor {text}: expected one of {', '.join(known)} behind =, got {buffer}.")
    if not any(re.search(pattern, name) for name in names):
        raise OptionError(
            f"--override-tensor {text}: {target.name} has no tensor whose name matches {pattern}.",
            f"Its tensors have names like {names[len(names) // 2]}.",
        )
    return pattern, known[buffer]


def _experts(layers: int | None, names: Sequence[str], target: Path) -> list[str]:
    """Regular expressions of the names of the first layers' experts."""
    if not layers:
        return []
    which = [rf"blk\.{layer}\." for layer in range(layers)] if layers != EVERY_LAYER else [r"blk\.\d+\."]
    patterns = [rf"^{layer}{_EXPERTS}" for layer in which]
    patterns = [pattern for pattern in patterns if any(re.search(pattern, name) for name in names)]
    if not patterns:
        flag = "--cpu-moe" if layers == EVERY_LAYER else f"--n-cpu-moe {layers}"
        raise OptionError(f"{flag}: {target.name} has no experts in these layers.", "Leave it out.")
    return patterns


def _tensor_names(target: Path) -> list[str]:
    names: list[str] = []
    for path in target_files(target):
        with GgufFile(path) as file:
            names += file.names()
    return names


def buffers() -> dict[str, int]:
    """Name -> address of every kind of memory that tensors can be put into."""
    types = map(_buffer_type, device_addresses())
    return {_buffer_name(kind).decode(): kind for kind in types if kind}
