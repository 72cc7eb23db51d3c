"""`eagle3 chat --overflow`: what happens when the conversation no longer fits into the context.

The fake engine's tokens are bytes, and it renders `<user>hi` for a message.
"""

from __future__ import annotations

import io
import sys

import pytest

from eagle3_cli.__main__ import run
from eagle3_cli.commands.conversation import without_oldest_turn

LONG = "x" * 200


# --- stop, the default ---------------------------------------------------------------------------------------------

# <user>hi<assistant>Hello world<user>more has 40 bytes


def test_a_piped_chat_stops_when_the_conversation_is_full(eagle3):
    result = eagle3("chat", "-c", "40", stdin=b"hi\nmore\nyo\n")
    assert (result.code, result.out) == (2, "Hello world\n")
    assert "the conversation is full: expected at most 39 tokens (the context holds 40), got 40" in result.err
    assert "--overflow drop" in result.err
    assert eagle3.engine.prompts == ["<user>hi"]


def test_one_cell_more_is_enough(eagle3):
    eagle3.script = [["Hello world"], ["again"]]
    result = eagle3("chat", "-c", "41", stdin=b"hi\nmore\n")
    assert (result.code, result.out, result.err) == (0, "Hello world\nagain\n", "")


def test_a_person_goes_on_and_the_message_that_did_not_fit_is_forgotten(typing, eagle3):
    eagle3.script = [["Hello world"], ["again"], ["new"]]
    result = typing("hi", "more", "yo", "/reset", "more", flags=("-c", "40"))
    assert (result.code, result.out) == (0, "Hello world\nagain\nnew\n")
    assert result.err.count("error: the conversation is full") == 1
    assert eagle3.engine.prompts == ["<user>hi", "<user>hi<assistant>Hello world<user>yo", "<user>more"]


@pytest.mark.parametrize("overflow", ["stop", "drop"])
def test_a_message_that_never_fits_is_an_error(eagle3, overflow):
    result = eagle3("chat", "-c", "64", "--overflow", overflow, stdin=LONG.encode())
    assert (result.code, result.out) == (2, "")
    assert "your message: expected at most 63 tokens (the context holds 64), got 206" in result.err
    assert "Shorten it" in result.err
    assert eagle3.engine.prompts == []


def test_the_system_message_counts(eagle3):
    result = eagle3("chat", "-c", "24", "--system", "be brief", stdin=b"hi\n")
    assert (result.code, result.out) == (2, "")
    assert "your message and the system message: expected at most 23 tokens" in result.err


@pytest.mark.parametrize("overflow", ["stop", "drop"])
def test_after_a_message_that_never_fits_the_conversation_is_as_it_was(typing, eagle3, overflow):
    eagle3.script = [["fine"], ["again"]]
    result = typing("hi", LONG, "yo", flags=("-c", "64", "--overflow", overflow))
    assert (result.code, result.out) == (0, "fine\nagain\n")
    assert result.err.count("error: your message") == 1
    assert "dropped" not in result.err
    assert eagle3.engine.prompts[1] == "<user>hi<assistant>fine<user>yo"


def test_a_template_that_refuses_a_message_does_not_end_the_chat_of_a_person(typing, eagle3, monkeypatch):
    from fake_engine import FakeEngine

    from eagle3_cli.errors import PromptError

    render = FakeEngine.render

    def refusing(self, messages):
        if messages[-1]["content"] == "no":
            raise PromptError("the template refuses.")
        return render(self, messages)

    monkeypatch.setattr(FakeEngine, "render", refusing)
    result = typing("no", "hi")
    assert (result.code, result.out) == (0, "Hello world\n")
    assert "error: the template refuses." in result.err
    assert eagle3.engine.prompts == ["<user>hi"]


# --- drop ------------------------------------------------------------------------------------------------------------

# A context of 64 leaves a quarter for the answer: a prompt may have 48 bytes.


def test_the_oldest_turn_is_dropped_for_good_and_said(eagle3):
    eagle3.script = [["Hello world"], ["again"], ["third"], ["end"]]
    result = eagle3("chat", "-c", "64", "--overflow", "drop", stdin=b"hi\nmore\nnext\nlast\n")
    assert (result.code, result.out) == (0, "Hello world\nagain\nthird\nend\n")
    assert result.err == "(dropped the oldest turn: the context holds 64 tokens)\n" * 2
    assert eagle3.engine.prompts == [
        "<user>hi",
        "<user>hi<assistant>Hello world<user>more",
        "<user>more<assistant>again<user>next",
        "<user>next<assistant>third<user>last",
    ]


