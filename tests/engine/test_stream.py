"""Text from tokens: whole characters, stop strings, broken bytes; against decoding the concatenated bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import text_until_stop, whole_characters

from eagle3_cli.engine.stream import TextStream


def run(pieces: list[bytes], stops=()) -> tuple[list[str], TextStream]:
    """What each token released, and what the end released (last entry), as the loop uses it."""
    stream = TextStream(pieces.__getitem__, stops)
    released = []
    for token in range(len(pieces)):
        released.append(stream.push(token))
        if stream.stopped:
            break
    return [*released, stream.finish()], stream


def split(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_characters_split_over_tokens_come_out_whole(size):
    text = "aé中😀z"
    released, _ = run(split(text.encode(), size))
    assert "".join(released) == text
    assert "�" not in "".join(released)


def test_a_character_is_released_by_its_last_byte():
    assert run([b"\xf0", b"\x9f", b"\x98", b"\x80"])[0] == ["", "", "", "😀", ""]


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"\xff", b"a"], "�a"),
        ([b"\xe4\xb8", b"a"], "�a"),  # a character broken off by the next token
        ([b"\xe4\xb8"], "�"),  # and by the end of the answer
        ([b"\xc3", b"\xc3\xa9"], "�é"),
        ([b"\x80\x80"], "��"),
        ([b"\xed\xa0\x80"], "���"),  # a surrogate
    ],
)
def test_broken_bytes_become_replacement_characters(pieces, text):
    assert "".join(run(pieces)[0]) == text


def test_control_tokens_print_nothing():
    assert run([b"a", b"", b"b"])[0] == ["a", "", "b", ""]


# --- stop strings ---------------------------------------------------------------------------------------------


def test_a_stop_string_is_held_back_and_cut():
    released, stream = run([b"one\n", b"\n", b"two"], ["\n\n"])
    assert released == ["one", "", ""]
    assert stream.stopped


def test_a_false_alarm_is_released_at_once():
    assert run([b"a\n", b"b"], ["\n\n"])[0] == ["a", "\nb", ""]


def test_what_is_held_at_the_end_is_released_by_finish():
    assert run([b"a\n"], ["\n\n"])[0] == ["a", "\n"]


def test_the_earliest_stop_wins_whatever_their_order():
    for stops in (["cd", "bc"], ["bc", "cd"]):
        assert run([b"abcd"], stops)[0] == ["a", ""]


def test_a_stop_inside_one_token_drops_the_rest_of_the_token():
    assert run([b"hello STOP world"], ["STOP"])[0] == ["hello ", ""]


def test_a_repeating_stop_string_matches_at_its_first_place():
    assert "".join(run([b"a", b"a", b"a", b"b"], ["aab"])[0]) == "a"


def test_a_stop_string_may_be_split_inside_a_character():
    pieces = split("xy中z".encode(), 1)
    released, stream = run(pieces, ["中"])
    assert "".join(released) == "xy"
    assert stream.stopped


def test_nothing_is_held_without_stop_strings():
    assert run([b"\n", b"\n"])[0] == ["\n", "\n", ""]


ALPHABET = [b"a", b"b", b"ab", b"\n", b"\xc3", b"\xa9", "é".encode(), "中".encode(), b"\xe4", b"\xb8\xad", b"\xff", b""]
texts = st.lists(st.sampled_from(ALPHABET), max_size=14)
stop_strings = st.lists(st.text(alphabet="ab\né中", min_size=1, max_size=4), max_size=3)


@given(texts, stop_strings)
def test_the_stream_equals_decoding_all_bytes_and_cutting_at_the_first_stop(pieces, stops):
    released, stream = run(pieces, stops)
    text, used = text_until_stop(pieces, stops)
    assert "".join(released) == text
    assert stream.stopped == any(stop in b"".join(pieces).decode("utf-8", "replace") for stop in stops)
    if stream.stopped:
        assert len(released) == used + 1  # the last entry is the end's


@given(texts, stop_strings)
def test_each_token_releases_all_but_a_tail_that_could_begin_a_stop_string(pieces, stops):
    released, stream = run(pieces, stops)
    for n in range(1, len(released) - 1 - stream.stopped):
        text = whole_characters(b"".join(pieces[:n]))
        held = max((k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0)
        assert "".join(released[:n]) == text[: len(text) - held]


@given(st.text(max_size=12), st.data())
def test_any_split_of_any_text_gives_the_text(text, data):
    raw = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    edges = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert "".join(run(pieces)[0]) == raw.decode()
