"""What answers look like in a chat: proposed tokens marked, Markdown drawn, nothing that steers the terminal."""

from __future__ import annotations

import re
import sys

import pytest
from fake_engine import Terminal
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli.console import visible
from eagle3_cli.markdown import Blocks, drawn

STYLE = re.compile(r"\x1b\[[\d;]*m")


def plain(text):
    return STYLE.sub("", text)


@pytest.fixture
def shown(eagle3, monkeypatch):
    """shown(script, *flags) -> what a terminal gets on stdout."""

    def chat(*script, flags=(), stdin=b"hi\nmore\n"):
        eagle3.script = list(script)
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        result = eagle3("chat", *flags, stdin=stdin)
        assert result.code == 0, result.err
        return screen.getvalue()

    return chat


# ---- --show-drafts ----------------------------------------------------------------------------------------

SOURCES = [["plain ", ["drafted ", 1], ["matched ", 2], ["both", 3], "."]]


@pytest.mark.parametrize(("no_colour", "codes"), [("", ("32", "36", "32;4")), ("1", ("4", "1", "1;4"))])
def test_what_was_proposed_has_its_style(shown, monkeypatch, no_colour, codes):
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setenv("TERM", "xterm")
    a, b, c = codes
    seen = shown(*SOURCES, flags=("--show-drafts",), stdin=b"hi\n")
    assert seen == f"plain \x1b[{a}mdrafted \x1b[0m\x1b[{b}mmatched \x1b[0m\x1b[{c}mboth\x1b[0m.\n"


