"""Names: which family a checkpoint belongs to, what its tensors mean, and which tensors nobody here can run.

Everything is a table.  A new layout is a new row; code is only needed where a family's config means something else
(layout.py).  Source of the names: docs/checkpoints.md, from public code and training configs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .checkpoint import Checkpoint, StoredTensor


@dataclass(frozen=True)
class Slot:
    """One tensor of the drafter.

    gguf    its name in llama.cpp's eagle3 architecture, None when it is not stored as a tensor
    shape   PyTorch order (rows first) in the symbols of `sizes.read_sizes`
    """

    gguf: str | None
    shape: tuple[str, ...]
    required: bool = True


# Canonical name -> slot.  A source name becomes canonical by dropping a leading "model." and then
# replacing the layer's prefix by "layer.".
SLOTS: dict[str, Slot] = {
    "fc.weight": Slot("fc.weight", ("H", "3Ht")),
    "input_norm.weight": Slot("enc.output_norm.weight", ("3Ht",), required=False),
    "fc_norm.0.weight": Slot(None, ("Ht",), required=False),
    "fc_norm.1.weight": Slot(None, ("Ht",), required=False),
    "fc_norm.2.weight": Slot(None, ("Ht",), required=False),
    "layer.input_layernorm.weight": Slot("blk.0.attn_norm.weight", ("H",)),
    "layer.hidden_norm.weight": Slot("blk.0.attn_norm_2.weight", ("H",)),
    "layer.self_attn.q_proj.weight": Slot("blk.0.attn_q.weight", ("Q", "2H")),
    "layer.self_attn.k_proj.weight": Slot("blk.0.attn_k.weight", ("K", "2H")),
    "layer.self_attn.v_proj.weight": Slot("blk.0.attn_v.weight", ("K", "2H")),
    "layer.self_attn.o_proj.weight": Slot("blk.0.attn_output.weight", ("H", "Q")),
    "layer.post_attention_layernorm.weight": Slot("blk.0.ffn_norm.weight", ("H",)),
    "layer.mlp.gate_proj.weight": Slot("blk.0.ffn_gate.weight", ("F", "H")),
    "layer.mlp.up_proj.weight": Slot("blk.0.ffn_up.weight", ("F", "H")),
    "layer.mlp.down_proj.weight": Slot("blk.0.ffn_down.weight", ("H", "F")),
    "norm.weight": Slot("output_norm.weight", ("H",), required=False),  # where the config says that there is none
    "lm_head.weight": Slot("output.weight", ("Vd", "H"), required=False),
    "embed_tokens.weight": Slot("token_embd.weight", ("V", "H"), required=False),
    "d2t": Slot("d2t", ("Vd",), required=False),
    "t2d": Slot(None, ("V",), required=False),
}

LAYER_PREFIXES = ("midlayer.", "layers.0.")

# Not weights, or weights of something else: left out, and said so in the report.
IGNORED = re.compile(r"(^|\.)rotary_emb\.|^verifier_")

# (pattern of a source name, what it is).  The first match is reported.
REFUSED: tuple[tuple[str, str], ...] = (
    (r"(^|\.)mask_hidden$|^mask_token", "P-EAGLE (parallel drafting)"),
    (r"(^|\.)fc_norm\.", "another number of feature norms than 3"),
    (r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale\w*|weight_zero_point|input_scale|absmax)$",
     "a quantised checkpoint; only F32, F16 and BF16 weights can be converted"),
    (r"self_attn\.(q_norm|k_norm)\.", "normalised queries and keys (q/k norm, as in Qwen3)"),
    (r"self_attn\.(q_a_|q_b_|kv_a_|kv_b_)", "multi-head latent attention (MLA)"),
    (r"self_attn\.sinks$", "attention sinks"),
    (r"mlp\.(experts|gate|router|shared_expert\w*)\.", "a mixture of experts"),
    (r"(^|\.)(layers|midlayers)\.[1-9]\d*\.|(^|\.)midlayer\.[1-9]", "several decoder layers"),
    (r"\.bias$", "biases"),
)  # fmt: skip


class Family(NamedTuple):
    """A way of writing EAGLE-3 checkpoints.

    norm_before_residual   what it means that the config does not say
    copies_target   its configs are the target's with some keys changed: the others do not speak of the drafter
    """

    name: str
    norm_before_residual: bool = False
    copies_target: bool = False


SAFEAILAB = Family("SafeAILab", copies_target=True)
SPECFORGE = Family("SpecForge")
ANGELSLIM = Family("AngelSlim", copies_target=True)
MODELOPT = Family("ModelOpt")
NEMO = Family("NeMo", copies_target=True)
SPECULATORS = Family("speculators", norm_before_residual=True)  # as vLLM, for which these files are made, reads them

ARCHITECTURES = {
    "LlamaForCausalLMEagle3": SPECFORGE,
    "Eagle3LlamaForCausalLM": ANGELSLIM,
    "CosyVoice3Eagle3LlamaForCausalLM": ANGELSLIM,
    "Eagle3Speculator": SPECULATORS,
    "Eagle3DraftModel": SPECULATORS,
}

# (pattern of an architecture or of speculators_model_type, what it is): drafters of another kind.
OTHER_DRAFTERS: tuple[tuple[str, str], ...] = (
    (r"p-?eagle", "P-EAGLE (parallel drafting)"),
    (r"dflash", "DFlash (block diffusion)"),
    (r"dspark", "DSpark (block diffusion)"),
    (r"domino", "Domino"),
    (r"medusa", "Medusa heads"),
    (r"mlp_?speculator", "an MLP speculator"),
    (r"mtp|nextn", "multi-token prediction"),
    (r"^(?!.*eagle-?3).*eagle", "EAGLE-1/2, which fuses one feature with the token embedding"),
)


def detect(config: Mapping[str, Any], names: Collection[str]) -> Family:
    """The family, by the config's architecture where that is distinctive, otherwise by the tensors' names.

    SafeAILab files say LlamaForCausalLM like any Llama model, so they are what remains.
    CheckpointError for a config that names another kind of drafter.
    """
    architectures = _architectures(config)
    kind = config.get("speculators_model_type")
    for name in (*architectures, kind):
        _refuse_other(name)
    if "transformer_layer_config" in config or kind is not None:
        return SPECULATORS
    found = next((ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES), None)
    numbered = any(name.startswith("layers.0.") for name in names)
    if found and not (found == SPECFORGE and numbered):  # ModelOpt exports under SpecForge's name
        return found
    if any(name.startswith(("model.layers.0.", "model.midlayer.")) for name in names):
        return NEMO
    return MODELOPT if numbered else SAFEAILAB


def _architectures(config: Mapping[str, Any]) -> list[str]:
    value = config.get("architectures")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _refuse_other(name: Any) -> None:
    if not isinstance(name, str):
        return
    for pattern, what in OTHER_DRAFTERS:
        if re.search(pattern, name, re.IGNORECASE):
            raise CheckpointError(
                f"config: {name!r} names {what}, not an EAGLE-3 drafter.",
                "llama.cpp's eagle3 graph cannot run it; look for an EAGLE-3 drafter for this target.",
            )


def canonical(name: str) -> str:
    """The name under which `SLOTS` knows a tensor, whichever prefixes its family uses."""
    name = name.removeprefix("model.")
    for prefix in LAYER_PREFIXES:
        if name.startswith(prefix):
            return "layer." + name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Named:
    """A checkpoint's tensors by canonical name, and those that are left out on purpose."""

    tensors: dict[str, StoredTensor]
    ignored: tuple[StoredTensor, ...]


