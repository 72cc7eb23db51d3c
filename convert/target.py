"""What a conversion needs to know of the target: its sizes and its tokenizer.

From its GGUF (of a split one, the first part), from a Hugging Face directory (target_hf.py), or, where there is
neither, from what the checkpoint itself says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, FileError
from .checkpoint import StoredTensor
from .config_keys import integer
from .gguf_header import Field, GgufFile, pack, read_gguf


@dataclass(frozen=True)
class Target:
    """Facts of the target model.

    path, name, architecture   None when no target was given
    layers      decoder layers, without llama.cpp's extra next-token-prediction blocks; None: unknown
    width       of the residual stream (Ht)
    vocab       number of token ids (V)
    context     trained context length in tokens; None: unknown
    tokenizer   the `tokenizer.*` keys, raw, in file order
    """

    path: Path | None
    name: str | None
    architecture: str | None
    layers: int | None
    width: int
    vocab: int
    context: int | None
    tokenizer: tuple[Field, ...]

    @property
    def where(self) -> str:
        """How messages call it."""
        return str(self.path) if self.path else "the config"


def read_target(path: Path) -> Target:
    """Read a GGUF's metadata or a Hugging Face directory.  FileError when it is no language model with a tokenizer."""
    if os.path.isdir(path):
        from .target_hf import read_directory

        return read_directory(path)
    if not os.path.isfile(path):
        raise FileError(f"{path}: no such file or directory.", "--target takes the model to be accelerated.")
    file = read_gguf(path)
    arch = file.value("general.architecture")
    if not isinstance(arch, str):
        raise FileError(f"{path}: no general.architecture in this GGUF file.", "--target takes a language model.")
    if arch in ("eagle3", "dflash"):
        raise FileError(
            f"{path}: this is a drafter ({arch}), expected the target model.",
            "--target takes the GGUF file of the model to be accelerated.",
        )
    part = file.value("split.no", 0)
    if part != 0:
        raise FileError(f"{path}: this is part {part} (from 0) of a split model.", "Give its first part, -00001-of-…")
    return _from_gguf(file, arch)


def _from_gguf(file: GgufFile, arch: str) -> Target:
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.count == 0:
        raise FileError(
            f"{file.path}: no tokenizer.ggml.tokens in this GGUF file.",
            "Give a language model, no projector or adapter.",
        )
    name = file.value("general.name")
    return Target(
        path=file.path,
        name=name if isinstance(name, str) else file.path.stem,
        architecture=arch,
        layers=_size(file, arch, "block_count") - _size(file, arch, "nextn_predict_layers", 0),
        width=_size(file, arch, "embedding_length"),
        vocab=tokens.count,
        context=_size(file, arch, "context_length"),
        tokenizer=tuple(f for name, f in file.fields.items() if name.startswith("tokenizer.")),
    )


def _size(file: GgufFile, arch: str, key: str, default: int | None = None) -> int:
    value = file.value(f"{arch}.{key}", default)
    if type(value) is not int or value < (1 if default is None else 0) or value >= 2**31:
        raise FileError(f"{file.path}: {arch}.{key}: expected a size, got {value!r}.", "Is this a language model?")
    return value


MOST_TOKENS = 1 << 22  # several times the largest vocabulary; llama.cpp makes an entry for each when it loads the file
NO_VOCABULARY = pack("tokenizer.ggml.model", "STRING", "no_vocab")


def without_target(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Target:
    """The target as far as a checkpoint tells: its width by the fusion layer, its vocabulary by config or tensors.

    CheckpointError that names the fact which is missing.
    """
    fc = tensors["fc.weight"]
    width = integer(config, "target_hidden_size")
    if width is None:
        if len(fc.shape) != 2 or fc.shape[1] % 3 or not fc.shape[1]:
            raise CheckpointError(f"{fc.name}: shape {list(fc.shape)} does not fuse three features.", _GIVE)
        width = fc.shape[1] // 3
    return Target(None, None, None, None, width, _vocabulary(config, tensors), None, (NO_VOCABULARY,))


def _vocabulary(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> int:
    """Number of the target's token ids; what tensors say is checked against it later."""
    stated = integer(config, "vocab_size")
    rows = [tensors[n].shape[0] for n in ("embed_tokens.weight", "t2d") if n in tensors and tensors[n].shape]
    if stated is None and not rows:
        raise CheckpointError("config: no vocab_size, and no tensor tells how many tokens the target has.", _GIVE)
    found = rows[0] if stated is None else stated
    if found > MOST_TOKENS:
        raise CheckpointError(f"config: vocab_size: expected at most {MOST_TOKENS} tokens, got {found}.")
    return found


_GIVE = "Give --target, or add the key to a copy of the config and give that with --config."
