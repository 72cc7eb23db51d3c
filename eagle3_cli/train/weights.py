"""What training needs of the target besides its states: embedding, head, final norm, last layer, and who it is.

From a GGUF of any number type, decoded by ggml itself in blocks of rows, or from a Hugging Face directory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..convert.checkpoint import StoredTensor, open_checkpoint
from ..convert.encode import floats
from ..convert.ggml import dequantise
from ..convert.ggml_types import KINDS
from ..convert.gguf_header import GgufFile, TensorInfo, read_gguf
from ..convert.json_files import read_json
from ..convert.parallel import in_order
from ..convert.tensors import BLOCK, release, rotary_order
from ..errors import FileError
from .manifest import TargetId

MIB = 1 << 20
_AGAIN = "Download or convert the file again."
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")  # without the chat template

# GGUF name in blk.<n> -> name in Hugging Face's decoder layer.  A layer with other tensors is not llama-like.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class TargetSizes:
    """What a target's header says.

    name         of its architecture ("llama"), as the file calls it
    width        Ht
    vocab        number of token ids, V
    layers       decoder layers, without llama.cpp's extra next-token-prediction blocks
    eps          of its norms
    heads, kv_heads, head_dim, ffn   of the last layer; None where the file does not say
    rope_theta   base of RoPE
    """

    name: str
    width: int
    vocab: int
    layers: int
    eps: float
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    ffn: int | None
    rope_theta: float


@dataclass(frozen=True)
class TargetWeights(TargetSizes):
    """The sizes, and weights as torch tensors on the CPU.

    embedding    [V, Ht], as stored: without the factor that some architectures apply to the rows
    head         [V, Ht], or the rows that were asked for, in that order; the embedding where the target's are tied
    final_norm   float32 [Ht]
    last_layer   the last decoder layer's weights by Hugging Face's names within a layer ("self_attn.q_proj.weight"),
                 q and k in split-half order of RoPE; None where the target is not llama-like
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    last_layer: dict[str, torch.Tensor] | None


def read_target_sizes(path: Path) -> TargetSizes:
    """From the header of a GGUF or the config of a Hugging Face directory.  FileError where a size is missing."""
    return TargetSizes(**_open(path).sizes())


def read_target_weights(
    path: Path, rows: np.ndarray | None = None, dtype: torch.dtype = torch.float32
) -> TargetWeights:
    """Read a target, a GGUF or a Hugging Face directory.

    rows    ids whose rows of the head are read, None: all of them
    dtype   of every matrix, float32 or bfloat16
    FileError for a missing tensor, a shape that does not fit, and a number type that cannot be decoded.
    """
    source = _open(path)
    head = source.matrix(source.head, dtype, rows)
    shared = source.head == source.embedding and rows is None
    weights = TargetWeights(
        **source.sizes(),
        embedding=head if shared else source.matrix(source.embedding, dtype),
        head=head,
        final_norm=source.matrix(source.final_norm, torch.float32),
        last_layer=source.last_layer(dtype),
    )
    _check(path, weights)
    return weights


def read_head_rows(path: Path, rows: np.ndarray) -> torch.Tensor:
    """float32 [len(rows), Ht]: the head's rows of these ids."""
    source = _open(path)
    return source.matrix(source.head, torch.float32, rows)


def _open(path: Path) -> _Gguf | _Folder:
    return _Folder(path) if path.is_dir() else _Gguf(path)


def _check(path: Path, weights: TargetWeights) -> None:
    expected = {"embedding": (weights.vocab, weights.width), "final_norm": (weights.width,)}
    for name, shape in expected.items():
        found = tuple(getattr(weights, name).shape)
        if found != shape:
            raise FileError(f"{path}: expected the {name.replace('_', ' ')} as {list(shape)}, got {list(found)}.")
    if weights.head.shape[1] != weights.width:
        raise FileError(f"{path}: expected the head's rows of {weights.width}, got {weights.head.shape[1]}.")


# --- GGUF ----------------------------------------------------------------------------------------------


