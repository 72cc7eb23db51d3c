"""Draft vocabulary: offsets, masks, and everything that must not pass as one of them (vllm 18909, SpecForge 76)."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import numpy as np
import pytest

from eagle3_cli.convert.checkpoint import StoredTensor
from eagle3_cli.convert.safetensors import DTYPES
from eagle3_cli.convert.vocab import draft_vocab
from eagle3_cli.errors import CheckpointError

OFFSETS, IDS, VOCAB = [0, 2, 3, 5], [0, 3, 5, 8], 10


def stored(name: str, values: object, dtype: str) -> StoredTensor:
    data = checkpoints.bf16(np.array(values)) if dtype == "BF16" else np.array(values).astype(DTYPES[dtype])
    return StoredTensor(name, dtype, data.shape, Path("x"), data)


def mask(ids: list[int], dtype: str = "BOOL", size: int = VOCAB) -> StoredTensor:
    return stored("t2d", [int(i in ids) for i in range(size)], dtype)


@pytest.mark.parametrize("dtype", ["I64", "I32", "I16", "U8", "F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("with_mask", [True, False])
def test_offsets_in_any_number_type(dtype, with_mask):
    tensors = {"d2t": stored("d2t", OFFSETS, dtype)} | ({"t2d": mask(IDS)} if with_mask else {})
    vocab = draft_vocab(tensors, 4, VOCAB)
    assert vocab.ids is not None
    assert (vocab.ids.tolist(), vocab.ids.dtype, vocab.how) == (IDS, np.int64, "own (d2t)")


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "I64", "F32"])
def test_mask_alone_defines_the_map(dtype):
    vocab = draft_vocab({"t2d": mask(IDS, dtype)}, 4, VOCAB)
    assert vocab.ids is not None
    assert (vocab.ids.tolist(), vocab.how) == (IDS, "own (t2d)")


def test_no_map_with_equal_sizes_is_the_identity():
    assert draft_vocab({}, VOCAB, VOCAB).ids is None


def test_a_map_that_is_the_identity_is_dropped():
    vocab = draft_vocab({"d2t": stored("d2t", [0] * VOCAB, "I64"), "t2d": mask(list(range(VOCAB)))}, VOCAB, VOCAB)
    assert (vocab.ids, vocab.how) == (None, "identity")


def test_no_map_with_a_smaller_head():
    with pytest.raises(CheckpointError, match="neither d2t nor t2d"):
        draft_vocab({}, 4, VOCAB)


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        ([0, 2, 2, 9], "I64", "row 3 means id 12"),
        ([-1, 2, 3, 5], "I64", "row 0 means id -1"),
        ([3, 2, 0, 0], "I64", "rows 0 and 1 both mean id 3"),  # padded with zeros
        ([0, 2, 1, 1], "I64", "rows 1 and 2 both mean id 3"),
        ([0, 2.5, 3, 5], "F32", "whole numbers"),
        ([0, np.nan, 3, 5], "F32", "whole numbers"),
        ([0, np.inf, 3, 5], "F64", "whole numbers"),
        ([0, 2**40, 3, 5], "I64", "within a vocabulary"),
        ([[0, 2], [3, 5]], "I64", "expected a vector"),
        ([0, 2, 3], "I64", "names 3 tokens"),
        ([0, 2, 3, 5], "F8_E4M3", "expected integers"),
    ],
)
def test_bad_offsets(values, dtype, words):
    with pytest.raises(CheckpointError, match=words):
        draft_vocab({"d2t": stored("d2t", values, dtype)}, 4, VOCAB)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"d2t": stored("d2t", OFFSETS, "I64"), "t2d": mask([0, 3, 5, 9])}, "id 8 is in d2t but t2d says no"),
        ({"d2t": stored("d2t", OFFSETS, "I64"), "t2d": mask([0, 3, 5, 7, 8])}, "id 7 is not in d2t but t2d says yes"),
        ({"t2d": mask(IDS, size=11)}, "vocabulary of 11 ids, but the target has 10"),
        ({"t2d": mask([0, 3])}, "names 2 tokens"),
        ({"t2d": stored("t2d", [2] * VOCAB, "U8")}, "mask of 0 and 1"),
        ({"d2t": stored("d2t", [0] * 4, "I64"), "t2d": mask(list(range(10)))}, "id 4 is not in d2t but t2d says yes"),
    ],
)
def test_map_and_mask_must_agree(tensors, words):
    with pytest.raises(CheckpointError, match=words):
        draft_vocab(tensors, 4, VOCAB)


def test_an_ambiguous_map_is_noted():
    tensors = {"d2t": stored("d2t", [0, 1, 2, 4], "I64")}
    assert "could also be absolute" in draft_vocab(tensors, 4, VOCAB).notes[0]
    assert draft_vocab({"d2t": stored("d2t", [0, 0, 3, 5], "I64")}, 4, VOCAB).notes == ()


@pytest.mark.parametrize("with_mask", [True, False])
def test_absolute_ids_are_taken_where_offsets_are_impossible(with_mask):
    tensors = {"d2t": stored("d2t", IDS, "I64")} | ({"t2d": mask(IDS)} if with_mask else {})
    vocab = draft_vocab(tensors, 4, VOCAB)
    assert vocab.ids is not None
    assert (vocab.ids.tolist(), vocab.how) == (IDS, "own (d2t, absolute ids)")
    assert "other programs would misread it" in vocab.notes[0]


def test_the_mask_tells_absolute_ids_from_offsets():
    """[0, 1, 2, 4] could be either."""
    d2t = {"d2t": stored("d2t", [0, 1, 2, 4], "I64")}
    absolute = draft_vocab({**d2t, "t2d": mask([0, 1, 2, 4])}, 4, VOCAB)
    offsets = draft_vocab({**d2t, "t2d": mask([0, 2, 4, 7])}, 4, VOCAB)
    assert [v.ids.tolist() for v in (absolute, offsets) if v.ids is not None] == [[0, 1, 2, 4], [0, 2, 4, 7]]
    assert offsets.notes == ()


def test_ids_in_another_order_are_kept_and_noted():
    vocab = draft_vocab({"d2t": stored("d2t", [5, 0, 0, -3], "I64")}, 4, VOCAB)
    assert vocab.ids is not None
    assert vocab.ids.tolist() == [5, 1, 2, 0]
    assert vocab.notes == ("d2t is not ascending",)
