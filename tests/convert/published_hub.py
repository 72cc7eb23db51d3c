"""Drafters of the model hub and what exporters write, with values that public code and threads quote; and refusals.

Where only some of a file's values are quoted, the rest are those of its family.
"""

from __future__ import annotations

from typing import Any

from published import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA_LAYER,
    QWEN,
    QWEN3,
    QWEN3_8B,
    QWEN3_30B,
    QWEN3_32B,
    QWEN3_235B,
    QWEN3_VL_8B,
    VICUNA_13B,
    Config,
    Expect,
    Published,
    Target,
    Tensors,
    sizes,
)
from published_code import specforge

AUX = "eagle_aux_hidden_state_layer_ids"
LLAMA3_ROPE: Config = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
MODELOPT_YARN: Config = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
GPT_OSS_YARN: Config = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip
MOE: Config = {  # of Qwen3-30B-A3B itself
    "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    "norm_topk_prob": True, "output_router_logits": False, "router_aux_loss_coef": 0.001, "mlp_only_layers": [],
}  # fmt: skip

BARE = Tensors(layer="layers.0.", optional="lm_head d2t norm")  # ModelOpt: no t2d, no embeddings
FULL = Tensors(layer="layers.0.", optional="embed_tokens lm_head d2t t2d norm")  # speculators
INSIDE = Tensors(layer="layers.0.", prefix="model.", optional="embed_tokens lm_head d2t t2d norm")  # NeMo


def safeailab(name: str, source: str, target: Target, expect: Expect | str, *optional: str, **more: Any) -> Published:
    """A pytorch_model.bin that says LlamaForCausalLM like any Llama model."""
    made = LLAMA_LAYER | {
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "pad_token_id": 0, "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab,
    }  # fmt: skip
    tensors = Tensors(optional=" ".join(("lm_head", "norm", *optional)), kind="bin")
    return Published("safeailab " + name, source, "SafeAILab", made | more, target, expect, tensors)


def speculators(name: str, source: str, target: Target, expect: Expect | str, *optional: str, **more: Any) -> Published:
    """A nested config; `more` is the decoder layer's, but for the keys that belong to the top level."""
    outer = {k: more.pop(k) for k in tuple(more) if k in TOP_LEVEL}
    layer = {"vocab_size": target.vocab, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False} | more
    made = {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": 32000, "has_no_defaults_at_init": False,
        "speculators_model_type": "eagle3", "speculators_version": "0.1.0.dev42",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3,
                                  "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "verifier"},
        },
        "transformer_layer_config": {k: v for k, v in (LLAMA_LAYER | layer).items() if k != "tie_word_embeddings"},
    }  # fmt: skip
    tensors = Tensors(layer="layers.0.", optional=" ".join((FULL.optional, *optional)))
    return Published("speculators " + name, source, "speculators", made | outer, target, expect, tensors)


TOP_LEVEL = {
    "architectures", "auto_map", "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output", "target_hidden_size", "embed_requires_grad", "speculators_model_type", AUX,
}  # fmt: skip


