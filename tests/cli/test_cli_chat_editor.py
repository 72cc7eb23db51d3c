"""The editor of a chat's messages: keys, several lines, Tab, history; and plain lines where there is none."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
from fake_engine import Terminal
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from eagle3_cli import interrupt
from eagle3_cli.commands import chat_editor
from eagle3_cli.commands.chat_commands import ALIASES, COMMANDS
from eagle3_cli.commands.chat_editor import Editor, wanted
from eagle3_cli.commands.chat_input import can_edit, goes_on, joined, open_quotes, reader
from eagle3_cli.commands.chat_settings import KINDS
from eagle3_cli.console import Console
from eagle3_cli.interrupt import Terminated

ENTER, NEW_LINE, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"


@pytest.fixture
def typed():
    """typed(keys, ...) -> the messages of an editor that got these keys, one reading each."""

    def messages(*keys, keep_history=False):
        with create_pipe_input() as pipe:
            editor = Editor(keep_history, (pipe, DummyOutput()))
            found = []
            for each in keys:
                pipe.send_text(each)
                found.append(editor.read())
            return found

    return messages


# ---- several lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (f"hi{ENTER}", "hi"),
        ("hi\n", "hi"),  # typed while an answer came
        (f"first\\{ENTER}second{ENTER}", "first\nsecond"),
        (f"first{NEW_LINE}  second{ENTER}", "first\n  second"),
        (f'"""first{ENTER}second\\{ENTER}"""{ENTER}', '"""first\nsecond\\\n"""'),
        (f'"""one line"""{ENTER}', '"""one line"""'),
        (f"a \\ b{ENTER}", "a \\ b"),
        (f"\x1b[200~one\r\ntwo\\\n\x1b[201~three{ENTER}", "one\ntwo\\\nthree"),
        (f"b\x01\\{ENTER}a{ENTER}", "\nab"),  # Ctrl-A: to the beginning
        (f"wrong\x15right{ENTER}", "right"),  # Ctrl-U: delete to there
    ],
)
def test_keys_make_a_message(typed, keys, message):
    assert typed(keys) == [message]


@given(st.text(alphabet='"\\ab\n', max_size=12), st.text(alphabet='"\\ab', max_size=6))
def test_a_message_that_goes_on_is_joined_without_its_backslash(text, line):
    if not goes_on(text):
        assert not open_quotes(text)
        assert not text.endswith("\\") or text.lstrip().startswith('"""')
    elif open_quotes(text):
        assert joined(text, line) == f"{text}\n{line}"
    else:
        assert joined(text, line) == f"{text[:-1]}\n{line}"


def test_ctrl_d_on_an_empty_line_is_the_end(typed):
    with pytest.raises(EOFError):
        typed(CTRL_D)


def test_ctrl_c_drops_what_was_typed(typed):
    with pytest.raises(KeyboardInterrupt):
        typed(f"half{CTRL_C}")


# ---- history ----------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    return tmp_path


def test_history_comes_back_in_the_next_chat(typed, cache):
    assert typed(f"one\\{ENTER}two{ENTER}", f"three{ENTER}", keep_history=True) == ["one\ntwo", "three"]
    # through the lines of the newest entry, then of the one before
    assert typed(f"{UP}{ENTER}", keep_history=True) == ["three"]
    assert typed(f"{UP}{UP}{ENTER}", keep_history=True) == ["one\ntwo"]


def test_history_can_be_left_out(typed, cache):
    assert typed(f"one{ENTER}", f"{UP}{ENTER}") == ["one", "one"]
    assert not list(cache.iterdir())


# ---- Tab --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ("", "")),
        ("hello /sa", ("", "")),
        ("first\n/sa", ("", "")),
        ("/sa", ("command", "/sa")),
        ("/save ", ("file", "")),
        ("/save my fi", ("file", "my fi")),
        ("/save --force my", ("file", "my")),
        ("/load ~/c", ("file", "~/c")),
        ("/set te", ("setting", "te")),
        ("/set temperature 0", ("", "")),
        ("/model a.gguf b", ("model", "b")),
        ("/undo x", ("", "")),
        ("/nothing x", ("", "")),
    ],
)
def test_what_tab_completes(line, expected):
    assert wanted(line) == expected


def candidates(line):
    found = chat_editor._Words().get_completions(Document(line), CompleteEvent())
    return [line[: len(line) + each.start_position] + each.text for each in found]


def test_commands_settings_files_and_models_are_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eagle3_cli.registry.registry_file", lambda: tmp_path / "models.json")
    (tmp_path / "models.json").write_text(
        '{"format": 1, "models": {"my-llama": {"target": "/t.gguf", "draft": null}}}'
    )  # fmt: skip
    for name in ("my chat.json", "my.gguf", "other.json"):
        (tmp_path / name).write_text("")
    (tmp_path / "myfolder").mkdir()
    assert candidates("/") == [*COMMANDS, *ALIASES]
    assert candidates("/s") == ["/system", "/save", "/stats", "/set"]
    assert candidates("/set top_") == ["/set top_k", "/set top_p", "/set top_n_sigma"]
    assert set(candidates("/set ")) == {f"/set {name}" for name in KINDS}
    assert candidates("/load my") == ["/load my chat.json", "/load my.gguf", "/load myfolder/"]
    assert candidates("/load my c") == ["/load my chat.json"]
    assert candidates("/model my") == ["/model my-llama", "/model my.gguf", "/model myfolder/"]
    assert candidates("hello") == []


def test_tab_completes_what_is_typed(typed):
    assert typed(f"/sy\t be brief{ENTER}") == ["/system be brief"]


# ---- signals ----------------------------------------------------------------------------------------------


@pytest.fixture
def listening(monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    monkeypatch.setattr(interrupt, "_listening", False)
    interrupt.listen()
    yield {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_reading_and_our_handlers_stay(listening, number, monkeypatch):
    with create_pipe_input() as pipe:
        editor = Editor(False, (pipe, DummyOutput()))
        begun = editor._leave_at_signals

        def then_strike():
            begun()
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

        monkeypatch.setattr(editor, "_leave_at_signals", then_strike)
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
            editor.read()
    assert {each: signal.getsignal(each) for each in listening} == listening


# ---- plain lines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message", "marks"),
    [
        ("hi\nmore\n", "hi", "> "),
        ("first\\\nsecond\n", "first\nsecond", "> . "),
        ('"""first\n\nsecond\n"""\n', '"""first\n\nsecond\n"""', "> . . . "),
        ("first\\\n", "first\\", "> . "),  # Ctrl-D: what there is
    ],
)
def test_plain_lines_make_a_message(monkeypatch, lines, message, marks):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(lines))
    monkeypatch.setattr(sys, "stderr", screen)
    assert reader(Console(), keep_history=False)() == message
    assert screen.getvalue() == marks


def test_there_is_no_editor_without_two_terminals_that_can_do_it(monkeypatch):
    ours, theirs = os.openpty()
    with open(theirs, "r+b", buffering=0) as terminal, open(os.devnull) as file:

        def possible(stdin, stdout, term):
            monkeypatch.setenv("TERM", term)
            monkeypatch.setattr(sys, "stdin", stdin)
            monkeypatch.setattr(sys, "stdout", stdout)
            return can_edit()

        assert possible(terminal, terminal, "xterm")
        assert not possible(terminal, terminal, "dumb")
        assert not possible(terminal, terminal, "")
        assert not possible(terminal, file, "xterm")
        assert not possible(file, terminal, "xterm")
        assert not possible(Terminal(), terminal, "xterm")
        assert not possible(None, terminal, "xterm")
    os.close(ours)
