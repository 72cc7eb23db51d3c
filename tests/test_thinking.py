"""Thinking and answer of a reasoning model, however the text is cut into parts."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli import thinking
from eagle3_cli.llama import Model
from eagle3_cli.thinking import CHANNEL, MESSAGE, PAIRS, START, Thinking, opened_by

TEXT = ["<", "think", ">", "/", " ", "\n", "a", "b c", "<th", "ink>", "</thi", "é", "\x1c", "["]
PARTS = st.lists(st.sampled_from([*PAIRS, *PAIRS.values(), *TEXT]))
MESSAGES = st.lists(
    st.sampled_from([CHANNEL, MESSAGE, START, "analysis", "final", "assistant", "<|", "st", "art|>", *TEXT])
)
OPENED = st.sampled_from([None, *PAIRS])


def split(parts: list[str], opened: str | None = None) -> tuple[str, str]:
    splitter = Thinking(opened)
    pairs = [*map(splitter.push, parts), splitter.finish()]
    return "".join(thinking for thinking, _ in pairs), "".join(answer for _, answer in pairs)


def reference(text: str, opened: str | None) -> tuple[str, str]:
    """The same of a whole text."""
    body = text.lstrip()
    if body.startswith(CHANNEL):
        return messages(body)
    tag = next((tag for tag in PAIRS if body.startswith(tag)), None)
    if tag is None and opened is None:
        return "", text
    rest, close = (text, PAIRS[opened]) if tag is None else (body[len(tag) :], PAIRS[tag])
    thinking, _, answer = rest.partition(close)
    return thinking.strip(), answer.lstrip()


def messages(text: str) -> tuple[str, str]:
    said: dict[bool, list[str]] = {True: [], False: []}
    while MESSAGE in text:
        header, _, text = text.partition(MESSAGE)
        body, start, text = text.partition(START)
        if body:
            said[header.split(CHANNEL)[-1].split()[:1] == ["analysis"]].append(body)
        text = start + text
    return "\n\n".join(said[True]), "\n\n".join(said[False])


@given(PARTS, OPENED)
def test_parts_do_not_matter(parts, opened):
    assert split(parts, opened) == reference("".join(parts), opened)


@given(PARTS, OPENED)
def test_single_characters_give_the_same(parts, opened):
    text = "".join(parts)
    assert split(list(text), opened) == reference(text, opened)


@given(MESSAGES)
def test_messages_for_channels_are_told_apart_however_they_are_cut(parts):
    text = "".join([CHANNEL, *parts])
    assert split([CHANNEL, *parts]) == split(list(text)) == reference(text, None)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.", None, ("Two and two.", "Four.")),
        ("Two and two.\n</think>\n\nFour.", "<think>", ("Two and two.", "Four.")),
        ("<think>\n\n</think>\n\nFour.", None, ("", "Four.")),
        ("Four.", None, ("", "Four.")),
        ("The tag <think> opens it, </think> closes it.", None, ("", "The tag <think> opens it, </think> closes it.")),
        ("<think>It never ends", None, ("It never ends", "")),
        (" \n<table>", None, ("", " \n<table>")),
        ("<think>a </thin b</think>c", None, ("a </thin b", "c")),
        ("<think>a</think>b</think>c", None, ("a", "b</think>c")),
        ("[THINK]a </think> b[/THINK]c", None, ("a </think> b", "c")),
        ("a<|END_THINKING|>c", "<|START_THINKING|>", ("a", "c")),
        (
            "<|channel|>analysis<|message|>Two and two.<|start|>assistant<|channel|>final<|message|>Four.",
            None,
            ("Two and two.", "Four."),
        ),
        ("<|channel|>final<|message|>Four, <not> five.", None, ("", "Four, <not> five.")),
        (
            "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>analysis<|message|>b",
            None,
            ("a\n\nb", ""),
        ),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|chan", None, ("a", "")),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
            None,
            ("", "{}"),
        ),
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
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("<|im_start|>assistant\n<think>", "<think>"),
        ("<|im_start|>assistant\n<seed:think>", "<seed:think>"),
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("What does <think> mean?<|im_start|>assistant\n", None),
        ("", None),
    ],
)
def test_a_template_may_have_opened_it(prompt, opened):
    assert opened_by(list(prompt.encode()), lambda token: bytes([token])) == opened


def test_a_tag_that_is_a_control_token_prints_its_name_and_other_control_tokens_nothing(tiny_target, monkeypatch):
    monkeypatch.setattr(thinking, "TAGS", frozenset({b"<|im_end|>"}))
    model = Model(tiny_target.path, [], 0)
    try:
        tokens = {model.token_text(token): token for token in range(model.n_vocab)}
        assert [model.piece(tokens[name]) for name in tiny.CONTROL] == [b"", b"", b"<|im_end|>"]
    finally:
        model.close()