def modelopt(name: str, target: Target, expect: Expect | str, tensors: Tensors = BARE, **more: Any) -> Published:
    """What NVIDIA's Model Optimizer exports (hf_spec_configs.py @ a2fbac7); absent values are written as null."""
    nested = {
        "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    } | more.pop("eagle_config", {})  # fmt: skip
    made = LLAMA_LAYER | {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "transformers_version": None, "pretraining_tp": None, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "initializer_range": 0.01, "rms_norm_eps": 1e-5, "rope_theta": 10000, "rope_scaling": None,
        "head_dim": 128, "vocab_size": target.vocab, "draft_vocab_size": 32000, "eagle_config": nested,
    }  # fmt: skip
    source = "Model-Optimizer @ a2fbac7" if not name.startswith("gpt-oss") else "sglang#32334 and llama.cpp#25794"
    return Published("modelopt " + name, source, "ModelOpt", made | more, target, expect, tensors)


def nemo(name: str, target: Target, expect: Expect | str, *optional: str, **more: Any) -> Published:
    """NeMo AutoModel copies the target's config, number of layers included (train_eagle3.py @ 36044ad)."""
    made = LLAMA_LAYER | {
        "architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": target.layers, "vocab_size": target.vocab,
        "max_position_embeddings": target.context, "draft_vocab_size": 32000, "target_hidden_size": target.width,
        "attn_implementation": "eager", "fc_norm": False, "norm_output": False, "parallel_drafting": False,
        "rms_norm_eps": 1e-6, "attention_bias": False,
    }  # fmt: skip
    tensors = Tensors(INSIDE.layer, INSIDE.prefix, optional=" ".join((INSIDE.optional, *optional)))
    return Published("nemo " + name, "Automodel @ 36044ad", "NeMo", made | more, target, expect, tensors)


EIGHT_B = sizes(4096, 14336, 32, 8, 2048)
QWEN3_LAYER = {**QWEN3, **sizes(4096, 12288, 32, 8, 40960)}
WINDOW = {"sliding_window": 2048, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
GPT_OSS = {**sizes(2880, 17280, 64, 8, 131072), "head_dim": 64}
DEFAULT_8B = Expect((2, 16, 29), (32, 8, 128), 10000)
OWN_8B = Expect((2, 18, 33), (32, 8, 128), 1e6, embeddings="own", norm_before_residual=True)

HUB: tuple[Published, ...] = (
    safeailab("llama3.1-8b", "EAGLE @ cb7e084, traineagle3/config.json", LLAMA3_8B, DEFAULT_8B, "d2t", "t2d",
              **EIGHT_B, draft_vocab_size=32000, bos_token_id=128000, eos_token_id=128001),
    safeailab("llama3.3-70b", "target_hidden_size, own embeddings and H != Ht are quoted; the width is not", LLAMA3_70B,
              Expect((2, 40, 77), (48, 8, 128), 10000, embeddings="own"), "d2t", "t2d", "embed_tokens",
              **sizes(6144, 16384, 48, 8, 2048), target_hidden_size=8192, draft_vocab_size=32000),
    safeailab("vicuna-13b", "BaldEagle#6 (40 layers in its config), EAGLE @ cb7e084 train/vicuna_13B_config.json",
              VICUNA_13B, Expect((2, 20, 37), (40, 40, 128), 10000, d2t="identity"), hidden_size=5120,
              intermediate_size=13824, num_attention_heads=40, num_hidden_layers=40, max_position_embeddings=2048,
              rms_norm_eps=1e-6, draft_vocab_size=32000),
    safeailab("qwen3-8b of Tengyunw", "widths of Qwen3-8B, SpecForge-like", QWEN3_8B,
              Expect((2, 18, 33), (32, 8, 128), 1e6), "d2t", "t2d", **QWEN3_LAYER, draft_vocab_size=32000),
    safeailab("llama3.1-8b of TensorRT-LLM#6158", "TensorRT-LLM#6158", LLAMA3_8B,
              Expect((2, 16, 29), (32, 8, 128), 500000, "llama3"), "d2t", **sizes(4096, 14336, 32, 8, 131072),
              attention_bias=False, mlp_bias=False, head_dim=128, rope_scaling=LLAMA3_ROPE, rope_theta=500000.0,
              pretraining_tp=1, draft_vocab_size=32000),
    safeailab("gpt-oss-20b of nebius", "quoted in public code", GPT_OSS_20B,
              Expect((2, 12, 21), (64, 8, 64), 150000, "yarn"), "d2t", "t2d", **sizes(2880, 11520, 64, 8, 131072),
              head_dim=64, truncated_vocab_size=64000, draft_vocab_size=64000, rope_theta=150000,
              rope_scaling=GPT_OSS_YARN),

    # SpecForge's exports write modern and legacy RoPE fields side by side (tests/test_runtime/test_export.py @ a6b6b02)
    specforge("export with transformers 5", QWEN3_8B, QWEN3_LAYER, Expect((2, 18, 33), (32, 8, 128), 1e6),
              rope_parameters={"rope_type": "default", "rope_theta": 1_000_000}),
    specforge("export with YaRN", QWEN3_8B, QWEN3_LAYER, Expect((2, 18, 33), (32, 8, 128), 8e6, "yarn"),
              rope_theta=8_000_000, rope_scaling={"rope_type": "yarn", "factor": 128.0},
              rope_parameters={"rope_type": "yarn", "factor": 128.0, "rope_theta": 8_000_000}),

    speculators("llama3.1-8b, first converter", "speculators#53", LLAMA3_8B,
                Expect((2, 16, 29), (32, 8, 128), 10000, embeddings="own"), **sizes(4096, 14336, 32, 8, 131072),
                auto_map={"": "eagle3.Eagle3SpeculatorConfig"}, norm_before_residual=False, head_dim=128,
                rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-5, pretraining_tp=1),
    speculators("qwen3-8b of RedHatAI", "quoted in public code", QWEN3_8B, OWN_8B, **QWEN3_LAYER,
                norm_before_residual=True, **{AUX: [2, 18, 33]}),
    speculators("qwen3-32b of RedHatAI, ids null", "the same as for 8B", QWEN3_32B,
                Expect((2, 32, 61), (64, 8, 128), 1e6, embeddings="own", norm_before_residual=True),
                **QWEN3, **sizes(5120, 25600, 64, 8, 40960), norm_before_residual=True, **{AUX: None}),
    speculators("gpt-oss-20b of RedHatAI", "quoted in public code; speculators#337", GPT_OSS_20B,
                Expect((2, 12, 21), (64, 8, 64), 10000, embeddings="own", norm_before_residual=True,
                       norm_before_fc=True), "input_norm", **sizes(2880, 2880, 64, 8, 131072), head_dim=64,
                architectures=["Eagle3DraftModel"], draft_vocab_size=64000, norm_before_fc=True,
                norm_before_residual=True, rope_theta=10000.0, rms_norm_eps=1e-5),
    speculators("qwen3-235b of nm-testing", "its model card: ids taken over from eagle_config", QWEN3_235B,
                Expect((2, 47, 91), (64, 4, 128), 1e6, embeddings="own"), **QWEN3, **sizes(4096, 24576, 64, 4, 40960),
                norm_before_residual=False, **{AUX: [1, 46, 90]}),
    speculators("qwen3-8b, today's trainer", "speculators @ c05b95b, scripts/train.py", QWEN3_8B,
                Expect((2, 18, 33), (32, 8, 128), 1e6, embeddings="own", sliding_window=2048),
                **sizes(4096, 12288, 32, 8, 40960), head_dim=128, rms_norm_eps=1e-6, **WINDOW,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000}, architectures=["Eagle3DraftModel"],
                norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
                embed_requires_grad=False, target_hidden_size=None, **{AUX: [2, 18, 33]}),
    speculators("qwen3-8b, EAGLE 3.1", "speculators @ c05b95b, models/eagle3/config.py", QWEN3_8B,
                Expect((2, 18, 33), (32, 8, 128), 1e6, embeddings="own", fc_norm=True, norm_output=True,
                       sliding_window=2048), "fc_norm", **sizes(4096, 12288, 32, 8, 40960), head_dim=128, **WINDOW,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000}, architectures=["Eagle3DraftModel"],
                norm_before_residual=False, fc_norm=True, norm_output=True, **{AUX: [2, 18, 33]}),

    modelopt("llama3.1-8b, exported today", LLAMA3_8B, Expect((2, 16, 29), (32, 8, 128), 10000, "yarn"),
             **sizes(4096, 14336, 32, 8, 131072), rope_scaling=MODELOPT_YARN, eagle_config={AUX: [1, 15, 28]}),
    modelopt("llama3.1-8b, the whole vocabulary", LLAMA3_8B,
             Expect((2, 16, 29), (32, 8, 128), 10000, "yarn", d2t="identity"),
             Tensors(layer="layers.0.", optional="lm_head norm"), **sizes(4096, 14336, 32, 8, 131072),
             rope_scaling=MODELOPT_YARN, draft_vocab_size=128256, eagle_config={AUX: [1, 15, 28]}),
    modelopt("llama3.1-8b, no final norm", LLAMA3_8B, Expect((2, 16, 29), (32, 8, 128), 10000, final_norm=False),
             Tensors(layer="layers.0.", optional="lm_head d2t"), **sizes(4096, 14336, 32, 8, 131072),
             eagle_config={AUX: [1, 15, 28], "use_last_layernorm": False}),
    modelopt("cosmos-reason2-8b", QWEN3_VL_8B, Expect((2, 18, 33), (32, 8, 128), 150000, "yarn"),
             **sizes(4096, 14336, 32, 8, 262144), rms_norm_eps=1e-6, rope_theta=150000, eagle_config={AUX: [1, 17, 32]},
             rope_scaling=GPT_OSS_YARN | {"original_max_position_embeddings": 8192}),
    modelopt("gpt-oss-120b long-context", GPT_OSS_120B,
             Expect((2, 18, 33), (64, 8, 64), 10000, "llama3", head="target", d2t="identity"),
             Tensors(layer="layers.0.", optional="norm"), **GPT_OSS, rope_scaling=LLAMA3_ROPE, draft_vocab_size=201088,
             eagle_config={AUX: [1, 17, 32]}),
    modelopt("gpt-oss-120b v3", GPT_OSS_120B, Expect((24, 30, 36), (64, 8, 64), 10000, norm_before_fc=True),
             Tensors(layer="layers.0.", optional="lm_head d2t norm input_norm"), **GPT_OSS, norm_before_fc=True,
             **{AUX: [24, 30, 36]}),
    modelopt("gpt-oss-120b v3, ids in eagle_config", GPT_OSS_120B,
             Expect((24, 30, 36), (64, 8, 64), 10000, norm_before_fc=True),
             Tensors(layer="layers.0.", optional="lm_head d2t norm input_norm"), **GPT_OSS, norm_before_fc=True,
             eagle_config={AUX: [24, 30, 36]}),

    nemo("llama3.1-8b, EAGLE 3.1", LLAMA3_8B, Expect((2, 16, 29), (32, 8, 128), 500000, "llama3", embeddings="own",
         fc_norm=True, norm_output=True), "fc_norm", **sizes(4096, 14336, 32, 8, 131072), fc_norm=True,
         norm_output=True, rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000.0}, head_dim=128, mlp_bias=False),
    nemo("qwen3-8b", QWEN3_8B, Expect((2, 18, 33), (32, 8, 128), 1e6, embeddings="own"),
         **QWEN, **sizes(4096, 12288, 32, 8, 40960), head_dim=128, model_type="qwen3", sliding_window=None,
         use_sliding_window=False, max_window_layers=36, layer_types=["full_attention"] * 36,
         rope_parameters={"rope_type": "default", "rope_theta": 1000000}),
    nemo("qwen3-30b-a3b", QWEN3_30B, Expect((2, 24, 45), (32, 4, 128), 1e6, embeddings="own"),
         **QWEN, **sizes(2048, 6144, 32, 4, 40960), head_dim=128, model_type="qwen3_moe", **MOE,
         rope_parameters={"rope_type": "default", "rope_theta": 1000000}),
)  # fmt: skip


