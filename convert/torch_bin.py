"""Reading PyTorch's pickled checkpoints (pytorch_model.bin) without ever running what a pickle asks for.

Through `torch.load(weights_only=True)`, which builds tensors and plain containers and nothing else.  Torch is only
needed here.
"""

from __future__ import annotations

import pickle
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError
from .checkpoint import StoredTensor

# torch type -> safetensors name, and the numpy type of the stored bytes where numpy has no such number
TYPES = {
    "float32": ("F32", None), "float16": ("F16", None), "float64": ("F64", None), "bfloat16": ("BF16", "int16"),
    "int64": ("I64", None), "int32": ("I32", None), "int16": ("I16", None), "int8": ("I8", None),
    "uint8": ("U8", None), "bool": ("BOOL", "uint8"),
}  # fmt: skip


def open_bin(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a .bin file, in file order; mapped where the file allows it (torch 1.6 and later write such).

    FileError for a pickle that holds anything but tensors, and for a damaged file.
    """
    state = _load(path)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise FileError(f"{path}: expected a dictionary of tensors by name, got {type(state).__name__}.")
    return {name: _tensor(path, name, value) for name, value in state.items()}


def _load(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise FileError(
            f"{path}: reading a .bin file needs PyTorch, which is not installed.",
            "pip install torch, or save the checkpoint as safetensors.",
        ) from error
    try:
        if _is_tar(path):
            raise pickle.UnpicklingError("a tar archive, as PyTorch 0.1 wrote it")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path}: refused: this pickle is damaged or holds more than tensors, and would run code if it were"
            " loaded in the usual way.",
            "Get the checkpoint as safetensors, from a source that you trust.",
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged archive makes torch raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(f"{path}: cannot be read as a PyTorch file: {reason}.", "Download it again.") from error


def _is_tar(path: Path) -> bool:
    """Before 2.6 torch.load(weights_only=True) ran what these ask for (CVE-2025-32434); nobody writes them any more."""
    try:
        with tarfile.open(path, "r:"):
            return True
    except tarfile.TarError:
        return False


def _tensor(path: Path, name: str, value: Any) -> StoredTensor:
    import torch

    where = f"{path}: {name!r}"
    if not name or not name.isprintable():
        raise FileError(f"{where}: expected a printable name.")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise FileError(f"{where}: expected a plain tensor, got {type(value).__name__}.")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in TYPES:
        raise FileError(f"{where}: unknown type {dtype}, expected one of {', '.join(TYPES)}.")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise FileError(f"{where}: shape {list(value.shape)} is larger than what the file stores for it.")
    kind, stored = TYPES[dtype]
    plain = value.detach().contiguous()
    data = (plain.view(getattr(torch, stored)) if stored else plain).numpy()
    if kind == "BF16":
        data = data.view(np.uint16)
    return StoredTensor(name, kind, tuple(value.shape), path, data)