def sort_tensors(checkpoint: Checkpoint) -> Named:
    """Give every tensor its meaning.  CheckpointError for one that is unknown, unsupported, missing or there twice."""
    where = checkpoint.path
    _refuse_older(checkpoint)
    known: dict[str, StoredTensor] = {}
    ignored: list[StoredTensor] = []
    for name, tensor in checkpoint.tensors.items():
        slot = canonical(name)
        if slot in SLOTS:
            if slot in known:
                raise CheckpointError(f"{where}: {known[slot].name} and {name} are one tensor under two names.")
            known[slot] = tensor
        elif IGNORED.search(name):
            ignored.append(tensor)
        else:
            _refuse(where, name)
    for name, spec in SLOTS.items():
        if spec.required and name not in known:
            shown = name.replace("layer.", "midlayer.", 1) if name.startswith("layer.") else name
            raise CheckpointError(
                f"{where}: the tensor {shown} is missing.", "Is the download complete, and is this an EAGLE-3 drafter?"
            )
    return Named(known, tuple(ignored))


def _refuse(where: object, name: str) -> None:
    for pattern, what in REFUSED:
        if re.search(pattern, name):
            raise CheckpointError(
                f"{where}: tensor {name}: this drafter uses {what}.",
                "llama.cpp's eagle3 graph is one plain Llama layer; look for another drafter for this target.",
            )
    raise CheckpointError(
        f"{where}: tensor {name} is not part of an EAGLE-3 drafter, and nothing is dropped silently.",
        "Is a name misspelt, or is this another kind of checkpoint?",
    )


def _refuse_older(checkpoint: Checkpoint) -> None:
    """Say what a file is that is no EAGLE-3 drafter at all: EAGLE-1/2 has fc [H, 2H] and no hidden_norm."""
    by_slot = {canonical(name): tensor for name, tensor in checkpoint.tensors.items()}
    fc = by_slot.get("fc.weight")
    if fc is None:
        raise CheckpointError(
            f"{checkpoint.path}: the tensor fc.weight is missing, so this is not an EAGLE-3 drafter.",
            "Give the drafter's checkpoint, not the target model's.",
        )
    twice = len(fc.shape) == 2 and fc.shape[1] == 2 * fc.shape[0]
    if twice and "layer.hidden_norm.weight" not in by_slot:
        raise CheckpointError(
            f"{checkpoint.path}: {fc.name} has shape {list(fc.shape)}: this is an EAGLE-1/2 drafter, which fuses one"
            " feature with the token embedding.",
            "Use an EAGLE-3 drafter: its fc.weight is [H, 3 x the target's width].",
        )
