"""Published drafters as files: in their real shapes with holes for data, and scaled down with random weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
from published import Config, Expect, Published, Target

NESTED = "transformer_layer_config"
SCALE = 32  # of all widths and of head_dim, so that heads x head_dim relates to the width as before
SMALL_DRAFT_VOCAB, SMALL_FFN = 41, 48
ITEM = {"BF16": 2, "I64": 8, "BOOL": 1}
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> safetensors dtype, shape


# --- what a checkpoint holds ---------------------------------------------------------------------------


def shapes(entry: Published, ffn: int | None = None) -> Shapes:
    """Every tensor's dtype and shape; ffn replaces the real width, of which nothing else depends."""
    c = {**entry.config, **entry.config.get(NESTED, {})}
    h, ht, f = c["hidden_size"], entry.target.width, ffn or c["intermediate_size"]
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or h // heads
    q, k = heads * head_dim, (c.get("num_key_value_heads") or heads) * head_dim
    v, vd = entry.target.vocab, c.get("draft_vocab_size") or entry.target.vocab
    layer = {
        "input_layernorm": (h,), "hidden_norm": (h,), "post_attention_layernorm": (h,), "mlp.down_proj": (h, f),
        "self_attn.q_proj": (q, 2 * h), "self_attn.k_proj": (k, 2 * h), "self_attn.v_proj": (k, 2 * h),
        "self_attn.o_proj": (h, q), "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h),
    }  # fmt: skip
    made = {entry.tensors.layer + name + ".weight": shape for name, shape in layer.items()}
    if "eagle1" in entry.tensors.optional:
        del made[entry.tensors.layer + "hidden_norm.weight"]
    made |= _fusion(entry, h, ht)
    choices = {
        "embed_tokens": {"embed_tokens.weight": (v, h)}, "lm_head": {"lm_head.weight": (vd, h)}, "d2t": {"d2t": (vd,)},
        "t2d": {"t2d": (v,)}, "norm": {"norm.weight": (h,)}, "input_norm": {"input_norm.weight": (3 * ht,)},
        "fc_norm": {f"fc_norm.{i}.weight": (ht,) for i in range(3)}, "eagle1": {"fc.bias": (h,)},
    }  # fmt: skip
    for name in entry.tensors.optional.split():
        made |= choices.get(name, {name: (1,)})
    made |= dict.fromkeys(entry.tensors.extra, (1,))
    return {_full_name(entry, name): (_dtype(name), shape) for name, shape in made.items()}


def _fusion(entry: Published, h: int, ht: int) -> dict[str, tuple[int, ...]]:
    if "eagle1" in entry.tensors.optional:
        return {"fc.weight": (h, 2 * h)}
    return {"fc.weight": (h, entry.tensors.features * ht)} if entry.tensors.features else {}


def _full_name(entry: Published, name: str) -> str:
    bare = name.split(".")[0] in entry.tensors.bare.split()
    return name if bare else entry.tensors.prefix + name


def _dtype(name: str) -> str:
    return {"d2t": "I64", "t2d": "BOOL"}.get(name, "BF16")


def _vocabulary(found: Shapes, target: Target) -> dict[str, np.ndarray]:
    """Values of d2t and t2d, as far as they are there: ids of the target, evenly spread."""
    if "d2t" not in found:
        return {}
    size = found["d2t"][1][0]
    ids = np.arange(size) * target.vocab // size
    return {"d2t": ids - np.arange(size), "t2d": np.isin(np.arange(target.vocab), ids).astype(np.uint8)}


# --- files ---------------------------------------------------------------------------------------------


