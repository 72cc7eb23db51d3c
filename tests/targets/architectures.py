"""Tiny random models of many architectures: a `transformers` model as the reference, and its weights as a GGUF.

The files are made as llama.cpp's own converter makes them: tensors by the names of the gguf package's table, q and k
rows in the order that llama.cpp's RoPE of the architecture expects, fused and stacked tensors where it wants them.
Weights are random, of a size that makes every layer change its input a lot, and float32 unless said otherwise.

transformers is imported with the first model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny

Tensors = Iterable[tuple[str, np.ndarray]]
MXFP4 = gguf.GGMLQuantizationType.MXFP4

# Six pairs of RoPE dimensions in a head; two heads share keys and values.
SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": tiny.END_OF_TEXT,
    "eos_token_id": tiny.IM_END,
    "pad_token_id": tiny.END_OF_TEXT,
}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}


def as_they_are(name: str, value: np.ndarray, config: Any) -> Tensors:
    yield name, value


def no_keys(config: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """How one model is made.

    gguf        general.architecture
    model       model_type of transformers
    config      besides SIZES; None removes one of them
    keys        further keys of the file, without the architecture in front
    tensors     one tensor of the reference -> those of the file, still under the reference's names
    embedding   standard deviation of the embeddings
    gain        of all matrices
    tolerance   of hidden states and logits, relative to the root mean square of all of them
    quantised   the experts are MXFP4; products of 8-bit numbers now and then choose another expert than the reference
    """

    gguf: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: Callable[[Any], dict[str, Any]] = no_keys
    tensors: Callable[[str, np.ndarray, Any], Tensors] = as_they_are
    embedding: float = 1.0
    gain: float = 1.4
    tolerance: float = 2e-4
    quantised: bool = False


class Model:
    """One tiny model: the reference and the file.

    path, width, layers   of the GGUF
    aux                   three layers whose inputs a drafter reads; the last of them is behind all kinds of layers
    """

    def __init__(self, architecture: Architecture, folder: Path, parts: int = 0) -> None:
        """parts: tensors in each file of a split GGUF; 0 for one file."""
        self.architecture = architecture
        self.reference = _reference(architecture)
        config = self.reference.config
        self.width, self.layers = config.hidden_size, config.num_hidden_layers
        self.aux = (1, 2, self.layers - 1)
        self.path = folder / "target.gguf"
        _write(self.path, architecture, self.reference, parts)

    def read(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The reference's logits [n, V] after each token, and hidden states [n, layers + 1, width]: the input of every
        layer, and the output of the last one before the final norm."""
        rows: list[Any] = []
        layers = _layers(self.reference)
        hooks = [layer.register_forward_pre_hook(partial(_input, rows), with_kwargs=True) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(partial(_output, rows)))
        try:
            logits = self.logits([tokens])[0]
        finally:
            for hook in hooks:
                hook.remove()
        return logits, np.stack(rows, axis=1)

    def logits(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The reference's logits [n, V] of several texts.  What is behind a text does not reach it."""
        import torch

        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        with torch.no_grad():
            logits = self.reference(input_ids=ids, use_cache=False).logits.numpy()
        return [logits[i, : len(text)] for i, text in enumerate(texts)]


def _input(rows: list[Any], module: Any, args: Any, kwargs: Any) -> None:
    rows.append((args[0] if args else kwargs["hidden_states"])[0].numpy())


def _output(rows: list[Any], module: Any, args: Any, result: Any) -> None:
    rows.append((result[0] if isinstance(result, tuple) else result)[0].numpy())


def _layers(model: Any) -> Any:
    inner = getattr(model, "model", model.base_model)
    return inner.layers if hasattr(inner, "layers") else inner.h


# --- the reference ---------------------------------------------------------------------------------------------


def _reference(architecture: Architecture) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in {**SIZES, **architecture.config}.items() if value is not None}
    config = AutoConfig.for_model(architecture.model, **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    rng = np.random.default_rng(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_values(name, tuple(parameter.shape), architecture, rng)))
    return model


