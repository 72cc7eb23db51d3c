"""A target given as a Hugging Face directory: config.json and the tokenizer's files, no weights.

The vocabulary is read by the `gguf` package's own readers, as llama.cpp's conversion does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, FileError
from .config_keys import integer
from .gguf_header import Field, pack
from .json_files import read_json
from .target import Target

HINT = "--target takes the model's GGUF, or the directory with its config.json and tokenizer."


def read_directory(folder: Path) -> Target:
    """Sizes from config.json (or its text_config), tokens from the tokenizer, padded to the config's vocabulary size.

    FileError when a file is missing or a size is not stated.
    """
    if not (folder / "config.json").is_file():
        raise FileError(f"{folder}: no config.json in this directory.", HINT)
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else config
    need = lambda key: _need(folder, merged, key)  # noqa: E731
    vocab = need("vocab_size")
    architecture = merged.get("model_type")
    return Target(
        path=folder,
        name=folder.resolve().name,
        architecture=architecture if isinstance(architecture, str) else None,
        layers=need("num_hidden_layers"),
        width=need("hidden_size"),
        vocab=vocab,
        context=need("max_position_embeddings"),
        tokenizer=_read(folder, lambda: _tokenizer(folder, vocab)),
    )


def _need(folder: Path, config: Mapping[str, Any], key: str) -> int:
    try:
        value = integer(config, key)
    except CheckpointError as error:
        raise FileError(f"{folder / 'config.json'}: {error.message.removeprefix('config: ')}") from error
    if value is None:
        raise FileError(f"{folder / 'config.json'}: no {key}.", HINT)
    return value


def _tokenizer(folder: Path, size: int) -> tuple[Field, ...]:
    """The `tokenizer.*` keys.  The name of the pre-tokenizer is left out: the drafter never splits text itself."""
    path = folder / "tokenizer.json"
    tokenizer = read_json(path) if path.is_file() else None
    vocabulary = _vocabulary(folder, tokenizer)
    tokens = [(text, score, int(kind)) for text, score, kind in vocabulary.all_tokens()]
    if not len(tokens) <= size <= 2 * len(tokens):  # a little padding is usual
        raise FileError(f"{folder}: the tokenizer has {len(tokens)} tokens, but vocab_size is {size}.")
    unused = 5  # gguf.TokenType.UNUSED
    tokens += [(f"[PAD{i}]", -1000.0, unused) for i in range(len(tokens), size)]
    texts = [text.encode() if isinstance(text, str) else text for text, _, _ in tokens]
    types = [kind for _, _, kind in tokens]
    model = vocabulary.tokenizer_model
    if model == "gpt2" and tokenizer is not None:
        types = _added_types(tokenizer, types)
    fields = [
        pack("tokenizer.ggml.model", "STRING", model),
        pack("tokenizer.ggml.tokens", "STRING", texts),
        pack("tokenizer.ggml.token_type", "INT32", types),
    ]
    if model == "llama":
        fields.append(pack("tokenizer.ggml.scores", "FLOAT32", [float(score) for _, score, _ in tokens]))
    return (*fields, *_special(folder, model == "gpt2", size))


def _added_types(tokenizer: Mapping[str, Any], types: list[int]) -> list[int]:
    """Types of tokens with those of added ones as tokenizer.json says: gguf's reader takes one that is also in the
    vocabulary for an ordinary token, and each other one for a control token."""
    normal, control, user_defined = 1, 3, 4  # gguf.TokenType
    result = [normal if kind == control else kind for kind in types]
    for added in tokenizer.get("added_tokens") or []:
        result[added["id"]] = control if added.get("special") else user_defined
    return result


def _vocabulary(folder: Path, tokenizer: Mapping[str, Any] | None) -> Any:
    """The first of gguf's readers that takes the directory, in the order of llama.cpp's conversion."""
    from gguf import vocab

    if (folder / "tokenizer.model").is_file():
        return vocab.SentencePieceVocab(folder)
    if tokenizer is None and not (folder / "vocab.json").is_file():
        raise FileError(f"{folder}: no tokenizer.model, tokenizer.json or vocab.json in this directory.", HINT)
    model = tokenizer.get("model") if tokenizer else None
    if isinstance(model, dict) and model.get("byte_fallback"):
        return vocab.LlamaHfVocab(folder)
    return vocab.BpeVocab(folder)


def _special(folder: Path, merges: bool, size: int) -> list[Field]:
    from gguf import SpecialVocab

    special = SpecialVocab(folder, load_merges=merges, n_vocab=size)
    fields = []
    if special.merges:
        fields.append(pack("tokenizer.ggml.merges", "STRING", [merge.encode() for merge in special.merges]))
    for kind, token in special.special_token_ids.items():
        name = {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(kind, kind)  # llama.cpp's spelling
        fields.append(pack(f"tokenizer.ggml.{name}_token_id", "UINT32", int(token)))
    for kind, add in special.add_special_token.items():
        fields.append(pack(f"tokenizer.ggml.add_{kind}_token", "BOOL", bool(add)))
    return fields


def _read(folder: Path, read: Callable[[], tuple[Field, ...]]) -> tuple[Field, ...]:
    try:
        return read()
    except (FileError, MemoryError):
        raise
    except (ImportError, RuntimeError) as error:  # RuntimeError: sentencepiece is not installed
        reason = str(error).rstrip(".")
        raise FileError(f"{folder}: its tokenizer cannot be read: {reason}.", "Or give the target's GGUF.") from error
    except Exception as error:  # a damaged tokenizer makes gguf's readers raise anything
        reason = f"{type(error).__name__}: {error}"
        raise FileError(f"{folder}: its tokenizer cannot be read: {reason}.", HINT) from error
