"""Chat through a pipe, with scripted typing, and on a real terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import pytest

from eagle3_cli.commands.chat_input import reader, typed_lines
from eagle3_cli.console import Console
from eagle3_cli.errors import PromptError


def test_each_piped_line_is_a_message(eagle3):
    eagle3.script = [["one"], ["two"]]
    result = eagle3("chat", stdin=b"hi\n\nmore\n")
    assert (result.code, result.out, result.err) == (0, "one\ntwo\n", "")
    assert eagle3.engine.prompts == ["<user>hi", "<user>hi<assistant>one<user>more"]


def test_last_line_needs_no_line_break(eagle3):
    assert eagle3("chat", stdin=b"hi").out == "Hello world\n"


def test_nothing_piped_in_says_nothing(eagle3):
    result = eagle3("chat", stdin=b"")
    assert (result.code, result.out) == (0, "")


def test_system_message_stays_in_front(eagle3):
    eagle3.script = [["a"], ["b"]]
    eagle3("chat", "--system", "be brief", stdin=b"one\n/reset\ntwo\n")
    assert eagle3.engine.prompts == ["<system>be brief<user>one", "<system>be brief<user>two"]


def test_reset_forgets_and_exit_leaves(eagle3):
    eagle3.script = [["a"], ["b"], ["c"]]
    result = eagle3("chat", stdin=b"one\n/reset\ntwo\n/exit\nthree\n")
    assert result.out == "a\nb\n"
    assert eagle3.engine.prompts == ["<user>one", "<user>two"]


def test_unknown_command_in_a_pipe_is_an_error(eagle3):
    result = eagle3("chat", stdin=b"/rest\n")
    assert (result.code, result.out) == (2, "")
    assert "/rest: no such command" in result.err


def test_path_is_no_command(eagle3):
    eagle3("chat", stdin=b"/etc/hosts is what?\n")
    assert eagle3.engine.prompts == ["<user>/etc/hosts is what?"]


@pytest.mark.parametrize(("line", "words"), [(b"a\0b\n", "stdin, line 2"), (b"caf\xe9\n", "stdin, line 2")])
def test_bad_line_ends_the_chat_after_the_good_ones(eagle3, line, words):
    result = eagle3("chat", stdin=b"hi\n" + line)
    assert (result.code, result.out) == (2, "Hello world\n")
    assert words in result.err


def test_full_context_ends_the_chat_with_bad_input(eagle3):
    eagle3.script = [["fine"], [PromptError("the prompt does not fit.", "/reset starts over.")]]
    result = eagle3("chat", stdin=b"hi\nmore\n")
    assert (result.code, result.out) == (2, "fine\n")
    assert result.err == "error: the prompt does not fit.\nhint: /reset starts over.\n"


def test_ctrl_c_in_a_pipe_exits_130(eagle3):
    eagle3.script = [["Hel", KeyboardInterrupt()]]
    result = eagle3("chat", stdin=b"hi\nmore\n")
    assert (result.code, result.out) == (130, "Hel\n")


@pytest.fixture
def typing(eagle3, monkeypatch):
    """Answers of `input` one after the other: text, or an exception to raise."""

    def prepare(*lines):
        waiting = list(lines)

        def ask(*_):
            line = waiting.pop(0) if waiting else EOFError()
            if isinstance(line, BaseException) or (isinstance(line, type) and issubclass(line, BaseException)):
                raise line
            return line

        monkeypatch.setattr("eagle3_cli.commands.chat_input._ask", ask)
        return eagle3

    return prepare


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_answer_only_and_keeps_it(typing):
    program = typing("hi", "more")
    program.script = [["Hello", interrupt, " wor", "ld"], ["again"]]
    result = program("chat")
    assert (result.code, result.out) == (0, "Hello wor\nagain\n")
    assert program.engine.prompts[1] == "<user>hi<assistant>Hello wor<user>more"
    assert program.engine.answers_closed == 2


def test_second_ctrl_c_leaves_an_answer_that_hangs(typing):
    program = typing("hi", "more")
    program.script = [["Hello", interrupt, interrupt, " wor"], ["again"]]
    result = program("chat")
    assert (result.code, result.out) == (130, "Hello\n")


def test_message_whose_answer_never_began_is_dropped(typing):
    program = typing("hi", "more")
    program.script = [[interrupt, interrupt, "Hello"], ["again"]]
    program("chat")
    assert program.engine.prompts == ["<user>hi", "<user>more"]


def test_ctrl_c_in_the_last_moment_is_no_interruption(typing):
    program = typing("hi")
    program.script = [["Hello", interrupt]]
    assert program("chat").out == "Hello\n"


def test_handler_is_put_back(typing):
    before = signal.getsignal(signal.SIGINT)
    typing("hi")("chat")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_at_the_prompt_leaves(typing):
    program = typing("hi", KeyboardInterrupt, "more", KeyboardInterrupt, KeyboardInterrupt, "never")
    program.script = [["a"], ["b"]]
    result = program("chat")
    assert (result.code, result.out) == (130, "a\nb\n")
    assert len(program.engine.prompts) == 2


def test_unknown_command_on_a_terminal_goes_on(typing):
    program = typing("/rest", "/help", "hi")
    result = program("chat")
    assert (result.code, result.out) == (0, "Hello world\n")
    assert "/rest: no such command" in result.err
    assert "/reset" in result.err


def test_unreadable_message_on_a_terminal_goes_on(typing):
    program = typing("caf\udce9", "hi")
    assert program("chat").out == "Hello world\n"


def test_summary_follows_each_answer_on_a_terminal(typing, monkeypatch):
    from fake_engine import Terminal

    for flags, shown in (((), True), (("-q",), False)):
        stderr = Terminal()
        monkeypatch.setattr(sys, "stderr", stderr)
        typing("hi")("chat", *flags)
        assert ("acceptance length" in stderr.getvalue()) is shown


def test_marks_stay_out_of_a_redirected_answer(monkeypatch, capsys):
    from fake_engine import Terminal

    monkeypatch.setattr(sys, "stdin", Terminal("hi\n"))
    console = Console()
    assert list(typed_lines(console, reader(console, keep_history=False))) == ["hi"]
    assert capsys.readouterr().out == ""


class Screen:
    """A real terminal with a process in it."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        import pty

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, arguments, environment)
        self.seen = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, seconds: float = 30.0) -> None:
        """Read until text has been seen since the last call."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"ended without {text!r}: {self.seen!r}") from None
        self.seen = self.seen.split(text, 1)[1]

    def wait_for_mark(self) -> None:
        """Read until the editor waits for keys: it says that it takes pastes, and shows its mark."""
        self.wait_for("\x1b[?2004h")
        self.wait_for(">")

    def exit_code(self) -> int:
        for _ in range(300):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    os.read(self.fd, 4096)
                except OSError:
                    time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("still running")


@pytest.mark.parametrize(("leave", "code"), [("\x04", 0), ("/exit\r", 0), ("\x03\x03", 130)])
def test_terminal_session(command, environment, leave, code):
    screen = Screen(command('[["<forever>"], ["second answer"]]', "chat"), environment)
    screen.wait_for_mark()
    screen.type("hi\r")
    screen.wait_for(" word word")
    screen.type("\x03")
    screen.wait_for("(stopped)")
    screen.wait_for_mark()
    screen.type("more\r")
    screen.wait_for("second answer")
    screen.wait_for("tokens/s")
    screen.wait_for_mark()
    screen.type(leave[0])
    if leave == "\x03\x03":
        screen.wait_for("again or Ctrl-D leaves")
        screen.wait_for_mark()
    screen.type(leave[1:])
    assert screen.exit_code() == code


def test_a_dumb_terminal_gets_plain_lines(command, environment):
    screen = Screen(command('[["one"], ["two"]]', "chat"), {**environment, "TERM": "dumb"})
    screen.wait_for("> ")
    screen.type("hi\\\n")
    screen.wait_for(". ")
    screen.type("there\n")
    screen.wait_for("one")
    screen.wait_for("> ")
    screen.type("/undo\n")
    screen.wait_for("(taken back: hi ...)")
    screen.wait_for("> ")
    screen.type("\x04")
    assert screen.exit_code() == 0