def _values(name: str, shape: tuple[int, ...], architecture: Architecture, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape).astype(np.float32)
    leaf = name.split(".")[-2]
    if name.endswith("bias") or leaf == "router" or name.endswith("sinks"):
        return 0.3 * noise
    if len(shape) == 1:
        return 1 + 0.2 * noise
    if leaf in ("embed_tokens", "embed_in", "embed_out", "wte", "wpe", "word_embeddings", "lm_head"):
        return architecture.embedding * noise
    inputs = shape[-2] if _transposed(name, architecture) else shape[-1]
    values = architecture.gain * noise / np.sqrt(np.float32(inputs))
    if architecture.quantised and ".experts." in name:
        rows = gguf.quants.quantize(values.swapaxes(1, 2), MXFP4)
        values = gguf.quants.dequantize(rows, MXFP4).swapaxes(1, 2)
    return np.ascontiguousarray(values)


def _transposed(name: str, architecture: Architecture) -> bool:
    """Is a matrix stored as [in, out]?"""
    return architecture.model == "gpt2" or (architecture.model == "gpt_oss" and ".experts." in name)


# --- the file --------------------------------------------------------------------------------------------------


def _write(path: Path, architecture: Architecture, model: Any, parts: int) -> None:
    logging.getLogger("gguf").setLevel(logging.ERROR)
    writer = gguf.GGUFWriter(path, architecture.gguf, split_max_tensors=parts)
    tiny._vocabulary(writer, tiny.TOKENS)
    writer.add_chat_template(tiny.CHATML)
    config = model.config
    keys = {**_keys(config), **_rope_keys(config), **architecture.keys(config)}
    tensors = _tensors(architecture, model)
    if architecture.quantised:
        for name in [name for name in tensors if name.endswith("_exps.weight")]:
            writer.add_tensor(name, gguf.quants.quantize(tensors.pop(name), MXFP4), raw_dtype=MXFP4)
    tiny._finish(writer, tensors, {f"{architecture.gguf}.{key}": value for key, value in keys.items()})


