"""A tiny target as a Hugging Face directory: the GGUF's weights, tokens and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
from states_tools import save_llama

Json = dict[str, Any]


def write_folder(
    folder: Path,
    weights: tiny.Weights | None = None,
    template: str | None = tiny.CHATML,
    tokenizer: Json | None = None,
    bos: bool = False,
    **config: Any,
) -> Path:
    """tokenizer: keys to replace in tokenizer.json.  bos: it puts one in front of a text.  config: keys to replace in
    config.json."""
    save_llama(folder, tiny.TARGET, tiny.target_weights() if weights is None else weights)
    sizes = {"max_position_embeddings": 8192, "bos_token_id": tiny.END_OF_TEXT, "eos_token_id": tiny.IM_END}
    change(folder / "config.json", **{**sizes, **config})
    change(folder / "generation_config.json", eos_token_id=[tiny.IM_END, tiny.END_OF_TEXT], repetition_penalty=1.5)
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**facts, "chat_template": template}))
    around = bracket(["<|endoftext|>"], []) if bos else None
    made = {**byte_level(), "post_processor": around, **(tokenizer or {})}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


def change(path: Path, **keys: Any) -> None:
    """Replace keys of a JSON file; None takes one out."""
    values = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def byte_level() -> Json:
    """tokenizer.json of the tiny vocabulary."""
    plain = [token for token in tiny.TOKENS if token not in tiny.CONTROL]
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [added(tiny.TOKENS.index(token), token) for token in tiny.CONTROL],
        "pre_tokenizer": pieces,
        "decoder": pieces,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(plain)}, "merges": list(tiny.MERGES)},
    }


def added(token: int, text: str, special: bool = True) -> Json:
    kept = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": special, **kept}


def bracket(before: list[str], behind: list[str]) -> Json:
    """A post_processor that puts these tokens around a text."""
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    around = [[{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens] for tokens in (before, behind)]
    ids = {t: {"id": t, "ids": [tiny.TOKENS.index(t)], "tokens": [t]} for t in (*before, *behind)}
    template = [*around[0], *text, *around[1]]
    return {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": ids}
