"""Tiny random models, made with numpy and written as GGUF: a llama target and EAGLE-3 drafters for it.

Weights are dictionaries of float32 arrays in row-major order [out, in], under their GGUF names, so that
`reference.py` computes from the same arrays that llama.cpp reads.

The target mostly follows a fixed successor for every token (its head looks for the embedding of the token before),
disturbed by its random layers.  That gives it clear favourites (no near-ties) and something that `good_drafter`
can know.  Its control tokens have logit 0, far below the others: it never ends an answer on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

Weights = dict[str, np.ndarray]

# RuntimeSettings under which batches of all widths give nearly the same logits.
EXACT = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "i n", "a n", "th e", "h e")


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


TOKENS = [*_byte_letters(), *(m.replace(" ", "") for m in MERGES), *CONTROL]
VOCAB = len(TOKENS)
END_OF_TEXT, IM_START, IM_END = range(VOCAB - 3, VOCAB)


@dataclass(frozen=True)
class Config:
    """What both architectures share.  q has heads * head_dim rows, k and v kv_heads * head_dim."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int = 1
    eps: float = 1e-5
    rope_base: float = 10000.0


@dataclass(frozen=True)
class DrafterConfig(Config):
    """aux_layers are layers whose inputs the drafter reads.

    What llama.cpp's graph lacks:
    fc_norm      each aux layer's part is normed by its own weights, "fc_norm" [3, target_width]
    norm_output  the fed-back row is the one after the final norm
    final_norm   False: the head reads the output itself
    window       keys at this many positions are seen, the row's own included
    """

    target_width: int = 64
    aux_layers: tuple[int, ...] = (1, 2, 4)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    final_norm: bool = True
    window: int | None = None


TARGET = Config(width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, layers=5)
DRAFTER = DrafterConfig(width=64, heads=4, kv_heads=2, head_dim=16, ffn=96)


@dataclass(frozen=True)
class TinyModel:
    """A GGUF file and what was written into it.  d2t: absolute ids, None for the whole vocabulary."""

    path: Path
    config: Any
    weights: Weights
    d2t: np.ndarray | None = None


# --- weights -------------------------------------------------------------------------------------------


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    return (gain * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def _norm(rng: np.random.Generator, width: int) -> np.ndarray:
    return (1.0 + 0.1 * rng.standard_normal(width)).astype(np.float32)


def _layer(rng: np.random.Generator, config: Config, inputs: int, gain: float, name: str) -> Weights:
    """One decoder layer; `inputs` is the length of the rows that attention reads."""
    c, queries, keys = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        f"{name}.attn_norm.weight": _norm(rng, c.width),
        f"{name}.attn_q.weight": _matrix(rng, queries, inputs, 1.5),
        f"{name}.attn_k.weight": _matrix(rng, keys, inputs, 1.5),
        f"{name}.attn_v.weight": _matrix(rng, keys, inputs),
        f"{name}.attn_output.weight": _matrix(rng, c.width, queries, gain),
        f"{name}.ffn_norm.weight": _norm(rng, c.width),
        f"{name}.ffn_gate.weight": _matrix(rng, c.ffn, c.width),
        f"{name}.ffn_up.weight": _matrix(rng, c.ffn, c.width),
        f"{name}.ffn_down.weight": _matrix(rng, c.width, c.ffn, gain),
    }


def successors(seed: int = 7) -> np.ndarray:
    """The target's favourite successor of each token: one cycle through everything but the control tokens."""
    order = np.random.default_rng(seed).permutation(VOCAB - len(CONTROL))
    after = np.arange(VOCAB)
    after[order] = np.roll(order, -1)
    return after


def _head(embedding: np.ndarray, scale: float) -> np.ndarray:
    """Rows that find the token whose successor each one is; zero for control tokens."""
    head = np.zeros_like(embedding)
    plain = np.arange(VOCAB - len(CONTROL))
    head[successors()[plain]] = scale * embedding[plain] / np.sqrt(embedding.shape[1])
    return head


