"""The draft vocabulary: which target tokens the drafter's head scores.

Checkpoints store OFFSETS (target id = i + d2t[i]) and a mask t2d over the target's vocabulary; a GGUF stores the
ABSOLUTE ids.  A wrong map costs almost all acceptance without any error, so the two are checked against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .checkpoint import StoredTensor
from .tensors import to_float32

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class DraftVocab:
    """ids: int64 [Vd] absolute target ids, unique; None when the head scores the whole vocabulary in order.
    how: for the report; source: canonical name of the tensor that named the ids."""

    ids: Ids | None
    size: int
    how: str
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def transform(self) -> str:
        """How the stored ids came from the source, for the report."""
        return {OFFSETS: "offsets to absolute ids", MASK: "mask to absolute ids"}.get(self.how, "absolute ids")


OFFSETS, ABSOLUTE, MASK = "own (d2t)", "own (d2t, absolute ids)", "own (t2d)"


def draft_vocab(tensors: Mapping[str, StoredTensor], size: int, vocab: int) -> DraftVocab:
    """The draft vocabulary of a head with `size` rows, for a target with `vocab` ids.

    CheckpointError unless the ids are unique, in range, and the same ones that t2d marks.
    """
    mask = _mask(tensors["t2d"], vocab) if "t2d" in tensors else None
    notes: tuple[str, ...] = ()
    if "d2t" in tensors:
        ids, how, notes = _from_d2t(tensors["d2t"], vocab, mask)
    elif mask is not None:
        ids, how = np.flatnonzero(mask), MASK
    elif size == vocab:
        return DraftVocab(None, size, "identity")
    else:
        raise CheckpointError(
            f"the head scores {size} tokens and the target has {vocab}, but there is neither d2t nor t2d.",
            "Without one of them nobody knows which tokens are meant; use the complete checkpoint.",
        )
    if len(ids) != size:
        raise CheckpointError(f"{how}: names {len(ids)} tokens, but the drafter's head scores {size}.")
    if len(ids) == vocab and np.array_equal(ids, np.arange(vocab)):
        return DraftVocab(None, size, "identity")
    return DraftVocab(ids, size, how, "t2d" if how == MASK else "d2t", notes)


def _from_d2t(tensor: StoredTensor, vocab: int, mask: NDArray[np.bool_] | None) -> tuple[Ids, str, tuple[str, ...]]:
    """(absolute ids, how they were stored, notes).  Offsets is what every program that serves drafters expects;
    absolute ids are taken where only that reading is possible."""
    stored = _integers(tensor)
    offsets = stored + np.arange(len(stored))
    fault, absolute = _fault(offsets, vocab, mask), _fault(stored, vocab, mask)
    if fault is None:
        notes = [f"{tensor.name} is not ascending"] if np.any(np.diff(offsets) <= 0) else []
        if absolute is None and mask is None:
            notes.append(f"{tensor.name} read as offsets; it could also be absolute ids, and there is no t2d to tell")
        return offsets, OFFSETS, tuple(notes)
    if absolute is None:
        note = f"{tensor.name} holds absolute ids, not offsets, as which {fault}; other programs would misread it"
        return stored, ABSOLUTE, (note,)
    raise CheckpointError(
        f"{tensor.name}: as offsets (target id = i + d2t[i]) {fault}.",
        "Was the drafter made for this target, and with as many distinct tokens as its head has rows?",
    )


def _fault(ids: Ids, vocab: int, mask: NDArray[np.bool_] | None) -> str | None:
    """What is wrong with a list of absolute ids, as the end of a sentence; None if nothing."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
        i = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
        return f"row {i} means id {ids[i]}, outside the target's 0..{vocab - 1}"
    unique, first = np.unique(ids, return_index=True)
    if len(unique) < len(ids):
        i = int(np.setdiff1d(np.arange(len(ids)), first)[0])
        return f"rows {int(np.flatnonzero(ids == ids[i])[0])} and {i} both mean id {ids[i]}"
    if mask is not None and not np.array_equal(np.flatnonzero(mask), unique):
        marked = np.zeros_like(mask)
        marked[ids] = True
        i = int(np.flatnonzero(marked != mask)[0])
        return f"id {i} is {'in' if marked[i] else 'not in'} d2t but t2d says {'no' if marked[i] else 'yes'}"
    return None


def _integers(tensor: StoredTensor) -> Ids:
    """int64 values of a vector in any number type; CheckpointError for a fraction."""
    if len(tensor.shape) != 1:
        raise CheckpointError(f"{tensor.name}: expected a vector, got shape {list(tensor.shape)}.")
    values: NDArray[Any] = tensor.data
    if tensor.dtype in ("F16", "BF16", "F32", "F64"):
        values = tensor.data if tensor.dtype == "F64" else to_float32(tensor.data, tensor.dtype)
        # 2**31 is beyond any vocabulary; the comparison is false for NaN
        if not np.all((np.abs(values) < 2**31) & (values == np.floor(values))):
            raise CheckpointError(f"{tensor.name}: expected whole numbers, got fractions or values out of range.")
    elif tensor.dtype.startswith("F8"):
        raise CheckpointError(f"{tensor.name}: expected integers, got {tensor.dtype}.")
    elif values.size and (int(values.max()) >= 2**31 or int(values.min()) < -(2**31)):
        raise CheckpointError(f"{tensor.name}: expected offsets within a vocabulary, got {values.max()}.")
    return values.astype(np.int64)


def _mask(tensor: StoredTensor, vocab: int) -> NDArray[np.bool_]:
    values = _integers(tensor)
    if len(values) != vocab:
        raise CheckpointError(
            f"{tensor.name}: marks a vocabulary of {len(values)} ids, but the target has {vocab}.",
            "Give the --target that the drafter was trained for.",
        )
    if values.size and (values.min() < 0 or values.max() > 1):
        raise CheckpointError(f"{tensor.name}: expected a mask of 0 and 1, got values up to {values.max()}.")
    return values.astype(np.bool_)
