"""A bar while a long prompt is read: how far, only on a terminal, and gone before the answer."""

from __future__ import annotations

import sys

import pytest
from fake_engine import Terminal

from eagle3_cli.commands.answer import reading, watching
from eagle3_cli.console import Console
from eagle3_cli.engine.types import Watch
from eagle3_cli.settings import Limits, SamplingSettings


@pytest.fixture
def watched(monkeypatch):
    """watched() makes stderr a terminal and returns what is written to it."""

    def watch():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return watch


def test_the_engine_tells_every_chunk_of_the_prompt(open_engine):
    engine = open_engine("good")
    rows, told = engine.decoder.target.context.rows, []
    prompt = [1 + i % 50 for i in range(2 * rows + 5)]
    greedy = SamplingSettings(temperature=0.0, seed=0)
    watch = Watch(prefill=lambda done, total: told.append((done, total)))
    list(engine.stream(prompt, greedy, Limits(1), watch))
    assert told == [(done, len(prompt)) for done in (rows, 2 * rows, 2 * rows + 5)]
    told.clear()
    list(engine.stream(prompt, greedy, Limits(1), watch))
    assert told == [(len(prompt), len(prompt))]


def test_a_bar_is_shown_after_a_while_and_cleared_at_the_end(watched):
    screen = watched()
    show = reading(Console(), patience=0.0)
    show(512, 2048)
    assert "25% reading the prompt" in screen.getvalue()
    show(2048, 2048)
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_prompt_that_is_read_at_once_shows_nothing(watched):
    screen = watched()
    show = reading(Console(), patience=1000.0)
    show(512, 2048)
    show(2048, 2048)
    assert screen.getvalue() == ""


def test_nobody_is_told_where_nobody_looks(monkeypatch, watched):
    watched()
    assert watching(Console())[0].prefill is not None
    monkeypatch.setattr(sys, "stderr", None)
    assert watching(Console()) == ()


@pytest.mark.parametrize("args", [["generate", "-p", "hi"], ["chat"]])
def test_commands_ask_to_be_told(eagle3, watched, args):
    watched()
    assert eagle3(*args, stdin=b"hi\n").code == 0
    assert eagle3.engine.watch.prefill is not None
