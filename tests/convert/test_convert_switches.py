"""EAGLE 3.1, windows, missing norms, partial RoPE, and speculators' nested configs."""

from __future__ import annotations

from typing import Any

import checkpoints
import numpy as np
import pytest
from checkpoints import HEAD_DIM, HEADS, HT, KV_HEADS, config

PLAIN = {"fc_norm": False, "norm_output": False, "final_norm": True, "sliding_window": None}


def fc_norms(prefix: str = "", dtype: str = "F32") -> checkpoints.Tensors:
    """Three norms of different values."""
    rows = np.arange(3 * HT).reshape(3, HT) / 16
    made = (checkpoints.bf16(row) if dtype == "BF16" else row.astype(checkpoints.NAMES[dtype]) for row in rows)
    return {f"{prefix}fc_norm.{i}.weight": (dtype, values) for i, values in enumerate(made)}


def without(name: str) -> checkpoints.Tensors:
    return {k: v for k, v in checkpoints.tensors().items() if k != name}


def own(keys: dict[str, Any]) -> dict[str, Any]:
    """Our keys about what llama.cpp's graph lacks."""
    return {
        k.removeprefix("eagle3_cli."): v for k, v in keys.items() if k.startswith("eagle3_cli.") and "target" not in k
    }


def test_a_plain_drafter_has_no_switches(convert):
    report, keys, _ = convert()
    assert {name: getattr(report, name) for name in PLAIN} == PLAIN
    assert own(keys) == {}


# --- EAGLE 3.1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_feature_norms_travel_as_one_array(convert, dtype):
    report, keys, tensors = convert(checkpoints.tensors() | fc_norms(dtype=dtype), config(fc_norm=True))
    assert report.fc_norm
    assert np.array_equal(own(keys)["fc_norm"], np.arange(3 * HT) / 16)
    assert not [name for name in tensors if "fc_norm" in name]
    assert {r.transform for r in report.tensors if "fc_norm" in r.source} == {"stored as the key eagle3_cli.fc_norm"}


def test_feature_norms_are_taken_from_the_tensors_if_the_config_is_silent(convert):
    report, _, _ = convert(checkpoints.tensors(prefix="model.") | fc_norms("model."))
    assert report.fc_norm
    assert "fc_norm.0.weight is there and fc_norm is not in the config: taken as true" in report.notes


@pytest.mark.parametrize(
    ("stored", "changes", "words"),
    [
        (fc_norms(), {"fc_norm": False}, "fc_norm is false, but the tensor fc_norm.0.weight is there"),
        ({k: v for k, v in fc_norms().items() if "1" not in k}, {}, "fc_norm.1.weight is missing, but fc_norm.0"),
        (fc_norms() | {"input_norm.weight": ("F32", np.ones(3 * HT, "<f4"))}, {}, "exclude each other"),
        (fc_norms() | {"fc_norm.2.weight": ("F32", np.ones(HT + 1, "<f4"))}, {}, "shape [65], expected [64]"),
        (fc_norms() | {"fc_norm.2.weight": ("F32", np.full(HT, np.nan, "<f4"))}, {}, "fc_norm.2.weight: holds NaN"),
    ],
)  # fmt: skip
def test_feature_norms_that_contradict(refused, stored, changes, words):
    assert words in refused(checkpoints.tensors() | stored, config(**changes))


@pytest.mark.parametrize("place", [lambda v: {"norm_output": v}, lambda v: {"eagle_config": {"norm_output": v}}])
@pytest.mark.parametrize(("stated", "feedback", "expected"), [
    (True, "auto", True), (True, "pre", False), (True, "post", True),
    (False, "auto", False), (False, "post", True), (None, "auto", False), (None, "post", True),
])  # fmt: skip
def test_feedback_is_what_the_config_says_unless_overridden(convert, place, stated, feedback, expected):
    """norm_output has no tensor to give it away."""
    report, keys, _ = convert(config=config(**({} if stated is None else place(stated))), feedback=feedback)
    assert report.norm_output is expected
    assert own(keys) == ({"norm_output": True} if expected else {})
    overridden = stated is not None and expected is not stated
    assert any("overrides it" in note for note in report.notes) is overridden


def test_specforge_files_are_known_to_claim_post_norm_feedback(convert):
    report, _, _ = convert(config=config(norm_output=True))
    assert any("compare with --feedback pre" in note for note in report.notes)
    report, _, _ = convert(config=config(norm_output=True, architectures=["Eagle3LlamaForCausalLM"]))
    assert not any("compare with --feedback pre" in note for note in report.notes)


def test_feedback_is_one_of_three(refused):
    assert "--feedback: expected one of auto, pre, post" in refused(feedback="both")


# --- no final norm -------------------------------------------------------------------------------------

NO_NORM = {"eagle_config": {"use_last_layernorm": False}}


def test_a_missing_final_norm_becomes_ones_and_a_key(convert):
    report, keys, tensors = convert(without("norm.weight"), config(**NO_NORM))
    assert report.final_norm is False
    assert own(keys) == {"final_norm": False}
    assert np.array_equal(tensors["output_norm.weight"].data, np.ones(checkpoints.H))


def test_post_norm_feedback_needs_a_norm(refused):
    assert "there is no final norm" in refused(without("norm.weight"), config(norm_output=True, **NO_NORM))
    assert "this drafter has no final norm" in refused(without("norm.weight"), config(**NO_NORM), feedback="post")


