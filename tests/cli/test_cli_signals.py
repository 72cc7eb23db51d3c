"""Ctrl-C, SIGTERM and SIGHUP wherever they arrive: exit code, what was printed stays, nothing is left behind."""

from __future__ import annotations

import array
import ctypes
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from fake_engine import Terminal
from signalling import strike
from test_cli_chat import Screen

from eagle3_cli import interrupt
from eagle3_cli.__main__ import run
from eagle3_cli.interrupt import Terminated, called_from_c, check, gentle_interrupt, stop_wanted

sys.path.append(str(Path(__file__).parents[1] / "convert"))

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
PROMPT = "the hen and the other hen " * 8  # more rows than a pass that cannot be stopped
FOREVER = '[["<forever>"]]'


@pytest.fixture
def listening(monkeypatch):
    """Signals arrive in this process as they do in the command's."""
    before = {number: signal.getsignal(number) for number in CODES}
    for number in CODES:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    monkeypatch.setattr(interrupt, "_listening", False)
    interrupt.listen()
    yield
    interrupt.stop_listening()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def arguments(tiny_target, tiny_drafters):
    """Of an answer of 40 tokens by real engines; `no_draft` for plain decoding."""

    def make(command, *more, no_draft=False):
        drafter = ["--no-draft"] if no_draft else ["--draft", str(tiny_drafters["random"].path), "--draft-tokens", "8"]
        common = ["--ctx-size", "512", "--threads", "1", "--temp", "0", "-n", "40"]
        return [command, "--target", str(tiny_target.path), *drafter, *common, *more]

    return make


@pytest.fixture
def generate(listening, arguments, monkeypatch, capsys):
    """generate(place, signal, *flags) -> exit code, stdout, stderr; without a place to its end."""

    def answer(place=None, number=signal.SIGINT, *flags):
        with monkeypatch.context() as patch:
            if place:
                strike(patch.setattr, place, number)
            patch.setattr(sys, "stdin", Terminal())
            code = run(arguments("generate", "--raw", "-p", PROMPT, *flags))
        return code, *capsys.readouterr()

    return answer


# ---- one answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("place", ["drafter", "prefill", "draft", "verify", "commit", "print"])
def test_a_signal_ends_the_answer_and_what_was_printed_stays(generate, place, number):
    whole = generate()[1].removesuffix("\n")
    code, out, err = generate(place, number)
    assert (code, err) == (CODES[number], "")
    assert whole.startswith(out.removesuffix("\n"))
    assert len(out) < len(whole)
    began = place not in ("drafter", "prefill")
    assert (out != "", out.endswith("\n")) == (began, began)


@pytest.mark.parametrize("number", CODES)
def test_a_signal_ends_the_load_and_the_line_is_cleared(generate, monkeypatch, number):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    code, out, _ = generate("load", number)
    assert (code, out) == (CODES[number], "")
    assert "loading target" in terminal.getvalue()
    assert "error" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("place", ["load", "prefill", "verify"])
def test_json_leaves_stdout_empty(generate, place):
    assert generate(place, signal.SIGINT, "--json") == (130, "", "")


def test_a_signal_between_two_nodes_of_the_graph_ends_the_pass(generate, monkeypatch):
    """Not only the prompt: the pass returns before it is done."""
    from eagle3_cli import context

    codes = []
    process = context._process
    monkeypatch.setattr(context, "_process", lambda *args: codes.append(process(*args)) or codes[-1])
    assert generate("prefill", signal.SIGINT)[0] == 130
    assert codes[-1] == 2  # llama.cpp's code of a pass that was aborted


def test_short_passes_are_not_asked_whether_to_stop(generate, monkeypatch):
    from eagle3_cli import context

    asked = []
    monkeypatch.setattr(context, "stop_wanted", lambda: asked.append(1) and False)
    with monkeypatch.context() as patch:
        patch.setattr(context, "_MANY_ROWS", 1000)
        patch.setattr(context, "_LONG", 1000.0)
        assert generate()[0] == 0
    assert not asked
    assert generate()[0] == 0
    assert asked


@pytest.mark.parametrize(("place", "number"), [("load", signal.SIGTERM), ("prefill", signal.SIGINT),
                                               ("verify", signal.SIGTERM)])  # fmt: skip
