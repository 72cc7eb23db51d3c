"""The parts of the C extension that talk to llama.cpp: bind, batch filling, Capture."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from eagle3_cli import _native
from eagle3_cli.context import DECODE, Context, ContextSettings
from eagle3_cli.errors import LlamaError
from eagle3_cli.llama import Model, function


def captured(capture):
    """The rows of a capture, float32 [capacity, width]."""
    return np.asarray(memoryview(capture))


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def model(tiny_target):
    model = Model(tiny_target.path, [], 0)
    yield model
    model.close()


@pytest.fixture
def make_context(model):
    made = []

    def make(capture=None, rows=8, sequences=4):
        made.append(Context(model, "test", ContextSettings(256, rows, sequences, threads=1), capture))
        return made[-1]

    yield make
    for context in made:
        context.close()


# --- bind -------------------------------------------------------------------------------------------------------


def bound() -> dict[str, int]:
    return {n: ctypes.cast(function(n, None), ctypes.c_void_p).value for n in _native.FUNCTIONS}


def test_bind_wants_every_function():
    for name in _native.FUNCTIONS:
        addresses = bound()
        del addresses[name]
        with pytest.raises(KeyError, match=name):
            _native.bind(addresses)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("0x1", TypeError), (None, TypeError), (1.5, TypeError)])
def test_bind_refuses_addresses(value, error):
    with pytest.raises(error):
        _native.bind({**bound(), "ggml_nbytes": value})


@pytest.mark.parametrize("addresses", [None, [], "x"])
def test_bind_wants_a_dict(addresses):
    with pytest.raises(TypeError):
        _native.bind(addresses)


def test_nothing_works_before_bind():
    program = """if True:
        import numpy as np
        from eagle3_cli import _native
        for call in (lambda: _native.Capture(["x"], 1, 1),
                     lambda: _native.fill(1, np.zeros(1, np.int32), np.zeros(1, np.int32), None, None, None, None)):
            try:
                call()
            except ValueError as error:
                assert "bind" in str(error)
            else:
                raise SystemExit("no error")
        """
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- fill -------------------------------------------------------------------------------------------------------

ONE = i32(0)


@pytest.mark.parametrize(
    "arrays",
    [
        (ONE, None, None, None, None, None),  # no positions
        (ONE, i32(), None, None, None, None),
        (None, ONE, None, None, None, None),  # neither tokens nor features
        (i32(1, 2), ONE, None, None, None, None),
        (ONE, ONE, None, None, np.zeros(2, np.int8), None),
        (i32(1, 2), i32(0, 1), None, None, None, np.zeros(3, np.float32)),  # no equal rows
        (ONE, ONE, i32(0), i32(0), None, None),
        (ONE, ONE, i32(0, 0), i32(0), None, None),  # a row in no sequence
        (ONE, ONE, i32(1, 0), i32(0), None, None),
        (ONE, ONE, i32(-1, 1), i32(0), None, None),
        (ONE, ONE, i32(0, 2), i32(0), None, None),  # more than seqs holds
        (ONE, ONE, i32(0, 1), None, None, None),
        (ONE, ONE, i32(0, 1), i32(-1), None, None),  # refused by llama.cpp
        (ONE, ONE, i32(0, 2), i32(0, 999), None, None),
        (i32(-5), ONE, None, None, None, None),
        (i32(10**6), ONE, None, None, None, None),
        (None, ONE, None, None, None, np.zeros(3, np.float32)),  # not the model's width
        (ONE, ONE, None, None, None, np.zeros(3, np.float32)),
    ],
)
def test_fill_refuses_values(make_context, arrays):
    with pytest.raises(ValueError, match=r"expected|llama_batch_ext"):
        _native.fill(make_context().batch, *arrays)


@pytest.mark.parametrize(
    "arrays",
    [
        ([0], ONE, None, None, None, None),
        (ONE.astype(np.int64), ONE, None, None, None, None),
        (ONE, ONE.astype(np.float32), None, None, None, None),
        (ONE, ONE, None, None, np.ones(1, np.int32), None),
        (ONE, ONE, None, None, np.ones(1, bool), None),
        (ONE, ONE, None, None, None, np.zeros((1, 64))),
    ],
)
def test_fill_refuses_types(make_context, arrays):
    with pytest.raises(TypeError):
        _native.fill(make_context().batch, *arrays)


@pytest.mark.parametrize(("batch", "error"), [(0, ValueError), (None, TypeError), ("batch", TypeError)])
def test_fill_wants_the_address_of_a_batch(batch, error):
    with pytest.raises(error):
        _native.fill(batch, ONE, ONE, None, None, None, None)


def test_strided_arrays_are_refused(make_context):
    with pytest.raises((BufferError, ValueError)):
        _native.fill(make_context().batch, i32(1, 2, 3, 4)[::2], i32(0, 1), None, None, None, None)


def test_a_refused_batch_does_not_stop_the_next_one(make_context):
    context = make_context()
    with pytest.raises(ValueError, match="llama_batch_ext"):
        context.process(DECODE, i32(0), i32(10**6))
    context.process(DECODE, i32(0), i32(5), outputs=np.ones(1, np.int8))
    assert context.last_position(0) == 0


def test_rows_keep_their_order_tokens_and_output_flags(make_context):
    together, alone = make_context(), make_context()
    together.process(DECODE, i32(0, 1, 2), i32(5, 9, 7), outputs=np.array([1, 0, 1], np.int8))
    rows = np.ctypeslib.as_array((ctypes.c_float * (2 * together.n_vocab)).from_address(together.logits())).copy()
    for i, token in enumerate([5, 9, 7]):
        alone.process(DECODE, i32(i), i32(token), outputs=np.ones(1, np.int8))
        row = np.ctypeslib.as_array((ctypes.c_float * alone.n_vocab).from_address(alone.logits()))
        if i != 1:
            np.testing.assert_allclose(rows[(i // 2) * len(row) : (i // 2 + 1) * len(row)], row, atol=2e-2)


def test_a_context_that_is_full_says_so(make_context):
    context = make_context(rows=256)
    context.process(DECODE, np.arange(256, dtype=np.int32), np.full(256, 3, np.int32))
    with pytest.raises(LlamaError, match="no room in the KV cache"):
        context.process(DECODE, i32(256), i32(3))


def test_a_gap_in_the_positions_is_an_error_with_llamas_words(make_context):
    context = make_context()
    context.process(DECODE, i32(0), i32(3))
    with pytest.raises(LlamaError, match="refused the batch"):
        context.process(DECODE, i32(5), i32(3))


# --- Capture ----------------------------------------------------------------------------------------------------


def test_the_buffer_is_float32_rows_of_all_layers_side_by_side():
    capture = _native.Capture(["a", "b", "c"], 4, 5)
    view = memoryview(capture)
    assert (view.format, view.shape, view.strides, view.readonly) == ("f", (5, 12), (48, 4), False)
    assert captured(capture).dtype == np.float32
    assert not captured(capture).any()


def test_a_capture_outlives_the_name_it_was_bound_to():
    rows = captured(_native.Capture(["a"], 4, 5))
    assert not rows.any()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError),
        ((["a"], 4), TypeError),
        ((7, 4, 5), TypeError),
        (([7], 4, 5), TypeError),
        ((["a"], "4", 5), TypeError),
        (([], 4, 5), ValueError),
        ((["a"] * 9, 4, 5), ValueError),
        ((["a" * 64], 4, 5), ValueError),
        ((["a"], 0, 5), ValueError),
        ((["a"], 4, -1), ValueError),
        ((["a"], 2**24, 5), ValueError),
        ((["a\ud800"], 4, 5), UnicodeEncodeError),
    ],
)
def test_capture_refuses_arguments(arguments, error):
    with pytest.raises(error):
        _native.Capture(*arguments)


def test_a_capture_is_made_once():
    capture = _native.Capture(["a"], 4, 5)
    with pytest.raises(ValueError, match="made once"):
        capture.__init__(["a"], 9, 9)
    assert captured(capture).shape == (5, 4)


def test_a_capture_that_was_never_initialised_has_no_buffer():
    with pytest.raises(BufferError):
        memoryview(_native.Capture.__new__(_native.Capture))


def test_check_says_which_tensor_was_not_seen(make_context):
    context = make_context(_native.Capture(["l_out-1", "no_such_tensor"], 64, 8))
    with pytest.raises(LlamaError, match="no_such_tensor: expected 2 rows, got 0"):
        context.process(DECODE, i32(0, 1), i32(3, 4))


@pytest.mark.parametrize(
    ("name", "width", "capacity", "fault"),
    [("l_out-1", 64, 1, "more rows than were announced"), ("l_out-1", 63, 8, "is not float32 rows")],
)
def test_rows_that_do_not_fit_are_a_fault_not_an_overflow(make_context, name, width, capacity, fault):
    context = make_context(_native.Capture([name], width, capacity))
    with pytest.raises(LlamaError, match=fault):
        context.process(DECODE, i32(0, 1), i32(3, 4))


@pytest.mark.parametrize("rows", ["2", None, -1])
def test_check_wants_a_count(rows):
    with pytest.raises((TypeError, OverflowError)):
        _native.Capture(["a"], 4, 5).check(rows)


def test_layers_lie_side_by_side_in_the_order_they_were_named(make_context, tiny_target):
    """Named against the order of the graph; the normed embeddings can be computed by hand."""
    capture = _native.Capture(["l_out-0", "attn_norm-0"], 64, 8)
    make_context(capture).process(DECODE, i32(0, 1, 2), i32(3, 200, 4))
    embedding = tiny_target.weights["token_embd.weight"][[3, 200, 4]]
    normed = embedding / np.sqrt((embedding**2).mean(1, keepdims=True) + 1e-5)
    rows = captured(capture)
    np.testing.assert_allclose(rows[:3, 64:], normed * tiny_target.weights["blk.0.attn_norm.weight"], rtol=1e-5)
    assert (rows[:3, :64] != 0).all()
    assert (rows[3:] == 0).all()


def test_a_second_process_overwrites_from_row_zero(make_context):
    capture = _native.Capture(["l_out-0"], 64, 8)
    context = make_context(capture)
    context.process(DECODE, i32(0, 1, 2), i32(3, 200, 4))
    context.remove(0, 0)
    first = captured(capture)[0].copy()
    context.process(DECODE, i32(0), i32(3))
    np.testing.assert_allclose(captured(capture)[0], first, atol=1e-4)
