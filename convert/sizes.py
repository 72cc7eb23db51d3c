"""A drafter's sizes: taken from the tensors, checked against what config and target say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, PairError
from .checkpoint import StoredTensor
from .config_keys import integer
from .families import SLOTS
from .target import Target

Sizes = Mapping[str, int]
"""Symbol -> size: H drafter width, Ht target width, Q and K rows of queries and keys, F ffn width, V target
vocabulary, Vd draft vocabulary; 2H and 3Ht are the products."""

FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Heads:
    """Attention heads, key/value heads, and dimensions per head."""

    count: int
    kv: int
    dim: int


def read_sizes(tensors: Mapping[str, StoredTensor], target: Target) -> Sizes:
    """All sizes, from the tensors that tell them; `check_sizes` compares everything else.

    CheckpointError where one of them is no matrix, PairError where the target has another width.
    """
    rows = {}
    for name in ("fc", "layer.self_attn.q_proj", "layer.self_attn.k_proj", "layer.mlp.gate_proj"):
        tensor = tensors[name + ".weight"]
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise CheckpointError(f"{tensor.name}: expected a matrix, got shape {list(tensor.shape)}.")
        rows[name] = tensor.shape[0]
    _check_fusion(tensors["fc.weight"], target)
    hidden, head = rows["fc"], tensors.get("lm_head.weight")
    return {
        "H": hidden, "2H": 2 * hidden, "Ht": target.width, "3Ht": 3 * target.width, "F": rows["layer.mlp.gate_proj"],
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
        f"{fc.name}: shape {list(fc.shape)} is made for a target of {made_for}, but {target.where} has {width}.",
        "Give the --target that the drafter was trained for.",
    )


def read_heads(config: Mapping[str, Any], sizes: Sizes) -> Heads:
    """Heads by the rows of queries and keys; the config only says how long one head is, or how many there are."""
    dim, count = integer(config, "head_dim"), integer(config, "num_attention_heads")
    if dim is None:
        if count is None:
            raise CheckpointError("config: neither head_dim nor num_attention_heads.", "Add one of them.")
        if sizes["Q"] % count:
            raise CheckpointError(f"config: {count} heads do not divide the {sizes['Q']} rows of q_proj.")
        dim = sizes["Q"] // count
    if dim % 2:
        raise CheckpointError(f"config: head_dim: expected an even number for RoPE, got {dim}.")
    for what in ("Q", "K"):
        if sizes[what] % dim:
            raise CheckpointError(
                f"{what.lower()}_proj has {sizes[what]} rows, which heads of {dim} dimensions do not divide."
            )
    heads = Heads(sizes["Q"] // dim, sizes["K"] // dim, dim)
    if heads.count % heads.kv:
        raise CheckpointError(f"{heads.count} attention heads cannot share {heads.kv} key/value heads.")
    _check_stated(config, {"num_attention_heads": heads.count, "num_key_value_heads": heads.kv})
    return heads


def check_sizes(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], sizes: Sizes, target: Target) -> None:
    """Every tensor has the shape of its slot, and the config states no other sizes; CheckpointError or PairError."""
    for name, tensor in tensors.items():
        _check_shape(tensor, SLOTS[name].shape, sizes)
    stated = {
        "hidden_size": sizes["H"], "intermediate_size": sizes["F"], "vocab_size": sizes["V"],
        "draft_vocab_size": sizes["Vd"], "target_hidden_size": sizes["Ht"],
    }  # fmt: skip
    _check_stated(config, stated, target)


def _check_shape(tensor: StoredTensor, symbols: tuple[str, ...], sizes: Sizes) -> None:
    expected = [sizes[s] for s in symbols]
    if list(tensor.shape) != expected:
        raise CheckpointError(
            f"{tensor.name}: shape {list(tensor.shape)}, expected {expected} ([{', '.join(symbols)}]; H drafter width,"
            " Ht target width, Q and K query and key rows, F ffn width, V and Vd target and draft vocabulary)."
        )
    if tensor.name.endswith("weight") and tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor.name}: {tensor.dtype} means a quantised checkpoint; expected F32, F16 or BF16 weights.",
            "Use the unquantised checkpoint and choose the size with --outtype.",
        )


def _check_stated(config: Mapping[str, Any], actual: Mapping[str, int], target: Target | None = None) -> None:
    """What the config says about sizes is what the tensors, or a target that was given, have."""
    for key, size in actual.items():
        value = integer(config, key)
        if value is None or value == size:
            continue
        of_target = target is not None and target.path is not None and key in ("vocab_size", "target_hidden_size")
        raise (PairError if of_target else CheckpointError)(
            f"config: {key} is {value}, but {'the target has' if of_target else 'the tensors say'} {size}.",
            "Is this the target that the drafter was trained for, and does the config belong to these tensors?",
        )
