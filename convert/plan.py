"""What the GGUF will hold: the tensors with their transforms, and the keys.

Only what llama.cpp's eagle3 architecture reads is written (src/models/eagle3.cpp, src/llama-model.cpp load_hparams at
0c1e570), because it refuses a file with a tensor it does not know.  It ignores unknown keys: `eagle3_cli.*` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import Facts
from .families import SLOTS, Named
from .gguf_header import Field
from .safetensors import StoredTensor
from .target import Target
from .tensors import OUTTYPES, Q8_BLOCK, Planned, rotary_order

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}  # llama.cpp's enum llama_ftype


@dataclass(frozen=True)
class Key:
    """One metadata key.  kind is the GGUF type's name; an array has kind ARRAY and the type of its items."""

    name: str
    kind: str
    value: Any
    items: str | None = None


def plan_tensors(named: Named, facts: Facts, outtype: str) -> tuple[Planned, ...]:
    """The output's tensors, in the order of `SLOTS`: the same bytes whichever names the checkpoint used."""
    planned = []
    for name, slot in SLOTS.items():
        if name in named.tensors and slot.gguf is not None and name != "d2t":
            planned.append(_plan(slot.gguf, named.tensors[name], facts, outtype))
    if facts.vocab.ids is not None:
        mask = "d2t" not in named.tensors
        source = named.tensors["t2d" if mask else "d2t"].name
        how = "mask to absolute ids" if mask else "offsets to absolute ids"
        planned.append(Planned("d2t", "I64", source, "I64", facts.vocab.ids, transform=how))
    if facts.rope.divisors is not None:
        how = "computed from the config's RoPE scaling"
        planned.append(Planned("rope_freqs.weight", "F32", "config", "F32", facts.rope.divisors, transform=how))
    return tuple(planned)


def _plan(gguf: str, tensor: StoredTensor, facts: Facts, outtype: str) -> Planned:
    kind, how = _kind(tensor, outtype)
    order = None
    if gguf in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        heads = facts.heads if gguf == "blk.0.attn_q.weight" else facts.kv_heads
        order = rotary_order(heads, facts.head_dim)
        how = ", ".join(filter(None, ("rows permuted for RoPE", how)))
    return Planned(gguf, kind, tensor.name, tensor.dtype, tensor.data, order, how)


def _kind(tensor: StoredTensor, outtype: str) -> tuple[str, str]:
    """(ggml type, remark).  Norms stay F32: they are tiny, and llama.cpp multiplies by them in F32."""
    if len(tensor.shape) == 1:
        return "F32", ""
    if outtype == "q8_0" and tensor.shape[1] % Q8_BLOCK:
        return "F16", f"rows of {tensor.shape[1]} do not fit Q8_0's blocks of {Q8_BLOCK}"
    return OUTTYPES[outtype], ""


def origins(named: Mapping[str, StoredTensor], facts: Facts) -> dict[str, str]:
    """Where embeddings, head and draft vocabulary come from: own, target or identity."""
    return {
        "embeddings": "own" if "embed_tokens.weight" in named else "target",
        "head": "own" if "lm_head.weight" in named else "target",
        "d2t": facts.vocab.how,
    }


def plan_keys(facts: Facts, target: Target, outtype: str) -> tuple[Key | Field, ...]:
    """All keys: ours, then the target's tokenizer as it is."""
    rope, u32 = facts.rope, "UINT32"
    keys = [
        Key("general.type", "STRING", "model"),
        Key("general.name", "STRING", f"EAGLE-3 drafter for {target.name}"),
        Key("general.file_type", u32, FILE_TYPES[outtype]),
        Key("general.quantization_version", u32, 2),
        Key("eagle3.vocab_size", u32, target.vocab),
        Key("eagle3.context_length", u32, facts.context),
        Key("eagle3.embedding_length", u32, facts.hidden),
        Key("eagle3.block_count", u32, 1),
        Key("eagle3.feed_forward_length", u32, facts.ffn),
        Key("eagle3.attention.head_count", u32, facts.heads),
        Key("eagle3.attention.head_count_kv", u32, facts.kv_heads),
        Key("eagle3.attention.key_length", u32, facts.head_dim),
        Key("eagle3.attention.value_length", u32, facts.head_dim),
        Key("eagle3.attention.layer_norm_rms_epsilon", "FLOAT32", facts.eps),
        Key("eagle3.rope.dimension_count", u32, facts.head_dim),
        Key("eagle3.rope.freq_base", "FLOAT32", rope.theta),
        Key("eagle3.target_layers", "ARRAY", list(facts.aux.inputs), "INT32"),
        Key("eagle3.target_hidden_size", u32, target.width),
        Key("eagle3.norm_before_residual", "BOOL", facts.norm_before_residual),
        Key("eagle3.norm_before_fc", "BOOL", facts.norm_before_fc),
        Key("eagle3_cli.target_name", "STRING", target.name),
        Key("eagle3_cli.target_architecture", "STRING", target.architecture),
    ]
    kinds = {str: "STRING", int: u32, float: "FLOAT32"}
    keys += [Key(f"eagle3.rope.scaling.{name}", kinds[type(v)], v) for name, v in rope.scaling.items()]
    return (*keys, *target.tokenizer)


def same_value(key: Key, stored: Any) -> bool:
    """Whether a value read back is the one that was to be written; floats are stored as float32."""
    if key.kind == "FLOAT32":
        return bool(np.float32(key.value) == np.float32(stored))
    return type(stored) is type(key.value) and bool(stored == key.value)
