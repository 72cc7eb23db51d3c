"""Synthetic drafters: tensors and config of any size, in the names that the families use.

Values are random but always the same ones.  Sizes differ from each other where they may, so that a swapped axis shows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stored_files import NUMPY, Tensor, array, sentencepiece_model, write_safetensors

LAYERS = 16  # decoder layers of every target


@dataclass(frozen=True)
class Drafter:
    """Sizes of a drafter and how its tensors are named.

    layer, prefix   names: prefix + "fc.weight", prefix + layer + "hidden_norm.weight"
    dtype           safetensors type of all weights
    draft_vocab     rows of the head; the ids are every (vocab // draft_vocab)-th token
    maps            which of "d2t" and "t2d" are there
    """

    layer: str = "midlayer."
    prefix: str = ""
    dtype: str = "BF16"
    hidden: int = 64
    target_width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    vocab: int = 512
    draft_vocab: int = 64
    embeddings: bool = False
    head: bool = True
    input_norm: bool = False
    maps: tuple[str, ...] = ("d2t", "t2d")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, rows first, by stored name."""
        layer, h, q, kv = (
            self.prefix + self.layer,
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {
            self.prefix + "fc.weight": (h, 3 * self.target_width),
            layer + "input_layernorm.weight": (h,),
            layer + "hidden_norm.weight": (h,),
            layer + "self_attn.q_proj.weight": (q, 2 * h),
            layer + "self_attn.k_proj.weight": (kv, 2 * h),
            layer + "self_attn.v_proj.weight": (kv, 2 * h),
            layer + "self_attn.o_proj.weight": (h, q),
            layer + "post_attention_layernorm.weight": (h,),
            layer + "mlp.gate_proj.weight": (self.ffn, h),
            layer + "mlp.up_proj.weight": (self.ffn, h),
            layer + "mlp.down_proj.weight": (h, self.ffn),
            self.prefix + "norm.weight": (h,),
        }
        if self.head:
            shapes["lm_head.weight"] = (self.draft_vocab, h)
        if self.embeddings:
            shapes[self.prefix + "embed_tokens.weight"] = (self.vocab, h)
        if self.input_norm:
            shapes[self.prefix + "input_norm.weight"] = (3 * self.target_width,)
        return shapes

    def ids(self) -> NDArray[np.int64]:
        """The draft vocabulary as absolute target ids, int64 [draft_vocab]."""
        return np.arange(self.draft_vocab, dtype=np.int64) * (self.vocab // self.draft_vocab)

    def tensors(self, **more: Tensor | None) -> dict[str, Tensor]:
        """All tensors; more: tensors to add or replace by stored name, None removes one."""
        made = {name: (self.dtype, shape, _random(name, shape, self.dtype)) for name, shape in self.shapes().items()}
        if "d2t" in self.maps:
            made["d2t"] = array("I64", self.ids() - np.arange(self.draft_vocab))
        if "t2d" in self.maps:
            made["t2d"] = array("BOOL", np.isin(np.arange(self.vocab), self.ids()))
        return _changed(made, more)

    def config(self, **changes: Any) -> dict[str, Any]:
        """A flat config with all sizes; None removes a key."""
        made = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "num_hidden_layers": 1, "vocab_size": self.vocab,
            "draft_vocab_size": self.draft_vocab, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }  # fmt: skip
        return _changed(made, changes)


def _changed(made: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


def _random(name: str, shape: tuple[int, ...], dtype: str) -> Callable[[int, int], NDArray[np.generic]]:
    """Values of the size that trained weights have: matrices around 0, norms around 1."""

    def rows(start: int, stop: int) -> NDArray[np.generic]:
        rng = np.random.default_rng([zlib.crc32(name.encode()), start])
        values = 0.05 * rng.standard_normal((stop - start, *shape[1:]), dtype=np.float32)
        if len(shape) == 1:
            values += 1
        if dtype == "BF16":
            return (values.view("<u4") >> 16).astype("<u2")
        return values.astype(NUMPY[dtype])

    return rows


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], parts: int = 1) -> None:
    """A checkpoint folder: config.json and model.safetensors, or several parts with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if parts == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = dict(list(tensors.items())[i::parts])
        write_safetensors(folder / file, part)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_target(folder: Path, drafter: Drafter, tokenizer: str = "sentencepiece") -> None:
    """The Hugging Face folder of a target without weights: all that either converter reads of a target.

    tokenizer   "sentencepiece", as Llama 2 has, or "bpe", byte level with merges, as Llama 3 has
    """
    folder.mkdir(parents=True, exist_ok=True)
    bos, eos = (1, 2) if tokenizer == "sentencepiece" else (drafter.vocab - 2, drafter.vocab - 1)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": drafter.target_width,
        "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": drafter.vocab,
        "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
        "bos_token_id": bos, "eos_token_id": eos,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    chat = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": chat}
    if tokenizer == "sentencepiece":
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(drafter.vocab))
    else:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer.json").write_text(json.dumps(byte_level_bpe(drafter.vocab)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def byte_level_bpe(vocab: int) -> dict[str, Any]:
    """A tokenizer.json of `vocab` tokens: 256 bytes, merges of two bytes each, then <s> and </s>, which are added
    tokens outside the model's vocabulary, as Llama 3 has them."""
    special, letters = ["<s>", "</s>"], _byte_letters()
    merges = [(a, b) for a in letters for b in letters][: vocab - len(special) - len(letters)]
    tokens = [*letters, *(a + b for a, b in merges)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": len(tokens) + i, "content": text, **flags} for i, text in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte: itself, or for unprintable bytes one from U+0100 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
