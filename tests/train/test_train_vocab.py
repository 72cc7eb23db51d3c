"""Choosing the tokens that a drafter scores."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_cli.errors import OptionError
from eagle3_cli.train.samples import Sample
from eagle3_cli.train.vocab import count_tokens, coverage, draft_vocabulary

COUNTS = np.array([0, 5, 9, 5, 0, 7, 1, 0])


def test_only_answer_tokens_are_counted() -> None:
    samples = [
        Sample(np.array([1, 2, 2, 3], np.int32), np.array([False, True, True, True])),
        Sample(np.array([3, 3], np.int32), np.array([True, False])),
        Sample(np.array([7], np.int32), np.array([False])),
    ]
    assert count_tokens(samples, 8).tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("size", "always", "ids"),
    [
        (1, [], [2]),
        (3, [], [1, 2, 5]),  # 1 and 3 are as frequent: the lower id
        (4, [], [1, 2, 3, 5]),
        (3, [7, 0], [0, 2, 7]),  # end and control tokens, however rare
        (2, [7, 7, 2], [2, 7]),
        (8, [4], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_vocabulary_holds_the_required_and_the_most_frequent_tokens(
    size: int, always: list[int], ids: list[int]
) -> None:
    chosen = draft_vocabulary(COUNTS, size, always)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == ids


@pytest.mark.parametrize("size", [0, 9])
def test_a_size_outside_the_targets_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(OptionError, match=f"expected 1 to 8, the size of the target's vocabulary, got {size}"):
        draft_vocabulary(COUNTS, size)


def test_a_size_without_room_for_the_required_tokens_is_refused() -> None:
    with pytest.raises(OptionError, match="expected at least 3"):
        draft_vocabulary(COUNTS, 2, [0, 4, 7])


def test_coverage_is_the_share_of_counted_tokens() -> None:
    assert coverage(COUNTS, np.array([2, 5])) == 16 / 27
    assert coverage(COUNTS, np.arange(8)) == 1
    assert coverage(np.zeros(8, np.int64), np.array([1])) == 1
