"""What the GGUF will hold: the tensors with their transforms, and the keys.

Only what llama.cpp's eagle3 architecture reads is written (src/models/eagle3.cpp, src/llama-model.cpp load_hparams at
0c1e570), because it refuses a file with a tensor it does not know.  It ignores unknown keys: `eagle3_cli.*` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checkpoint import StoredTensor
from .config import Facts
from .encode import encode
from .families import SLOTS, Named
from .ggml_types import KINDS, OUTTYPES, Rule
from .gguf_header import Field, pack
from .switches import FC_NORMS
from .target import Target
from .tensors import Planned, rotary_order

# llama.cpp's enum llama_ftype
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18,
    "iq4_nl": 25, "iq4_xs": 30, "bf16": 32,
}  # fmt: skip


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
    rule = Rule(outtype, facts.heads.count // facts.heads.kv, "lm_head.weight" in named.tensors)
    for name, slot in SLOTS.items():
        if name in named.tensors and slot.gguf is not None and name != "d2t":
            planned.append(_plan(slot.gguf, named.tensors[name], facts, rule))
    if facts.vocab.ids is not None:
        source = named.tensors[facts.vocab.source].name
        planned.append(Planned("d2t", "I64", source, "I64", facts.vocab.ids, transform=facts.vocab.transform))
    if not facts.switches.final_norm:
        ones, how = np.ones(facts.hidden, np.float32), "ones: there is no final norm"
        planned.append(Planned("output_norm.weight", "F32", "config", "F32", ones, transform=how))
    if facts.rope.divisors is not None:
        how = "computed from the config's RoPE scaling"
        planned.append(Planned("rope_freqs.weight", "F32", "config", "F32", facts.rope.divisors, transform=how))
    return tuple(planned)


def _plan(gguf: str, tensor: StoredTensor, facts: Facts, rule: Rule) -> Planned:
    kind, how = _kind(gguf, tensor, rule)
    order = None
    if gguf in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        heads = facts.heads.count if gguf == "blk.0.attn_q.weight" else facts.heads.kv
        order = rotary_order(heads, facts.heads.dim, facts.rope.dimensions)
        how = ", ".join(filter(None, ("rows permuted for RoPE", how)))
    return Planned(gguf, kind, tensor.name, tensor.dtype, tensor.data, order, how)


def _kind(gguf: str, tensor: StoredTensor, rule: Rule) -> tuple[str, str]:
    """(ggml type, remark).  Norms stay F32: they are tiny, and llama.cpp multiplies by them in F32."""
    if len(tensor.shape) == 1:
        return "F32", ""
    columns, most = tensor.shape[1], OUTTYPES[rule.outtype]
    block = KINDS[most].block
    how = f"rows of {columns} do not fit {most}'s blocks of {block}" if columns % block else ""
    return rule.kind(gguf, columns), how


def origins(named: Mapping[str, StoredTensor], facts: Facts) -> dict[str, str]:
    """Where embeddings, head and draft vocabulary come from: own, target or identity."""
    return {
        "embeddings": "own" if "embed_tokens.weight" in named else "target",
        "head": "own" if "lm_head.weight" in named else "target",
        "d2t": facts.vocab.how,
    }


def plan_keys(named: Named, facts: Facts, target: Target, outtype: str) -> tuple[Key | Field, ...]:
    """All keys: llama.cpp's, ours, then the target's tokenizer as it is."""
    rope, heads, switches, u32 = facts.rope, facts.heads, facts.switches, "UINT32"
    keys = [
        Key("general.type", "STRING", "model"),
        Key("general.name", "STRING", f"EAGLE-3 drafter for {target.name}" if target.name else "EAGLE-3 drafter"),
        Key("general.file_type", u32, FILE_TYPES[outtype]),
        Key("general.quantization_version", u32, 2),
        Key("eagle3.vocab_size", u32, target.vocab),
        Key("eagle3.context_length", u32, facts.context),
        Key("eagle3.embedding_length", u32, facts.hidden),
        Key("eagle3.block_count", u32, 1),
        Key("eagle3.feed_forward_length", u32, facts.ffn),
        Key("eagle3.attention.head_count", u32, heads.count),
        Key("eagle3.attention.head_count_kv", u32, heads.kv),
        Key("eagle3.attention.key_length", u32, heads.dim),
        Key("eagle3.attention.value_length", u32, heads.dim),
        Key("eagle3.attention.layer_norm_rms_epsilon", "FLOAT32", facts.eps),
        Key("eagle3.rope.dimension_count", u32, rope.dimensions),
        Key("eagle3.rope.freq_base", "FLOAT32", rope.theta),
        Key("eagle3.target_layers", "ARRAY", list(facts.aux.inputs), "INT32"),
        Key("eagle3.target_hidden_size", u32, target.width),
        Key("eagle3.norm_before_residual", "BOOL", switches.norm_before_residual),
        Key("eagle3.norm_before_fc", "BOOL", switches.norm_before_fc),
    ]
    kinds = {str: "STRING", int: u32, float: "FLOAT32"}
    keys += [Key(f"eagle3.rope.scaling.{name}", kinds[type(v)], v) for name, v in rope.scaling.items()]
    return (*keys, *_own_keys(named, facts, target), *target.tokenizer)


def _own_keys(named: Named, facts: Facts, target: Target) -> list[Key | Field]:
    """What only eagle3 reads (model_files.py): the parts of a drafter that llama.cpp's graph lacks, and its origin."""
    switches = facts.switches
    keys: list[Key | Field] = []
    if target.name and target.architecture:
        keys.append(Key("eagle3_cli.target_name", "STRING", target.name))
        keys.append(Key("eagle3_cli.target_architecture", "STRING", target.architecture))
    if switches.fc_norm:
        norms = [named.tensors[name] for name in FC_NORMS]
        weights = [encode(norm.data, norm.dtype, "F32", norm.name).view(np.float32) for norm in norms]
        keys.append(pack("eagle3_cli.fc_norm", "FLOAT32", np.concatenate(weights).tolist()))
    if switches.norm_output:
        keys.append(Key("eagle3_cli.norm_output", "BOOL", True))
    if not switches.final_norm:
        keys.append(Key("eagle3_cli.final_norm", "BOOL", False))
    if switches.window is not None:
        keys.append(Key("eagle3_cli.sliding_window", "UINT32", switches.window))
    return keys


def same_value(key: Key, stored: Any) -> bool:
    """Whether a value read back is the one that was to be written; floats are stored as float32."""
    if key.kind == "FLOAT32":
        return bool(np.float32(key.value) == np.float32(stored))
    return type(stored) is type(key.value) and bool(stored == key.value)
