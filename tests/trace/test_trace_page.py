"""The page: hostile texts stay texts, its policy fits, and it can be read without JavaScript."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from outline import Outline
from traced import HOSTILE, Words, traced

from eagle3_cli.console import visible
from eagle3_cli.engine.types import Piece
from eagle3_cli.trace import HEAD, MARK, Trace
from eagle3_cli.trace_data import data_of
from eagle3_cli.trace_page import embedded, page

MARKUP = ("<", ">", "&", '"', "'", "/", "!--", "-->", "script", "]]>", "@@data@@", "\u2028", "\x00", "\r", "{}")
awkward = st.one_of(st.text(min_size=1), st.lists(st.sampled_from(MARKUP), min_size=1).map("".join))


def page_of(trace):
    return page(data_of(trace.answers))


def data_in(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def one_token(text, title, prompt):
    """The page of an answer of one token."""
    trace = Trace(None, Words({1: text.encode()}.__getitem__))
    trace.begin(title, prompt)
    trace.piece(Piece(text, 1))
    return page_of(trace)


@given(awkward)
def test_embedded_json_is_ascii_that_cannot_end_its_element_and_comes_back_equal(text):
    written = embedded([text])
    assert written.isascii()
    assert not set("<>&") & set(written)
    assert json.loads(written) == [text]


@settings(max_examples=40)
@given(awkward, awkward, awkward)
def test_no_text_changes_the_structure_of_the_page(token, title, prompt):
    html = one_token(token, title, prompt)
    outline = Outline(html)
    assert outline.tags == Outline(one_token("a", "b", "c")).tags
    assert data_in(html)[0]["texts"]["1"][0] == visible(token)
    assert outline.within("h2") == visible(title)
    assert outline.within("p", "prompt") == visible(prompt)
    assert outline.within("div", "text") == visible(token)


def test_a_page_with_a_hostile_answer_has_the_scripts_of_any_other():
    outline = Outline(page_of(traced(title=HOSTILE, prompt=HOSTILE)))
    scripts = [attributes for tag, attributes in outline.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert "img" not in {tag for tag, _ in outline.tags}


def test_the_policy_names_the_pages_own_style_and_script_and_nothing_else():
    html = page_of(traced())
    policy = dict(rule.strip().split(" ", 1) for rule in re.search(r'Policy" content="([^"]*)"', html)[1].split(";"))
    for rule, tag in (("style-src", "style"), ("script-src", "script")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(rule) == f"'sha256-{digest}'"
    assert policy == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


def test_the_page_needs_nothing_from_elsewhere_and_has_no_inline_style_or_handler():
    html = page_of(traced())
    assert not re.search(r"https?:|url\(|@import", html.replace("http://www.w3.org/2000/svg", ""))
    outline = Outline(html)
    names = {name for _, attributes in outline.tags for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("style", "src")}
    assert all(attributes["href"].startswith("#") for attributes in outline.having("href"))


def test_the_mark_by_which_a_page_is_known_stands_at_its_start():
    assert MARK in page_of(traced()).encode()[:HEAD]


def test_without_javascript_the_answer_its_numbers_and_a_table_of_rounds_can_be_read():
    outline = Outline(page_of(traced()))
    assert outline.within("div", "text").startswith("The quick brown")
    assert outline.within("dd").startswith("732.3391.5")  # tokens, rounds, tau, tokens a second
    assert [a["title"] for a in outline.having("title")] == ["depth 1: 2 of 2", "depth 2: 2 of 2", "depth 3: 0 of 1"]
    assert sum(tag == "tr" for tag, _ in outline.tags) == 1 + 4  # its head, the prompt, three rounds
    assert r"\xe2\x82\xac⟨end⟩" in outline.within("i")
    assert ".↵" in outline.within("td", "said")
    assert "4253.020.025.030.0" in outline.within("td")  # proposed, accepted, rows, times of round 1


def test_every_answer_of_a_chat_has_a_section():
    trace = Trace(None, Words(lambda token: b"x"))
    for turn in ("one", "two", "three"):
        trace.begin(turn, turn)
    html = page_of(trace)
    assert html.count('<section class="answer"') == 3
    assert len(data_in(html)) == 3
