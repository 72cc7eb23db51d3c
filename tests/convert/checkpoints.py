"""Small random EAGLE-3 checkpoints and a target GGUF that has everything but weights.

Sizes differ from each other wherever they may, so that a swapped axis cannot pass.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from eagle3_cli.convert import ConvertSettings, Report, convert

H, HT, F, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 96, 6, 2, 16
V, VD, LAYERS = tiny.VOCAB, 32, 24
NAMES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "u1", "I8": "i1", "BOOL": "u1"}
Stored = tuple[str, np.ndarray]  # safetensors dtype, values
Tensors = dict[str, Stored]


def bf16(values: np.ndarray) -> np.ndarray:
    """Bit patterns of values rounded towards zero."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def draft_ids(seed: int = 0) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(V, VD, replace=False)).astype(np.int64)


def tensors(layer: str = "midlayer.", dtype: str = "F16", hidden: int = H, prefix: str = "") -> Tensors:
    """All tensors of a drafter with its own head and a reduced vocabulary, SpecForge's by default."""
    rng = np.random.default_rng(1)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "fc.weight": (hidden, 3 * HT),
        layer + "input_layernorm.weight": (hidden,),
        layer + "hidden_norm.weight": (hidden,),
        layer + "self_attn.q_proj.weight": (q, 2 * hidden),
        layer + "self_attn.k_proj.weight": (kv, 2 * hidden),
        layer + "self_attn.v_proj.weight": (kv, 2 * hidden),
        layer + "self_attn.o_proj.weight": (hidden, q),
        layer + "post_attention_layernorm.weight": (hidden,),
        layer + "mlp.gate_proj.weight": (F, hidden),
        layer + "mlp.up_proj.weight": (F, hidden),
        layer + "mlp.down_proj.weight": (hidden, F),
        "norm.weight": (hidden,),
        "lm_head.weight": (VD, hidden),
    }
    made: Tensors = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype("<f4")
        made[prefix + name] = (dtype, bf16(values) if dtype == "BF16" else values.astype(NAMES[dtype]))
    ids = draft_ids()
    made[prefix + "d2t"] = ("I64", ids - np.arange(VD))
    made[prefix + "t2d"] = ("BOOL", np.isin(np.arange(V), ids).astype(np.uint8))
    return made


def config(**changes: Any) -> dict[str, Any]:
    """A SpecForge config.  A change to None removes the key."""
    made = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": F,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1,
        "vocab_size": V, "draft_vocab_size": VD, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    return {k: v for k, v in {**made, **changes}.items() if v is not None}


def safetensors_bytes(stored: Mapping[str, Stored], header: Mapping[str, Any] | None = None) -> bytes:
    entries, data = {}, b""
    for name, (dtype, values) in stored.items():
        raw = np.ascontiguousarray(values).tobytes()
        entries[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(entries if header is None else header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(folder: Path, stored: Mapping[str, Stored], settings: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint directory with one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    (folder / "config.json").write_text(json.dumps(config() if settings is None else settings))
    return folder


def write_shards(folder: Path, stored: Tensors, parts: int = 3) -> Path:
    """The same checkpoint in several files with an index."""
    folder.mkdir(parents=True)
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = dict(list(stored.items())[i::parts])
        (folder / file).write_bytes(safetensors_bytes(part))
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config()))
    return folder


def write_target(path: Path, width: int = HT, layers: int = LAYERS) -> Path:
    """A target's metadata, with tokenizer keys of every kind."""
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.name", "Tiny target")
    for key, value in {"block_count": layers, "embedding_length": width, "context_length": 1024}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tiny.TOKENS)
    writer.add_token_types([1] * (V - 3) + [3] * 3)
    writer.add_token_merges(list(tiny.MERGES))
    writer.add_bos_token_id(tiny.IM_START)
    writer.add_eos_token_id(tiny.IM_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny.CHATML)
    writer.add_array("tokenizer.test.floats", [0.5, -1.25])
    writer.add_key_value("tokenizer.test.bytes", bytes([0, 255, 7]), GGUFValueType.ARRAY)
    writer.add_key_value("tokenizer.test.bools", [True, False], GGUFValueType.ARRAY)
    writer.add_int64("tokenizer.test.long", -(2**40))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(source: Path, target: Path | None, output: Path, **settings: Any) -> Report:
    return convert(ConvertSettings(source, target, output, **settings))


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys and tensors through gguf's own reader, which shares no code with the converter."""
    reader = GGUFReader(path)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}
