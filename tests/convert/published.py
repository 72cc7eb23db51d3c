"""Published EAGLE-3 drafters as test data: what an entry holds, the target models, and keys that many configs share.

Facts only: names and values of fields.  The entries are in `published_code.py` (configs in public code) and
`published_hub.py` (files of the model hub, exporters, and what must be refused).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """The model that a drafter was made for.  arch is its GGUF architecture."""

    arch: str
    layers: int
    width: int
    vocab: int
    context: int


@dataclass(frozen=True)
class Tensors:
    """Which tensors a checkpoint holds.

    prefix    before every name but those in `bare`
    layer     before the names of the decoder layer's tensors
    optional  embed_tokens, lm_head, d2t, t2d, norm, input_norm, fc_norm: those that are there
    extra     further names, one float each
    features  hidden states that fc.weight fuses
    kind      safetensors or bin (PyTorch's pickle)
    """

    layer: str = "midlayer."
    prefix: str = ""
    bare: str = "lm_head d2t t2d"
    optional: str = "lm_head d2t t2d norm"
    extra: tuple[str, ...] = ()
    features: int = 3
    kind: str = "safetensors"


@dataclass(frozen=True)
class Expect:
    """What the report must say.

    aux     *inputs* of the target's layers
    heads   attention heads, key/value heads, dimensions of a head
    """

    aux: tuple[int, int, int]
    heads: tuple[int, int, int]
    theta: float
    rope: str = ""
    embeddings: str = "target"
    head: str = "own"
    d2t: str = "own (d2t)"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    final_norm: bool = True
    sliding_window: int | None = None


@dataclass(frozen=True)
class Published:
    """One drafter.

    source    where the config's values come from
    expect    what must be found, or a pattern of the refusal's message and hint
    """

    name: str
    source: str
    family: str
    config: Config
    target: Target
    expect: Expect | str
    tensors: Tensors = Tensors()


def sizes(hidden: int, ffn: int, heads: int, kv_heads: int, context: int) -> Config:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }  # fmt: skip


LLAMA_LAYER: Config = {
    "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02, "num_hidden_layers": 1, "use_cache": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN: Config = {"bos_token_id": 151643, "eos_token_id": 151645, "attention_dropout": 0.0, "rms_norm_eps": 1e-6}
QWEN3: Config = QWEN | {
    "attention_bias": False, "head_dim": 128, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip

COSYVOICE3 = Target("qwen2", 24, 896, 6761, 32768)
DEEPSEEK_V2_LITE = Target("deepseek2", 27, 2048, 102400, 163840)
DEEPSEEK_V3 = Target("deepseek2", 61, 7168, 129280, 163840)
GEMMA3_1B = Target("gemma3", 26, 1152, 262144, 32768)
GPT_OSS_120B = Target("gpt-oss", 36, 2880, 201088, 131072)
GPT_OSS_20B = Target("gpt-oss", 24, 2880, 201088, 131072)
HUNYUAN_18B = Target("hunyuan-dense", 32, 2048, 120818, 262144)
HUNYUAN_4B = Target("hunyuan-dense", 36, 3072, 120818, 262144)
HUNYUAN_7B = Target("hunyuan-dense", 32, 4096, 128167, 32768)
HUNYUAN_OCR = Target("hunyuan-dense", 24, 1024, 120818, 32768)
LING_FLASH = Target("bailingmoe2", 32, 4096, 157184, 32768)
LLAMA3_70B = Target("llama", 80, 8192, 128256, 131072)
LLAMA3_8B = Target("llama", 32, 4096, 128256, 131072)
LLAMA4_SCOUT = Target("llama4", 48, 5120, 202048, 10485760)
LONGCAT_FLASH = Target("longcat-flash", 28, 6144, 131072, 131072)
PHI4 = Target("phi3", 40, 5120, 100352, 16384)
QWEN25_05B = Target("qwen2", 24, 896, 151936, 32768)
QWEN25_15B = Target("qwen2", 28, 1536, 151936, 32768)
QWEN25_3B = Target("qwen2", 36, 2048, 151936, 32768)
QWEN25_7B = Target("qwen2", 28, 3584, 152064, 32768)
QWEN25_VL_32B = Target("qwen2vl", 64, 5120, 152064, 128000)
QWEN25_VL_3B = Target("qwen2vl", 36, 2048, 151936, 128000)
QWEN25_VL_7B = Target("qwen2vl", 28, 3584, 152064, 128000)
QWEN2_AUDIO = Target("qwen2", 32, 4096, 156032, 8192)
QWEN35_35B = Target("qwen35moe", 40, 2048, 248320, 262144)
QWEN3_06B = Target("qwen3", 28, 1024, 151936, 40960)
QWEN3_14B = Target("qwen3", 40, 5120, 151936, 40960)
QWEN3_17B = Target("qwen3", 28, 2048, 151936, 40960)
QWEN3_235B = Target("qwen3moe", 94, 4096, 151936, 40960)
QWEN3_30B = Target("qwen3moe", 48, 2048, 151936, 40960)
QWEN3_32B = Target("qwen3", 64, 5120, 151936, 40960)
QWEN3_4B = Target("qwen3", 36, 2560, 151936, 40960)
QWEN3_8B = Target("qwen3", 36, 4096, 151936, 40960)
QWEN3_CODER_30B = Target("qwen3moe", 48, 2048, 151936, 262144)
QWEN3_CODER_480B = Target("qwen3moe", 62, 6144, 151936, 262144)
QWEN3_NEXT = Target("qwen3next", 48, 2048, 151936, 262144)
QWEN3_VL_2B = Target("qwen3vl", 28, 2048, 151936, 262144)
QWEN3_VL_30B = Target("qwen3vlmoe", 48, 2048, 151936, 262144)
QWEN3_VL_4B = Target("qwen3vl", 36, 2560, 151936, 262144)
QWEN3_VL_8B = Target("qwen3vl", 36, 4096, 151936, 262144)
QWQ_32B = Target("qwen2", 64, 5120, 152064, 40960)
VICUNA_13B = Target("llama", 40, 5120, 32000, 2048)
