"""A reasoning model's thinking: beside the answer, never in it."""

from __future__ import annotations

import json
import sys

import pytest
from fake_engine import FakeEngine, Terminal

SCRIPT = ["<think>\nHm", "m.", "\n</thi", "nk>\n\n", "Four", "."]


@pytest.fixture
def thinking(eagle3):
    eagle3.script = [SCRIPT]
    return eagle3


def test_thinking_goes_to_stderr_and_the_answer_to_stdout(thinking):
    result = thinking("generate", "x")
    assert (result.code, result.out, result.err) == (0, "Four.\n", "Hmm.\n")


@pytest.mark.parametrize("flag", ["--hide-thinking", "--quiet"])
def test_thinking_can_be_hidden(thinking, flag):
    result = thinking("generate", "x", flag)
    assert (result.code, result.out, result.err) == (0, "Four.\n", "")


def test_json_has_it_beside_the_text(thinking):
    result = thinking("generate", "x", "--json")
    document = json.loads(result.out)
    assert (document["text"], document["thinking"], result.err) == ("Four.", "Hmm.", "")
    assert len(document["tokens"]) == len(SCRIPT)


def test_json_leaves_it_out_when_it_is_hidden(thinking):
    assert "thinking" not in json.loads(thinking("generate", "x", "--json", "--hide-thinking").out)


def test_an_answer_without_thinking_has_none_in_the_document(eagle3):
    assert "thinking" not in json.loads(eagle3("generate", "x", "--json").out)


def test_raw_shows_what_the_model_says(thinking):
    assert thinking("generate", "x", "--raw").out == "".join(SCRIPT) + "\n"


def test_a_template_that_opened_it(eagle3, monkeypatch):
    monkeypatch.setattr(FakeEngine, "render", lambda self, messages: list(b"<assistant><think>\n"))
    eagle3.script = [["Hm", "m.</think>", "\nFour."]]
    result = eagle3("generate", "x")
    assert (result.out, result.err) == ("Four.\n", "Hmm.\n")


def test_thinking_that_never_ends_is_no_answer(eagle3):
    eagle3.script = [["<think>", "Hm", " </thi"]]
    result = eagle3("generate", "x")
    assert (result.code, result.out, result.err) == (0, "", "Hm </thi\n")


def test_ctrl_c_in_the_thinking_closes_its_line(eagle3):
    eagle3.script = [["<think>", "Hm", KeyboardInterrupt()]]
    result = eagle3("generate", "x")
    assert (result.code, result.out, result.err) == (130, "", "Hm\n")


def test_on_a_terminal_it_is_dimmed_and_its_control_characters_are_shown(eagle3, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    eagle3.script = [["<think>a\x1b[2J</think>", "b"]]
    assert eagle3("generate", "x").out == "b\n"
    assert screen.getvalue().endswith("\x1b[2ma\\u001b[2J\x1b[0m\n")


def test_hide_thinking_with_raw_is_refused(eagle3):
    result = eagle3("generate", "x", "--raw", "--hide-thinking")
    assert (result.code, result.out) == (2, "")
    assert "--hide-thinking: has no effect with --raw" in result.err
    assert not eagle3.engines


def test_every_line_of_a_batch_is_told_apart(eagle3, tmp_path):
    eagle3.script = [SCRIPT, ["Five."]]
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    result = eagle3("generate", "--batch", str(tmp_path / "p.jsonl"))
    first, second = map(json.loads, result.out.splitlines())
    assert (first["text"], first["thinking"]) == ("Four.", "Hmm.")
    assert second["text"] == "Five."
    assert "thinking" not in second
    assert result.err == ""
