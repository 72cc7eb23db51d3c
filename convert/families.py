"""Names: which family a checkpoint belongs to, what its tensors mean, and which tensors nobody here can run.

Everything is a table.  A new layout is a new row; code is only needed where a family's config means something else.
Source of the names: docs/checkpoint_families.md, from public code and training configs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .safetensors import Checkpoint, StoredTensor


@dataclass(frozen=True)
class Slot:
    """One tensor of the drafter.

    gguf    its name in llama.cpp's eagle3 architecture, None when it is read but not stored
    shape   PyTorch order (rows first) in the symbols of `config.Sizes`
    """

    gguf: str | None
    shape: tuple[str, ...]
    required: bool = True


# Canonical name -> slot.  A source name becomes canonical by dropping a leading "model." and then
# replacing the layer's prefix by "layer.".
SLOTS: dict[str, Slot] = {
    "fc.weight": Slot("fc.weight", ("H", "3Ht")),
    "input_norm.weight": Slot("enc.output_norm.weight", ("3Ht",), required=False),
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
    "norm.weight": Slot("output_norm.weight", ("H",)),
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
    (r"(^|\.)fc_norm\.", "EAGLE 3.1 (one norm per feature), which this version cannot convert yet"),
    (r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale\w*|weight_zero_point|input_scale|absmax)$",
     "a quantised checkpoint; only F32, F16 and BF16 weights can be converted"),
    (r"self_attn\.(q_norm|k_norm)\.", "normalised queries and keys (q/k norm, as in Qwen3)"),
    (r"self_attn\.(q_a_|q_b_|kv_a_|kv_b_)", "multi-head latent attention (MLA)"),
    (r"self_attn\.sinks$", "attention sinks"),
    (r"mlp\.(experts|gate|router|shared_expert\w*)\.", "a mixture of experts"),
    (r"(^|\.)(layers|midlayers)\.[1-9]\d*\.|(^|\.)midlayer\.[1-9]", "several decoder layers"),
    (r"\.bias$", "biases"),
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A way of writing EAGLE-3 checkpoints.  refusal names a family that is known but cannot be converted yet."""

    name: str
    refusal: str | None = None


SAFEAILAB = Family("SafeAILab")
SPECFORGE = Family("SpecForge")
ANGELSLIM = Family("AngelSlim")
MODELOPT = Family("ModelOpt")
NEMO = Family("NeMo")
SPECULATORS = Family("speculators", "its nested config (transformer_layer_config) cannot be read yet")

ARCHITECTURES = {
    "LlamaForCausalLMEagle3": SPECFORGE,
    "Eagle3LlamaForCausalLM": ANGELSLIM,
    "Eagle3Speculator": SPECULATORS,
    "Eagle3DraftModel": SPECULATORS,
}


def detect(config: Mapping[str, Any], names: Mapping[str, object]) -> Family:
    """The family, by the config's architecture where that is distinctive, otherwise by the tensors' names.

    SafeAILab files say LlamaForCausalLM like any Llama model, so they are what remains.
    """
    if "transformer_layer_config" in config or "speculators_model_type" in config:
        return SPECULATORS
    architectures = config.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else []:
        if isinstance(architecture, str) and architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    if any(name.startswith(("model.layers.0.", "model.midlayer.")) for name in names):
        return NEMO
    return MODELOPT if any(name.startswith("layers.0.") for name in names) else SAFEAILAB


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
