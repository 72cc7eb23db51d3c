"""Checkpoints on which the two converters differ by choice, and damaged ones that both refuse.

Of every case: what is written where llama.cpp runs both files alike, or what eagle3 refuses instead of guessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from agreeing_cases import LLAMA3, YARN, speculators_config
from cases import Case
from drafters import Drafter
from stored_files import Tensor, array

PLAIN = Drafter()
SPECULATORS = Drafter(layer="layers.0.", embeddings=True)
UNMAPPED = "Can not map tensor"


def choice_cases() -> list[Case]:
    return [*_equal_meaning(), *_refused_by_eagle3(), *_refused_by_both()]


def case(name: str, about: str, settings: Mapping[str, Any], drafter: Drafter = PLAIN, **more: Any) -> Case:
    """A case for F16 alone; tensors: changes to the drafter's."""
    tensors = drafter.tensors(**more.pop("tensors", {}))
    return Case(name, about, drafter, tensors, settings, outtypes=("f16",), **more)


def nested(**changes: Any) -> dict[str, Any]:
    """A speculators config with changes in transformer_layer_config; None removes a key."""
    config = speculators_config(SPECULATORS)
    flat = {k: v for k, v in {**config["transformer_layer_config"], **changes}.items() if v is not None}
    return {**config, "transformer_layer_config": flat}


def ones(*shape: int) -> Tensor:
    return array("BF16", np.ones(shape, np.float32))


def scaled(**scaling: Any) -> dict[str, Any]:
    return PLAIN.config(rope_scaling=scaling)


def _equal_meaning() -> list[Case]:
    whole = Drafter(draft_vocab=512)
    head_dim = {"eagle3.attention.key_length": "only eagle3", "eagle3.attention.value_length": "only eagle3"}
    betas = {"eagle3.rope.scaling.yarn_beta_fast": "only script", "eagle3.rope.scaling.yarn_beta_slow": "only script"}
    text = {f"tokenizer.{key}": "only script" for key in ("ggml.pre", "chat_template")}
    sections = {"eagle3.rope.dimension_sections": "only script"}
    mrope = scaled(rope_type="default", type="mrope", mrope_section=[2, 3, 3])
    return [
        case("d2t_identity", "a map of the whole vocabulary onto itself is not stored", whole.config(), whole,
             differs={"d2t": "only script"}),
        case("no_context", "no max_position_embeddings: transformers' 2048, or the target's; nothing is sized by it",
             PLAIN.config(max_position_embeddings=None), differs={"eagle3.context_length": "differs"}),
        case("yarn_usual_betas", "YaRN's betas 32 and 1 are llama.cpp's own, and its eagle3 loader reads no such key",
             scaled(**YARN, beta_fast=32.0, beta_slow=1.0), differs=betas),
        case("mrope", "sections of mrope, which the eagle3 loader does not read", mrope, differs=sections),
        case("target_folder", "a target's folder in place of its GGUF: what only text needs is left out",
             PLAIN.config(), folder=True, tokenizer="bpe", differs=text),
        case("speculators_no_theta", "no rope_theta: 10000 is written, or left to llama.cpp's default, the same",
             nested(rope_theta=None), SPECULATORS, differs={"eagle3.rope.freq_base": "only eagle3"}),
        case("speculators_no_head_dim", "no head_dim: width / heads is written, or left to llama.cpp's default",
             nested(head_dim=None), SPECULATORS, differs=head_dim),
    ]  # fmt: skip


def _refused_by_eagle3() -> list[Case]:
    incomplete = {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}
    contradicting = PLAIN.config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    misread = {"t2d": array("BOOL", np.isin(np.arange(512), PLAIN.ids() + 1))}
    return [
        case("llama3_incomplete", "a missing low_freq_factor: the script assumes 1", scaled(**incomplete),
             refused="low_freq_factor"),
        case("theta_twice", "two values of rope_theta: the script takes the one in rope_parameters", contradicting,
             refused="rope_theta is 500000.0 at top level, 10000.0"),
        case("draft_vocab_size_wrong", "draft_vocab_size contradicts the head: the script does not compare them",
             PLAIN.config(draft_vocab_size=32), refused="draft_vocab_size is 32, but the tensors say 64"),
        case("t2d_contradicts", "t2d marks other tokens than d2t: the script does not read t2d", PLAIN.config(),
             tensors=misread, refused="t2d"),
        case("dropped_tensor", "a tensor that starts with mlp: the script drops it silently", PLAIN.config(),
             tensors={"mlp_gate.weight": ones(64, 64)}, refused="mlp_gate.weight is not part of"),
    ]  # fmt: skip


def _refused_by_both() -> list[Case]:
    def extra(name: str, about: str, refused: str, **tensors: Tensor) -> Case:
        return case(name, about, PLAIN.config(), tensors=tensors, refused=refused, script_fails=UNMAPPED)

    norms = {f"midlayer.self_attn.{which}_norm.weight": ones(16) for which in "qk"}
    return [
        extra("q_norm", "normalised queries and keys", "normalised queries and keys", **norms),
        extra("mask_hidden", "P-EAGLE", "P-EAGLE", mask_hidden=ones(1, 192)),
        extra("second_layer", "two decoder layers", "several decoder layers",
              **{"layers.1.input_layernorm.weight": ones(64)}),
        extra("unknown_tensor", "a tensor that nobody knows", "not part of an EAGLE-3 drafter",
              **{"adapter.weight": ones(64, 64)}),
        case("two_layers", "num_hidden_layers 2", PLAIN.config(num_hidden_layers=2), refused="several decoder layers",
             script_fails=UNMAPPED),
    ]  # fmt: skip