def target_weights(config: Config = TARGET, seed: int = 1) -> Weights:
    rng = np.random.default_rng(seed)
    embedding = rng.standard_normal((VOCAB, config.width)).astype(np.float32)
    weights: Weights = {"token_embd.weight": embedding}
    for i in range(config.layers):
        weights |= _layer(rng, config, config.width, 0.45, f"blk.{i}")
    weights["output_norm.weight"] = _norm(rng, config.width)
    weights["output.weight"] = _head(embedding, 1.2)
    return weights


def drafter_weights(config: DrafterConfig, seed: int, candidates: int = VOCAB) -> Weights:
    """Random weights: own embeddings, and a head for so many candidates."""
    rng = np.random.default_rng(seed)
    weights = {
        "fc.weight": _matrix(rng, config.width, 3 * config.target_width),
        "token_embd.weight": rng.standard_normal((VOCAB, config.width)).astype(np.float32),
        **_layer(rng, config, 2 * config.width, 1.0, "blk.0"),
        "blk.0.attn_norm_2.weight": _norm(rng, config.width),
        "output_norm.weight": _norm(rng, config.width),
        "output.weight": _matrix(rng, candidates, config.width, 3.0),
    }
    if not config.final_norm:
        del weights["output_norm.weight"]
    if config.fc_norm:
        weights["fc_norm"] = np.array([_norm(rng, config.target_width) for _ in range(3)])
    if config.norm_before_fc:
        weights["enc.output_norm.weight"] = _norm(rng, 3 * config.target_width)
    return weights


def good_weights(target: Weights, config: DrafterConfig, focus: float = 3.0) -> Weights:
    """A drafter that knows the target's favourite successors.

    Every position attends to itself (queries and keys are one constant vector, turned by RoPE), the values hand on
    its token's embedding, and the head is the target's.  Column 0 of its embeddings is the constant.
    focus   the constant in queries and keys; the smaller, the more a position also attends to earlier ones
    """
    rng = np.random.default_rng(5)
    weights = drafter_weights(config, seed=5)
    embedding = target["token_embd.weight"].copy()
    embedding[:, 0] = 4.0
    constant = np.zeros((config.head_dim, 2 * config.width), np.float32)
    constant[:, 0] = focus
    copies = np.zeros((config.kv_heads * config.head_dim, 2 * config.width), np.float32)
    copies[:, : config.width] = np.linalg.qr(rng.standard_normal((config.width, config.width)))[0][: len(copies)]
    groups = config.heads // config.kv_heads
    back = copies[:, : config.width].reshape(config.kv_heads, config.head_dim, config.width)
    weights |= {
        "token_embd.weight": embedding,
        "blk.0.attn_norm.weight": np.ones(config.width, np.float32),
        "blk.0.attn_q.weight": np.tile(constant, (config.heads, 1)),
        "blk.0.attn_k.weight": np.tile(constant, (config.kv_heads, 1)),
        "blk.0.attn_v.weight": copies,
        "blk.0.attn_output.weight": 4 * np.repeat(back, groups, axis=0).reshape(-1, config.width).T / groups,
        "blk.0.ffn_down.weight": 0.3 * weights["blk.0.ffn_down.weight"],
        "output.weight": target["output.weight"],
    }
    if config.final_norm:
        weights["output_norm.weight"] = np.ones(config.width, np.float32)
    return weights


# --- files ---------------------------------------------------------------------------------------------


def _vocabulary(writer: GGUFWriter, tokens: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in CONTROL else TokenType.NORMAL for t in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)


