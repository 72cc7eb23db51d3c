"""What goes to which stream, and which exit code comes out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_engine import Terminal

from eagle3_cli.errors import FileError, LlamaError, PairError, PromptError

FOREVER = '[["<forever>"]]'


def test_text_goes_to_stdout_not_stderr(eagle3):
    result = eagle3("generate", "Hi")
    assert (result.code, result.out, result.err) == (0, "Hello world\n", "")


def test_answer_that_ends_its_line_gets_no_second_line_break(eagle3):
    eagle3.script = [["Hello\n"]]
    assert eagle3("generate", "Hi").out == "Hello\n"


def test_empty_answer_prints_nothing(eagle3):
    eagle3.script = [[]]
    assert eagle3("generate", "Hi").out == ""


def test_pieces_are_shown_as_they_come(eagle3, capsys):
    seen = []
    eagle3.script = [["Hello", lambda: seen.append(capsys.readouterr().out), " world"]]
    eagle3("generate", "Hi")
    assert seen == ["Hello"]


def test_engine_is_closed(eagle3):
    eagle3("generate", "Hi")
    assert eagle3.engine.closed
    assert eagle3.engine.answers_closed == 1


def test_engine_is_closed_after_a_failure(eagle3):
    eagle3.script = [["Hello", LlamaError("decode failed.")]]
    assert eagle3("generate", "Hi").code == 1
    assert eagle3.engine.closed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileError("x.gguf: truncated."), 2),
        (PairError("x.gguf: made for another target."), 2),
        (LlamaError("no memory."), 1),
        (RuntimeError("a bug"), 1),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_failure_leaves_stdout_empty(eagle3, error, code, flags):
    eagle3.load_error = error
    result = eagle3("generate", "Hi", *flags)
    assert (result.code, result.out) == (code, "")
    assert "error: " in result.err


def test_json_failure_in_the_middle_leaves_stdout_empty(eagle3):
    eagle3.script = [["Hello", LlamaError("decode failed.")]]
    result = eagle3("generate", "Hi", "--json")
    assert (result.code, result.out) == (1, "")


def test_error_has_message_and_hint(eagle3):
    eagle3.load_error = FileError("x.gguf: no such file.", "Check the path.")
    assert eagle3("generate", "Hi").err == "error: x.gguf: no such file.\nhint: Check the path.\n"


def test_prompt_that_does_not_fit_is_bad_input(eagle3):
    eagle3.script = [[PromptError("the prompt has 9000 tokens, the context 8192.")]]
    result = eagle3("generate", "Hi")
    assert (result.code, result.out) == (2, "")


def test_unexpected_error_keeps_its_traceback_for_debugging(eagle3, monkeypatch):
    eagle3.load_error = RuntimeError("a bug")
    result = eagle3("generate", "Hi")
    assert "internal error: RuntimeError: a bug" in result.err
    assert "EAGLE3_DEBUG=1" in result.err
    assert "Traceback" not in result.err
    monkeypatch.setenv("EAGLE3_DEBUG", "1")
    assert "Traceback" in eagle3("generate", "Hi").err


@pytest.mark.parametrize("args", [["generate", "--nonsense"], ["nonsense"], ["generate", "--temp", "warm"], []])
def test_usage_errors_exit_two(eagle3, args):
    result = eagle3(*args)
    assert (result.code, result.out) == (2, "")
    assert result.err


def test_misspelt_command_is_guessed(eagle3):
    assert "Did you mean generate?" in eagle3("genrate").err


def test_ctrl_c_exits_130_and_closes_the_line(eagle3):
    eagle3.script = [["Hello", KeyboardInterrupt()]]
    result = eagle3("generate", "Hi")
    assert (result.code, result.out) == (130, "Hello\n")
    assert eagle3.engine.closed


def test_ctrl_c_leaves_json_stdout_empty(eagle3):
    eagle3.script = [["Hello", KeyboardInterrupt()]]
    assert (eagle3("generate", "Hi", "--json").code, eagle3.capsys.readouterr().out) == (130, "")


def test_ctrl_c_of_a_real_process_exits_130(command, environment):
    child = subprocess.Popen(
        command(FOREVER, "generate", "-p", "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.read(5) == b" word"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert err == b""
    assert out.endswith(b"\n")


def test_closed_pipe_exits_zero(command, environment):
    child = subprocess.Popen(
        command(FOREVER, "generate", "-p", "x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.read(1) == b" "
    child.stdout.close()
    assert child.wait(timeout=30) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


def test_closed_pipe_of_help_exits_zero(environment):
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-m", "eagle3_cli", "--help"], stdout=write_end, stderr=subprocess.PIPE, env=environment
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (0, b"")


def test_closed_stderr_does_not_matter(process):
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = process('[["Hi"]]', "generate", "-p", "x", "--stats", capture_output=False,
                     stdout=subprocess.PIPE, stderr=write_end)  # fmt: skip
    os.close(write_end)
    assert (result.returncode, result.stdout) == (0, b"Hi\n")


def test_missing_streams_do_not_matter(command, environment):
    script = 'exec "$@" >&- 2>&- <&-'
    result = subprocess.run(["sh", "-c", script, "sh", *command('[["Hi"]]', "generate", "x")], env=environment)
    assert result.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_full_disk_is_an_error(process):
    with open("/dev/full", "wb") as full:
        result = process('[["Hi"]]', "generate", "-p", "x", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: stdout: No space left on device.")


def test_characters_that_the_terminal_lacks_do_not_crash(process, environment):
    environment["PYTHONIOENCODING"] = "ascii"
    result = process('[["na\u00efve"]]', "generate", "x")
    assert (result.returncode, result.stdout) == (0, b"na?ve\n")
    document = process('[["na\u00efve"]]', "generate", "x", "--json")
    assert json.loads(document.stdout)["text"] == "na\u00efve"


def test_progress_and_notes_only_on_a_terminal(eagle3, monkeypatch):
    assert eagle3("generate", "Hi").err == ""
    monkeypatch.setenv("TERM", "xterm")
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    eagle3("generate", "Hi")
    assert "[############            ]  50% loading target" in stderr.getvalue()


def test_quiet_silences_progress(eagle3, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    eagle3("generate", "Hi", "--quiet")
    assert stderr.getvalue() == ""


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_respected(eagle3, monkeypatch, no_color, coloured):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    eagle3.load_error = FileError("x.gguf: no such file.")
    eagle3("generate", "Hi", "-q")
    assert ("\x1b[" in stderr.getvalue()) is coloured


def test_stats_go_to_stderr(eagle3):
    result = eagle3("generate", "Hi", "--stats")
    assert result.out == "Hello world\n"
    assert "2 tokens, 8.0 tokens/s, acceptance length 2.00 (3 of 4 drafted)" in result.err


def test_stats_say_why_there_was_no_drafting(eagle3):
    assert "no drafting (--no-draft)" in eagle3("generate", "Hi", "--stats", "--no-draft").err


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["generate", "--help"], ["convert", "--help"]])
def test_help_imports_no_model_code(light, args):
    assert "Examples:" in light(*args)


def test_overview_imports_no_command(environment):
    code = (
        "import sys; from eagle3_cli.__main__ import run; run(['--help']); "
        "print([m for m in sys.modules if 'commands' in m], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stderr == "[]\n"


def test_version_names_what_a_bug_report_needs(eagle3):
    result = eagle3("--version")
    assert result.code == 0
    for name in ("eagle3 ", "python: ", "platform: ", "llama-cpp-python: ", "gguf: ", "numpy: ", "llama.cpp: "):
        assert name in result.out


def test_waiting_for_stdin_is_said_on_a_terminal(eagle3, monkeypatch):
    read_end, write_end = os.pipe()
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("eagle3_cli.prompt._ready", lambda stream: os.close(write_end) or False)
    with os.fdopen(read_end) as pipe:
        assert eagle3("generate", "Hi", stdin=pipe).code == 0
    assert "from stdin" in sys.stderr.getvalue()


def test_endless_stdin_does_not_stop_an_explicit_prompt(command, environment):
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as sleeper:
        started = time.monotonic()
        result = subprocess.run(
            command('[["Hi"]]', "generate", "-p", "x"), stdin=sleeper.stdout, capture_output=True, env=environment
        )
        sleeper.terminate()
    assert result.stdout == b"Hi\n"
    assert time.monotonic() - started < 50
