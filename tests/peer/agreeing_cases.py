"""Checkpoints in the layouts of the published families: both converters must write the same tensors and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import Case
from drafters import LAYERS, Drafter
from numpy.typing import NDArray
from stored_files import Tensor, array

LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
AUX = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, Tensor | None]
INPUTS = [2, LAYERS // 2, LAYERS - 3]


def agreeing_cases() -> list[Case]:
    return [*_families(), *_rope(), *_shapes(), *_storage(), *_vocabulary()]


def _case(
    name: str, about: str, drafter: Drafter, settings: dict[str, Any], tensors: Tensors | None = None, **more: Any
) -> Case:
    return Case(name, about, drafter, drafter.tensors(**(tensors or {})), settings, **more)


def speculators_config(drafter: Drafter, **changes: Any) -> dict[str, Any]:
    """speculators: the layer's sizes in transformer_layer_config, the draft's own facts at top level."""
    flat = drafter.config(architectures=None, draft_vocab_size=None, tie_word_embeddings=None)
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/target"}
    made = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.1.0",
        "draft_vocab_size": drafter.draft_vocab, "norm_before_residual": False, "target_hidden_size": None,
        "has_no_defaults_at_init": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": verifier},
        "transformer_layer_config": flat,
    }  # fmt: skip
    return {**made, **changes}


def _families() -> list[Case]:
    plain, modelopt = Drafter(), Drafter(layer="layers.0.", input_norm=True, maps=("d2t",))
    # SafeAILab's files have no head_dim and, for most targets, no rope_theta
    official = Drafter(dtype="F16").config(
        architectures=["LlamaForCausalLM"], head_dim=None, rope_theta=None, torch_dtype="float16"
    )
    speculators = Drafter(layer="layers.0.", embeddings=True)
    nemo = Drafter(layer="layers.0.", prefix="model.", embeddings=True)
    nested = speculators_config(speculators)
    return [
        _case("safeailab", "LlamaForCausalLM, midlayer, F16", Drafter(dtype="F16"), official),
        _case("specforge", "LlamaForCausalLMEagle3, midlayer, BF16", plain, plain.config()),
        _case("angelslim", "Eagle3LlamaForCausalLM, midlayer", plain,
              plain.config(architectures=["Eagle3LlamaForCausalLM"], **{AUX: INPUTS})),
        _case("speculators", "Eagle3Speculator, transformer_layer_config, own embeddings", speculators, nested),
        _case("speculators_draft_model", "Eagle3DraftModel, norm_before_residual", speculators,
              {**nested, "architectures": ["Eagle3DraftModel"], "norm_before_residual": True, AUX: INPUTS}),
        _case("nemo", "everything under model.", nemo, nemo.config()),
        _case("modelopt", "layers.0, norm_before_fc, aux layers as inputs at top level, no t2d", modelopt,
              modelopt.config(norm_before_fc=True, **{AUX: [3, 7, LAYERS]})),
    ]  # fmt: skip


def _rope() -> list[Case]:
    plain, long = Drafter(), Drafter(heads=2, kv_heads=1, head_dim=128)  # the angles of Llama 3.1
    old, new = {**LLAMA3, "type": "llama3"}, {**LLAMA3, "rope_theta": 500000.0}
    del old["rope_type"]
    rounded = {"rope_freqs.weight": "rounding"}  # the script computes in float32, eagle3 in float64
    return [
        _case("rope_llama3", "rope_scaling llama3", long, long.config(rope_scaling=LLAMA3), differs=rounded),
        _case("rope_llama3_old_key", "rope_scaling with the key type", long, long.config(rope_scaling=old),
              differs=rounded),
        _case("rope_parameters", "transformers 5: theta and llama3 in rope_parameters", long,
              long.config(rope_theta=None, rope_parameters=new), differs=rounded),
        _case("rope_linear", "rope_scaling linear", plain,
              plain.config(rope_scaling={"rope_type": "linear", "factor": 4.0})),
        _case("rope_yarn", "rope_scaling yarn, factor 32", plain, plain.config(rope_scaling=YARN)),
        _case("rope_dynamic", "rope_scaling dynamic", plain,
              plain.config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})),
        _case("rope_absent", "no rope_theta", plain, plain.config(rope_theta=None)),
        _case("rope_default", "rope_scaling default", plain, plain.config(rope_scaling={"rope_type": "default"})),
    ]  # fmt: skip


def _shapes() -> list[Case]:
    wide = Drafter(hidden=96, target_width=128, heads=6, ffn=160, embeddings=True)
    narrow = Drafter(hidden=80, target_width=64, heads=5, kv_heads=1, ffn=112, embeddings=True)
    heads = Drafter(hidden=64, heads=6, kv_heads=2, head_dim=32)
    whole = Drafter(draft_vocab=512, maps=())
    borrowing = Drafter(draft_vocab=512, maps=(), head=False)
    return [
        _case("own_embeddings", "H != Ht with target_hidden_size", wide, wide.config(target_hidden_size=128)),
        _case("odd_rows", "rows that do not fit Q8_0's blocks of 32", narrow, narrow.config()),
        _case("head_dim", "heads x head_dim != hidden_size", heads, heads.config()),
        _case("whole_vocabulary", "Vd = V, no d2t", whole, whole.config()),
        _case("borrowed_head", "Vd = V, neither head nor embeddings", borrowing, borrowing.config()),
        _case("residual", "norm_before_residual", Drafter(), Drafter().config(norm_before_residual=True)),
    ]


def _storage() -> list[Case]:
    plain, large = Drafter(), Drafter(hidden=1024, target_width=1024, heads=32, kv_heads=8, head_dim=128)
    return [
        _case("bf16", "BF16 weights", plain, plain.config()),
        _case("f16", "F16 weights", Drafter(dtype="F16"), plain.config()),
        _case("f32", "F32 weights", Drafter(dtype="F32"), plain.config()),
        _case("f64", "F64 weights", Drafter(dtype="F64"), plain.config()),
        _case("rounding", "F32 values that lie between two F16, BF16 or Q8_0 values, zeros and tiny ones", plain,
              plain.config(), {"fc.weight": array("F32", _hard_values((64, 192)))}),
        _case("large", "matrices that are written in several pieces", large, large.config()),
        _case("parts", "three files with an index", plain, plain.config(), file="parts"),
        _case("pytorch_bin", "pytorch_model.bin, as SafeAILab publishes", Drafter(dtype="F16"), plain.config(),
              file="bin"),
        _case("bpe_target", "a target with byte-level BPE", plain, plain.config(), tokenizer="bpe"),
    ]  # fmt: skip


def _vocabulary() -> list[Case]:
    plain, rows = Drafter(), np.arange(64)
    unsorted = {"d2t": array("I64", plain.ids()[::-1] - rows), "t2d": None}
    return [
        _case("d2t_int32", "d2t in int32", plain, plain.config(), {"d2t": array("I32", plain.ids() - rows)}),
        _case("d2t_float", "d2t in F32", plain, plain.config(), {"d2t": array("F32", plain.ids() - rows)}),
        _case("d2t_unsorted", "d2t names the tokens out of order", plain, plain.config(), unsorted),
        _case("tied", "tie_word_embeddings next to a separate head", Drafter(embeddings=True),
              plain.config(tie_word_embeddings=True)),
        _case("rotary", "rotary_emb.inv_freq, which is no weight", plain, plain.config(),
              {"midlayer.self_attn.rotary_emb.inv_freq": array("F32", np.ones(8))}),
        _case("model_type", "another model_type on the same layer", plain, plain.config(model_type="phi3")),
        _case("no_eps", "no rms_norm_eps: transformers' 1e-6", plain, plain.config(rms_norm_eps=None)),
    ]  # fmt: skip


def _hard_values(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values of all magnitudes of F16, a third of them halfway between two F16 or two BF16 values; one row of zeros."""
    rng = np.random.default_rng(0)
    values = (rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-26, 15.9, shape)).astype("<f4")
    bits, kind = values.view("<u4"), rng.integers(0, 3, shape)
    bits[:] = np.where(kind == 1, (bits & 0xFFFFE000) | 0x1000, np.where(kind == 2, (bits & 0xFFFF0000) | 0x8000, bits))
    values[0] = 0
    return values