def other(name: str, architecture: str, words: str, **more: Any) -> Published:
    """A drafter of another kind for Qwen3-8B (SpecForge @ a6b6b02, configs/)."""
    made = {**LLAMA_LAYER, **QWEN3_LAYER, "architectures": [architecture], "vocab_size": 151936, **more}
    return Published(name, "SpecForge @ a6b6b02", "SpecForge", made, QWEN3_8B, words)


BLOCKS: Config = {
    "block_size": 16, "num_hidden_layers": 5, "num_target_layers": 36, "model_type": "qwen3",
    "layer_types": ["full_attention"] * 5,
}  # fmt: skip
MARKS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
MLA = tuple(f"layers.0.self_attn.{part}_proj.weight" for part in ("q_a", "q_b", "kv_b"))
REFUSED: tuple[Published, ...] = (
    other("dflash", "DFlashDraftModel", "DFlash", **BLOCKS, dflash_config=MARKS),
    other("dflash of AngelSlim", "QwenDFlashDraftModel", "DFlash", **BLOCKS, dflash_config=MARKS),
    other("dspark", "DSparkDraftModel", "DSpark", **BLOCKS, dflash_config={**MARKS, "projector_type": "dspark"}),
    other("domino", "DominoDraftModel", "Domino", **BLOCKS, emb_dim=256, dflash_config=MARKS),
    other("p-eagle of SpecForge", "PEagleDraftModel", "P-EAGLE", num_hidden_layers=4, draft_vocab_size=32000),
    speculators("p-eagle", "speculators @ c05b95b", QWEN3_8B, "P-EAGLE", **QWEN3_LAYER,
                architectures=["PEagleDraftModel"], speculators_model_type="peagle"),
    speculators("qwen3 layer", "speculators @ c05b95b, models/eagle3/model_definitions.py", QWEN3_8B, "q/k norm",
                "layers.0.self_attn.q_norm.weight", **QWEN3_LAYER, model_type="qwen3", norm_before_residual=False),
    speculators("two layers", "speculators @ c05b95b", QWEN3_8B, "several decoder layers",
                "layers.1.self_attn.q_proj.weight", **QWEN3_LAYER | {"num_hidden_layers": 2}),
    speculators("two layers, the second lost", "speculators#812", QWEN3_8B, "several decoder layers",
                **QWEN3_LAYER | {"num_hidden_layers": 2}),
    speculators("gelu of a Gemma target", "speculators @ c05b95b, scripts/train.py", QWEN3_8B, "SiLU",
                **QWEN3_LAYER | {"hidden_act": "gelu_pytorch_tanh"}),
    modelopt("gpt-oss-120b short-context", GPT_OSS_120B, "not an EAGLE-3 drafter|last hidden state",
             Tensors(layer="layers.0.", optional="norm", features=0), **GPT_OSS,
             eagle_config={AUX: [], "use_aux_hidden_state": False}),
    modelopt("kimi-k2", DEEPSEEK_V3, "MLA", Tensors(layer="layers.0.", optional="d2t lm_head norm", extra=MLA),
             architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", kv_lora_rank=512, q_lora_rank=1536,
             qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, **sizes(7168, 18432, 64, 64, 262144)),
    modelopt("parallel heads", LLAMA3_8B, "parallel", Tensors(layer="layers.0.", optional="d2t lm_head norm",
             extra=("parallel_draft_heads.0.medusa_layers.0.linear.weight",)), **EIGHT_B,
             eagle_config={AUX: [1, 15, 28], "parallel_draft_step": 4}),
    modelopt("fp8", LLAMA3_8B, "quantised", Tensors(layer="layers.0.", optional="d2t lm_head norm",
             extra=("layers.0.mlp.up_proj.weight_scale",)), **EIGHT_B, eagle_config={AUX: [1, 15, 28]},
             quantization_config={"quant_algo": "FP8"}),
    nemo("gpt-oss-20b", GPT_OSS_20B, "biases", "layers.0.self_attn.q_proj.bias", **sizes(2880, 2880, 64, 8, 131072),
         head_dim=64, attention_bias=True, num_local_experts=32, rope_parameters=GPT_OSS_YARN | {"rope_theta": 150000}),
    nemo("deepseek-v3", DEEPSEEK_V3, "MLA", "layers.0.self_attn.kv_a_proj_with_mqa.weight",
         **sizes(7168, 18432, 128, 128, 163840), kv_lora_rank=512, q_lora_rank=1536),
    Published("five features", "sglang#24620", "SpecForge", {**LLAMA_LAYER, **GPT_OSS, "draft_vocab_size": 32000,
              "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 201088, "num_aux_hidden_states": 5},
              GPT_OSS_20B, "num_aux_hidden_states|fuses 5", Tensors(features=5)),
    safeailab("EAGLE-1 for llama3-70b", "EAGLE @ cb7e084, train/EAGLE-LLaMA3-Instruct-70B", LLAMA3_70B,
              "EAGLE-1/2", "eagle1", **sizes(8192, 28672, 64, 8, 2048), rope_theta=500000.0, bias=False),
)  # fmt: skip
