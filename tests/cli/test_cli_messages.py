"""--messages: a conversation from a file is gone on with."""

from __future__ import annotations

import json

import pytest

from eagle3_cli.errors import FileError, InputError
from eagle3_cli.messages import checked, read_messages

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "why?"},
]
AS_TEXT = "<system>be brief<user>hi<assistant>hello<user>why?"


@pytest.fixture
def ask(eagle3, tmp_path):
    """ask(document, *flags) -> result; the document is put into a file, text as it is."""

    def call(document, *flags, **options):
        path = tmp_path / "chat.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document, indent=1), "utf-8")
        return eagle3("generate", "--messages", str(path), *flags, **options)

    call.program = eagle3
    return call


@pytest.mark.parametrize("document", [TALK, {"messages": TALK}, {"messages": TALK, "model": "m", "version": 1}])
def test_a_list_or_what_chat_saves_is_the_conversation(ask, document):
    assert ask(document).code == 0
    assert ask.program.engine.prompts == [AS_TEXT]


def test_a_line_of_training_data_is_one_too(ask):
    assert ask(json.dumps({"messages": TALK}) + "\n").code == 0
    assert ask.program.engine.prompts == [AS_TEXT]


@pytest.mark.parametrize("flags", [("and", "now?"), ("-p", "and now?")])
def test_the_prompt_is_the_newest_message(ask, flags):
    assert ask(TALK[:3], *flags).code == 0
    assert ask.program.engine.prompts == ["<system>be brief<user>hi<assistant>hello<user>and now?"]


def test_a_file_and_a_prompt_are_one_message(ask, tmp_path):
    (tmp_path / "notes.txt").write_text("notes\n")
    ask(TALK[:3], "-f", str(tmp_path / "notes.txt"), "-p", "sum up")
    assert ask.program.engine.prompts[0].endswith("<user>notes\n\nsum up")


def test_stdin_is_left_alone(ask):
    ask(TALK, stdin=b"not this")
    assert ask.program.engine.prompts == [AS_TEXT]
    ask(TALK[:3], "and now?", stdin=b"not this")
    assert ask.program.engine.prompts[-1].endswith("<user>and now?")


def test_dash_is_stdin(eagle3):
    result = eagle3("generate", "--messages", "-", "--json", stdin=json.dumps(TALK).encode())
    assert json.loads(result.out)["settings"]["system"] == "be brief"
    assert eagle3.engine.prompts == [AS_TEXT]


def test_stdin_can_be_the_newest_message(ask):
    ask(TALK[:3], "-f", "-", stdin=b"piped\n")
    assert ask.program.engine.prompts[0].endswith("<user>piped")


def test_system_goes_in_front_where_there_is_none(ask):
    ask(TALK[1:], "--system", "be kind")
    assert ask.program.engine.prompts == ["<system>be kind<user>hi<assistant>hello<user>why?"]


def test_a_system_message_from_a_variable_gives_way(ask, monkeypatch):
    monkeypatch.setenv("EAGLE3_SYSTEM", "be kind")
    assert ask(TALK).code == 0
    assert ask.program.engine.prompts == [AS_TEXT]


def test_content_may_come_in_parts_of_text(ask):
    ask([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert ask.program.engine.prompts == ["<user>ab"]


def test_what_chat_saves_is_gone_on_with(eagle3, tmp_path):
    path = tmp_path / "saved.json"
    eagle3.script = [["hello"], ["because"]]
    assert eagle3("chat", "--system", "be brief", stdin=f"hi\n/save {path}\n".encode()).code == 0
    assert eagle3("generate", "--messages", str(path), "why?").out == "because\n"
    assert eagle3.engine.prompts == [AS_TEXT]


def test_windows_line_breaks_become_the_same_conversation(ask):
    ask([{"role": "user", "content": "one\r\ntwo"}])
    assert ask.program.engine.prompts == ["<user>one\ntwo"]


USER, SAID = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", "expected one JSON document, got ''"),
        ("hello", "expected one JSON document, got 'hello'"),
        ("[" * 100_000, "expected one JSON document, got"),
        ('{"messages": []}\n{"messages": []}\n', "hint: A file with one conversation per line is for --batch"),
        ([], "expected a list of messages, got []"),
        ({}, "expected a list of messages, got {}"),
        ({"messages": "x"}, "expected a list of messages"),
        ("5", "expected a list of messages, got 5"),
        ([USER, "x"], "message 2: expected an object with role and content, got 'x'"),
        ([USER, {"content": "x"}], "message 2: expected role as one of system, user, assistant, got null"),
        ([USER, {"role": "tool", "content": "x"}], "message 2: expected role as one of"),
        (
            [USER, {"role": ["user"], "content": "x"}],
            'message 2: expected role as one of system, user, assistant, got ["',
        ),
        ([USER, {"role": "assistant"}], "message 2: expected content as text, got null"),
        ([{"role": "user", "content": 5}], "message 1: expected content as text, got 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1: expected content as text, got [{"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1: expected content as text, got [{"),
        ([{"role": "user", "content": " \n"}], "message 1: is empty"),
        ([{"role": "user", "content": "a\0b"}], "message 1: expected text, got a NUL character at offset 1"),
        ('[{"role": "user", "content": "\\ud800"}]', "message 1: expected UTF-8 text"),
        ([USER, SAID], "expected the last message to be a user's, got assistant"),
        ([{"role": "system", "content": "x"}], "expected the last message to be a user's, got system"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_bad_conversation_is_refused_before_loading(ask, document, words):
    result = ask(document)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert "chat.json" in result.err
    assert len(result.err) < 400
    assert not ask.program.engines


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--raw"], "--messages: has no effect with --raw"),
        (["--system", "x"], "has a system message of its own"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "y"], "already given"),
    ],
)
def test_what_does_not_go_together_is_refused(ask, flags, words):
    result = ask(TALK, *flags)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not ask.program.engines


@pytest.mark.parametrize("other", [["-"], ["-f", "-"]])
def test_stdin_cannot_be_both(eagle3, other):
    result = eagle3("generate", "--messages", "-", *other, stdin=b"[]")
    assert (result.code, result.out) == (2, "")
    assert "--messages -: stdin is the prompt already" in result.err


def test_a_missing_file_is_named(eagle3):
    assert "--messages /no/such: No such file" in eagle3("generate", "--messages", "/no/such").err


def test_errors_name_the_flag_that_the_caller_has(tmp_path):
    with pytest.raises(FileError, match=r"^/load"):
        read_messages(str(tmp_path / "none"), "/load")
    with pytest.raises(InputError, match=r"^here: message 1: is empty"):
        checked([{"role": "user", "content": ""}], "here")
