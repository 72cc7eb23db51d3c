"""What cannot be converted: one clear error each, exit code 2, and no file left behind."""

from __future__ import annotations

from collections.abc import Mapping

import checkpoints
import numpy as np
import pytest
from checkpoints import HT, VD, H, V, config


def half(*shape: int) -> checkpoints.Stored:
    return "F16", np.zeros(shape, "<f2")


def with_(changes: Mapping[str, checkpoints.Stored | None]) -> checkpoints.Tensors:
    """The checkpoint with tensors replaced, added, or (None) removed."""
    return {name: value for name, value in {**checkpoints.tensors(), **changes}.items() if value is not None}


MISSING = [name for name in checkpoints.tensors() if name not in ("t2d", "d2t", "lm_head.weight")]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_is_named(refused, name):
    stored = checkpoints.tensors()
    del stored[name]
    assert f"the tensor {name} is missing" in refused(stored)


def test_a_misspelt_tensor_is_named(refused):
    stored = checkpoints.tensors()
    stored["midlayer.mlp.up_projj.weight"] = stored.pop("midlayer.mlp.up_proj.weight")
    assert "midlayer.mlp.up_projj.weight is not part of an EAGLE-3 drafter" in refused(stored)


UNSUPPORTED = {
    "mask_hidden": "P-EAGLE",
    "fc_norm.3.weight": "another number of feature norms than 3",
    "midlayer.self_attn.q_norm.weight": "q/k norm",
    "midlayer.self_attn.q_proj.bias": "biases",
    "fc.bias": "biases",
    "layers.1.mlp.up_proj.weight": "several decoder layers",
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": "MLA",
    "midlayer.mlp.experts.0.up_proj.weight": "mixture of experts",
    "midlayer.self_attn.q_proj.weight_scale": "quantised",
    "midlayer.mlp.down_proj.qweight": "quantised",
    "midlayer.self_attn.sinks": "attention sinks",
    "midlayer.extra": "not part of an EAGLE-3 drafter",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_tensor_that_llama_cpp_cannot_run_is_explained(refused, name):
    message = refused(checkpoints.tensors() | {name: half(H)})
    assert name in message
    assert UNSUPPORTED[name] in message


def test_eagle_1_and_2_are_called_by_their_name(refused):
    stored = checkpoints.tensors("layers.0.") | {"fc.weight": half(H, 2 * H), "fc.bias": half(H)}
    del stored["layers.0.hidden_norm.weight"]
    assert "this is an EAGLE-1/2 drafter" in refused(stored)


def test_an_ordinary_model_is_no_drafter(refused):
    stored = {"model.layers.0.mlp.up_proj.weight": half(H, H), "model.norm.weight": half(H)}
    assert "fc.weight is missing, so this is not an EAGLE-3 drafter" in refused(stored)


def test_the_same_tensor_twice(refused):
    assert "one tensor under two names" in refused(checkpoints.tensors() | {"model.norm.weight": half(H)})


WRONG_SHAPES = [
    ({"norm.weight": half(H + 1)}, "norm.weight: shape [65], expected [64]"),
    ({"midlayer.mlp.up_proj.weight": half(H, H)}, "midlayer.mlp.up_proj.weight: shape [64, 64], expected [96, 64]"),
    ({"midlayer.self_attn.v_proj.weight": half(16, 128)}, "v_proj.weight: shape [16, 128], expected [32, 128]"),
    ({"lm_head.weight": half(VD, H + 1)}, "lm_head.weight: shape [32, 65], expected [32, 64]"),
    ({"lm_head.weight": half(VD + 1, H)}, "expected [33]"),
    ({"embed_tokens.weight": half(V + 1, H)}, "embed_tokens.weight: shape [265, 64], expected [264, 64]"),
    ({"fc.weight": half(H)}, "fc.weight: expected a matrix"),
    ({"fc.weight": half(H, 4 * HT)}, "fuses 4 features of width 64, expected 3"),
    ({"fc.weight": half(H, 3 * 48)}, "made for a target of width 48, but"),
    ({"fc.weight": half(H, 100)}, "made for a target of another width than 64"),
    ({"midlayer.self_attn.q_proj.weight": half(90, 128)}, "q_proj has 90 rows, which heads of 16"),
    ({"norm.weight": ("I64", np.zeros(H, "<i8"))}, "norm.weight: I64 means a quantised checkpoint"),
    ({"fc.weight": ("I8", np.zeros((H, 3 * HT), "i1"))}, "fc.weight: I8 means a quantised checkpoint"),
    ({"d2t": None, "t2d": None}, "neither d2t nor t2d"),
    ({"lm_head.weight": None}, "d2t: shape [32], expected [264]"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG_SHAPES, ids=[w for _, w in WRONG_SHAPES])
def test_a_wrong_shape_says_what_was_expected(refused, changes, words):
    assert words in refused(with_(changes), config(draft_vocab_size=None))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fc.weight", np.full((H, 3 * HT), np.nan, "<f4"), "holds NaN"),
        ("midlayer.self_attn.q_proj.weight", np.full((96, 2 * H), np.inf, "<f4"), "holds NaN or infinite"),
        ("fc.weight", np.full((H, 3 * HT), 70000.0, "<f4"), "largest value 70000 does not fit into F16"),
    ],
)
def test_values_that_cannot_be_stored(refused, name, value, words):
    message = refused(with_({name: ("F32", value)}))
    assert words in message
    assert name in message


