"""Bytes of the two kinds of file that a synthetic model consists of: safetensors and a sentencepiece tokenizer.

Written by hand, so that the checkpoints need neither converter's libraries and are the same bytes on every machine.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "u1"}
ROWS = 2048  # written at a time

# rows [start, stop) of a tensor -> values in the tensor's number type; BF16 as uint16 bit patterns
Rows = Callable[[int, int], NDArray[np.generic]]
Tensor = tuple[str, tuple[int, ...], Rows]  # safetensors dtype, shape, values


def array(dtype: str, values: NDArray[np.generic]) -> Tensor:
    """A tensor of given values, rounded to the number type (BF16: towards zero)."""
    if dtype == "BF16":
        values = (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2")
    stored = values.astype(NUMPY[dtype])
    return dtype, stored.shape, lambda start, stop: stored[start:stop]


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file; tensors are asked for a block of rows at a time."""
    entries, end = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * np.dtype(NUMPY[dtype]).itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _, shape, rows in tensors.values():
            for start in range(0, shape[0], ROWS):
                file.write(np.ascontiguousarray(rows(start, min(start + ROWS, shape[0]))).tobytes())


def sentencepiece_model(vocab: int) -> bytes:
    """A sentencepiece unigram model of `vocab` pieces: <unk>, <s>, </s>, 256 bytes, then made-up words.

    The fields are those of sentencepiece_model.proto (google/sentencepiece): ModelProto.pieces is field 1, of a piece
    text is field 1, score 2 and type 3 (normal 1, unknown 2, control 3, byte 6); trainer_spec is field 2, and of it
    byte_fallback field 35.
    """
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3)] + [(f"<0x{b:02X}>", 6) for b in range(256)]
    pieces += [(f"\u2581w{i}", 1) for i in range(len(pieces), vocab)]
    byte_fallback = b"\x12\x03\x98\x02\x01"
    return b"".join(_piece(text, -float(i), kind) for i, (text, kind) in enumerate(pieces[:vocab])) + byte_fallback


def _piece(text: str, score: float, kind: int) -> bytes:
    raw = text.encode()
    body = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(body)]) + body
