"""The drafter's facts: read from config.json, checked against the tensors' shapes and the target.

Sizes come from the tensors; where the config states them, too, it must agree.  Every key that could change what the
drafter computes is either read, or required to have the one value that llama.cpp's eagle3 graph implements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, PairError
from .config_keys import check_keys, flag, integer
from .families import SLOTS, Named
from .layers import AuxLayers, choose_layers
from .rope import Rope, read_rope
from .safetensors import StoredTensor
from .target import Target
from .vocab import DraftVocab, draft_vocab

DEFAULT_EPS = 1e-6  # transformers' LlamaConfig


@dataclass(frozen=True)
class Facts:
    """Everything about a drafter that is not a weight.  Sizes count floats, heads, tokens or positions."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    context: int
    aux: AuxLayers
    rope: Rope
    vocab: DraftVocab
    norm_before_residual: bool
    norm_before_fc: bool
    notes: tuple[str, ...]


def read_facts(config: Mapping[str, Any], named: Named, target: Target, convention: str = "auto") -> Facts:
    """Decide everything.  CheckpointError or PairError with the key or tensor at the first contradiction."""
    notes = check_keys(config)
    tensors = named.tensors
    sizes = _sizes(config, tensors, target)
    heads, kv_heads, head_dim = _heads(config, sizes)
    for name, tensor in tensors.items():
        _check_shape(tensor, SLOTS[name].shape, sizes)
    _check_stated(config, sizes, heads, kv_heads)
    vocab = draft_vocab(tensors, sizes["Vd"], target.vocab)
    _check_borrowed(tensors, sizes, vocab)
    rope = read_rope(config, head_dim)
    norm_before_fc = _norm_before_fc(config, tensors, notes)
    return Facts(
        hidden=sizes["H"], ffn=sizes["F"], heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        eps=_eps(config, notes), context=_context(config, target, notes),
        aux=choose_layers(config, target.layers, convention), rope=rope, vocab=vocab,
        norm_before_residual=bool(flag(config, "norm_before_residual")), norm_before_fc=norm_before_fc,
        notes=(*notes, *vocab.notes, *rope.notes),
    )  # fmt: skip


def _sizes(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], target: Target) -> dict[str, int]:
    """The symbols of `families.SLOTS`.  Matrices must be matrices; everything else is checked afterwards."""
    rows = {}
    for name in ("fc", "layer.self_attn.q_proj", "layer.self_attn.k_proj", "layer.mlp.gate_proj"):
        tensor = tensors[name + ".weight"]
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise CheckpointError(f"{tensor.name}: expected a matrix, got shape {list(tensor.shape)}.")
        rows[name] = tensor.shape[0]
    _check_fusion(tensors["fc.weight"], target)
    hidden, head = rows["fc"], tensors.get("lm_head.weight")
    return {
        "H": hidden, "2H": 2 * hidden, "3Ht": 3 * target.width, "F": rows["layer.mlp.gate_proj"],
        "Q": rows["layer.self_attn.q_proj"], "K": rows["layer.self_attn.k_proj"], "V": target.vocab,
        "Vd": head.shape[0] if head is not None and head.shape else target.vocab,
    }  # fmt: skip


def _check_fusion(fc: StoredTensor, target: Target) -> None:
    columns, width = fc.shape[1], target.width
    if columns == 3 * width:
        return
    if columns % width == 0 and columns // width != 3 and columns % 3:
        raise CheckpointError(
            f"{fc.name}: shape {list(fc.shape)} fuses {columns // width} features of width {width}, expected 3.",
            "llama.cpp's eagle3 graph fuses exactly three.",
        )
    made_for = f"width {columns // 3}" if columns % 3 == 0 else f"another width than {width}"
    raise PairError(
        f"{fc.name}: shape {list(fc.shape)} is made for a target of {made_for}, but {target.path} has {width}.",
        "Give the --target that the drafter was trained for.",
    )


