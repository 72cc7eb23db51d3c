"""What the files of a pair must say before llama.cpp loads them: is it a target, is it a drafter, do the two fit?

llama.cpp aborts the process on several kinds of files that the checks here refuse with a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import FileError, OptionError, PairError
from .gguf_file import AGAIN, F32, I64, GgufFile

NOT_FOR_MATRICES = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}  # no kernel multiplies these
_WITHOUT_TOKENS = ("no_vocab", "none")  # llama.cpp makes eagle3.vocab_size nameless ones
_MOST_LAYERS = 512  # LLAMA_MAX_LAYERS
# architectures of llama.cpp that are no targets; those with recurrent layers it tells us itself
_OTHER_DRAFTERS = ("dflash", "gemma4-assistant")
_EMBEDDERS = ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
              "eurobert", "gemma-embedding", "llama-embed", "t5encoder")  # fmt: skip
_DIFFUSION = ("dream", "llada", "llada-moe", "rnd1")


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter's GGUF says of itself.

    aux_layers     the three target layers whose *inputs* it reads (llama.cpp's convention)
    target_width   Ht, floats of one hidden state of the target
    width          H, floats of one fused feature
    d2t            int64 [Vd] absolute target ids that the head scores, ascending or not; None for all of them
    eps            of every RMSNorm

    llama.cpp's graph has none of the following; the engine does what they ask for (keys eagle3_cli.*).

    fc_norm         float32 [3, Ht] weights of an RMSNorm on each aux layer's hidden state before fc, in the order of
                    aux_layers; None where there is none (EAGLE 3.1 has it)
    norm_output     the row fed back is the output after the final norm (EAGLE 3.1), not the one before it
    final_norm      False: the head reads the output itself; the file's output_norm.weight is all ones
    sliding_window  keys at this many positions are seen, the row's own included; None: all
    """

    path: Path
    aux_layers: tuple[int, int, int]
    target_width: int
    width: int
    d2t: np.ndarray | None
    eps: float
    fc_norm: np.ndarray | None = None
    norm_output: bool = False
    final_norm: bool = True
    sliding_window: int | None = None


def read_drafter(path: Path, target: Path) -> DrafterInfo:
    """Check a drafter file against its target, by their headers alone.

    Raises FileError for a file that is no whole EAGLE-3 drafter, PairError for a drafter of another target.
    """
    with GgufFile(path) as draft, GgufFile(target) as wanted:
        info = _drafter_info(draft)
        _check_pair(draft, info, wanted)
        return info


def check_drafter(path: Path) -> None:
    """FileError unless the file is a whole EAGLE-3 drafter, for whatever target."""
    with GgufFile(path) as draft:
        _drafter_info(draft)


def check_target(path: Path, cells: int = 0) -> None:
    """FileError unless the file, with every other part of a split one, is a whole GGUF that can be a target.

    cells: of the context that was asked for; OptionError where the target has no embeddings for so many positions.
    """
    with GgufFile(path) as file:
        parts = _parts(file)
        arch = file.need("general.architecture", str)
        _check_kind(file, arch)
        if not file.count_strings("tokenizer.ggml.tokens"):
            raise FileError(f"{path}: has no vocabulary (tokenizer.ggml.tokens).", AGAIN)
        layers = file.need(f"{arch}.block_count", int)
        if not 1 <= layers <= _MOST_LAYERS:
            raise FileError(f"{path}: expected {arch}.block_count from 1 to {_MOST_LAYERS}, got {layers}.", AGAIN)
        positions = _learned_positions(file, parts) if cells else None
    if positions is not None and cells > positions:  # llama.cpp aborts at the first position behind the table
        raise OptionError(f"--ctx-size {cells}: {path.name} knows {positions} positions.", f"Give at most {positions}.")


def target_files(path: Path) -> list[Path]:
    """The file, or all parts of a split model in llama.cpp's order, given the first.

    Only the first part's header says what the model is.  FileError for another part, for one that is missing or
    damaged, and for one that belongs elsewhere.
    """
    with GgufFile(path) as file:
        return _parts(file)


