"""What differs between two GGUF files, read by gguf's own reader, which shares no code with eagle3's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderField, ReaderTensor

ROUNDING = 4 * 2.0**-23  # four units in the last place of a float32
LAYOUT = "GGUF."  # what the reader reports about the file itself: version and counts


def differences(ours: Path, script: Path) -> dict[str, str]:
    """Key or tensor -> "only eagle3", "only script", "differs" or, for a tensor, "type", "shape" or "rounding".

    Keys are equal when types and values are: an integer of another width is a difference.  Tensors are equal when
    type, shape and every byte are; "rounding" is an F32 tensor within 4 units in the last place.  The order of keys and
    tensors does not matter.  Empty: the files say the same.
    """
    a, b = GGUFReader(ours), GGUFReader(script)
    keys = _pairs(_fields(a), _fields(b), _field_difference)
    return keys | _pairs({t.name: t for t in a.tensors}, {t.name: t for t in b.tensors}, _tensor_difference)


def counts(path: Path) -> tuple[int, int]:
    """(keys, tensors) of a file."""
    reader = GGUFReader(path)
    return len(_fields(reader)), len(reader.tensors)


def _fields(reader: GGUFReader) -> dict[str, ReaderField]:
    return {name: f for name, f in reader.fields.items() if not name.startswith(LAYOUT)}


def _pairs(a: dict[str, Any], b: dict[str, Any], difference: Any) -> dict[str, str]:
    found = dict.fromkeys(a.keys() - b.keys(), "only eagle3") | dict.fromkeys(b.keys() - a.keys(), "only script")
    both = {name: difference(a[name], b[name]) for name in a.keys() & b.keys()}
    return found | {name: kind for name, kind in both.items() if kind}


def _field_difference(a: ReaderField, b: ReaderField) -> str:
    return "" if a.types == b.types and a.contents() == b.contents() else "differs"


def _tensor_difference(a: ReaderTensor, b: ReaderTensor) -> str:
    if a.tensor_type != b.tensor_type:
        return "type"
    if list(a.shape) != list(b.shape):
        return "shape"
    if np.array_equal(a.data.view(np.uint8), b.data.view(np.uint8)):
        return ""
    close = a.data.dtype == np.float32 and np.allclose(a.data, b.data, rtol=ROUNDING, atol=0)
    return "rounding" if close else "differs"
