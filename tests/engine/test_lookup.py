"""Prompt lookup against trying every place of the text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import search

from eagle3_cli.engine import lookup
from eagle3_cli.engine.lookup import ALONE, BEST, CHECKED, OTHER, Lookup

A, B, C, X, Y, Z = range(6)

bounds = st.tuples(st.integers(1, 4), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
# Text of few distinct tokens repeats by chance; repeated pieces make matches that are longer than `longest`.
texts = st.one_of(
    st.lists(st.integers(0, 1), max_size=200),
    st.lists(st.integers(0, 3), max_size=200),
    st.builds(
        lambda pieces, order: [token for i in order for token in pieces[i % len(pieces)]],
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=4),
        st.lists(st.integers(0, 3), max_size=20),
    ),
)


def index(text, shortest=2, longest=16) -> Lookup:
    made = Lookup(shortest, longest)
    made.extend(text)
    return made


def found(text, root, most=4, count=2, **bounds):
    """(length, continuation) of each match."""
    return [(match.length, list(match.tokens)) for match in index(text, **bounds).find(root, most, count)]


@given(texts, st.integers(0, 3), st.integers(1, 12), st.integers(1, 4), bounds)
@settings(max_examples=500)
def test_find_equals_trying_every_place(text, root, most, count, bounds):
    matches = found(text, root, most, count, shortest=bounds[0], longest=bounds[1])
    assert matches == search(text, root, most, count, *bounds, CHECKED)


@given(texts, st.integers(0, 3), bounds, st.one_of(st.integers(1, 14), st.just(math.inf)))
def test_a_repeat_is_a_match_so_long(text, root, bounds, length):
    lookup = index(text, *bounds)
    longest = max((match[0] for match in search(text, root, 1, 9, 1, bounds[1], len(text))), default=0)
    assert lookup.repeats(root, length) == (length <= longest)
    assert len(lookup) == len(text)


@given(texts, st.integers(0, 3), st.integers(1, 6), bounds)
def test_find_looks_at_the_most_recent_occurrences_only(text, root, checked, bounds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "CHECKED", checked)
        matches = found(text, root, 4, 3, shortest=bounds[0], longest=bounds[1])
    assert matches == search(text, root, 4, 3, *bounds, checked)


@given(texts, st.integers(0, 3), st.integers(1, 12), st.integers(1, 4))
def test_matches_differ_in_their_first_token_and_the_longest_comes_first(text, root, most, count):
    matches = index(text).find(root, most, count)
    assert len(matches) <= count
    assert len({match.tokens[0] for match in matches}) == len(matches)
    assert all(len(match.tokens) == most and 2 <= match.length <= 16 for match in matches)
    assert [match.length for match in matches] == sorted((match.length for match in matches), reverse=True)
    every = search(text, root, most, 10, 2, 16, CHECKED)
    assert [match.rank for match in matches] == [ALONE if len(every) == 1 else BEST, OTHER, OTHER, OTHER][
        : len(matches)
    ]


@given(texts, st.lists(st.tuples(st.integers(0, 220), texts), max_size=4), st.integers(0, 3), bounds)
def test_truncate_and_extend_leave_what_a_fresh_index_has(text, edits, root, bounds):
    edited = index(text, *bounds)
    for length, tokens in edits:
        edited.truncate(length)
        text = text[:length]
        assert vars(edited) == vars(index(text, *bounds))
        edited.extend(tokens)
        text = text + tokens
    assert len(edited) == len(text)
    assert vars(edited) == vars(index(text, *bounds))
    assert edited.find(root, 5) == index(text, *bounds).find(root, 5)


@given(texts, st.integers(1, 7), bounds)
def test_it_does_not_matter_how_the_text_arrives(text, step, bounds):
    made = Lookup(*bounds)
    for start in range(0, len(text), step):
        made.extend(text[start : start + step])
    assert vars(made) == vars(index(text, *bounds))


@given(texts, st.integers(0, 3))
def test_find_changes_nothing(text, root):
    made = index(text)
    first = made.find(root, 4)
    assert made.find(root, 4) == first
    assert vars(made) == vars(index(text))


def test_the_longer_match_is_better_than_the_more_recent_one():
    assert found([A, B, C, X, Y, B, C, Z, A, B], C) == [(3, [X, Y, B, C]), (2, [Z, A, B, C])]


def test_of_two_equal_matches_the_more_recent_one_is_better():
    assert found([A, B, X, A, B, Y, A], B, count=1) == [(2, [Y, A, B, Y])]
    assert found([A, B, X, A, B, Y, A], B, count=2) == [(2, [Y, A, B, Y]), (2, [X, A, B, Y])]


def test_two_places_with_the_same_next_token_give_one_match():
    assert found([C, A, B, X, Y, A, B, X, Z, C, A], B, most=2) == [(3, [X, Y])]


@pytest.mark.parametrize(
    ("text", "root", "length", "tokens"),
    [
        ([A, B, C, A, B, C, A, B], C, 6, [A, B, C, A, B, C, A]),
        ([A, B, A, B], A, 3, [B, A, B, A, B, A, B]),
        ([A, A], A, 2, [A, A, A, A, A, A, A]),
        ([X, A, B, Y, A], B, 2, [Y, A, B, Y, A, B, Y]),
    ],
)
def test_a_continuation_that_reaches_the_root_goes_on_with_itself(text, root, length, tokens):
    assert found(text, root, most=7, count=1) == [(length, tokens)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 12))
def test_periodic_text_stays_periodic(period, extra, most):
    """The most recent match is one period back, at most six tokens."""
    loop = period * 120
    size = 100 + extra
    (match,) = index(loop[:size]).find(loop[size], most, count=1)
    assert (match.length, match.tokens) == (16, loop[size + 1 : size + 1 + most])


def test_a_loop_is_continued_and_also_left():
    """The second match is where an earlier loop ended."""
    text = [*[A, B] * 10, X, *[A, B] * 9, A]
    assert found(text, B, most=3) == [(16, [A, B, A]), (16, [X, A, B])]


def test_an_agreement_is_counted_up_to_the_longest_only():
    text = [X, A, B, C, Y, X, A, B]
    assert [found(text, C, most=1, longest=longest)[0][0] for longest in (2, 3, 4, 5)] == [2, 3, 4, 4]


def test_no_match_is_shorter_than_the_shortest():
    text = [A, B, C, X, Y, A, B]
    assert found(text, C, most=1, shortest=3) == [(3, [X])]
    assert found(text, C, most=1, shortest=4) == []
    assert found([A, X, B], A, most=1, shortest=1) == [(1, [X])]


def test_the_root_alone_may_complete_the_shortest():
    assert found([A], A, shortest=1) == [(1, [A, A, A, A])]
    assert found([A], A) == []


@pytest.mark.parametrize("text", [[], [A], [A, B]])
def test_a_text_shorter_than_the_shortest_has_no_match(text):
    assert found(text, A, shortest=3, longest=3) == []


def test_a_root_never_seen_has_no_match():
    assert found([A, B, A, B, A, B], X) == []


def test_one_token_and_none():
    text = [A, B, X, A, B, Y, A]
    assert found(text, B, most=1) == [(2, [Y]), (2, [X])]
    assert found(text, B, most=0) == []
    assert found(text, B, count=0) == []


def test_an_empty_index_can_be_truncated_and_filled():
    made = Lookup()
    made.truncate(0)
    made.extend([])
    assert (len(made), made.find(A, 4)) == (0, [])
    made.extend([A, B, X, A])
    made.truncate(0)
    assert vars(made) == vars(Lookup())
