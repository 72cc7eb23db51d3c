"""Thinking and answer of a reasoning model, however the text is cut into parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli.thinking import CLOSE, OPEN, Thinking, opened_by

PARTS = st.lists(
    st.sampled_from([OPEN, CLOSE, "<", "think", ">", "/", " ", "\n", "a", "b c", "<th", "ink>", "</thi", "é", "\x1c"])
)


def split(parts: list[str], opened: bool) -> tuple[str, str]:
    splitter = Thinking(opened)
    pairs = [*map(splitter.push, parts), splitter.finish()]
    return "".join(thinking for thinking, _ in pairs), "".join(answer for _, answer in pairs)


def reference(text: str, opened: bool) -> tuple[str, str]:
    """The same of a whole text."""
    if text.lstrip().startswith(OPEN):
        text = text.lstrip()[len(OPEN) :]
    elif not opened:
        return "", text
    thinking, _, answer = text.partition(CLOSE)
    return thinking.strip(), answer.lstrip()


@given(PARTS, st.booleans())
def test_parts_do_not_matter(parts, opened):
    assert split(parts, opened) == reference("".join(parts), opened)


@given(PARTS, st.booleans())
def test_single_characters_give_the_same(parts, opened):
    text = "".join(parts)
    assert split(list(text), opened) == reference(text, opened)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.", False, ("Two and two.", "Four.")),
        ("Two and two.\n</think>\n\nFour.", True, ("Two and two.", "Four.")),
        ("<think>\n\n</think>\n\nFour.", False, ("", "Four.")),
        ("Four.", False, ("", "Four.")),
        ("The tag <think> opens it, </think> closes it.", False, ("", "The tag <think> opens it, </think> closes it.")),
        ("<think>It never ends", False, ("It never ends", "")),
        (" \n<table>", False, ("", " \n<table>")),
        ("<think>a </thin b</think>c", False, ("a </thin b", "c")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_what_is_thinking(text, opened, expected):
    assert split([text], opened) == expected


def test_both_are_handed_out_as_soon_as_they_are_certain():
    splitter = Thinking()
    assert splitter.push("<thi") == ("", "")
    assert splitter.push("nk>\nI wonder") == ("I wonder", "")
    assert splitter.push(" if \n") == (" if", "")
    assert splitter.push("so.</") == (" \nso.", "")
    assert splitter.push("think>\n") == ("", "")
    assert splitter.push("\nYes") == ("", "Yes")
    assert splitter.push(", ") == ("", ", ")


def test_an_answer_without_thinking_is_not_held_back():
    splitter = Thinking()
    assert splitter.push("He") == ("", "He")
    assert splitter.push("llo <think>") == ("", "llo <think>")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What does <think> mean?<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_template_may_have_opened_it(prompt, opened):
    assert opened_by(list(prompt.encode()), lambda token: bytes([token])) is opened
