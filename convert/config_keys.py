"""Single keys of a drafter's config: typed access, and which keys stop a conversion.

Every key that could change what the drafter computes is either read by someone, or must have the one value that
llama.cpp's eagle3 graph implements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError


def flag(config: Mapping[str, Any], key: str) -> bool | None:
    """A yes/no key at top level or in eagle_config; None when absent or null."""
    nested = config.get("eagle_config")
    found = [place[key] for place in (config, nested) if isinstance(place, dict) and place.get(key) is not None]
    if any(not isinstance(value, bool) for value in found) or len(set(found)) > 1:
        raise CheckpointError(f"config: {key}: expected true or false, got {' and '.join(map(repr, found))}.")
    return found[0] if found else None


def integer(config: Mapping[str, Any], key: str) -> int | None:
    """A positive whole number; None when absent or null."""
    value = config.get(key)
    if value is not None and (type(value) is not int or not 0 < value < 2**31):
        raise CheckpointError(f"config: {key}: expected a positive whole number, got {value!r}.")
    return value


# Keys that change what is computed -> the values that llama.cpp's eagle3 graph implements, and a name for the rest.
# Absent and null are always fine.
MUST_BE: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_hidden_layers": ((1,), "several decoder layers"),
    "hidden_act": (("silu", "swish"), "another activation than SiLU"),
    "attention_bias": ((False,), "biases"),
    "mlp_bias": ((False,), "biases"),
    "qkv_bias": ((False,), "biases"),
    "fc_bias": ((False,), "biases"),
    "use_qk_norm": ((False,), "normalised queries and keys"),
    "qk_norm": ((False,), "normalised queries and keys"),
    "rope_interleave": ((False,), "interleaved RoPE"),
    "quantization_config": (({},), "a quantised checkpoint"),
    "compression_config": (({},), "a quantised checkpoint"),
    "use_aux_hidden_state": ((True,), "only the target's last hidden state"),
    "use_input_layernorm_in_first_layer": ((True,), "no norm on the token embedding"),
    "use_mtp_layernorm": ((False,), "a different input norm (use_mtp_layernorm)"),
    "parallel_draft_step": ((0, 1), "parallel drafting (P-EAGLE)"),
    "parallel_drafting": ((False,), "parallel drafting (P-EAGLE)"),
    "num_experts": ((0,), "a mixture of experts"),
    "num_local_experts": ((0,), "a mixture of experts"),
    "n_routed_experts": ((0,), "a mixture of experts"),
    "kv_lora_rank": ((0,), "multi-head latent attention (MLA)"),
    "q_lora_rank": ((0,), "multi-head latent attention (MLA)"),
}

# Keys whose meaning the tensors show, too.  A config that is a copy of the target's says them of the target.
SHOWN_BY_TENSORS = (
    "num_hidden_layers", "attention_bias", "mlp_bias", "qkv_bias", "fc_bias", "use_qk_norm", "qk_norm",
    "num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank",
)  # fmt: skip

# Keys that are read, or that change nothing for one Llama layer whose tensors are all there.
HARMLESS = re.compile(
    r"architectures|model_type|eagle_config|eagle_aux_hidden_state_layer_ids|norm_before_(residual|fc)|fc_norm|"
    r"norm_output|use_last_layernorm|partial_rotary_factor|hidden_size|"
    r"intermediate_size|num_(attention|key_value)_heads|head_dim|(draft_|target_)?vocab_size|target_hidden_size|"
    r"rms_norm_eps|max_position_embeddings|rope_(theta|scaling|parameters)|torch_dtype|dtype|"
    r"(bos|eos|pad|unk|sep)_token_id|transformers_version|use_cache|initializer_range|pretraining_tp|"
    r"tie_word_embeddings|\w*dropout\w*|_?name_or_path|auto_map|_?attn_implementation|max_window_layers|"
    r"use_sliding_window|sliding_window|layer_types|decoder_sparse_step|router_aux_loss_coef|"
    r"num_experts_per_tok|norm_topk_prob|mlp_only_layers|moe_\w+|attention_head_dim|norm_type|use_rotary_pos_emb|"
    r"parallel_draft_heads_num_layers|"
    r"next_layer_regular|has_lm_head|return_dict|id2label|label2id|embd_pdrop|resid_pdrop|attn_pdrop|torchscript|"
    r"chunk_size_feed_forward|cross_attention_hidden_size|layer_norm_eps|eagle_decoder_type|\w+_(beams|length)|"
    r"temperature|top_[kp]|typical_p|\w*penalty|num_return_sequences|tokenizer_class|mode|target_model_type|"
    r"original_max_position_embeddings"
)

# An unknown key with such a word in its name may change the computation; it is an error unless it is off.  Text is
# mostly a name of something, so fewer words count.
SUSPICIOUS_TEXT = re.compile(r"norm|rope|rotary|scal|activation|_act|attention|quant")
SUSPICIOUS = re.compile(
    r"norm|rope|rotary|bias|scal|window|softcap|multiplier|attention|attn|layer|expert|head|parallel|quant|residual|"
    r"fc|draft|aux|embed|activation|_act|rank|gate"
)


def check_keys(config: Mapping[str, Any], copies_target: bool = False) -> list[str]:
    """Notes on keys that are ignored; CheckpointError for keys that ask for what llama.cpp cannot run.

    copies_target   the config is a copy of the target's: what tensors would show is not taken from it
    """
    notes: list[str] = []
    nested = config.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(f"config: eagle_config: expected an object, got {nested!r}.")
    for place, keys in (("config", config), ("config: eagle_config", nested or {})):
        for key, value in keys.items():
            if not (copies_target and key in SHOWN_BY_TENSORS):
                _check_key(place, key, value, notes)
    return notes


def _check_key(place: str, key: str, value: Any, notes: list[str]) -> None:
    if key in MUST_BE:
        allowed, what = MUST_BE[key]
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{place}: {key} is {value!r}: this drafter has {what}, which llama.cpp's eagle3 graph cannot run.",
                "Use another drafter for this target.",
            )
    elif not HARMLESS.fullmatch(key) and value not in (None, False, 0, "", [], {}):
        words = SUSPICIOUS_TEXT if isinstance(value, str) else SUSPICIOUS
        if words.search(key):
            raise CheckpointError(
                f"{place}: the key {key!r} ({value!r}) is unknown and may change what the drafter computes.",
                "If it does not, remove it from a copy of the config and give that with --config.",
            )
        notes.append(f"{place}: the key {key!r} is not used")
