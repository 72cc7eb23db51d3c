"""How much memory a pair takes, estimated from the headers of its files: weights, KV caches, working space.

An estimate on the high side: llama.cpp sizes its working space by the largest batch, which a short prompt never fills.
What keys and values of layers without attention would take is not subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .gguf_file import GgufFile
from .model_files import target_files
from .settings import DEFAULT_CONTEXT, DRAFTER_ROWS, PairSettings, RuntimeSettings, TreeShape, context_cells

FLOAT = 4
PROGRAM = 120_000_000  # Python, numpy, the libraries and their graphs: measured
BYTES_PER_VALUE = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
                   "q4_1": 20 / 32, "q4_0": 18 / 32}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What a header tells about a model.  kv_heads, feed_forward: of each layer.  context: the trained one."""

    layers: int
    width: int
    heads: int
    kv_heads: tuple[int, ...]
    key: int
    value: int
    feed_forward: int
    vocabulary: int
    context: int


@dataclass(frozen=True)
class Needs:
    """Bytes.  cells: of the context they are for."""

    weights: int
    cache: int
    working: int
    cells: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


def of_pair(pair: PairSettings, runtime: RuntimeSettings, on_gpu: bool) -> Needs:
    """Of both models and the adapters.  FileError for a header that does not say enough."""
    target, shape = read_sizes(pair.target), pair.tree(on_gpu)
    cells = context_cells(runtime.ctx_size, target.context)
    flash = runtime.flash_attention(on_gpu) != "off"
    files = [*target_files(pair.target), *([pair.draft] if pair.draft else []), *(lora.path for lora in pair.loras)]
    weights = sum(path.stat().st_size for path in files)
    cache = cache_bytes(target, cells, runtime.cache_type_k, runtime.cache_type_v)
    working = _target_working(target, cells, min(max(runtime.batch, shape.nodes + 1), cells), shape, flash)
    if pair.draft:
        drafter, more = read_sizes(pair.draft), cells + shape.width * shape.depth
        cache += cache_bytes(drafter, more, "f16", "f16")
        every_token = replace(drafter, vocabulary=target.vocabulary)  # its logits are spread over the target's tokens
        working += working_bytes(every_token, more, DRAFTER_ROWS, flash=on_gpu)
    return Needs(weights, cache, working + PROGRAM, cells)


def _target_working(target: Sizes, cells: int, rows: int, shape: TreeShape, flash: bool) -> int:
    """With the logits of one row per sequence, which are kept beside it."""
    return working_bytes(target, cells, rows, flash) + FLOAT * target.vocabulary * (shape.nodes + 1)


def cache_bytes(sizes: Sizes, cells: int, key_type: str, value_type: str) -> int:
    per_head = sizes.key * BYTES_PER_VALUE[key_type] + sizes.value * BYTES_PER_VALUE[value_type]
    return round(cells * sum(sizes.kv_heads) * per_head)


def working_bytes(sizes: Sizes, cells: int, rows: int, flash: bool) -> int:
    """Of a pass over so many rows: logits, hidden states, and the attention scores unless it is flash attention."""
    per_row = sizes.vocabulary + 6 * sizes.width + 2 * sizes.feed_forward
    per_row += cells * (1 if flash else 1 + sizes.heads)  # the mask; scores of every head
    return FLOAT * rows * per_row


def read_sizes(path: Path) -> Sizes:
    with GgufFile(path) as file:
        arch = file.need("general.architecture", str)
        layers = file.need(f"{arch}.block_count", int)
        width = file.need(f"{arch}.embedding_length", int)
        heads = max(_each(file.get(f"{arch}.attention.head_count"), 0, layers))  # recurrent layers have none
        head = width // max(heads, 1)
        return Sizes(
            layers,
            width,
            heads,
            _each(file.get(f"{arch}.attention.head_count_kv"), heads, layers),
            file.get(f"{arch}.attention.key_length") or head,
            file.get(f"{arch}.attention.value_length") or head,
            max(_each(file.get(f"{arch}.feed_forward_length"), 0, layers)),
            _vocabulary(file, arch),
            file.get(f"{arch}.context_length") or DEFAULT_CONTEXT,
        )


def _each(value: Any, default: int, layers: int) -> tuple[int, ...]:
    """A number for every layer: the header has one for all, one for each, or none."""
    if isinstance(value, list):
        return tuple(int(each) for each in value) or (default,)
    return (int(default if value is None else value),) * max(layers, 1)


def _vocabulary(file: GgufFile, arch: str) -> int:
    """Rows of the head, which a drafter may have for a part of the vocabulary alone."""
    head = file.shape("output.weight")
    return head[1] if head else file.count_strings("tokenizer.ggml.tokens") or file.get(f"{arch}.vocab_size") or 0