# --- windows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 256, "layer_types": ["sliding_attention"]}, 256),
        ({"sliding_window": 256, "use_sliding_window": True}, 256),
        ({"sliding_window": 256, "use_sliding_window": True, "layer_types": ["sliding_attention"]}, 256),
        ({"sliding_window": 256, "use_sliding_window": True, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 28}, None),
        ({"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 0}, 256),
        ({"sliding_window": 256, "use_sliding_window": False}, None),
        ({"sliding_window": 256, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 512}, None),
    ],
)
def test_windows(convert, changes, window):
    if changes.get("max_window_layers") == 0:
        changes = {k: v for k, v in changes.items() if k != "max_window_layers"}
    report, keys, _ = convert(config=config(**changes))
    assert report.sliding_window == window
    assert own(keys) == ({} if window is None else {"sliding_window": window})
    assert any("llama-server attends to all positions" in note for note in report.notes) is (window is not None)


# --- partial RoPE --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_partial_rope_rotates_the_first_dimensions_only(convert, place):
    half = {"partial_rotary_factor": 0.5}
    stored = checkpoints.tensors()
    changes = half if place == "top" else {"rope_parameters": {"rope_type": "default", **half}}
    _, keys, tensors = convert(stored, config(**changes))
    assert keys["eagle3.rope.dimension_count"] == HEAD_DIM // 2
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        source = stored[f"midlayer.self_attn.{name}_proj.weight"][1].astype(np.float32)
        rows = tensors[f"blk.0.attn_{name}.weight"].data.astype(np.float32)
        for head in range(heads):
            a, b = source[head * HEAD_DIM :][:HEAD_DIM], rows[head * HEAD_DIM :][:HEAD_DIM]
            assert np.array_equal(b[0:8:2], a[0:4])
            assert np.array_equal(b[1:8:2], a[4:8])
            assert np.array_equal(b[8:], a[8:])


# --- speculators ---------------------------------------------------------------------------------------


def speculators(outer: dict[str, Any] | None = None, **nested: Any) -> dict[str, Any]:
    flat = config()
    inner = {k: flat[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                                  "head_dim", "num_hidden_layers", "vocab_size", "rms_norm_eps", "hidden_act",
                                  "max_position_embeddings")}  # fmt: skip
    inner = {k: v for k, v in {**inner, "model_type": "llama", **nested}.items() if v is not None}
    made = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": checkpoints.VD, "norm_before_residual": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 12, 21], "transformer_layer_config": inner,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b", "architectures": ["X"]}},
        "tie_word_embeddings": False, "dtype": "bfloat16", "embed_requires_grad": False,
    }  # fmt: skip
    return {k: v for k, v in {**made, **(outer or {})}.items() if v != "absent"}


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
def test_a_nested_config_gives_the_same_bytes_as_a_flat_one(convert, tmp_path, architecture):
    stored = checkpoints.tensors("layers.0.")
    report, _, _ = convert(stored, speculators({"architectures": [architecture]}))
    nested = (tmp_path / "out.gguf").read_bytes()
    convert(checkpoints.tensors(), config(eagle_aux_hidden_state_layer_ids=[2, 12, 21]))
    assert nested == (tmp_path / "out.gguf").read_bytes()
    assert report.family == "speculators"


@pytest.mark.parametrize(("stated", "expected"), [(True, True), (False, False), ("absent", True)])
def test_norm_before_residual_of_speculators(convert, stated, expected):
    report, keys, _ = convert(checkpoints.tensors("layers.0."), speculators({"norm_before_residual": stated}))
    assert keys["eagle3.norm_before_residual"] is expected
    assert any("as vLLM reads speculators files" in note for note in report.notes) is (stated == "absent")


def test_norm_before_residual_of_everybody_else_is_false(convert):
    assert convert()[0].norm_before_residual is False


def test_key_value_heads_follow_from_the_tensors(convert):
    """speculators 812: num_key_value_heads absent."""
    _, keys, _ = convert(checkpoints.tensors("layers.0."), speculators(num_key_value_heads=None))
    assert keys["eagle3.attention.head_count_kv"] == KV_HEADS


def test_a_default_of_the_nested_class_is_no_missing_fact(refused):
    """32 heads is what transformers' LlamaConfig leaves out of a file; these tensors have 6."""
    words = refused(checkpoints.tensors("layers.0."), speculators(num_attention_heads=None))
    assert "num_attention_heads is 32, but the tensors say 6" in words


def test_rope_of_the_nested_config_counts(convert):
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    _, keys, _ = convert(checkpoints.tensors("layers.0."), speculators(rope_parameters=scaling))
    assert keys["eagle3.rope.freq_base"] == 5e5
    assert (keys["eagle3.rope.scaling.type"], keys["eagle3.rope.scaling.factor"]) == ("linear", 4.0)


def test_eagle_3_1_of_speculators(convert):
    outer = {"fc_norm": True, "norm_output": True, "architectures": ["Eagle3DraftModel"]}
    window = {"sliding_window": 2048, "layer_types": ["sliding_attention"], "max_position_embeddings": 4096}
    report, _, _ = convert(checkpoints.tensors("layers.0.") | fc_norms(), speculators(outer, **window))
    assert (report.fc_norm, report.norm_output, report.sliding_window) == (True, True, 2048)


def test_several_layers_in_the_nested_config_are_refused(refused):
    assert "several decoder layers" in refused(checkpoints.tensors("layers.0."), speculators(num_hidden_layers=2))
