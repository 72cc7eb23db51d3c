"""Nothing that a model, a file or a template says can steer a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tty
import unicodedata

import pytest
from fake_engine import Terminal

from eagle3_cli.console import Console, visible
from eagle3_cli.errors import FileError

# Sequences that clear the screen, set the title, write the clipboard, go back, colour, overwrite, reverse.
PIECES = [
    "a\x1b", "[2Jb\x1b]0;title", "\x07\x1b]52;c;aGk=\x1b", "\\", "\rc\x08", "\x9b31m\x7f", "d\u202ee\u2066",
    "\u2028\té\n",
]  # fmt: skip
SHOWN = r"a\u001b[2Jb\u001b]0;title\u0007\u001b]52;c;aGk=\u001b\\u000dc\u0008\u009b31m\u007fd\u202ee\u2066\u2028"
COMMANDS = {"generate": ["generate", "-p", "x"], "chat": ["chat"], "demo": ["demo", "-q"]}


def on_terminal(command, environment, stdin=b""):
    """What a process writes to a terminal: (stdout and stderr as text, exit code)."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)  # no translation of line breaks
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    process.stdin.write(stdin)
    process.stdin.close()
    seen = b""
    try:
        while piece := os.read(ours, 4096):
            seen += piece
    except OSError:  # Linux says so where the other side is closed
        pass
    os.close(ours)
    return seen.decode(), process.wait(timeout=30)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_answer_on_a_terminal_shows_its_control_characters(command, environment, name):
    script = json.dumps([PIECES, PIECES])
    seen, code = on_terminal(command(script, *COMMANDS[name]), {**environment, "TERM": "dumb"}, b"hi\n")
    assert code == 0
    assert seen.startswith(SHOWN + "\té\n")
    assert not set("\x1b\x07\r\x08\x9b\x7f") & set(seen)


def test_raw_output_sends_them(command, environment):
    seen, code = on_terminal(command(json.dumps([PIECES]), "generate", "-p", "x", "--raw-output"), environment)
    assert (seen, code) == ("".join(PIECES), 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_raw_output_reaches_every_command(eagle3, monkeypatch, name):
    eagle3.script = [PIECES, PIECES]
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert eagle3(*COMMANDS[name], "--raw-output", stdin=b"hi\n").code == 0
    assert screen.getvalue() == "".join(PIECES)


def test_through_a_pipe_the_answer_is_what_the_model_said(eagle3):
    eagle3.script = [PIECES]
    assert eagle3("generate", "-p", "x").out == "".join(PIECES)


def test_a_document_on_a_terminal_is_still_that_document(eagle3, monkeypatch):
    eagle3.script = [PIECES]
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert eagle3("generate", "-p", "x", "--json").code == 0
    assert json.loads(screen.getvalue())["text"] == "".join(PIECES)
    assert visible(screen.getvalue()) == screen.getvalue()


def test_a_sequence_that_ends_the_answer_is_followed_by_a_line_break(eagle3, monkeypatch):
    eagle3.script = [["a\x1b"]]
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    eagle3("generate", "-p", "x")
    assert screen.getvalue() == "a\\u001b\n"


def test_which_characters_are_shown():
    """By what Unicode says of them."""
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for code in (*range(0x3000), *range(0xF000, 0x11000), *range(0xE0000, 0xE0100)):
        char = chr(code)
        steers = unicodedata.category(char) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(char) in turning
        expected = f"\\u{code:04x}" if steers and char not in "\n\t" else char
        assert visible(char) == expected, hex(code)


EVIL = "\x1b]0;pwned\x07\r\u202e"


@pytest.mark.parametrize("debug", ["", "1"])
def test_errors_show_them_whoever_reads(eagle3, monkeypatch, debug):
    monkeypatch.setenv("EAGLE3_DEBUG", debug)
    eagle3.load_error = FileError(f"{EVIL}.gguf: llama.cpp cannot load it: {EVIL}.", f"Look at {EVIL}")
    err = eagle3("generate", "-p", "x").err
    assert err.count(visible(EVIL)) == (5 if debug else 3)
    assert visible(err) == err


@pytest.mark.parametrize("args", [["-f", f"/no/{EVIL}"], ["--target", EVIL], [f"--{EVIL}"], ["--device", EVIL]])
def test_names_that_are_refused_are_shown(eagle3, args):
    result = eagle3("generate", "-p", "x", *args)
    assert (result.code, result.out) == (2, "")
    assert visible(result.err) == result.err


def test_an_error_on_a_terminal_has_no_sequences_but_ours(command, environment):
    seen, code = on_terminal(command("[]", "generate", "-f", f"/no/{EVIL}"), environment)
    assert code == 2
    assert seen.count("\x1b") == 2  # the colour of "error:" and its end
    assert "\\u001b]0;pwned\\u0007\\u000d\\u202e" in seen


def test_notes_reports_and_progress_show_them(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    console = Console()
    console.note(EVIL)
    console.report(EVIL)
    console.progress(EVIL, 0.5)
    console.clear_progress()
    said = screen.getvalue().replace("\r\x1b[K", "")
    assert said.count(visible(EVIL)) == 3
    assert visible(said) == said