def test_a_real_process_ends_without_a_word(arguments, environment, place, number):
    program = str(Path(__file__).with_name("signalling.py"))
    result = subprocess.run(
        [sys.executable, program, place, str(int(number)), *arguments("generate", "--raw", "-p", PROMPT)],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=60, env=environment,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (CODES[number], b"")
    began = place == "verify"
    assert (result.stdout != b"", result.stdout.endswith(b"\n")) == (began, began)


# ---- chat -------------------------------------------------------------------------------------------------


@pytest.fixture
def talk(listening, arguments, monkeypatch, capsys):
    """talk(place, times, *typed) -> exit code, stdout, messages of the last turn; a typed exception is raised."""

    def converse(place, times, *typed, number=signal.SIGINT):
        waiting, asked = list(typed), []

        def ask(*_):
            line = waiting.pop(0) if waiting else EOFError()
            if isinstance(line, BaseException):
                raise line
            return line

        with monkeypatch.context() as patch:
            from eagle3_cli.engine import Engine

            render = Engine.render
            patch.setattr(Engine, "render", lambda self, m: asked.append(list(m)) or render(self, m))
            patch.setattr("eagle3_cli.commands.chat_input._ask", ask)
            patch.setattr(sys, "stdin", Terminal())
            strike(patch.setattr, place, number, times)
            code = run(arguments("chat"))
        return code, capsys.readouterr().out, [(m["role"], m["content"]) for m in asked[-1]]

    return converse


def test_the_first_ctrl_c_ends_the_answer_only_and_keeps_it(talk):
    code, out, messages = talk("verify", 1, "hi", "more")
    assert code == 0
    assert [role for role, _ in messages] == ["user", "assistant", "user"]
    first = messages[1][1]
    assert first
    assert out.startswith(first + "\n")
    assert len(out) > len(first) + 1


def test_the_first_ctrl_c_in_a_long_prompt_ends_it_at_once_and_the_message_is_dropped(talk):
    code, out, messages = talk("prefill", 1, PROMPT, "more")
    assert (code, messages) == (0, [("user", "more")])
    assert out


def test_an_answer_after_an_interruption_is_that_of_a_fresh_chat(talk):
    fresh = talk("print", 0, "more")
    assert talk("prefill", 1, PROMPT, "more") == fresh


@pytest.mark.parametrize("place", ["draft", "verify"])
def test_a_second_ctrl_c_leaves(talk, place):
    code, out, _ = talk(place, 2, "hi", "never")
    assert code == 130
    assert out.count("\n") == 1


def test_a_second_ctrl_c_at_the_prompt_leaves(talk):
    code, _, messages = talk("verify", 1, "hi", KeyboardInterrupt(), "never")
    assert (code, messages) == (130, [("user", "hi")])


def test_ctrl_c_at_the_prompt_after_a_whole_answer_asks_once_more(talk):
    code, _, messages = talk("print", 0, "hi", KeyboardInterrupt(), "more")
    assert (code, len(messages)) == (0, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_leave_the_chat(talk, number):
    code, out, _ = talk("verify", 1, "hi", "never", number=number)
    assert (code, out.count("\n")) == (CODES[number], 1)


def test_sigterm_at_the_prompt_leaves_the_terminal_in_order(command, environment):
    screen = Screen(command('[["hello"]]', "chat"), environment)
    before = termios.tcgetattr(screen.fd)[3]
    screen.wait_for_mark()
    assert not termios.tcgetattr(screen.fd)[3] & termios.ECHO
    os.kill(screen.pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1]) == 143
    assert termios.tcgetattr(screen.fd)[3] == before
    os.close(screen.fd)


# ---- convert ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("existing", [True, False])
def test_a_signal_in_a_conversion_leaves_no_half_written_file(listening, tmp_path, monkeypatch, number, existing):
    import checkpoints

    source = checkpoints.write(tmp_path / "checkpoint", checkpoints.tensors())
    target, folder = checkpoints.write_target(tmp_path / "target.gguf"), tmp_path / "out"
    folder.mkdir()
    if existing:
        (folder / "o.gguf").write_text("old")
    strike(monkeypatch.setattr, "load", number)  # the third tensor's progress
    args = ["convert", str(source), "--target", str(target), "-o", str(folder / "o.gguf"), "--force"]
    assert run(args) == CODES[number]
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == ([("o.gguf", "old")] if existing else [])


# ---- readers, shells and background jobs ------------------------------------------------------------------


@pytest.mark.parametrize("number", CODES)
def test_a_reader_that_does_not_read_cannot_hold_the_command(command, environment, number):
    script = json.dumps([["x" * 100_000]])
    child = subprocess.Popen(command(script, "generate", "-p", "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             stdin=subprocess.DEVNULL, env=environment,
                             preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # fmt: skip
    fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, 4096)
    waiting = array.array("i", [0])
    while waiting[0] < 4096:
        fcntl.ioctl(child.stdout, termios.FIONREAD, waiting)
        assert child.poll() is None
    child.send_signal(number)
    assert child.wait(timeout=30) == CODES[number]
    out, err = child.communicate()
    assert (out, err) == (b"x" * 4096, b"")


def test_nohup_is_respected(command, environment):
    child = subprocess.Popen(
        command(FOREVER, "generate", "-p", "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    assert child.stdout.read(5) == b" word"
    child.send_signal(signal.SIGHUP)
    assert child.stdout.read(500) == b" word" * 100
    child.terminate()
    out, err = child.communicate(timeout=30)
    assert (child.returncode, err, out[-1:]) == (143, b"", b"\n")


def test_a_signal_while_stdin_is_awaited(command, environment):
    with subprocess.Popen(command(FOREVER, "generate"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=environment) as child:  # fmt: skip
        child.stdin.write(b"the prompt")
        child.stdin.flush()
        unread = array.array("i", [1])
        while unread[0]:  # until it reads
            fcntl.ioctl(child.stdin, termios.FIONREAD, unread)
        child.terminate()
        assert child.wait(timeout=30) == 143
        assert (child.stdout.read(), child.stderr.read()) == (b"", b"")


# ---- the parts --------------------------------------------------------------------------------------------


COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def sort_with(function) -> None:
    """Let a C library call a Python function: qsort of two numbers."""
    callback = COMPARE(function)
    ctypes.CDLL(None).qsort((ctypes.c_int * 2)(2, 1), 2, 4, callback)


@pytest.mark.parametrize("number", CODES)
def test_in_a_function_that_c_calls_a_signal_waits(listening, capfd, number):
    wanted = []

    def below():
        signal.raise_signal(number)

    @called_from_c
    def function(_a, _b):
        wanted.append(stop_wanted())
        below()
        wanted.append(stop_wanted())
        return 0

    sort_with(function)
    assert wanted == [False, True]
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
        check()
    assert not stop_wanted()
    check()
    assert capfd.readouterr().err == ""


def test_elsewhere_a_signal_raises(listening):
    for number in CODES:
        with pytest.raises((KeyboardInterrupt, Terminated)):
            signal.raise_signal(number)
    assert not stop_wanted()


def test_another_thread_is_not_interrupted(listening):
    @called_from_c
    def function(_a, _b):
        signal.raise_signal(signal.SIGTERM)
        return 0

    sort_with(function)
    fault = []

    def work():
        try:
            check()
        except BaseException as error:
            fault.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not fault
    with pytest.raises(Terminated):
        check()


def test_before_the_answer_has_begun_the_first_ctrl_c_is_not_gentle(listening):
    begun = []
    with gentle_interrupt(lambda: bool(begun)) as asked:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not asked()
        begun.append(1)
        signal.raise_signal(signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_a_progress_function_raises_ends_the_load(tiny_target):
    from eagle3_cli.llama import Model

    class MyError(Exception):
        pass

    def progress(_done):
        raise MyError

    with pytest.raises(MyError):
        Model(tiny_target.path, [], 0, progress=progress)


def test_handlers_of_others_stay(listening):
    def mine(*_):
        pass

    signal.signal(signal.SIGTERM, mine)
    interrupt.listen()
    interrupt.stop_listening()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_text_stream_without_a_file_is_no_reader_that_blocks(listening, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)
