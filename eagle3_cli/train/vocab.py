"""The draft vocabulary: the tokens that the drafter's head scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..gguf_file import GgufFile
from .samples import Sample

Ids = NDArray[np.int64]

MOST_CANDIDATES = 32_000  # of a draft vocabulary chosen by coverage
COVERAGE = 0.995
CONTROL = 3  # enum llama_token_type


def count_tokens(samples: Iterable[Sample], vocab: int) -> Ids:
    """How often every id of the target's vocabulary occurs in answers, int64 [vocab]."""
    counts = np.zeros(vocab, np.int64)
    for sample in samples:
        counts += np.bincount(sample.tokens[np.asarray(sample.answer, bool)], minlength=vocab)
    return counts


def draft_vocabulary(counts: Ids, size: int, always: Sequence[int] = ()) -> Ids:
    """The `size` tokens to score, absolute ids, int64 [size], ascending: `always` and then the most frequent ones,
    the lower id first among equals.

    counts   int64 [V] by id
    always   end and control tokens
    A size of V means no reduction.  OptionError where `size` is larger, or smaller than `always`.
    """
    vocab, first = len(counts), np.unique(np.asarray(always, np.int64))
    if not 1 <= size <= vocab:
        raise OptionError(
            f"--draft-vocab: expected 1 to {vocab}, the size of the target's vocabulary, got {size}.",
            f"Give {vocab} for a drafter that scores every token.",
        )
    if len(first) > size:
        raise OptionError(
            f"--draft-vocab: expected at least {len(first)}, the target's end and control tokens, got {size}."
        )
    ranked = np.array(counts)
    ranked[first] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int64)


def coverage(counts: Ids, ids: Ids) -> float:
    """Share of the counted tokens that lies in a draft vocabulary; 1 where nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 1.0


def unskippable(path: Path) -> list[int]:
    """Ids that every draft vocabulary has: the target's control tokens and its end tokens.  path: a GGUF, or a Hugging
    Face directory, whose special added tokens are control tokens."""
    if path.is_dir():
        from .hf_tokenizer import HfTokenizer

        return HfTokenizer(path).unskippable
    with GgufFile(path) as file:
        kinds = file.get("tokenizer.ggml.token_type") or []
        ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = [i for i, kind in enumerate(kinds) if kind == CONTROL]
    return sorted({*control, *(end for end in ends if isinstance(end, int))})


def choose_size(counts: np.ndarray, always: Sequence[int]) -> int:
    """Size of the draft vocabulary where none was asked for: the fewest of the most frequent tokens, besides `always`,
    that cover `COVERAGE` of the counted ones, rounded up to a multiple of 64 and at most `MOST_CANDIDATES`."""
    others = np.array(counts, np.int64)
    others[list(always)] = 0
    wanted = COVERAGE * others.sum()
    enough = int(np.searchsorted(np.cumsum(np.sort(others)[::-1]), wanted)) + 1
    size = -(-(len(always) + enough) // 64) * 64
    return min(size, max(MOST_CANDIDATES, len(always)), len(counts))