def _keys(writer: GGUFWriter, config: Config) -> None:
    writer.add_block_count(config.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(VOCAB)


def _finish(writer: GGUFWriter, weights: Weights, overrides: dict[str, Any]) -> None:
    """overrides: keys to write last; a key that was written already is replaced."""
    for key, value in overrides.items():
        writer.kv_data[0].pop(key, None)
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:  # None leaves the key out
            writer.add_array(key, value)
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_target(
    path: Path, config: Config = TARGET, weights: Weights | None = None, tokens: list[str] = TOKENS, **overrides: Any
) -> TinyModel:
    """overrides: keys of the file, `__` for a dot; None leaves one out."""
    weights = target_weights(config) if weights is None else weights
    writer = GGUFWriter(path, "llama")
    _keys(writer, config)
    _vocabulary(writer, tokens)
    writer.add_chat_template(CHATML)
    _finish(writer, weights, {key.replace("__", "."): value for key, value in overrides.items()})
    return TinyModel(path, config, weights)


def write_drafter(
    path: Path,
    config: DrafterConfig = DRAFTER,
    weights: Weights | None = None,
    d2t: list[int] | np.ndarray | None = None,
    tokens: list[str] = TOKENS,
    **overrides: Any,
) -> TinyModel:
    """d2t: absolute ids, written as I64.  tokens: empty for a file without a vocabulary.  overrides as for
    `write_target`."""
    weights = dict(drafter_weights(config, 11, VOCAB if d2t is None else len(d2t)) if weights is None else weights)
    writer = GGUFWriter(path, "eagle3")
    _keys(writer, config)
    writer.add_array("eagle3.target_layers", list(config.aux_layers))
    writer.add_uint32("eagle3.target_hidden_size", config.target_width)
    writer.add_bool("eagle3.norm_before_residual", config.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", config.norm_before_fc)
    if tokens:
        _vocabulary(writer, tokens)
    else:
        writer.add_tokenizer_model("no_vocab")
    file_weights = {name: value for name, value in weights.items() if name != "fc_norm"}
    if d2t is not None:
        file_weights["d2t"] = np.asarray(d2t, np.int64)
    if not config.final_norm:
        file_weights.setdefault("output_norm.weight", np.ones(config.width, np.float32))
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    _finish(writer, file_weights, {**_own_keys(config, weights), **keys})
    return TinyModel(path, config, weights, None if d2t is None else np.asarray(d2t))


def _own_keys(config: DrafterConfig, weights: Weights) -> dict[str, Any]:
    """What eagle3 itself reads; nothing for a drafter of EAGLE-3 as llama.cpp knows it."""
    keys: dict[str, Any] = {}
    if config.fc_norm:
        keys["eagle3_cli.fc_norm"] = [float(weight) for weight in weights["fc_norm"].reshape(-1)]
    if config.norm_output:
        keys["eagle3_cli.norm_output"] = True
    if not config.final_norm:
        keys["eagle3_cli.final_norm"] = False
    if config.window is not None:
        keys["eagle3_cli.sliding_window"] = config.window
    return keys


def write_borrowing_drafter(path: Path) -> TinyModel:
    """Random, without embeddings and head: llama.cpp takes the target's."""
    weights = drafter_weights(DRAFTER, 12)
    del weights["token_embd.weight"], weights["output.weight"]
    return write_drafter(path, DRAFTER, weights)


def write_narrow_drafter(path: Path) -> TinyModel:
    """Random, of another width than the target, with every optional norm and a draft vocabulary without id 0."""
    config = replace(
        DRAFTER, width=48, heads=6, kv_heads=3, ffn=80, norm_before_residual=True, norm_before_fc=True, rope_base=500.0
    )
    d2t = [i for i in range(VOCAB) if i % 3 and i < END_OF_TEXT]
    return write_drafter(path, config, drafter_weights(config, 13, len(d2t)), d2t)


def write_good_drafter(path: Path, target: Weights) -> TinyModel:
    config = replace(DRAFTER, norm_before_residual=True)
    return write_drafter(path, config, good_weights(target, config))


def write_end_drafter(path: Path) -> TinyModel:
    """Random, with a draft vocabulary of nothing but the two tokens that end an answer."""
    return write_drafter(path, DRAFTER, drafter_weights(DRAFTER, 14, 2), [END_OF_TEXT, IM_END])