CONFIGS = [
    ({"hidden_size": 128}, "hidden_size is 128, but the tensors say 64"),
    ({"intermediate_size": 1}, "intermediate_size is 1, but the tensors say 96"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3, but the tensors say 2"),
    ({"num_attention_heads": 4}, "num_attention_heads is 4, but the tensors say 6"),
    ({"vocab_size": 300}, "vocab_size is 300, but the target has 264"),
    ({"draft_vocab_size": 16}, "draft_vocab_size is 16, but the tensors say 32"),
    ({"target_hidden_size": 32}, "target_hidden_size is 32, but the target has 64"),
    ({"hidden_size": "64"}, "hidden_size: expected a positive whole number"),
    ({"head_dim": 0}, "head_dim: expected a positive whole number"),
    ({"head_dim": 3}, "head_dim: expected an even number"),
    ({"head_dim": None, "num_attention_heads": None}, "neither head_dim nor num_attention_heads"),
    ({"head_dim": None, "num_attention_heads": 5}, "5 heads do not divide the 96 rows of q_proj"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"norm_before_residual": 1}, "norm_before_residual: expected true or false"),
    ({"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}}, "got True and False"),
    ({"norm_before_fc": True}, "norm_before_fc is true, but the tensor input_norm.weight is missing"),
    ({"num_hidden_layers": 2}, "several decoder layers"),
    ({"hidden_act": "gelu"}, "another activation than SiLU"),
    ({"attention_bias": True}, "biases"),
    ({"sliding_window": 256}, "neither layer_types nor use_sliding_window says if it is used"),
    ({"layer_types": ["sliding_attention"]}, "there is no sliding_window"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "but the drafter has one layer"),
    ({"layer_types": ["sliding_attention"], "use_sliding_window": False}, "but use_sliding_window is false"),
    ({"layer_types": ["linear_attention"]}, "expected full_attention or sliding_attention"),
    ({"partial_rotary_factor": 0.2}, "of 16 dimensions is no even share"),
    ({"layer_types": 5}, "layer_types: expected a list"),
    ({"quantization_config": {"quant_method": "gptq"}}, "a quantised checkpoint"),
    ({"fc_norm": True}, "fc_norm is true, but the tensor fc_norm.0.weight is missing"),
    ({"norm_output": "yes"}, "norm_output: expected true or false"),
    ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is false, but the tensor norm.weight is"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "only the target's last hidden state"),
    ({"eagle_config": {"parallel_draft_step": 4}}, "P-EAGLE"),
    ({"eagle_config": 3}, "eagle_config: expected an object"),
    ({"logit_scale": 0.5}, "the key 'logit_scale' (0.5) is unknown and may change"),
    ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is unknown"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "three ascending ids"),
    ({"transformer_layer_config": []}, "transformer_layer_config: expected an object"),
    ({"transformer_layer_config": {"vocab_size": 300}}, "vocab_size is 264, but 300 in transformer_layer_config"),
    ({"speculators_model_type": "peagle"}, "'peagle' names P-EAGLE"),
    ({"speculators_model_type": "eagle"}, "'eagle' names EAGLE-1/2"),
    ({"architectures": ["DFlashDraftModel"]}, "names DFlash"),
    ({"architectures": ["EagleLlamaForCausalLM"]}, "names EAGLE-1/2"),
]


@pytest.mark.parametrize(("changes", "words"), CONFIGS, ids=[w for _, w in CONFIGS])
def test_a_config_that_does_not_fit_names_the_key(refused, changes, words):
    message = refused(config=config(**changes))
    assert words in message
    assert "config.json" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 256, "use_sliding_window": False},
        {"sliding_window": 512},
        {"sliding_window": None, "layer_types": ["full_attention"]},
        {"eagle_config": {"use_aux_hidden_state": True, "parallel_draft_step": 1}},
        {"logit_scale": 0},
        {"final_logit_softcapping": None},
        {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "bos_token_id": 151643},
        {"rms_norm_eps": None},
    ],
)
def test_keys_that_change_nothing_are_accepted(convert, changes):
    convert(config=config(**changes))


def test_an_unknown_harmless_key_is_noted(convert):
    report, _, _ = convert(config=config(trained_by="somebody"))
    assert "the key 'trained_by' is not used" in report.notes[0]


def test_missing_embeddings_or_head_of_another_width(refused):
    stored = checkpoints.tensors(hidden=32)
    changed = config(hidden_size=32)
    assert "embed_tokens.weight is missing and cannot be the target's" in refused(stored, changed)
    stored["embed_tokens.weight"] = half(V, 32)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del stored[name]
    assert "lm_head.weight is missing and cannot be" in refused(stored, config(hidden_size=32, draft_vocab_size=None))


def test_a_reordered_vocabulary_needs_its_own_head(refused):
    stored = checkpoints.tensors()
    for name in ("lm_head.weight", "t2d"):
        del stored[name]
    stored["d2t"] = ("I64", np.ones(V, "<i8"))
    assert "outside the target's 0..263" in refused(stored, config(draft_vocab_size=None))


def test_options(refused):
    assert "--outtype: expected one of f32, f16, bf16, q8_0" in refused(outtype="mxfp4")
    assert "--aux-convention: expected one of auto" in refused(aux_convention="both")
    assert "--aux-convention: has no effect" in refused(aux_convention="input")
