"""Random samples, states and folders for the tests of shards, capture and weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiny
import torch

from eagle3_cli.train.manifest import Header, TargetId
from eagle3_cli.train.samples import Sample

torch.set_num_threads(1)  # tests share few cores

WIDTH = 4
HEADER = Header(TargetId("t.gguf", 10, "a" * 64, "b" * 64), (1, 2, 4), WIDTH, 50, "c" * 64, "llama.cpp")


def random_samples(lengths: list[int], vocab: int = 50, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [Sample(rng.integers(0, vocab, n).astype(np.int32), rng.random(n) < 0.5) for n in lengths]


def random_states(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 3 * WIDTH, generator=made).bfloat16()
    final = torch.randn(n, WIDTH, generator=made).bfloat16()
    return hidden, final, torch.randint(0, 50, (n,), generator=made)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def save_llama(folder: Path, config: tiny.Config, weights: tiny.Weights) -> Path:
    """The weights of a tiny target as a Hugging Face directory: q and k in split-half order of RoPE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=config.width,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.eps,
        rope_theta=config.rope_base,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(llama)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in hf_weights(config, weights).items()})
    model.save_pretrained(folder)
    return folder


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


def hf_weights(config: tiny.Config, weights: tiny.Weights) -> tiny.Weights:
    """The same under transformers' names."""
    named = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for i in range(config.layers):
        for gguf, hf in _LAYER.items():
            value = weights[f"blk.{i}.{gguf}.weight"]
            if gguf == "attn_q":
                value = split_half(value, config.heads)
            if gguf == "attn_k":
                value = split_half(value, config.kv_heads)
            named[f"model.layers.{i}.{hf}.weight"] = value
    return named


def split_half(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows (2j, 2j+1) of each head, ggml's pairs, to rows j and j + half, transformers' pairs."""
    pairs = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3).reshape(matrix.shape))
