"""The C kernels against numpy."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from eagle3_cli import _native


@pytest.mark.skipif("EAGLE3_NATIVE_FROM" not in os.environ, reason="only in `make sanitize`")
def test_the_module_under_test_is_the_sanitized_one():
    assert Path(os.environ["EAGLE3_NATIVE_FROM"]).resolve() in Path(_native.__file__).parents


# Few distinct values make ties; the rest are ordinary floats and what a broken model or a mask produces.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, -1.0, 30.0, -200.0, -np.inf, np.nan]), st.floats(-100, 100, width=32)
)
SIZES = st.one_of(st.integers(1, 6), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 100]))


def vectors(size=SIZES):
    return size.flatmap(lambda n: npst.arrays(np.float32, n, elements=VALUES))


def topk(rows, k: int, d2t=None, scales=None):
    rows = np.ascontiguousarray(rows, np.float32)
    ids, logps = np.full((len(rows), k), -7, np.int32), np.full((len(rows), k), 7, np.float32)
    n = rows.shape[1] if d2t is None else len(d2t)
    _native.topk(rows.ctypes.data, rows.shape[1], d2t, n, ids, logps, k, scales)
    return ids, logps


def topk_reference(row, k: int, d2t=None):
    """(ids, natural log of the softmax) of the k best candidates above -inf; NaN counts as absent."""
    ids = np.arange(len(row)) if d2t is None else d2t
    z = row[ids].astype(np.float64)
    z[np.isnan(z)] = -np.inf
    order = [i for i in np.argsort(-z, kind="stable")[:k] if z[i] > -np.inf]
    peak = z.max()
    total = peak + np.log(np.exp(z - peak).sum()) if order else 0.0
    missing = k - len(order)
    return [*ids[order], *[-1] * missing], [*(z[order] - total), *[-np.inf] * missing]


@given(vectors(), st.integers(1, 20))
@example(np.full(17, -np.inf, np.float32), 3)
@example(np.full(16, np.nan, np.float32), 3)
@example(np.array([1, 2], np.float32), 20)
@example(np.r_[np.zeros(16), 1].astype(np.float32), 1)
def test_topk_equals_a_stable_numpy_sort(row, k):
    ids, logps = topk(row[None], k)
    wanted_ids, wanted_logps = topk_reference(row, k)
    assert ids[0].tolist() == wanted_ids
    np.testing.assert_allclose(logps[0], wanted_logps, atol=1e-5, rtol=1e-6)


@given(vectors(), st.integers(1, 8), st.data())
def test_topk_of_a_draft_vocabulary_ignores_all_other_tokens(row, k, data):
    chosen = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, unique=True))
    d2t = np.array(chosen, np.int32)
    ids, logps = topk(row[None], k, d2t)
    wanted_ids, wanted_logps = topk_reference(row, k, d2t)
    assert ids[0].tolist() == wanted_ids
    np.testing.assert_allclose(logps[0], wanted_logps, atol=1e-5, rtol=1e-6)


@given(vectors(), st.integers(1, 8), st.sampled_from([0.25, 1.0, 3.0, 17.0]), st.booleans())
def test_topk_with_a_scale_is_the_softmax_of_the_scaled_logits(row, k, scale, reverse):
    d2t = np.arange(len(row), dtype=np.int32)[::-1].copy() if reverse else None
    ids, logps = topk(row[None], k, d2t, np.array([scale], np.float32))
    wanted_ids, wanted_logps = topk_reference(row.astype(np.float64) * scale, k, d2t)
    assert ids[0].tolist() == wanted_ids
    np.testing.assert_allclose(logps[0], wanted_logps, atol=1e-4, rtol=1e-5)


def test_topk_scales_every_row_by_its_own_factor():
    rows, scales = np.random.default_rng(1).normal(size=(3, 70)), np.array([0.5, 1, 4], np.float32)
    _, logps = topk(rows, 5, scales=scales)
    for i, scale in enumerate(scales):
        np.testing.assert_allclose(logps[i], topk(rows[i : i + 1] * scale, 5)[1][0], atol=1e-5)


@pytest.mark.parametrize(("scales", "error"), [(np.ones(1, np.float32), ValueError), (np.ones(2), TypeError)])
def test_topk_wants_one_float32_scale_per_row(scales, error):
    with pytest.raises(error, match="scales"):
        topk(np.zeros((2, 4)), 2, scales=scales)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_topk_treats_rows_alike_and_separately(rows, width, k, seed):
    logits = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    ids, logps = topk(logits, k)
    for i in range(rows):
        alone_ids, alone_logps = topk(logits[i : i + 1], k)
        assert (ids[i] == alone_ids[0]).all()
        assert (logps[i] == alone_logps[0]).all()


def test_topk_log_probabilities_of_a_large_vocabulary_sum_to_one():
    row = np.random.default_rng(0).normal(0, 4, 50_000).astype(np.float32)
    _, logps = topk(row[None], len(row))
    assert np.exp(logps.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_topk_survives_huge_logits():
    ids, logps = topk(np.array([[3e38, -3e38, 3e38, 0]], np.float32), 4)
    assert ids.tolist() == [[0, 2, 3, 1]]
    assert not np.isnan(logps).any()


@pytest.mark.parametrize("offset", [-10_000, 1_000, 100_000])
def test_topk_log_probabilities_do_not_depend_on_the_height_of_the_logits(offset):
    row = np.array([2, 1, 0.5, -3], np.float32)
    _, high = topk((row + offset)[None], 4)
    _, low = topk((row + np.float32(offset)).astype(np.float64)[None] - offset, 4)
    np.testing.assert_allclose(high, low, atol=1e-5)


def test_topk_of_no_rows_writes_nothing():
    ids, logps = np.empty((0, 3), np.int32), np.empty((0, 3), np.float32)
    row = np.zeros(4, np.float32)
    _native.topk(row.ctypes.data, 4, None, 4, ids, logps, 3)


@given(vectors())
@example(np.full(40, np.nan, np.float32))
@example(np.full(40, -np.inf, np.float32))
@example(np.r_[np.zeros(16), 1, 1, np.zeros(16)].astype(np.float32))
def test_argmax_is_the_first_largest(row):
    numbers = [(-value, i) for i, value in enumerate(row.tolist()) if not np.isnan(value)]
    wanted = min(numbers)[1] if numbers and math.isfinite(min(numbers)[0]) else -1
    assert _native.argmax(row.ctypes.data, len(row)) == wanted


@given(st.integers(1, 9), st.integers(1, 33), st.data())
def test_gather_equals_indexing(rows, width, data):
    source = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    index = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=12)), np.int32)
    out = np.full((len(index), width), -1, np.float32)
    _native.gather(source, index, out)
    assert (out == source[index]).all()


# --- arguments: TypeError or ValueError, never a crash ---------------------------------------------------------

ROW = np.zeros(8, np.float32)
AT = ROW.ctypes.data
IDS, LOGPS = np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32)
INDEX = np.array([0, 1], np.int32)


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 8, None, 8, IDS, LOGPS, 2),  # no address
        (AT, 8, None, 9, IDS, LOGPS, 2),  # more candidates than a row has
        (AT, 8, None, 0, IDS, LOGPS, 2),
        (AT, 8, None, -1, IDS, LOGPS, 2),
        (AT, 8, INDEX, 3, IDS, LOGPS, 2),  # d2t of another length
        (AT, 8, np.array([0, 8], np.int32), 2, IDS, LOGPS, 2),  # outside the row
        (AT, 8, np.array([-1, 0], np.int32), 2, IDS, LOGPS, 2),
        (AT, 8, None, 8, IDS, LOGPS, 0),
        (AT, 8, None, 8, IDS, LOGPS, -2),
        (AT, 8, None, 8, IDS, LOGPS, 3),  # no whole rows
        (AT, 8, None, 8, IDS, LOGPS[:, :1].copy(), 2),
    ],
)
def test_topk_refuses_values(arguments):
    with pytest.raises(ValueError, match=r".+"):
        _native.topk(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("address", 8, None, 8, IDS, LOGPS, 2),
        (None, 8, None, 8, IDS, LOGPS, 2),
        (AT, 8, [0, 1], 2, IDS, LOGPS, 2),
        (AT, 8, INDEX.astype(np.int64), 2, IDS, LOGPS, 2),
        (AT, 8, None, 8, IDS.astype(np.float32), LOGPS, 2),
        (AT, 8, None, 8, IDS, LOGPS.astype(np.float64), 2),
        (AT, 8, None, 8, IDS, LOGPS, 2.5),
    ],
)
def test_topk_refuses_types(arguments):
    with pytest.raises(TypeError):
        _native.topk(*arguments)


def test_outputs_must_be_writable_and_contiguous():
    frozen = LOGPS.copy()
    frozen.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        _native.topk(AT, 8, None, 8, IDS, frozen, 2)
    with pytest.raises((BufferError, ValueError)):
        _native.topk(AT, 8, None, 8, np.zeros((2, 4), np.int32)[:, ::2], np.zeros((2, 2), np.float32), 2)


@pytest.mark.parametrize("outputs", [(None, None), (None, LOGPS), (IDS, None)])
def test_topk_refuses_missing_outputs(outputs):
    with pytest.raises((TypeError, ValueError)):
        _native.topk(AT, 8, None, 8, *outputs, 2)


@pytest.mark.parametrize(("address", "n"), [(0, 8), (AT, 0), (AT, -1)], ids=["null", "none", "negative"])
def test_argmax_refuses_values(address, n):
    with pytest.raises(ValueError, match="expected an address"):
        _native.argmax(address, n)


@pytest.mark.parametrize("arguments", [("x", 8), (None, 8), (AT, "8"), (AT,), (AT, 8, 9)])
def test_argmax_refuses_types(arguments):
    with pytest.raises(TypeError):
        _native.argmax(*arguments)


ROWS, OUT = np.zeros((3, 4), np.float32), np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("rows", "index", "out"),
    [
        (ROWS, np.array([0, 3], np.int32), OUT),
        (ROWS, np.array([-1, 0], np.int32), OUT),
        (ROWS, INDEX, np.zeros(7, np.float32)),  # no equal rows
        (ROWS, INDEX, np.zeros((2, 5), np.float32)),  # wider than what divides the source
        (ROWS, INDEX, np.zeros((2, 0), np.float32)),
        (np.zeros((0, 4), np.float32), INDEX, OUT),
    ],
)
def test_gather_refuses_values(rows, index, out):
    with pytest.raises(ValueError, match=r"expected"):
        _native.gather(rows, index, out)


@pytest.mark.parametrize(
    ("rows", "index", "out"),
    [
        (ROWS.astype(np.float64), INDEX, OUT),
        (ROWS, INDEX.astype(np.uint32), OUT),
        (ROWS, INDEX, OUT.astype(np.float16)),
        (ROWS.tolist(), INDEX, OUT),
    ],
)
def test_gather_refuses_types(rows, index, out):
    with pytest.raises(TypeError):
        _native.gather(rows, index, out)


@pytest.mark.parametrize("arrays", [(None, INDEX, OUT), (ROWS, INDEX, None), (ROWS, None, OUT), (None, None, None)])
def test_gather_refuses_none(arrays):
    with pytest.raises((TypeError, ValueError)):
        _native.gather(*arrays)


def matches_reference(text, shortest, longest, checked):
    """(length, end) of the best match of each token that followed, from the newest on; by slices."""
    n, best = len(text), {}
    ends = [end for end in range(n - 1, shortest - 1, -1) if text[end - shortest : end] == text[n - shortest :]]
    for end in ends[:checked]:
        length = max(m for m in range(shortest, min(longest, end) + 1) if text[end - m : end] == text[n - m :])
        if text[end] not in best or length > best[text[end]][0]:
            best[text[end]] = length, end
    return list(best.values())


@given(st.lists(st.integers(0, 2), max_size=80), st.integers(1, 4), st.integers(0, 12), st.integers(0, 9))
def test_matches_are_those_of_comparing_slices(text, shortest, more, checked):
    found = _native.matches(np.array(text, np.int32), shortest, shortest + more, checked)
    assert found == matches_reference(text, shortest, shortest + more, checked)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((np.zeros(3, np.int64), 1, 2, 3), TypeError, "text: expected an array of 'i'"),
        ((np.zeros(3, np.int32), 0, 2, 3), ValueError, "shortest, longest: expected 1 <= shortest <= longest"),
        ((np.zeros(3, np.int32), 3, 2, 3), ValueError, "shortest, longest"),
        ((np.zeros(3, np.int32), 1, 2, 257), ValueError, "checked: expected 0 to 256"),
        ((np.zeros(3, np.int32), 1, 2, -1), ValueError, "checked: expected 0 to 256"),
    ],
)
def test_matches_refuses_what_it_cannot_search(arguments, error, said):
    with pytest.raises(error, match=said):
        _native.matches(*arguments)


def test_no_text_has_no_match():
    assert _native.matches(np.zeros(0, np.int32), 1, 2, 3) == _native.matches(None, 1, 2, 3) == []