def _heads(config: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """(heads, key/value heads, head_dim).  Counts follow from the rows of q and k; head_dim needs the config."""
    head_dim = integer(config, "head_dim")
    if head_dim is None:
        heads = integer(config, "num_attention_heads")
        if heads is None:
            raise CheckpointError("config: neither head_dim nor num_attention_heads.", "Add one of them.")
        if sizes["H"] % heads:
            raise CheckpointError(f"config: {heads} heads do not divide the width {sizes['H']}.", "Add head_dim.")
        head_dim = sizes["H"] // heads
    if head_dim % 2:
        raise CheckpointError(f"config: head_dim: expected an even number for RoPE, got {head_dim}.")
    for what in ("Q", "K"):
        if sizes[what] % head_dim:
            raise CheckpointError(
                f"{what.lower()}_proj has {sizes[what]} rows, which heads of {head_dim} dimensions do not divide."
            )
    heads, kv_heads = sizes["Q"] // head_dim, sizes["K"] // head_dim
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key/value heads.")
    return heads, kv_heads, head_dim


def _check_shape(tensor: StoredTensor, symbols: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    expected = [sizes[s] for s in symbols]
    if list(tensor.shape) != expected:
        raise CheckpointError(
            f"{tensor.name}: shape {list(tensor.shape)}, expected {expected} ([{', '.join(symbols)}]; H drafter width,"
            " Ht target width, Q and K query and key rows, F ffn width, V and Vd target and draft vocabulary)."
        )
    floats = tensor.name.endswith("weight")
    if floats and tensor.dtype not in ("F32", "F16", "BF16", "F64"):
        raise CheckpointError(
            f"{tensor.name}: {tensor.dtype} means a quantised checkpoint; expected F32, F16 or BF16 weights.",
            "Use the unquantised checkpoint and choose the size with --outtype.",
        )


def _check_stated(config: Mapping[str, Any], sizes: Mapping[str, int], heads: int, kv_heads: int) -> None:
    """What the config says about sizes agrees with the tensors."""
    stated = {
        "hidden_size": sizes["H"], "intermediate_size": sizes["F"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": sizes["V"], "draft_vocab_size": sizes["Vd"],
        "target_hidden_size": sizes["3Ht"] // 3,
    }  # fmt: skip
    for key, actual in stated.items():
        value = integer(config, key)
        if value is not None and value != actual:
            other = "the target has" if key in ("vocab_size", "target_hidden_size") else "the tensors say"
            kind = PairError if key in ("vocab_size", "target_hidden_size") else CheckpointError
            raise kind(
                f"config: {key} is {value}, but {other} {actual}.",
                "Is this the target that the drafter was trained for, and does the config belong to these tensors?",
            )


def _check_borrowed(tensors: Mapping[str, StoredTensor], sizes: Mapping[str, int], vocab: DraftVocab) -> None:
    """Embeddings and head can be the target's only where they fit."""
    hidden, width = sizes["H"], sizes["3Ht"] // 3
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in tensors and hidden != width:
            raise CheckpointError(
                f"{name} is missing and cannot be the target's: the drafter has width {hidden}, the target {width}.",
                "Use the complete checkpoint.",
            )
    if "lm_head.weight" not in tensors and vocab.ids is not None:
        raise CheckpointError("lm_head.weight is missing, and d2t or t2d reorders the vocabulary of the target's head.")


def _norm_before_fc(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], notes: list[str]) -> bool:
    stated, there = flag(config, "norm_before_fc"), "input_norm.weight" in tensors
    if stated is None and there:
        notes.append("input_norm.weight is there and norm_before_fc is not in the config: taken as true")
    elif bool(stated) != there:
        raise CheckpointError(
            f"config: norm_before_fc is {str(stated).lower()}, but the tensor input_norm.weight is"
            f" {'there' if there else 'missing'}.",
            "Use the complete checkpoint with its own config.",
        )
    return there


def _eps(config: Mapping[str, Any], notes: list[str]) -> float:
    eps = config.get("rms_norm_eps")
    if eps is None:
        notes.append(f"rms_norm_eps is not in the config: {DEFAULT_EPS:g}, transformers' default for Llama")
        return DEFAULT_EPS
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        raise CheckpointError(f"config: rms_norm_eps: expected a small positive number, got {eps!r}.")
    return float(eps)


def _context(config: Mapping[str, Any], target: Target, notes: list[str]) -> int:
    """Positions the drafter was trained for; only informative, nothing is sized by it."""
    context = integer(config, "max_position_embeddings")
    if context is not None and context < target.context:
        notes.append(f"trained for {context} positions, the target for {target.context}: acceptance may fall beyond")
    return context or target.context