def _keys(config: Any) -> dict[str, Any]:
    """What nearly every architecture has."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "vocab_size": tiny.VOCAB,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
    }
    eps = getattr(config, "rms_norm_eps", None)
    if eps is not None:
        return {**keys, "attention.layer_norm_rms_epsilon": eps}
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, name):
            keys["attention.layer_norm_epsilon"] = getattr(config, name)
    return keys


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _rope_keys(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    keys = {"rope.freq_base": float(rope["rope_theta"])} if "rope_theta" in rope else {}
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


def _tensors(architecture: Architecture, model: Any) -> dict[str, np.ndarray]:
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.gguf)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        for each, values in architecture.tensors(name, value.numpy(), model.config):
            new = names.get_name(each, try_suffixes=(".weight", ".bias"))
            assert new, f"{each} has no name in a {architecture.gguf} file"
            tensors[new] = np.ascontiguousarray(values)
    factors = _llama3_factors(model.config)
    return tensors if factors is None else {**tensors, "rope_freqs.weight": factors}


def _llama3_factors(config: Any) -> np.ndarray | None:
    """What llama.cpp divides the frequencies by."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    head = config.head_dim
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head, 2) / head)
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((context / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


# --- what architectures do to their tensors -----------------------------------------------------------------------


def pairs(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Rows of q and k so that the two of a RoPE pair are neighbours; the reference has them half a head apart."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f".{part}." in name:
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    yield name, value


def gemma(name: str, value: np.ndarray, config: Any) -> Tensors:
    yield name, value + 1 if name.endswith("norm.weight") else value


def gpt2(name: str, value: np.ndarray, config: Any) -> Tensors:
    yield name, value.T if ".c_" in name and value.ndim == 2 else value


def falcon(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Groups of queries, each with its key and value -> all queries, all keys, all values."""
    if "query_key_value" in name:
        groups = _falcon_kv_heads(config)
        rows = value.reshape(groups, -1, config.head_dim, config.hidden_size)
        value = np.concatenate([part.reshape(-1, config.hidden_size) for part in np.split(rows, [-2, -1], axis=1)])
    yield name, value


def _falcon_kv_heads(config: Any) -> int:
    return config.num_kv_heads if config.new_decoder_architecture else 1


def heads_apart(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Query, key and value of every head in turn -> all queries, all keys, all values."""
    if "query_key_value" in name:
        rows = value.reshape(config.num_attention_heads, 3, -1, *value.shape[1:])
        value = rows.swapaxes(0, 1).reshape(value.shape)
    yield name.removeprefix("transformer."), value


def experts(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Gate and up behind each other."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(value, 2, axis=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    else:
        yield f"{name}.weight" if name.endswith("experts.down_proj") else name, value


def mixtral(name: str, value: np.ndarray, config: Any) -> Tensors:
    for each, values in experts(name, value, config):
        yield from pairs(each, values, config)


def granitemoe(name: str, value: np.ndarray, config: Any) -> Tensors:
    yield from mixtral(
        name.replace(".router.", ".router.layer.").replace("block_sparse_moe.experts", "mlp.experts"), value, config
    )


def llama4(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Experts as [in, out], gate and up behind each other."""
    yield from experts(name, value.swapaxes(1, 2) if ".experts." in name else value, config)


def with_expert_bias(name: str, value: np.ndarray, config: Any) -> Tensors:
    """What the choice of experts is corrected by ends in .bias."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield from experts(f"{name}.bias" if name.endswith("expert_bias") else name, value, config)


def deepseek(name: str, value: np.ndarray, config: Any) -> Tensors:
    """The matrix from the latent to all heads' keys and values -> one for keys, transposed, and one for values."""
    if "kv_b_proj" not in name:
        yield from with_expert_bias(name, value, config)
        return
    heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def gpt_oss(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Gate and up in turn; matrices as [in, out]."""
    if name.endswith("sinks"):
        yield f"{name}.weight", value
    elif ".experts." not in name:
        yield name, value
    else:
        name, kind = (name[: -len("_bias")], "bias") if name.endswith("_bias") else (name, "weight")
        value = value if kind == "bias" else value.swapaxes(1, 2)
        if name.endswith("gate_up_proj"):
            yield name.replace("gate_up_proj", f"gate_proj.{kind}"), value[:, ::2]
            yield name.replace("gate_up_proj", f"up_proj.{kind}"), value[:, 1::2]
        else:
            yield f"{name}.{kind}", value


def lfm2(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Convolutions of one channel each, without the axis for more."""
    yield name, value[:, 0] if name.endswith("conv.conv.weight") else value


def lfm2moe(name: str, value: np.ndarray, config: Any) -> Tensors:
    for each, values in lfm2(name, value, config):
        yield from with_expert_bias(each, values, config)


def qwen35moe(name: str, value: np.ndarray, config: Any) -> Tensors:
    for each, values in qwen35(name, value, config):
        yield from experts(each, values, config)


def qwen35(name: str, value: np.ndarray, config: Any) -> Tensors:
    """Norms as factors, decay as such, convolutions of one channel each.  As many keys as values, so in one order."""
    if name.endswith("A_log"):
        value = -np.exp(value)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    yield name.replace("dt_bias", "dt_proj.bias"), value[:, 0] if "conv1d" in name else value


# --- what they say besides ----------------------------------------------------------------------------------------


def window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def gemma2_keys(config: Any) -> dict[str, Any]:
    return {
        **window(config),
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def gemma3_keys(config: Any) -> dict[str, Any]:
    return {**window(config), "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"]}


def granite_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def cohere_keys(config: Any) -> dict[str, Any]:
    keys = {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
    return keys if config.model_type == "cohere" else {**keys, **window(config)}


def mixture_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": next(getattr(config, name) for name in _EXPERT_COUNTS if hasattr(config, name)),
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", config.intermediate_size),
    }


def qwen2moe_keys(config: Any) -> dict[str, Any]:
    return {**mixture_keys(config), "expert_shared_feed_forward_length": config.shared_expert_intermediate_size}


def granitemoe_keys(config: Any) -> dict[str, Any]:
    return {**mixture_keys(config), **granite_keys(config)}


def sigmoid_keys(config: Any) -> dict[str, Any]:
    """Experts by a sigmoid with a correction, behind layers without."""
    return {
        **mixture_keys(config),
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": _SIGMOID,
        "leading_dense_block_count": config.first_k_dense_replace,
    }


def glm4moe_keys(config: Any) -> dict[str, Any]:
    return {**sigmoid_keys(config), **half_turned(config)}


def deepseek_keys(config: Any) -> dict[str, Any]:
    """llama.cpp keeps one latent instead of keys and values, with the turned dimensions of the key behind it."""
    latent, turned = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        **sigmoid_keys(config),
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": latent,
        "attention.head_count_kv": 1,
        "attention.key_length": latent + turned,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + turned,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": turned,
    }


def llama4_keys(config: Any) -> dict[str, Any]:
    return {
        **mixture_keys(config),
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def nemotron_keys(config: Any) -> dict[str, Any]:
    return {**half_turned(config), "attention.layer_norm_epsilon": config.norm_eps}


def one_key(config: Any) -> dict[str, Any]:
    """All heads share keys and values."""
    return {"attention.head_count_kv": 1}


def gpt_oss_keys(config: Any) -> dict[str, Any]:
    return {**mixture_keys(config), **window(config)}


def olmo3_keys(config: Any) -> dict[str, Any]:
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    return {**window(config), "attention.sliding_window_pattern": pattern}


def ministral3_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def half_turned(config: Any) -> dict[str, Any]:
    """RoPE turns the first half of a head only."""
    return {"rope.dimension_count": config.hidden_size // config.num_attention_heads // 2}


def neox_keys(config: Any) -> dict[str, Any]:
    return {**half_turned(config), "use_parallel_residual": config.use_parallel_residual}


def olmo_keys(config: Any) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": 1e-5}


def falcon_keys(config: Any) -> dict[str, Any]:
    return {"attention.head_count_kv": _falcon_kv_heads(config)}


def lfm2_keys(config: Any) -> dict[str, Any]:
    kv_heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    return {
        "shortconv.l_cache": config.conv_L_cache,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }


def lfm2moe_keys(config: Any) -> dict[str, Any]:
    return {
        **lfm2_keys(config),
        **mixture_keys(config),
        "expert_gating_func": _SIGMOID,
        "leading_dense_block_count": config.num_dense_layers,
    }


def qwen35moe_keys(config: Any) -> dict[str, Any]:
    return {**qwen35_keys(config), **qwen2moe_keys(config)}


def qwen35_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 4,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
    }


def sections(config: Any) -> dict[str, Any]:
    """How the pairs of a head are shared among time, height and width; text has the same position in all of them."""
    return {"rope.dimension_sections": [2, 2, 2, 0]}


# --- all of them --------------------------------------------------------------------------------------------------


def _yarn(context: int) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": context}


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_PLAIN = {"rope_type": "default", "rope_theta": 150000.0}
_HALF_TURNED = {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5}}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the same in configs
_SIGMOID = 2  # llama.cpp's number of this function of the router's logits
_TIED = {"tie_word_embeddings": True}
_HALF = 5e-2  # tolerance with GELU, which llama.cpp looks up in half precision

llama = partial(Architecture, "llama", "llama", tensors=pairs)
# The smaller the embeddings, the less a tied head repeats the last token.
gemmas = partial(Architecture, tensors=gemma, embedding=0.1, tolerance=_HALF)
gelu = partial(Architecture, embedding=0.3, tolerance=_HALF)
_GEMMA2 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 10.0,
    "sliding_window": 8,
}
_GEMMA3 = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 8, "num_hidden_layers": 7}
_GPT2 = {"intermediate_size": None, "num_key_value_heads": None}
_FALCON = {**_GPT2, "activation": "gelu_pytorch_tanh"}
_GPT_OSS = {**EXPERTS, "head_dim": 12, "sliding_window": 8, "rope_parameters": _PLAIN}
_MINISTRAL3 = {
    "head_dim": 12,
    "rope_parameters": {**_yarn(16), "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
}

_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_MOE, "shared_expert_intermediate_size": 40}
_ROUTED = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LLAMA4 = {
    **EXPERTS,
    "num_experts_per_tok": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 2,
    "head_dim": 12,
}
_GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}

ARCHITECTURES = {
    "llama": llama(),
    "llama, tied head": llama(config=_TIED),
    "llama, biases": llama(config={"attention_bias": True, "mlp_bias": True}),
    "llama, linear RoPE": llama(
        config={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
    ),
    "llama, YaRN": llama(config={"rope_parameters": _yarn(64)}),
    "llama, llama3 RoPE": llama(config={"rope_parameters": _LLAMA3}),
    "mistral": Architecture("llama", "mistral", {"sliding_window": None, "head_dim": 12}, tensors=pairs),
    "mistral3": Architecture("mistral3", "ministral3", _MINISTRAL3, ministral3_keys, pairs),
    "qwen2": Architecture("qwen2", "qwen2"),
    "qwen2, tied head": Architecture("qwen2", "qwen2", _TIED),
    "qwen2, YaRN": Architecture("qwen2", "qwen2", {"rope_parameters": _yarn(64)}),
    "qwen2vl": Architecture("qwen2vl", "qwen2", keys=sections),
    "qwen3": Architecture("qwen3", "qwen3", {"head_dim": 16}),
    "qwen3vl": Architecture("qwen3vl", "qwen3", {"head_dim": 12}, sections),
    "qwen3moe": Architecture(
        "qwen3moe",
        "qwen3_moe",
        {**_MOE, "norm_topk_prob": True, "head_dim": 12},
        mixture_keys,
        experts,
    ),
    "gemma2": gemmas("gemma2", "gemma2", _GEMMA2, gemma2_keys),
    "gemma3": gemmas("gemma3", "gemma3_text", _GEMMA3, gemma3_keys),
    "phi3": Architecture("phi3", "phi3", {"sliding_window": None}),
    "granite": Architecture(
        "granite",
        "granite",
        _GRANITE,
        granite_keys,
        pairs,
    ),
    "glm4": Architecture("glm4", "glm4", {"head_dim": 12}, half_turned),
    "gpt-oss": Architecture("gpt-oss", "gpt_oss", _GPT_OSS, gpt_oss_keys, gpt_oss),
    "olmo2": Architecture("olmo2", "olmo2"),
    "olmo3": Architecture("olmo2", "olmo3", {"sliding_window": 8}, olmo3_keys),
    "smollm3": Architecture("smollm3", "smollm3", tensors=pairs),
    "command-r": Architecture("command-r", "cohere", {"logit_scale": 0.5}, cohere_keys),
    "cohere2": Architecture("cohere2", "cohere2", {"logit_scale": 0.5, "sliding_window": 8}, cohere_keys),
    "starcoder2": gelu("starcoder2", "starcoder2"),
    "gpt2": gelu("gpt2", "gpt2", _GPT2, tensors=gpt2),
    "falcon": gelu("falcon", "falcon", _FALCON, falcon_keys, falcon),
    "falcon, 40B": gelu(
        "falcon", "falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, falcon_keys, falcon
    ),
}
OTHERS = {
    "arcee": Architecture("arcee", "arcee", tensors=pairs),
    "bloom": gelu("bloom", "bloom", _GPT2, tensors=heads_apart),
    "deci": Architecture("deci", "llama", tensors=pairs),
    "deepseek2": Architecture("deepseek2", "deepseek_v3", _DEEPSEEK, deepseek_keys, deepseek),
    "ernie4_5": Architecture("ernie4_5", "ernie4_5", {"head_dim": 12, "tie_word_embeddings": False}),
    # a window of 4096 is larger than any text here; layers without one would have no RoPE
    "exaone4": Architecture("exaone4", "exaone4", {"head_dim": 12, "layer_types": 5 * ["sliding_attention"]}),
    "gemma": gemmas("gemma", "gemma", {"head_dim": 12}),
    "glm4moe": Architecture(
        "glm4moe",
        "glm4_moe",
        {**_ROUTED, **_HALF_TURNED, "head_dim": 12, "use_qk_norm": True},
        glm4moe_keys,
        with_expert_bias,
    ),
    "gptneox": gelu(
        "gptneox",
        "gpt_neox",
        {"num_key_value_heads": None, "rotary_pct": 0.5, "hidden_act": "gelu_pytorch_tanh"},
        neox_keys,
        heads_apart,
    ),
    "granitemoe": Architecture("granitemoe", "granitemoe", {**EXPERTS, **_GRANITE}, granitemoe_keys, granitemoe),
    "hunyuan-dense": Architecture("hunyuan-dense", "hunyuan_v1_dense", {"head_dim": 12}),
    "llama4": Architecture("llama4", "llama4_text", _LLAMA4, llama4_keys, llama4),
    "mixtral": Architecture("llama", "mixtral", EXPERTS, mixture_keys, mixtral),
    "nemotron": Architecture("nemotron", "nemotron", _HALF_TURNED, nemotron_keys, gemma),
    "olmoe": Architecture("olmoe", "olmoe", {**_MOE, "num_key_value_heads": 4}, mixture_keys, experts),
    "olmo": Architecture("olmo", "olmo", keys=olmo_keys, tensors=pairs),
    "phi2": gelu("phi2", "phi", {"partial_rotary_factor": 0.5}, half_turned),
    "qwen2moe": Architecture("qwen2moe", "qwen2_moe", _SHARED, qwen2moe_keys, experts),
    "seed_oss": Architecture("seed_oss", "seed_oss", {"head_dim": 16}),
    "starcoder": gelu("starcoder", "gpt_bigcode", _GPT2, one_key),
    "stablelm": Architecture("stablelm", "stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}, neox_keys),
    # rows of experts are multiples of 32
    "gpt-oss, MXFP4": Architecture(
        "gpt-oss", "gpt_oss", {**_GPT_OSS, "hidden_size": 64}, gpt_oss_keys, gpt_oss, quantised=True
    ),
}
# Some layers keep a state instead of keys and values, and llama.cpp can step back from it.
_LFM2 = {"full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}
_QWEN35 = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        **_PLAIN,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_LFM2MOE = {
    **_MOE,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
}
HYBRIDS = {
    "lfm2": Architecture("lfm2", "lfm2", _LFM2, lfm2_keys, lfm2, embedding=0.3),
    "qwen35": Architecture("qwen35", "qwen3_5_text", _QWEN35, qwen35_keys, qwen35, tolerance=9e-4),
}
OTHER_HYBRIDS = {
    "lfm2moe": Architecture("lfm2moe", "lfm2_moe", _LFM2MOE, lfm2moe_keys, lfm2moe, embedding=0.3),
    "qwen35moe": Architecture(
        "qwen35moe", "qwen3_5_moe_text", {**_QWEN35, **_SHARED}, qwen35moe_keys, qwen35moe, tolerance=9e-4
    ),
}
WINDOWED = ("gemma2", "gemma3", "gpt-oss", "olmo3", "cohere2")
