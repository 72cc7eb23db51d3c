"""A trained drafter as a checkpoint: model.safetensors and config.json in SpecForge's layout.

`eagle3 convert` reads it, and so do vLLM and SGLang, which differ in where they look for the aux layers: vLLM at top
level for layer *inputs* (llama.cpp's convention, too), SGLang and SpecForge in eagle_config for layer *outputs*.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..convert.layers import KEY
from ..convert.output import replacing
from ..errors import OptionError
from .model import Drafter, FeatureDrafter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NOT_WEIGHTS = ("d2t", "scale")


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says besides its weights.

    aux_layers   the *inputs* of these target layers
    context      positions that the target's texts may have
    bos, eos     ids of the target, None where it has none
    dtype        of the weights: float32, bfloat16 or float16
    """

    aux_layers: tuple[int, int, int]
    context: int
    bos: int | None = None
    eos: int | None = None
    dtype: str = "float32"


def write_checkpoint(drafter: Drafter, folder: Path, facts: CheckpointFacts) -> None:
    """Write both files into a folder, which is made; each appears complete or not at all.

    OptionError for aux layers that a config cannot say, and for a drafter that no file format holds.
    """
    if isinstance(drafter, FeatureDrafter):
        raise OptionError("--objective eagle: is for comparison in torch, llama.cpp's eagle3 graph cannot run it.")
    config = checkpoint_config(drafter, facts)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as path:
        path.write_bytes(save(checkpoint_tensors(drafter, facts.dtype), metadata={"format": "pt"}))
    with replacing(folder / "config.json") as path:
        path.write_text(json.dumps(config, indent=2) + "\n")


def checkpoint_tensors(drafter: Drafter, dtype: str) -> dict[str, Tensor]:
    """All tensors by their SpecForge names, copies on the CPU.

    fc.weight works on the states as they are: the columns are divided by `scale`.  d2t is int64 [Vd] OFFSETS (target
    id = i + d2t[i]), t2d bool [V] marks the same tokens.
    """
    state = {name: tensor for name, tensor in drafter.state_dict().items() if name not in _NOT_WEIGHTS}
    state["fc.weight"] = state["fc.weight"].float() / drafter.scale
    tensors = {name: tensor.to("cpu", DTYPES[dtype], copy=True).contiguous() for name, tensor in state.items()}
    ids = drafter.d2t.cpu()
    mask = torch.zeros(drafter.shape.vocab, dtype=torch.bool)
    mask[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": mask}


def checkpoint_config(drafter: Drafter, facts: CheckpointFacts) -> dict[str, Any]:
    """config.json.  Switches that are off by default everywhere are only there where they are on."""
    shape = drafter.shape
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.target_width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": facts.context,
        "bos_token_id": facts.bos,
        "eos_token_id": facts.eos,
        "tie_word_embeddings": False,
        "torch_dtype": facts.dtype,
        "use_cache": True,
        **_aux_keys(facts.aux_layers),
    }
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return config | {name: True for name in switches if getattr(shape, name)}


def _aux_keys(inputs: tuple[int, int, int]) -> dict[str, Any]:
    """The aux layers at top level as inputs and in eagle_config as outputs.

    Readers, our converter among them, take a list that starts with 1 for outputs and one that starts with 2 for inputs,
    wherever it is.  So inputs that start with 3 can only be said at top level, and such that start with 1 not at all.
    """
    if not 2 <= inputs[0] < inputs[1] < inputs[2]:
        raise OptionError(
            f"aux layers: expected three ascending layers from 2 on, got {list(inputs)}.",
            "The input of layer 1 cannot be named in a checkpoint: a list that starts with 1 counts outputs.",
        )
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    if inputs[0] != 3:
        nested[KEY] = [layer - 1 for layer in inputs]
    return {KEY: list(inputs), "eagle_config": nested}
