"""The draft vocabulary: the tokens that the drafter's head scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from .samples import Sample

Ids = NDArray[np.int64]


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