class _Gguf:
    """The tensors of a GGUF, of a split one those of all its parts."""

    embedding, final_norm = "token_embd.weight", "output_norm.weight"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = [read_gguf(part) for part in parts(path)]
        self.tensors = {name: (part, info) for part in self.parts for name, info in part.tensors.items()}
        self.head = "output.weight" if "output.weight" in self.tensors else self.embedding
        arch = self.parts[0].value("general.architecture")
        if not isinstance(arch, str) or arch == "eagle3":
            raise FileError(f"{path}: expected a target model, got general.architecture {arch!r}.")
        self.arch = arch

    def sizes(self) -> dict[str, Any]:
        layers = self._need("block_count", int) - self._key("nextn_predict_layers", 0)
        width = self._need("embedding_length", int)
        heads = _of_layer(self._key("attention.head_count"), layers - 1)
        eps = "attention.layer_norm_rms_epsilon"
        tokens = self.parts[0].fields.get("tokenizer.ggml.tokens")
        return {
            "name": self.arch,
            "width": width,
            "vocab": tokens.count if tokens else self._need("vocab_size", int),
            "layers": layers,
            "eps": self._need(eps if self._key(eps) is not None else "attention.layer_norm_epsilon", float),
            "heads": heads,
            "kv_heads": _of_layer(self._key("attention.head_count_kv", heads), layers - 1),
            "head_dim": self._key("attention.key_length", width // heads if heads else None),
            "ffn": _of_layer(self._key("feed_forward_length"), layers - 1),
            "rope_theta": float(self._key("rope.freq_base", 10000.0)),  # llama.cpp's default
        }

    def _key(self, name: str, default: Any = None) -> Any:
        return self.parts[0].value(f"{self.arch}.{name}", default)

    def _need(self, name: str, kind: type) -> Any:
        value = self._key(name)
        if type(value) is not kind:
            raise FileError(f"{self.path}: expected {self.arch}.{name} as {kind.__name__}, got {value!r}.", _AGAIN)
        return value

    def last_layer(self, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
        """In llama-architecture files the rows of q and k are permuted for ggml's NORM type of RoPE."""
        sizes = self.sizes()
        prefix = f"blk.{sizes['layers'] - 1}."
        found = {name for name in self.tensors if name.startswith(prefix)}
        if self.arch != "llama" or found != {f"{prefix}{name}.weight" for name in _LAYER}:
            return None
        layer = {f"{hf}.weight": self.matrix(f"{prefix}{name}.weight", dtype) for name, hf in _LAYER.items()}
        dim = sizes["head_dim"]
        rotated = self._key("rope.dimension_count", dim)
        for name, heads in (("q", sizes["heads"]), ("k", sizes["kv_heads"])):
            name = f"self_attn.{name}_proj.weight"
            order = rotary_order(heads, dim, rotated)
            if len(order) != len(layer[name]):
                raise FileError(f"{self.path}: expected {len(order)} rows of {name}, got {len(layer[name])}.", _AGAIN)
            layer[name] = layer[name][torch.from_numpy(np.argsort(order))]
        return layer

    def matrix(self, name: str, dtype: torch.dtype, rows: np.ndarray | None = None) -> torch.Tensor:
        """A tensor, or rows of it in the order asked for."""
        if name not in self.tensors:
            raise FileError(f"{self.path}: has no tensor {name}.", _AGAIN)
        file, info = self.tensors[name]
        kind, block, size = _kind(file, info)
        columns = info.shape[-1]
        if columns % block:
            raise FileError(f"{file.path}: {name}: rows of {columns} are no whole blocks of {kind}.", _AGAIN)
        count, length = int(np.prod(info.shape[:-1], dtype=np.int64)), columns // block * size
        if info.offset + count * length > file.size:
            raise FileError(f"{file.path}: truncated: {name} ends behind its {file.size} bytes.", _AGAIN)
        data = np.memmap(file.path, np.uint8, "r", info.offset, (count, length))
        picked = _check_rows(f"{file.path}: {name}", rows, count)
        result = _by_blocks(picked, count, columns, dtype, lambda part: _decode(np.asarray(data[part]), kind))
        release(np.asarray(data))
        return result.reshape(info.shape) if rows is None else result


def _kind(file: GgufFile, info: TensorInfo) -> tuple[str, int, int]:
    """Name, elements and bytes of a block of a tensor's number type."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(info.type)
        return kind.name, *gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise FileError(f"{file.path}: {info.name}: unknown ggml type {info.type}.", "Update gguf.") from error


def _decode(data: np.ndarray, kind: str) -> np.ndarray:
    """float32 of whole rows; the few types that our table lacks by the gguf package, slower, with the same numbers."""
    if kind == "F32":
        return data.view(np.float32)
    if kind in KINDS:
        return dequantise(data, kind)
    import gguf

    try:
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise FileError(f"a tensor is stored as {kind}, which cannot be decoded.", "Give another file.") from error


def _of_layer(value: Any, layer: int) -> Any:
    """A size that may be stated layer by layer."""
    return value[layer] if isinstance(value, list) else value


def parts(path: Path) -> list[Path]:
    """All files of a GGUF, given its first one.  FileError where one is missing."""
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    files = [path]
    if split:
        count = int(split[2])
        files = [path.with_name(f"{split[1]}-{i:05d}-of-{split[2]}.gguf") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise FileError(f"{file}: no such file; expected a GGUF.")
    return files


# --- Hugging Face --------------------------------------------------------------------------------------


class _Folder:
    """The tensors of a Hugging Face directory, and its config."""

    embedding, final_norm = "model.embed_tokens.weight", "model.norm.weight"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.tensors: Mapping[str, StoredTensor] = open_checkpoint(path).tensors
        tied = "lm_head.weight" not in self.tensors
        self.head = self.embedding if tied else "lm_head.weight"

    def sizes(self) -> dict[str, Any]:
        get = self.config.get
        width, heads = self._need("hidden_size", int), get("num_attention_heads")
        rope = get("rope_parameters") or {}
        return {
            "name": self._need("model_type", str),
            "width": width,
            "vocab": self._need("vocab_size", int),
            "layers": self._need("num_hidden_layers", int),
            "eps": float(self._need("rms_norm_eps", float)),
            "heads": heads,
            "kv_heads": get("num_key_value_heads") or heads,
            "head_dim": get("head_dim") or (width // heads if heads else None),
            "ffn": get("intermediate_size"),
            "rope_theta": float(get("rope_theta") or rope.get("rope_theta") or 10000.0),
        }

    def _need(self, name: str, kind: type) -> Any:
        value = self.config.get(name)
        if type(value) is not kind:
            raise FileError(f"{self.path / 'config.json'}: expected {name} as {kind.__name__}, got {value!r}.")
        return value

    def last_layer(self, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
        prefix = f"model.layers.{self._need('num_hidden_layers', int) - 1}."
        names = {f"{name}.weight" for name in _LAYER.values()}
        found = {name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)}
        if self.config["model_type"] not in ("llama", "mistral") or found != names:
            return None
        return {name: self.matrix(prefix + name, dtype) for name in sorted(names)}

    def matrix(self, name: str, dtype: torch.dtype, rows: np.ndarray | None = None) -> torch.Tensor:
        if name not in self.tensors:
            raise FileError(f"{self.path}: has no tensor {name}.", "Give the model's GGUF.")
        tensor = self.tensors[name]
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise FileError(f"{tensor.path}: {name}: expected F32, F16 or BF16, got {tensor.dtype}.")
        data = tensor.data.reshape(-1, tensor.shape[-1])
        picked = _check_rows(f"{tensor.path}: {name}", rows, len(data))
        decode = lambda part: floats(np.ascontiguousarray(data[part]), tensor.dtype)  # noqa: E731
        result = _by_blocks(picked, len(data), data.shape[1], dtype, decode)
        return result.reshape(tensor.shape) if rows is None else result


# --- both ----------------------------------------------------------------------------------------------


def _check_rows(where: str, rows: np.ndarray | None, count: int) -> np.ndarray | None:
    if rows is not None and len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise FileError(f"{where}: has {count} rows; rows {rows.min()} to {rows.max()} were asked for.")
    return rows


def _by_blocks(
    rows: np.ndarray | None, count: int, columns: int, dtype: torch.dtype, decode: Callable[[Any], np.ndarray]
) -> torch.Tensor:
    """[rows, columns] of decoded rows.  decode: a slice or an array of row numbers -> their float32 values."""
    picks = list(_picks(rows, count, columns))
    result = torch.empty(count if rows is None else len(rows), columns, dtype=dtype)
    start = 0
    for values in in_order(decode, picks):
        block = torch.from_numpy(np.require(values.reshape(-1, columns), requirements="W"))  # a mapped file is not
        result[start : start + len(block)] = block
        start += len(block)
    return result


def _picks(rows: np.ndarray | None, count: int, columns: int) -> Iterator[Any]:
    step = max(1, BLOCK // columns)
    for start in range(0, count if rows is None else len(rows), step):
        yield slice(start, start + step) if rows is None else rows[start : start + step]


# --- identity ------------------------------------------------------------------------------------------


def identify(path: Path) -> tuple[TargetId, str]:
    """Who a target is, and the sha256 of its chat template (empty where it has none)."""
    return _identify_folder(path) if path.is_dir() else _identify_gguf(path)


def _identify_gguf(path: Path) -> tuple[TargetId, str]:
    fields = read_gguf(path).fields
    tokenizer = hashlib.sha256()
    for name in sorted(fields):
        if name.startswith("tokenizer.") and not name.startswith("tokenizer.chat_template"):
            tokenizer.update(name.encode() + b"\0" + fields[name].raw)
    template = fields.get("tokenizer.chat_template")
    digest = hashlib.sha256(template.value.encode()).hexdigest() if template else ""
    return _target_id(path, parts(path), tokenizer.hexdigest()), digest


def _identify_folder(path: Path) -> tuple[TargetId, str]:
    files = sorted({tensor.path for tensor in open_checkpoint(path).tensors.values()})
    tokenizer = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (path / name).is_file():
            tokenizer.update(name.encode() + b"\0" + (path / name).read_bytes())
    config = path / "tokenizer_config.json"
    template: Any = read_json(config).get("chat_template") if config.is_file() else None
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text("utf-8")
    digest = hashlib.sha256(str(template).encode()).hexdigest() if template else ""
    return _target_id(path, files, tokenizer.hexdigest()), digest


def _target_id(path: Path, files: list[Path], tokenizer: str) -> TargetId:
    with files[0].open("rb") as file:
        first = hashlib.sha256(file.read(MIB)).hexdigest()
    return TargetId(str(path), sum(file.stat().st_size for file in files), first, tokenizer)