def write_sparse(folder: Path, entry: Published) -> Path:
    """A checkpoint in real shapes (but for the ffn's width), of whose data only d2t and t2d are written."""
    folder.mkdir()
    found = shapes(entry, SMALL_FFN)
    config = _with(entry.config, {"intermediate_size": SMALL_FFN})
    header, end = {}, 0
    for name, (dtype, shape) in found.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + prod(shape) * ITEM[dtype]]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + end)
        for name, values in _vocabulary(found, entry.target).items():
            if name in found:
                file.seek(start + header[name]["data_offsets"][0])
                file.write(values.tobytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_random(folder: Path, entry: Published) -> Path:
    """A small checkpoint with random weights, in the entry's kind of file."""
    rng, values = np.random.default_rng(3), _vocabulary(shapes(entry), entry.target)
    stored: checkpoints.Tensors = {}
    for name, (dtype, shape) in shapes(entry).items():
        data = values[name] if name in values else checkpoints.bf16(rng.normal(size=shape).astype("<f4"))
        stored[name] = (dtype, data)
    if entry.tensors.kind == "safetensors":
        return checkpoints.write(folder, stored, entry.config)
    folder.mkdir()
    _write_bin(folder / "pytorch_model.bin", stored)
    (folder / "config.json").write_text(json.dumps(entry.config))
    return folder


def _write_bin(path: Path, stored: Mapping[str, checkpoints.Stored]) -> None:
    import torch

    kinds = {"BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
    made = {}
    for name, (dtype, values) in stored.items():
        tensor = torch.from_numpy(np.ascontiguousarray(values).view(np.int16 if dtype == "BF16" else values.dtype))
        made[name] = tensor.view(kinds[dtype]) if dtype == "BF16" else tensor.to(kinds[dtype])
    torch.save(made, path)


def write_header(path: Path, target: Target) -> Path:
    """A GGUF without tensors: the target's sizes, and a vocabulary of t0000000, t0000001 and so on."""
    digits = np.arange(target.vocab)[:, None] // 10 ** np.arange(6, -1, -1) % 10 + ord("0")
    tokens = np.zeros((target.vocab, 16), np.uint8)  # one row: length as uint64, then eight characters
    tokens[:, 0], tokens[:, 8], tokens[:, 9:] = 8, ord("t"), digits
    numbers = {"block_count": target.layers, "embedding_length": target.width, "context_length": target.context}
    keys = [_key(name, 8, _text(value)) for name, value in (
        ("general.architecture", target.arch), ("general.name", "Target"), ("tokenizer.ggml.model", "gpt2"),
    )]  # fmt: skip
    keys += [_key(f"{target.arch}.{name}", 4, struct.pack("<I", value)) for name, value in numbers.items()]
    keys.append(_key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, target.vocab) + tokens.tobytes()))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys) + bytes(32))
    return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


# --- scaling down --------------------------------------------------------------------------------------


def scaled(entry: Published) -> Published:
    """The same drafter and target with small widths, vocabularies and ffn: heads and all relations stay."""
    assert isinstance(entry.expect, Expect)
    c = {**entry.config, **entry.config.get(NESTED, {})}
    whole = c.get("draft_vocab_size") in (None, entry.target.vocab)
    small = {
        "hidden_size": c["hidden_size"] // SCALE, "intermediate_size": SMALL_FFN, "vocab_size": checkpoints.V,
        "draft_vocab_size": checkpoints.V if whole else SMALL_DRAFT_VOCAB,
    }  # fmt: skip
    for key in ("head_dim", "target_hidden_size", "attention_head_dim"):
        if c.get(key):
            small[key] = c[key] // SCALE
    heads = entry.expect.heads
    return replace(
        entry,
        config=_with(entry.config, small),
        target=replace(entry.target, arch="llama", width=entry.target.width // SCALE, vocab=checkpoints.V),
        expect=replace(entry.expect, heads=(heads[0], heads[1], heads[2] // SCALE)),
    )


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with the values of keys replaced where they are, on either level."""
    made = {k: changes.get(k, v) for k, v in config.items()}
    if NESTED in config:
        made[NESTED] = _with(config[NESTED], changes)
    return made
