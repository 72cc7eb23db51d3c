"""What a conversion needs from the target's GGUF: its sizes and its tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import FileError
from .gguf_header import Field, GgufFile, read_gguf


@dataclass(frozen=True)
class Target:
    """Facts of the target model.

    layers      decoder layers, without llama.cpp's extra next-token-prediction blocks
    width       of the residual stream (Ht)
    vocab       number of token ids (V)
    context     trained context length in tokens
    tokenizer   the `tokenizer.*` keys, raw, in file order
    """

    path: Path
    name: str
    architecture: str
    layers: int
    width: int
    vocab: int
    context: int
    tokenizer: tuple[Field, ...]


def read_target(path: Path) -> Target:
    """Read the target's metadata.  FileError when it is no language model with a tokenizer."""
    if not os.path.isfile(path):
        raise FileError(f"{path}: no such file.", "--target takes the GGUF file of the model to be accelerated.")
    file = read_gguf(path)
    arch = file.value("general.architecture")
    if not isinstance(arch, str):
        raise FileError(f"{path}: no general.architecture in this GGUF file.", "--target takes a language model.")
    if arch in ("eagle3", "dflash"):
        raise FileError(
            f"{path}: this is a drafter ({arch}), expected the target model.",
            "--target takes the GGUF file of the model to be accelerated.",
        )
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.count == 0:
        raise FileError(
            f"{path}: no tokenizer.ggml.tokens in this GGUF file.",
            "Give the first part of a split model, and not a projector or adapter.",
        )
    return Target(
        path=path,
        name=str(file.value("general.name", path.stem)),
        architecture=arch,
        layers=_size(file, arch, "block_count") - _size(file, arch, "nextn_predict_layers", 0),
        width=_size(file, arch, "embedding_length"),
        vocab=tokens.count,
        context=_size(file, arch, "context_length"),
        tokenizer=tuple(f for name, f in file.fields.items() if name.startswith("tokenizer.")),
    )


def _size(file: GgufFile, arch: str, key: str, default: int | None = None) -> int:
    value = file.value(f"{arch}.{key}", default)
    if type(value) is not int or value < (1 if default is None else 0):
        raise FileError(f"{file.path}: {arch}.{key}: expected a size, got {value!r}.", "Is this a language model?")
    return value
