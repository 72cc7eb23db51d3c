"""--extract: the code of an answer, ready for a file or a pipe."""

from __future__ import annotations

import pytest

TWO = ["Here it is:\n\n```py", "thon\ndef f():\n\n    return 1\n``", "`\n\nOr ", "shorter:\n\n~~~\nf = 1\n~~~\n\nDone."]


@pytest.fixture
def answering(eagle3):
    eagle3.script = [TWO]
    return eagle3


@pytest.mark.parametrize(
    ("flag", "code"),
    [("-x", "def f():\n\n    return 1\n"), ("--extract", "def f():\n\n    return 1\n"), ("--xl", "f = 1\n")],
)
def test_one_block_is_printed_and_nothing_else(answering, flag, code):
    result = answering("generate", "x", flag)
    assert (result.code, result.out, result.err) == (0, code, "")


def test_what_was_thought_is_not_searched(eagle3):
    eagle3.script = [["<think>```\na\n```</think>", "```\nb\n```"]]
    result = eagle3("generate", "x", "-x")
    assert (result.out, result.err) == ("b\n", "```\na\n```\n")


def test_a_block_that_the_end_of_the_answer_cut_is_printed_as_far_as_it_goes(eagle3):
    eagle3.script = [["```sh\nls\nec"]]
    assert eagle3("generate", "x", "-x").out == "ls\nec\n"


def test_an_answer_without_code_is_an_error_that_shows_it(eagle3):
    eagle3.script = [["I cannot ", "do that."]]
    result = eagle3("generate", "x", "-x")
    assert (result.code, result.out) == (1, "")
    assert "--extract: expected a code block in the answer, got" in result.err
    assert "I cannot do that." in result.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-x", "--json"], "--extract: has no effect with --json"),
        (["--xl", "--json"], "--extract-last: has no effect with --json"),
        (["-x", "--xl"], "--extract: has no effect with --extract-last"),
        (["--batch", __file__, "-x"], "--extract: has no effect with --batch"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(eagle3, flags, words):
    result = eagle3("generate", *([] if "--batch" in flags else ["x"]), *flags)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
