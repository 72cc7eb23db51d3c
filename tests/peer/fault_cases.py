"""Checkpoints for which llama.cpp's script writes nothing, or a file that does not load or means something else.

Everything here was found by running it.  Where the script's file loads, the consequence is in the case's `about`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from agreeing_cases import AUX, INPUTS, YARN
from cases import Case
from choice_cases import PLAIN, SPECULATORS, UNMAPPED, case, nested, ones, scaled
from drafters import Drafter
from stored_files import Tensor, array

OUTPUTS = [i - 1 for i in INPUTS]  # the same layers, counted as outputs
ATTN_FACTOR = {"eagle3.rope.scaling.attn_factor": "only eagle3"}


def fault_cases() -> list[Case]:
    return [*_layers(), *_vocabulary(), *_sizes(), *_speculators(), *_norms(), *_rope(), *_values(), *_names()]


def _layers() -> list[Case]:
    other = {"eagle3.target_layers": "differs"}
    four, beyond = [2, 6, 9, 13], [2, 9, 99]
    return [
        case("aux_nested", "ids in eagle_config are not read: the default layers are written",
             PLAIN.config(eagle_config={AUX: [1, 9, 12]}), differs=other),
        case("aux_outputs", "ids of outputs are taken for inputs: one layer off", PLAIN.config(**{AUX: OUTPUTS}),
             differs=other),
        case("aux_four", "four ids are written", PLAIN.config(**{AUX: four}), refused="three layer ids", loads=False),
        case("aux_beyond", "an id beyond the target's layers is written", PLAIN.config(**{AUX: beyond}),
             refused="does not fit a target of 16 layers"),
    ]  # fmt: skip


def _vocabulary() -> list[Case]:
    whole, masked, mapless = Drafter(draft_vocab=512, maps=()), Drafter(maps=("t2d",)), Drafter(maps=())
    llama = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}
    even = np.arange(64) * 2
    absolute = {"d2t": array("I64", even), "t2d": array("BOOL", np.isin(np.arange(512), even))}
    tokens = {f"tokenizer.ggml.{key}": "differs" for key in ("tokens", "scores", "token_type")}
    return [
        case("no_draft_vocab_size", "without draft_vocab_size it is no EAGLE-3 drafter",
             PLAIN.config(draft_vocab_size=None), script_fails=UNMAPPED),
        case("no_draft_vocab_size_whole", "the same for Vicuna's head, which has no reduced vocabulary",
             whole.config(**llama), whole, script_fails=UNMAPPED),
        case("d2t_absolute", "absolute ids are taken for offsets: out of range here", PLAIN.config(),
             tensors={"d2t": array("I64", PLAIN.ids())}, script_fails="out of range"),
        case("d2t_absolute_low", "absolute ids are taken for offsets: other tokens are proposed", PLAIN.config(),
             tensors=absolute, differs={"d2t": "differs"}),
        case("t2d_alone", "a reduced head with t2d alone: no d2t is written", masked.config(), masked,
             differs={"d2t": "only eagle3"}, loads=False),
        case("no_maps", "a reduced head with neither map: no d2t is written", mapless.config(), mapless,
             refused="neither d2t nor t2d", loads=False),
        case("other_vocab_size", "vocab_size is not the target's: the tokenizer is cut to it",
             PLAIN.config(vocab_size=480), refused="vocab_size is 480, but the target has 512"),
        case("no_vocab_size", "no vocab_size: the tokenizer is padded to 32000, transformers' default",
             PLAIN.config(vocab_size=None), differs={"eagle3.vocab_size": "differs", **tokens}),
    ]  # fmt: skip


def _sizes() -> list[Case]:
    wide = Drafter(heads=6, kv_heads=2, head_dim=32)
    dimensions = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    head_dim = {f"eagle3.{key}": "differs" for key in dimensions}
    heads = {"blk.0.attn_q.weight": "differs", "eagle3.attention.head_count": "differs"}
    kv_heads = {"blk.0.attn_k.weight": "differs", "eagle3.attention.head_count_kv": "differs"}
    return [
        case("no_kv_heads", "no num_key_value_heads: as many as heads", PLAIN.config(num_key_value_heads=None),
             differs=kv_heads, loads=False),
        case("no_heads", "no num_attention_heads: 32, transformers' default", PLAIN.config(num_attention_heads=None),
             differs=heads, loads=False),
        case("no_head_dim", "no head_dim where heads x head_dim != width: width / heads", wide.config(head_dim=None),
             wide, differs=head_dim, loads=False),
        case("kv_heads_wrong", "num_key_value_heads contradicts k_proj", PLAIN.config(num_key_value_heads=1),
             refused="num_key_value_heads is 1, but the tensors say 2", loads=False),
        case("hidden_size_wrong", "hidden_size contradicts the tensors", PLAIN.config(hidden_size=128),
             refused="hidden_size is 128, but the tensors say 64", loads=False),
        case("target_size_wrong", "target_hidden_size contradicts the target", PLAIN.config(target_hidden_size=80),
             refused="target_hidden_size is 80, but the target has 64", loads=False),
        case("wrong_target", "fc is made for a target of another width", PLAIN.config(),
             tensors={"fc.weight": ones(64, 240)}, refused="made for a target of width 80", loads=False),
        case("missing_tensor", "v_proj is missing", PLAIN.config(),
             tensors={"midlayer.self_attn.v_proj.weight": None}, refused="v_proj.weight is missing", loads=False),
    ]  # fmt: skip


def _speculators() -> list[Case]:
    no_residual = {k: v for k, v in nested().items() if k != "norm_before_residual"}
    eps, context = "eagle3.attention.layer_norm_rms_epsilon", "eagle3.context_length"
    return [
        case("speculators_no_kv_heads", "no num_key_value_heads", nested(num_key_value_heads=None), SPECULATORS,
             script_fails="num_key_value_heads"),
        case("speculators_no_eps", "no rms_norm_eps: none is written", nested(rms_norm_eps=None), SPECULATORS,
             differs={eps: "only eagle3"}, loads=False),
        case("speculators_no_context", "no max_position_embeddings: no context length is written",
             nested(max_position_embeddings=None), SPECULATORS, differs={context: "only eagle3"}, loads=False),
        case("speculators_no_residual", "no norm_before_residual: false, where speculators and vLLM mean true",
             no_residual, SPECULATORS, differs={"eagle3.norm_before_residual": "differs"}),
    ]  # fmt: skip


def _norms() -> list[Case]:
    fused = Drafter(input_norm=True)
    fc_norm = {f"fc_norm.{i}.weight": ones(64) for i in range(3)}
    flag = {"eagle3.norm_before_fc": "differs"}
    unnormed = {"output_norm.weight": "only eagle3", "eagle3_cli.final_norm": "only eagle3"}
    return [
        case("fc_norm", "EAGLE 3.1: one norm per feature", PLAIN.config(fc_norm=True), tensors=fc_norm,
             script_fails=UNMAPPED),
        case("norm_output", "EAGLE 3.1: feedback after the norm is not recorded", PLAIN.config(norm_output=True),
             differs={"eagle3_cli.norm_output": "only eagle3"}),
        case("norm_before_fc_nested", "norm_before_fc in eagle_config is not read: the norm is stored, the flag false",
             fused.config(eagle_config={"norm_before_fc": True}), fused, differs=flag, loads=False),
        case("norm_before_fc_absent", "input_norm without the flag: the same", fused.config(), fused, differs=flag,
             loads=False),
        case("norm_before_fc_alone", "the flag without input_norm", PLAIN.config(norm_before_fc=True),
             refused="input_norm.weight is missing", loads=False),
        case("no_final_norm", "use_last_layernorm false: no output_norm is written",
             PLAIN.config(eagle_config={"use_last_layernorm": False}), tensors={"norm.weight": None},
             differs=unnormed, loads=False),
        case("last_feature_only", "use_aux_hidden_state false is not read: three layers are fused all the same",
             PLAIN.config(eagle_config={"use_aux_hidden_state": False}), refused="use_aux_hidden_state is False"),
        case("window", "sliding-window attention is not recorded: full attention",
             PLAIN.config(sliding_window=2048, use_sliding_window=True),
             differs={"eagle3_cli.sliding_window": "only eagle3"}),
        case("gelu", "another activation is not read: SiLU is run", PLAIN.config(hidden_act="gelu"),
             refused="hidden_act is 'gelu'"),
    ]  # fmt: skip


def _rope() -> list[Case]:
    keys = {f"eagle3.rope.scaling.{key}": "only script" for key in ("type", "factor", "original_context_length")}
    freqs = {**keys, **ATTN_FACTOR, "rope_freqs.weight": "only eagle3"}
    betas = {f"eagle3.rope.scaling.yarn_beta_{which}": "only script" for which in ("fast", "slow")}
    partial = dict.fromkeys(("blk.0.attn_q.weight", "blk.0.attn_k.weight", "eagle3.rope.dimension_count"), "differs")
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 2048}
    yarn_key = {"eagle3.rope.scaling.yarn_attn_factor": "only script"}
    return [
        case("yarn_betas", "other betas: under keys that the eagle3 loader does not read, so 32 and 1 are run",
             scaled(**YARN, beta_fast=16.0, beta_slow=2.0), differs={**freqs, **betas}),
        case("yarn_attention", "attention_factor: under a key that the eagle3 loader does not read",
             scaled(**YARN, attention_factor=1.0), differs={**ATTN_FACTOR, **yarn_key}),
        case("yarn_mscale", "mscale and mscale_all_dim are not read", scaled(**YARN, mscale=1.0, mscale_all_dim=1.0),
             differs=ATTN_FACTOR),
        case("yarn_truncate", "truncate false is not read", scaled(**YARN, truncate=False), differs=freqs),
        case("yarn_no_original", "YaRN without the original context", scaled(rope_type="yarn", factor=32.0),
             script_fails="original_max_position_embeddings"),
        case("rope_unknown", "an unknown rope type: plain RoPE and a warning", scaled(rope_type="wavy", factor=2.0),
             refused="rope type 'wavy' is unknown"),
        case("rope_longrope", "longrope: the type without its factors", scaled(rope_type="longrope", **lists),
             refused="short_factor"),
        case("rope_linear_no_factor", "linear without a factor: plain RoPE", scaled(rope_type="linear"),
             refused="factor"),
        case("rope_partial", "partial_rotary_factor is not read: all dimensions turn",
             PLAIN.config(partial_rotary_factor=0.5), differs=partial),
    ]  # fmt: skip


def _values() -> list[Case]:
    def filled(value: float) -> Mapping[str, Tensor]:
        return {"fc.weight": array("BF16", np.full((64, 192), value, np.float32))}

    return [
        case("overflow", "values beyond F16 become infinite", PLAIN.config(), tensors=filled(1e6),
             refused="does not fit into F16"),
        case("not_a_number", "NaN is copied", PLAIN.config(), tensors=filled(np.nan), refused="NaN"),
    ]  # fmt: skip


def _names() -> list[Case]:
    def extra(name: str, about: str, tensor: str, shape: tuple[int, ...], **more: Any) -> Case:
        return case(name, about, PLAIN.config(), tensors={tensor: ones(*shape)}, **more)

    midlayer, nemo = (
        Drafter(layer="midlayer.", prefix="model."),
        Drafter(layer="layers.0.", prefix="model.", input_norm=True),
    )
    qwen3 = PLAIN.config(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    return [
        extra("bias", "a bias of q is written", "midlayer.self_attn.q_proj.bias", (64,), refused="biases", loads=False),
        extra("fc_bias", "a bias of fc is written", "fc.bias", (64,), refused="biases", loads=False),
        extra("verifier", "a copy of the target's head", "verifier_lm_head.weight", (512, 64), script_fails=UNMAPPED),
        case("nemo_midlayer", "the prefix model.midlayer", midlayer.config(), midlayer, script_fails="AssertionError"),
        case("nemo_input_norm", "the name model.input_norm", nemo.config(norm_before_fc=True), nemo,
             script_fails=UNMAPPED),
        case("architecture_qwen3", "an architecture of another class", qwen3, script_fails=UNMAPPED),
        case("architecture_unknown", "an architecture without a class",
             PLAIN.config(architectures=["Eagle3Phi3ForCausalLM"]), script_fails="is not supported"),
    ]  # fmt: skip
