"""A drafter's own tokenizer.json, where its checkpoint has one: it must be the target's."""

from __future__ import annotations

import struct
from pathlib import Path

from ..errors import FileError, PairError
from .gguf_header import Field
from .json_files import read_json
from .target import Target


def check_tokenizer(folder: Path, target: Target) -> None:
    """PairError when a token of the checkpoint's tokenizer has another text in the target's vocabulary.

    Vocabularies of one size need not be one vocabulary, and a drafter for the other one accepts almost nothing.
    Only tokens of the base vocabulary are compared: GGUF files spell special tokens in several ways.
    """
    path = folder / "tokenizer.json"
    stored = next((f for f in target.tokenizer if f.name == "tokenizer.ggml.tokens"), None)
    if stored is None or target.path == folder or not path.is_file():
        return
    model = read_json(path).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        return
    theirs = texts(stored)
    for text, token in vocab.items():
        if type(token) is not int or token < 0:
            raise FileError(f"{path}: expected a token id for {text!r}, got {token!r}.")
        if token >= len(theirs) or theirs[token] != text.encode("utf-8", "surrogatepass"):
            found = theirs[token].decode("utf-8", "replace") if token < len(theirs) else None
            raise PairError(
                f"{path}: token {token} is {text!r}, but {found!r} in {target.where}.",
                "Give the --target that the drafter was trained for.",
            )


def texts(field: Field) -> list[bytes]:
    """The items of a raw array of texts."""
    found, position = [], 16  # behind the array's type, its items' type and their number
    for _ in range(field.count):
        (length,) = struct.unpack_from("<Q", field.raw, position)
        found.append(field.raw[position + 8 : position + 8 + length])
        position += 8 + length
    return found