def _parts(file: GgufFile) -> list[Path]:
    path, (number, count) = file.path, file.part
    if count == 1:
        return [path]
    what, ending = f"part {number} of {count} of a split model", f"-{number:05d}-of-{count:05d}.gguf"
    if not path.name.endswith(ending):
        raise FileError(
            f"{path}: is {what}; expected its name to end in {ending}.",
            "Give all parts the names that they were published with.",
        )
    prefix = path.name.removesuffix(ending)
    parts = [path.with_name(f"{prefix}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if number != 1:
        raise FileError(f"{path}: is {what}; expected the first part.", f"Give {parts[0].name}.")
    for i, part in enumerate(parts[1:], 2):
        _check_part(part, i, count)
    return parts


def _check_part(path: Path, number: int, count: int) -> None:
    expected = f"part {number} of {count} of a split model"
    if not path.is_file():
        raise FileError(f"{path}: no such file; expected {expected}.", "Put all parts into one folder.")
    with GgufFile(path) as file:
        if file.part != (number, count):
            raise FileError(f"{path}: expected {expected}, got part {file.part[0]} of {file.part[1]}.", AGAIN)


def _check_kind(file: GgufFile, arch: str) -> None:
    """FileError for a model that does not write text from left to right."""
    if arch == "eagle3":
        raise FileError(f"{file.path}: is an EAGLE-3 drafter, but was given as the target.", "Give it as --draft.")
    if arch in _OTHER_DRAFTERS:
        raise FileError(f"{file.path}: is a drafter ({arch}), but was given as the target.")
    if arch in _EMBEDDERS or file.get(f"{arch}.attention.causal") is False:
        raise FileError(f"{file.path}: this {arch} model turns text into vectors; expected one that writes text.")
    if arch in _DIFFUSION:
        raise FileError(f"{file.path}: {arch} is a diffusion model; expected one that writes from left to right.")


def _learned_positions(first: GgufFile, parts: list[Path]) -> int | None:
    """Rows of a target's table of position embeddings (GPT-2, StarCoder, some MPT); None where there is no table."""
    shape = first.shape("position_embd.weight")
    for path in parts[1:]:
        with GgufFile(path) as file:
            shape = shape or file.shape("position_embd.weight")
    return shape[1] if shape else None


def _drafter_info(draft: GgufFile) -> DrafterInfo:
    number, count = draft.part
    if count > 1:
        raise FileError(
            f"{draft.path}: is part {number} of {count} of a split model; expected a drafter in one file.",
            "Join the parts with llama-gguf-split --merge.",
        )
    arch = draft.need("general.architecture", str)
    if arch != "eagle3":
        raise FileError(
            f"{draft.path}: is no EAGLE-3 drafter: expected general.architecture eagle3, got {arch}.",
            "Convert a drafter checkpoint with `eagle3 convert`, or leave --draft out and give --no-draft.",
        )
    aux_layers = _aux_layers(draft)
    blocks = draft.need("eagle3.block_count", int)
    if blocks != 1:
        raise FileError(f"{draft.path}: expected one decoder layer, got eagle3.block_count {blocks}.")
    _check_heads(draft)
    width = draft.need("eagle3.embedding_length", int)
    target_width = draft.need("eagle3.target_hidden_size", int)
    if draft.shape("fc.weight") != (3 * target_width, width):
        raise FileError(
            f"{draft.path}: expected fc.weight [{3 * target_width}, {width}], got {draft.shape('fc.weight')}.", AGAIN
        )
    _check_types(draft)
    return DrafterInfo(
        draft.path,
        aux_layers,
        target_width,
        width,
        _d2t(draft),
        _eps(draft),
        fc_norm=_fc_norm(draft, target_width),
        norm_output=_flag(draft, "norm_output", False),
        final_norm=_final_norm(draft),
        sliding_window=_sliding_window(draft),
    )


def _aux_layers(draft: GgufFile) -> tuple[int, int, int]:
    layers = draft.need("eagle3.target_layers", list)
    if len(set(layers)) != 3 or len(layers) != 3 or not all(isinstance(i, int) and i >= 1 for i in layers):
        raise FileError(f"{draft.path}: expected three different eagle3.target_layers from 1 on, got {layers}.", AGAIN)
    return layers[0], layers[1], layers[2]


def _d2t(draft: GgufFile) -> np.ndarray | None:
    if draft.shape("d2t") is None:
        return None
    d2t = draft.values("d2t", I64)
    if not len(d2t):
        raise FileError(f"{draft.path}: its d2t is empty; expected at least one token.", AGAIN)
    ids, counts = np.unique(d2t, return_counts=True)
    if counts.max() > 1:  # the drafter would propose one child twice
        most = ids[counts.argmax()]
        raise FileError(f"{draft.path}: its d2t names token {most} {counts.max()} times; expected it once.", AGAIN)
    return d2t


def _eps(draft: GgufFile) -> float:
    key = "eagle3.attention.layer_norm_rms_epsilon"
    eps: float = draft.need(key, float)
    if not 0 <= eps < np.inf:  # llama.cpp asserts it in the first pass
        raise FileError(f"{draft.path}: expected {key} as a finite number from 0 on, got {eps}.", AGAIN)
    return eps


def _flag(draft: GgufFile, name: str, default: bool) -> bool:
    return bool(draft.need(f"eagle3_cli.{name}", bool)) if draft.has(f"eagle3_cli.{name}") else default


def _final_norm(draft: GgufFile) -> bool:
    """Without a final norm the graph's own must do nothing but divide by the root mean square, which can be undone."""
    present = _flag(draft, "final_norm", True)
    if not present and _flag(draft, "norm_output", False):
        raise FileError(f"{draft.path}: norm_output is true, but final_norm is false: no norm to feed back.", AGAIN)
    if not present and (draft.values("output_norm.weight", F32) != 1).any():
        raise FileError(f"{draft.path}: final_norm is false, so expected output_norm.weight as ones.", AGAIN)
    return present


def _fc_norm(draft: GgufFile, target_width: int) -> np.ndarray | None:
    key = "eagle3_cli.fc_norm"
    if not draft.has(key):
        return None
    if draft.get("eagle3.norm_before_fc"):
        raise FileError(f"{draft.path}: has both {key} and eagle3.norm_before_fc; expected at most one.", AGAIN)
    values = draft.need(key, list)
    if len(values) != 3 * target_width or not all(isinstance(v, float) for v in values):
        raise FileError(f"{draft.path}: expected {key} as {3 * target_width} floats, got {len(values)} values.", AGAIN)
    weights = np.array(values, np.float32).reshape(3, target_width)
    if not np.isfinite(weights).all():
        raise FileError(f"{draft.path}: expected finite numbers in {key}.", AGAIN)
    return weights


def _sliding_window(draft: GgufFile) -> int | None:
    key = "eagle3_cli.sliding_window"
    if not draft.has(key):
        return None
    window: int = draft.need(key, int)
    if window < 1:
        raise FileError(f"{draft.path}: expected {key} from 1 on, got {window}.", AGAIN)
    return window


def _check_heads(draft: GgufFile) -> None:
    """llama.cpp asserts on these instead of reporting them."""
    heads = draft.need("eagle3.attention.head_count", int)
    kv_heads = draft.get("eagle3.attention.head_count_kv")
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise FileError(f"{draft.path}: {heads} attention heads cannot share {kv_heads} key/value heads.", AGAIN)
    key, value = draft.get("eagle3.attention.key_length"), draft.get("eagle3.attention.value_length")
    if key != value:
        raise FileError(f"{draft.path}: expected keys as long as values, got {key} and {value}.", AGAIN)
    head = draft.need("eagle3.embedding_length", int) // heads if key is None else key
    rotated = draft.get("eagle3.rope.dimension_count")
    rotated = head if rotated is None else rotated
    if not isinstance(rotated, int) or rotated % 2 or not 2 <= rotated <= head:
        raise FileError(
            f"{draft.path}: expected an even eagle3.rope.dimension_count from 2 to {head}, got {rotated}.", AGAIN
        )


def _check_types(draft: GgufFile) -> None:
    """llama.cpp loads these and dies in the first pass."""
    for name in draft.names():
        kind = draft.type(name)
        if ("norm" in name or "rope_freqs" in name) and kind != F32:
            raise FileError(f"{draft.path}: expected {name} as F32, got ggml type {kind}.", AGAIN)
        if name != "d2t" and kind in NOT_FOR_MATRICES:
            raise FileError(
                f"{draft.path}: expected {name} in a floating-point or quantised type, got {NOT_FOR_MATRICES[kind]}.",
                AGAIN,
            )


def _check_pair(draft: GgufFile, info: DrafterInfo, target: GgufFile) -> None:
    arch = target.need("general.architecture", str)
    width = target.need(f"{arch}.embedding_length", int)
    n_layer = target.need(f"{arch}.block_count", int)
    hint = "Use the drafter that was trained for this target."
    if info.target_width != width:
        raise PairError(
            f"{draft.path}: made for target width {info.target_width}, but {target.path.name} has {width}.", hint
        )
    if max(info.aux_layers) > n_layer:
        raise PairError(
            f"{draft.path}: reads target layer {max(info.aux_layers)}, but {target.path.name} has {n_layer}.", hint
        )
    _check_vocabulary(draft, info, target, hint)
    own = draft.shape("token_embd.weight")
    if own is None and info.width != width:
        raise PairError(
            f"{draft.path}: has no token embeddings of its own and cannot borrow the target's: expected width"
            f" {info.width}, got {width}.",
            "Convert the checkpoint again; it must contain embed_tokens.weight.",
        )


def _check_vocabulary(draft: GgufFile, info: DrafterInfo, target: GgufFile, hint: str) -> None:
    tokens = target.count_strings("tokenizer.ggml.tokens")
    nameless = draft.get("tokenizer.ggml.model") in _WITHOUT_TOKENS
    ours = draft.need("eagle3.vocab_size", int) if nameless else draft.count_strings("tokenizer.ggml.tokens")
    if ours != tokens:
        raise PairError(f"{draft.path}: has a vocabulary of {ours} tokens, but {target.path.name} has {tokens}.", hint)
    if not nameless:
        _check_tokens(draft, target, hint)
    _check_tables(draft, info, target, hint)


def _check_tokens(draft: GgufFile, target: GgufFile, hint: str) -> None:
    ours, theirs = draft.strings("tokenizer.ggml.tokens"), target.strings("tokenizer.ggml.tokens")
    if ours != theirs:
        i = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        raise PairError(f"{draft.path}: its token {i} is {ours[i]!r}, but {target.path.name} has {theirs[i]!r}.", hint)


def _check_tables(draft: GgufFile, info: DrafterInfo, target: GgufFile, hint: str) -> None:
    """Embeddings, head and d2t, for a vocabulary of the target's size."""
    tokens = target.count_strings("tokenizer.ggml.tokens")
    own = draft.shape("token_embd.weight")
    if own is not None and own != (info.width, tokens):
        raise PairError(f"{draft.path}: expected token_embd.weight [{info.width}, {tokens}], got {list(own)}.", hint)
    head = draft.shape("output.weight")
    candidates = tokens if info.d2t is None else len(info.d2t)
    if head is None and (info.d2t is not None or info.width != info.target_width):
        raise PairError(f"{draft.path}: has no output.weight and cannot borrow the target's head.", AGAIN)
    if head is not None and head != (info.width, candidates):
        raise PairError(f"{draft.path}: expected output.weight [{info.width}, {candidates}], got {list(head)}.", AGAIN)
    if info.d2t is not None and not (info.d2t.min() >= 0 and info.d2t.max() < tokens):
        raise PairError(
            f"{draft.path}: d2t names token {info.d2t.min()} to {info.d2t.max()}, but {target.path.name} has"
            f" {tokens} tokens.",
            "Convert the checkpoint again; d2t must hold absolute ids.",
        )
