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
        ids, numbers = np.zeros(2, np.int32), np.zeros(1, np.float32)
        for call in (lambda: _native.Capture(["x"], 1, 1),
                     lambda: _native.fill(1, ids, ids, None, None, None, None),
                     lambda: _native.plain(1, 1, 0, 0, 9, ids, 1, 0, 0, 1.0, numbers)):
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


# --- plain ------------------------------------------------------------------------------------------------------


def plain(context, text, most, *, vocab=0, sampler=0, repeating=0, limit=60.0, position=0):
    """(emitted, code, no numbers, the text with what was emitted, seconds of each pass)"""
    room = i32(*text, *[-7] * most)
    seconds = np.zeros(most, np.float32)
    handles = (context.handle, context.batch, vocab, sampler, context.n_vocab)
    emitted, _, code, no_numbers = _native.plain(*handles, room, len(text), position, repeating, limit, seconds)
    return emitted, code, no_numbers, room.tolist(), seconds.tolist()


def one_by_one(context, root, count):
    """The greedy tokens behind a root, by a pass and an argmax each."""
    tokens = []
    for position in range(count):
        context.process(DECODE, i32(position), i32(tokens[-1] if tokens else root), outputs=np.ones(1, np.int8))
        tokens.append(_native.argmax(context.logits(), context.n_vocab))
    return tokens


def test_plain_decoding_in_one_call_is_what_it_is_one_by_one(make_context):
    context, expected = make_context(), one_by_one(make_context(), 5, 20)
    emitted, code, no_numbers, text, seconds = plain(context, [5], 20)
    assert (emitted, code, no_numbers, text) == (20, 0, False, [5, *expected])
    assert all(0 < took < 60 for took in seconds)
    assert context.last_position(0) == 19


def test_plain_decoding_goes_on_where_it_stopped(make_context):
    context, expected = make_context(), one_by_one(make_context(), 5, 9)
    text = [5, *expected[:4]]
    assert plain(context, [5], 4)[3] == text
    assert plain(context, text, 5, position=4)[3] == [5, *expected]


def test_plain_decoding_draws_from_a_sampler(make_context, model):
    """One that bans all tokens but three, with the same seed as by hand."""
    from eagle3_cli.engine.sampler import Sampler, with_seed
    from eagle3_cli.settings import SamplingSettings

    banned = tuple((token, float("-inf")) for token in range(model.n_vocab) if token not in (11, 12, 13))
    settings = with_seed(SamplingSettings(temperature=1.0, logit_bias=banned, seed=7))
    by_hand, at_once, one, other = make_context(), make_context(), *(Sampler(model, settings, [], 256) for _ in "ab")
    tokens = [5]
    for position in range(30):
        by_hand.process(DECODE, i32(position), i32(tokens[-1]), outputs=np.ones(1, np.int8))
        tokens.append(one.draw(by_hand, 0))
    assert plain(at_once, [5], 30, sampler=other.address)[3] == tokens
    assert set(tokens[1:]) == {11, 12, 13}
    one.close()
    other.close()


def test_plain_decoding_ends_behind_an_end_token_unless_it_does_not_count(make_context, model):
    from eagle3_cli.engine.sampler import Sampler, with_seed
    from eagle3_cli.settings import SamplingSettings

    end = next(token for token in range(model.n_vocab) if model.is_end(token))
    sampler = Sampler(model, with_seed(SamplingSettings(temperature=0.0, logit_bias=((end, 1e9),))), [], 256)
    assert plain(make_context(), [5], 6, sampler=sampler.address, vocab=model.vocab)[:2] == (1, 0)
    assert plain(make_context(), [5], 6, sampler=sampler.address)[3] == [5, *[end] * 6]
    sampler.close()


def test_plain_decoding_begins_no_token_behind_its_time(make_context):
    emitted, code, _, text, seconds = plain(make_context(), [5], 6, limit=0.0)
    assert (emitted, code, text[2:], seconds[1:]) == (1, 0, [-7] * 5, [0.0] * 5)


@pytest.mark.parametrize("repeating", [1, 2, 3])
def test_plain_decoding_ends_where_the_text_repeats_itself(make_context, repeating):
    before = one_by_one(make_context(), 5, 12)  # the greedy answer, twice
    emitted, _, _, text, _ = plain(make_context(), [*before, 5], 12, repeating=repeating)
    found = [n for n in range(1, 13) if _repeats([*before, 5, *before[:n]], repeating)]
    assert emitted == found[0]
    assert text[: 13 + emitted] == [*before, 5, *before[:emitted]]


def _repeats(text, length):
    return text[-length:] in [text[at : at + length] for at in range(len(text) - length)]


def test_plain_decoding_in_a_full_context_ends_with_llamas_code(make_context):
    context = make_context(rows=256)
    context.process(DECODE, np.arange(254, dtype=np.int32), np.full(254, 3, np.int32))
    emitted, code, no_numbers, _, _ = plain(context, [3], 5, position=254)
    assert (emitted, code, no_numbers) == (2, 1, False)
    seconds, text = np.zeros(5, np.float32), i32(*[3] * 6)
    with pytest.raises(LlamaError, match="no room in the KV cache for 1 rows"):
        context.decode_plain(text, 1, 256, seconds)


def test_logits_that_are_no_numbers_are_told_apart(make_context, monkeypatch):
    """By a sampler that refuses: none of llama.cpp's does, so its place is taken by a function of our own."""
    refuse = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)(lambda *_: -1)
    _native.bind({**bound(), "llama_sampler_sample": ctypes.cast(refuse, ctypes.c_void_p).value})
    try:
        assert plain(make_context(), [5], 3, sampler=1)[:3] == (0, 0, True)
    finally:
        _native.bind(bound())


@pytest.mark.parametrize(
    "changed",
    [
        {0: 0},  # no context
        {1: 0},
        {4: 0},  # an empty vocabulary
        {4: -1},
        {5: i32(1, 2)},  # no room for what is emitted
        {6: 0},  # no root
        {6: 4},
        {7: -1},
        {7: 2**31 - 1},
        {8: -1},
        {5: None},
        {10: None},
        {10: np.zeros(0, np.float32)},
        {5: i32(-5, 0, 0)},  # refused by llama.cpp
        {5: i32(10**6, 0, 0)},
    ],
)
def test_plain_refuses_values(make_context, changed):
    with pytest.raises(ValueError, match=r"expected|out of range|llama_batch_ext"):
        _native.plain(*plain_arguments(make_context(), changed))


@pytest.mark.parametrize("changed", [{0: "x"}, {5: [5, 0]}, {5: np.zeros(3, np.int64)}, {10: np.zeros(2)}, {9: "x"}])
def test_plain_refuses_types(make_context, changed):
    with pytest.raises(TypeError):
        _native.plain(*plain_arguments(make_context(), changed))


def plain_arguments(context, changed):
    """Right ones for two tokens, but for those that are changed, by their place."""
    models = (context.handle, context.batch, 0, 0, context.n_vocab)
    arguments = [*models, i32(5, 0, 0), 1, 0, 0, 1.0, np.zeros(2, np.float32)]
    return [changed.get(at, value) for at, value in enumerate(arguments)]


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
