"""generate --trace: a page beside the answer, which stays what it is."""

from __future__ import annotations

import json
import sys

import pytest
from fake_engine import Terminal

from eagle3_cli.__main__ import run
from eagle3_cli.trace import MARK


@pytest.fixture
def ask(tiny_target, tiny_drafters, tmp_path, monkeypatch, capsys):
    """ask(*flags) -> (exit code, stdout, stderr), with the real tiny pair."""
    monkeypatch.setattr(sys, "stdin", Terminal())
    pair = ["--target", str(tiny_target.path), "--draft", str(tiny_drafters["good"].path), "--draft-tokens", "8"]

    def call(*flags):
        code = run(["generate", "-p", "the hen", *pair, "-c", "256", "-t", "1", "--temp", "0", "-n", "12", *flags])
        return code, *capsys.readouterr()

    return call


def test_a_page_is_written_and_the_answer_is_the_same(ask, tmp_path):
    page = tmp_path / "t.html"
    assert ask("--trace", str(page)) == ask()
    assert MARK in page.read_bytes()
    assert b"the hen" in page.read_bytes()


def test_json_is_the_same_document_with_a_trace(ask, tmp_path):
    page = tmp_path / "t.html"
    traced, plain = (json.loads(ask("--json", "--logprobs", "1", *flags)[1]) for flags in ((), ("--trace", str(page))))
    assert {key: traced[key] for key in ("text", "tokens", "logprobs")} == {
        key: plain[key] for key in ("text", "tokens", "logprobs")
    }
    assert page.exists()


def test_an_interrupted_answer_is_on_the_page(ask, tmp_path, monkeypatch):
    from eagle3_cli.engine.target import Target

    verify, calls = Target.verify, []

    def interrupted(self, root, tree):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        verify(self, root, tree)

    monkeypatch.setattr(Target, "verify", interrupted)
    page = tmp_path / "t.html"
    code, out, err = ask("--trace", str(page))
    assert (code, err) == (130, "")
    assert out.endswith("\n")
    assert MARK in page.read_bytes()


def test_without_an_answer_there_is_no_page(ask, tmp_path):
    page = tmp_path / "t.html"
    assert ask("--trace", str(page), "--system", "x" * 500)[:2] == (2, "")
    assert not page.exists()


def test_another_file_is_not_replaced(eagle3, tmp_path):
    (tmp_path / "notes.html").write_text("notes")
    result = eagle3("generate", "x", "--trace", str(tmp_path / "notes.html"))
    assert (result.code, result.out) == (2, "")
    assert "--trace" in result.err
    assert (tmp_path / "notes.html").read_text() == "notes"
    assert not eagle3.engines