def test_control_characters_are_shown_within_the_style(shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    seen = shown([["a\x1b[2J", 1]], flags=("--show-drafts",), stdin=b"hi\n")
    assert plain(seen) == "a\\u001b[2J\n"


def test_the_legend_is_told_to_a_person(eagle3, monkeypatch):
    from eagle3_cli.commands.chat_show import Marked
    from eagle3_cli.console import Console

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Marked(Console()).legend == (
        "green: proposed by the drafter; cyan: by a match in the text; green and underlined: by both"
    )


# ---- --markdown -------------------------------------------------------------------------------------------

TEXT = """# A title

Some *emphasis* and `code`.

- one

  more of one
- two

```python
a = 1

b = 2
```
After.
"""


def cut(*parts):
    blocks = Blocks()
    found = [block for part in parts for block in blocks.push(part)]
    return [*found, blocks.finish()]


def test_a_block_ends_at_a_blank_line_outside_of_lists_and_fences():
    assert [block.split("\n")[0] for block in cut(TEXT)] == ["# A title", "Some *emphasis* and `code`.", "- one",
                                                             "```python"]  # fmt: skip


markdown_texts = st.lists(
    st.sampled_from(["a", "\n", "\n\n", " ", "```", "````", "~~~", "- ", "1. ", "`", "\n```\n", "x\n\n", "\t", "    b"])
).map("".join)


@given(markdown_texts, st.data())
def test_blocks_are_the_text_however_it_comes(text, data):
    whole = cut(text)
    assert "".join(whole) == text
    parts, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(rest[:size])
        rest = rest[size:]
    assert cut(*parts) == whole


@given(markdown_texts)
def test_a_block_never_ends_within_a_fence(text):
    for block in cut(text)[:-1]:
        assert block.endswith("\n")
        fence = ""
        for line in block.split("\n"):
            mark = re.match(r"\s*(?:(?:[-*+]|\d+[.)])\s+)?(```+|~~~+)([^`]*)$", line)
            if not fence and mark:
                fence = mark[1]
            elif fence and line.strip() and set(line.strip()) == {fence[0]} and len(line.strip()) >= len(fence):
                fence = ""
        assert not fence


def test_markdown_is_drawn(shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    seen = shown(list(TEXT), flags=("--markdown",), stdin=b"hi\n")
    lines = [line.strip() for line in plain(seen).split("\n")]
    assert "A title" in "".join(lines)
    assert "# A title" not in lines
    assert "Some emphasis and code." in lines
    assert {"• one", "• two", "a = 1", "b = 2", "After."} <= set(lines)
    assert re.search(r"two\n\n *a = 1", plain(seen))  # one blank line between blocks
    assert STYLE.search(seen)
    assert seen.endswith("\n")
    assert all(line == line.rstrip() for line in plain(seen).split("\n"))


def test_a_block_is_drawn_before_the_next_one_is_whole(shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    seen = []
    shown(["first\n", "\n", "sec", lambda: seen.append(plain(sys.stdout.getvalue())), "ond"], flags=("--markdown",),
          stdin=b"hi\n")  # fmt: skip
    assert seen == ["first\n"]


def test_answers_are_blocks_of_their_own(shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert plain(shown(["a\n\nb"], ["c"], flags=("--markdown",))) == "a\n\nb\nc\n"


def test_tags_links_and_images_are_readable():
    seen = plain(drawn("<b>bold</b> [name](http://a.example/x) ![picture](y.png)\n\n<div>\nhi\n</div>\n", 80))
    for text in ("<b>bold</b>", "name", "http://a.example/x", "picture", "<div>", "hi", "</div>"):
        assert text in seen


EVIL = [
    "\x1b]0;title\x07", "a\rb", "\u202eevil", "&#27;[2J", "&#x202e;x", "&#13;x", "`\x1b[2J`", "```\n\x1b[2J\n```",
    "[a](http://x/\x1b[2J)", "[a](<http://x/&#x1b;]8;;y>)", "[red]x[/red] :smile:", "| a |\n|---|\n| \x9b2J |",
]  # fmt: skip


@pytest.mark.parametrize("text", EVIL)
def test_nothing_in_markdown_steers_the_terminal(text, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    rest = plain(drawn(text, 60))
    assert visible(rest) == rest


@given(st.text(st.characters(codec="utf-8")), st.integers(0, 120))
def test_any_text_can_be_drawn_and_steers_nothing(text, columns):
    rest = plain(drawn(text, columns))
    assert visible(rest) == rest


@given(st.text("abc "))
def test_words_are_drawn_as_they_are(text):
    assert plain(drawn(text, 80)).split() == text.split()


def test_no_color_leaves_no_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    codes = STYLE.findall(drawn("# title\n\n`code` and [link](x)\n\n```python\nx = 'y'\n```\n", 60))
    assert not [code for code in codes if re.search(r"[\[;](3[0-79]|38|4[0-8]|9\d|10\d)[;m]", code)]


# ---- flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--markdown", "--show-drafts"])
def test_without_a_terminal_they_have_no_effect(eagle3, flag, monkeypatch):
    result = eagle3("chat", flag, stdin=b"hi\n")
    assert (result.code, result.out) == (2, "")
    assert f"{flag}: has no effect where stdout is no terminal" in result.err
    assert not eagle3.engines
    monkeypatch.setenv(f"EAGLE3_{flag[2:].replace('-', '_').upper()}", "1")
    assert eagle3("chat", stdin=b"hi\n").out == "Hello world\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--markdown", "--show-drafts"], "--show-drafts: cannot be used with --markdown"),
        (["--show-drafts", "--no-draft"], "--show-drafts: has no effect with --no-draft"),
        (["--show-drafts", "--draft-tokens", "0"], "--show-drafts: has no effect with --draft-tokens 0"),
        (["--markdown", "--raw-output"], "--raw-output: has no effect with --markdown"),
        (["--no-history"], "--no-history: has no effect where lines are piped in"),
    ],
)
def test_flags_that_do_not_go_together(eagle3, monkeypatch, flags, words):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    result = eagle3("chat", *flags, stdin=b"hi\n")
    assert (result.code, screen.getvalue()) == (2, "")
    assert words in result.err


def test_one_that_is_typed_wins_over_a_habit(shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("EAGLE3_MARKDOWN", "1")
    assert "\x1b[32m**drafted**" in shown([["**drafted**", 1]], flags=("--show-drafts",), stdin=b"hi\n")