def test_as_many_turns_as_needed_are_dropped_but_never_the_system_message(eagle3):
    eagle3.script = [["ok"], ["ok"], ["ok"], ["end"]]
    words = ["aa", "bb", "cc", "y" * 50]
    flags = ("-c", "100", "--system", "be brief", "--overflow", "drop")
    result = eagle3("chat", *flags, stdin="\n".join(words).encode())
    assert result.out == "ok\nok\nok\nend\n"
    assert result.err == "(dropped the oldest 3 turns: the context holds 100 tokens)\n"
    assert eagle3.engine.prompts[2] == "<system>be brief<user>aa<assistant>ok<user>bb<assistant>ok<user>cc"
    assert eagle3.engine.prompts[3] == "<system>be brief<user>" + "y" * 50


def test_no_more_is_dropped_than_needed(eagle3):
    eagle3.script = [["ok"], ["ok"], ["ok"], ["end"]]
    result = eagle3("chat", "-c", "100", "--overflow", "drop", stdin=b"aa\nbb\ncc\n" + b"y" * 27)
    assert "(dropped the oldest turn:" in result.err
    assert len(eagle3.engine.prompts[3]) == 75
    assert eagle3.engine.prompts[3].startswith("<user>bb<assistant>ok<user>cc")


def test_a_short_answer_needs_less_room(eagle3):
    flags = ("chat", "-c", "41", "--overflow", "drop")
    lines = b"hi\nmore\n"
    assert "dropped" in eagle3(*flags, stdin=lines).err
    eagle3.script = [["Hello world"], ["again"]]
    assert eagle3(*flags, "-n", "1", stdin=lines).err == ""


def test_a_long_message_alone_is_answered_in_what_room_there_is(eagle3):
    result = eagle3("chat", "-c", "64", "--overflow", "drop", stdin=b"z" * 57)
    assert (result.code, result.out, result.err) == (0, "Hello world\n", "")


def test_dropping_is_said_even_if_quiet(eagle3):
    eagle3.script = [["Hello world"], ["again"]]
    result = eagle3("chat", "-q", "-c", "48", "--overflow", "drop", stdin=b"hi\nmore\n")
    assert (result.code, result.out) == (0, "Hello world\nagain\n")
    assert "(dropped the oldest turn" in result.err


def test_what_was_stopped_is_dropped_with_its_message(typing, eagle3):
    """An unfinished answer is part of its turn."""
    import os
    import signal

    eagle3.script = [["Hello", lambda: os.kill(os.getpid(), signal.SIGINT), " wor", "ld"], ["again"]]
    result = typing("hi", "more", flags=("-c", "48", "--overflow", "drop"))
    assert result.code == 0
    assert eagle3.engine.prompts[1] == "<user>more"


def test_overflow_can_be_a_habit(eagle3, monkeypatch):
    monkeypatch.setenv("EAGLE3_OVERFLOW", "drop")
    result = eagle3("chat", "-c", "40", stdin=b"hi\nmore\n")
    assert result.code == 0
    assert "dropped" in result.err


def test_overflow_takes_two_words(eagle3):
    result = eagle3("chat", "--overflow", "shift", stdin=b"hi\n")
    assert (result.code, result.out) == (2, "")
    assert "'shift' is not one of 'stop', 'drop'" in result.err


def test_a_turn_is_a_message_and_its_answer():
    def said(*roles):
        return [{"role": role, "content": str(i)} for i, role in enumerate(roles)]

    turns = said("system", "user", "assistant", "user", "assistant", "user")
    assert [m["content"] for m in without_oldest_turn(turns)] == ["0", "3", "4", "5"]
    assert [m["content"] for m in without_oldest_turn(without_oldest_turn(turns))] == ["0", "5"]
    assert [m["content"] for m in without_oldest_turn(turns[1:])] == ["3", "4", "5"]
    assert without_oldest_turn(said("system", "user")) == without_oldest_turn(said("user")) == []


# --- a real pair -----------------------------------------------------------------------------------------------------


@pytest.fixture
def real_chat(tiny_target, tiny_drafters, monkeypatch, capfd):
    """real_chat(lines, *flags) -> (exit code, stdout, stderr) of a chat of the tiny pair."""

    def chat(lines, *flags):
        stdin = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        exact = ("-c", "256", "-b", "32", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--temp", "0")
        code = run(["chat", "--target", str(tiny_target.path), *exact, "-n", "12", *flags])
        out, err = capfd.readouterr()
        return code, out, err

    return chat


def test_a_real_pair_drops_and_answers_like_the_target_alone(real_chat, tiny_drafters):
    lines = ["the inn", "and then", "on and on", "in the end", "again", "the hen"] * 2
    draft = ("--draft", str(tiny_drafters["good"].path), "--draft-tokens", "6")
    code, out, err = real_chat(lines, *draft, "--overflow", "drop")
    assert (code, err.count("(dropped the oldest")) == (0, err.count("\n"))
    assert "(dropped the oldest" in err
    assert real_chat(lines, "--no-draft", "--overflow", "drop") == (code, out, err)
    code, stopped, err = real_chat(lines, *draft)
    assert code == 2
    assert "the conversation is full: expected at most 255 tokens (the context holds 256)" in err
    assert stopped.count("\n") > 1
    assert out.startswith(stopped[: stopped.index("\n") + 1])
