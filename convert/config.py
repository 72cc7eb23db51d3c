"""The drafter's facts: read from config.json, checked against the tensors' shapes and the target.

Sizes come from the tensors; where the config states them, too, it must agree.  Every key that could change what the
drafter computes is either read, or required to have the one value that llama.cpp's eagle3 graph implements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .checkpoint import StoredTensor
from .config_keys import check_keys, integer
from .families import Family
from .layers import AuxLayers, choose_layers
from .rope import Rope, read_rope
from .sizes import Heads, Sizes, check_sizes, read_heads, read_sizes
from .switches import Switches, read_switches
from .target import Target
from .vocab import DraftVocab, draft_vocab

DEFAULT_EPS = 1e-6  # transformers' LlamaConfig and Qwen3Config


@dataclass(frozen=True)
class Facts:
    """Everything about a drafter that is not a weight.  Sizes count floats, heads, tokens or positions."""

    family: Family
    hidden: int
    ffn: int
    heads: Heads
    eps: float
    context: int
    aux: AuxLayers
    rope: Rope
    vocab: DraftVocab
    switches: Switches
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Choices:
    """What the user decides: `auto`, `input` or `output` for aux layers; `auto`, `pre` or `post` for feedback."""

    aux_convention: str = "auto"
    feedback: str = "auto"


def read_facts(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    family: Family,
    target: Target,
    choices: Choices,
) -> Facts:
    """Decide everything.  An InputError with the key or tensor at the first contradiction.

    config   flat, see layout.py; tensors by canonical name
    """
    notes = check_keys(config, family.copies_target)
    sizes = read_sizes(tensors, target)
    heads = read_heads(config, sizes)
    check_sizes(config, tensors, sizes, target)
    vocab = draft_vocab(tensors, sizes["Vd"], target.vocab)
    _check_borrowed(tensors, sizes, vocab)
    rope = read_rope(config, heads.dim)
    return Facts(
        family=family, hidden=sizes["H"], ffn=sizes["F"], heads=heads, eps=_eps(config, notes),
        context=_context(config, target, notes), aux=choose_layers(config, target.layers, choices.aux_convention),
        rope=rope, vocab=vocab, switches=read_switches(config, tensors, family, choices.feedback, notes),
        notes=(*notes, *vocab.notes, *rope.notes),
    )  # fmt: skip


def _check_borrowed(tensors: Mapping[str, StoredTensor], sizes: Sizes, vocab: DraftVocab) -> None:
    """Embeddings and head can be the target's only where they fit."""
    hidden, width = sizes["H"], sizes["Ht"]
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in tensors and hidden != width:
            raise CheckpointError(
                f"{name} is missing and cannot be the target's: the drafter has width {hidden}, the target {width}.",
                "Use the complete checkpoint.",
            )
    if "lm_head.weight" not in tensors and vocab.ids is not None:
        raise CheckpointError("lm_head.weight is missing, and d2t or t2d reorders the vocabulary of the target's head.")


def _eps(config: Mapping[str, Any], notes: list[str]) -> float:
    eps = config.get("rms_norm_eps")
    if eps is None:
        notes.append(f"rms_norm_eps is not in the config: {DEFAULT_EPS:g}, transformers' default")
        return DEFAULT_EPS
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        raise CheckpointError(f"config: rms_norm_eps: expected a small positive number, got {eps!r}.")
    return float(eps)


def _context(config: Mapping[str, Any], target: Target, notes: list[str]) -> int:
    """Positions the drafter was trained for; only informative, nothing is sized by it."""
    context = integer(config, "max_position_embeddings")
    if context is not None and target.context is not None and context < target.context:
        notes.append(f"trained for {context} positions, the target for {target.context}: acceptance may fall beyond")
    found = context or target.context
    if found is None:
        raise CheckpointError("config: no max_position_embeddings, and no --target to say how long texts get.")
    return found
