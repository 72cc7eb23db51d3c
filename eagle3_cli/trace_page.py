"""The trace page: a template, what is readable without JavaScript, and the data that the script draws from.  Pure.

What models and prompts say is hostile.  Here it is escaped text between tags, never in an attribute, and JSON without
any <, > or &; the script makes text nodes of it.  The page's policy lets nothing run but the page's own script, which
it knows by its hash, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .console import visible
from .trace_data import TEXT, count

DRAWN_FROM = ("texts", "rounds")  # what the script needs of an answer

Answer = Mapping[str, Any]


def page(data: Mapping[str, Any]) -> str:
    """The whole page of what `data_of` gave."""
    style, script = _part("trace.css"), _part("trace.js")
    answers = data["answers"]
    slots = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'",
        "style": style,
        "script": script,
        "answers": "".join(_section(number, answer) for number, answer in enumerate(answers, 1)),
        "data": embedded([{key: answer[key] for key in DRAWN_FROM} for answer in answers]),
    }
    # in one pass: what fills a slot is not searched for slots
    return re.sub(r"@@(\w+)@@", lambda found: slots[found[1]], _part("trace.html"))


def embedded(value: Any) -> str:
    """JSON for a <script> element: ASCII in which nothing can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def safe(text: str) -> str:
    """Text to stand between tags."""
    return html.escape(visible(text))


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _hash(text: str) -> str:
    """As a policy names an element by its content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---- an answer without JavaScript -----------------------------------------------------------------------


def _section(number: int, answer: Answer) -> str:
    title = f"title-{number}"
    return (
        f'<section class="answer" aria-labelledby="{title}">\n'
        f'<h2 id="{title}">{safe(answer["title"])}</h2>\n'
        f'<p class="prompt" dir="auto">{safe(answer["prompt"])}</p>\n'
        f'<div class="summary">{_numbers(answer["summary"])}{_depths(answer["summary"]["by_depth"])}</div>\n'
        '<div class="work">\n'
        f'<div class="text" dir="auto">{safe(answer["text"])}</div>\n'
        '<div class="panel" hidden></div>\n'
        f"</div>\n{_table(answer)}</section>\n"
    )


def _numbers(summary: Mapping[str, Any]) -> str:
    """The summary line."""
    s = summary
    facts = [("tokens" if s["tokens"] != 1 else "token", str(s["tokens"]))]
    facts += [("rounds" if s["rounds"] != 1 else "round", str(s["rounds"]))]
    if s["tau"] is not None:
        facts.append(("tokens a round (τ)", f"{s['tau']:.2f}"))
    if s["tokens_per_second"] is not None:
        facts.append(("tokens a second", f"{s['tokens_per_second']:.1f}"))
    if s["speed_up"] is not None:
        facts.append(("of plain decoding's speed, estimated", f"{s['speed_up']:.2f} ×"))
    if s["drafted"]:
        facts.append(("proposals accepted", f"{s['accepted']} of {s['drafted']}"))
    if s["not_drafting"]:
        facts.append(("no drafting", s["not_drafting"]))
    if s["interrupted"]:
        facts.append(("before its end", "interrupted"))
    items = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in facts)
    return f'<dl class="numbers">{items}</dl>'


def _depths(by_depth: Iterable[tuple[int, int]]) -> str:
    """How often the walk matched a proposal at each depth, of the rounds in which it came so far."""
    bars = "".join(_bar(depth, accepted, tried) for depth, (accepted, tried) in enumerate(by_depth, 1))
    return f'<div class="depths"><ol>{bars}</ol><span>accepted by depth</span></div>' if bars else ""


def _bar(depth: int, accepted: int, tried: int) -> str:
    words = f"depth {depth}: {accepted} of {tried}"
    height = 28 * accepted / tried
    return (
        f'<li title="{words}"><span aria-hidden="true">{accepted / tried:.0%}</span>'
        f'<svg viewBox="0 0 26 28" role="img" aria-label="{words}"><rect class="all" width="26" height="28"/>'
        f'<rect y="{28 - height:.1f}" width="26" height="{height:.1f}"/></svg>'
        f'<span aria-hidden="true">{depth}</span></li>'
    )


def _table(answer: Answer) -> str:
    """All rounds, one line each."""
    rows = "".join(_row(answer["texts"], number, entry) for number, entry in enumerate(answer["rounds"]))
    heads = ("round", "tokens", "proposed", "accepted", "rows", "draft ms", "verify ms", "whole ms", "plain ms")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        f"<details><summary>{count(len(answer['rounds']) - 1, 'round')} as a table</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div></details>\n'
    )


def _row(texts: Mapping[str, tuple[str, int]], number: int, entry: Mapping[str, Any]) -> str:
    emitted = "".join(_token(*texts[str(token)]) for token, _ in entry["emitted"])
    ms = entry["ms"] or {}
    times = [ms.get(name) for name in ("draft", "verify", "all", "plain")]
    counts = [len(entry["tree"]), len(entry["accepted"]), entry["rows"]]
    cells = [*map(str, counts), *("" if value is None else f"{value:.1f}" for value in times)]
    shown = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{number or "prompt"}</th><td class="said" dir="auto">{emitted}</td>{shown}</tr>\n'


def _token(text: str, kind: int) -> str:
    """On one line."""
    return safe(text).replace("\n", "↵") if kind == TEXT else f"<i>{safe(text)}</i>"
