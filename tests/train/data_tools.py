"""A tiny target that speaks in capital letters, so that its answers are tokenised again as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny

LETTERS = [tiny.TOKENS.index(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
OPEN = "{{ '<|im_start|>assistant\n' }}"  # a template's own last line break would be dropped
CHATML = tiny.CHATML.replace("<|im_start|>assistant\n", OPEN)
THINKS_NOTHING = CHATML + "{{ '<think>\n\n</think>\n\n' }}"
# What stands before </T> in an earlier answer is dropped.
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('</T>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}" + OPEN
)
TRIMS = CHATML.replace("m['content']", "m['content'] | trim")
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}" + CHATML
)
NO_MARKS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}USER: {{ m['content'] }} ANSWER: "
    "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
)


def letters_target(path: Path, template: str = CHATML, ends: bool = True, clear: bool = True, **overrides: Any) -> Path:
    weights = letters_weights(ends, clear)
    return tiny.write_target(path, weights=weights, tokenizer__chat_template=template, **overrides).path


def letters_weights(ends: bool = True, clear: bool = True) -> tiny.Weights:
    """Every letter is followed by the next, everything else by some letter, and Z by the end of the answer or by A.
    clear: hardly ever by anything else."""
    sure, unsure = (2.0, 0.4) if clear else (1.5, 0.9)
    weights = tiny.target_weights()
    embedding = weights["token_embd.weight"]
    for name in weights:
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            weights[name] = 0.4 * weights[name]
    head = np.zeros_like(embedding)
    for token in range(tiny.VOCAB):
        after = LETTERS[(LETTERS.index(token) + 1) % 26] if token in LETTERS else LETTERS[token % 20]
        if ends and token == LETTERS[-1]:
            after = tiny.IM_END
        head[after] += (sure if token in LETTERS else unsure) * embedding[token] / np.sqrt(embedding.shape[1])
    weights["output.weight"] = head
    return weights


def user(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def talk(*contents: str) -> list[dict[str, str]]:
    """user, assistant, user, ... in turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
