"""What the trace page shows, as plain data: of every round the proposals, what was drawn, what it cost.  Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .console import visible
from .engine.types import DRAFTED, LOOKED_UP, Statistics

if TYPE_CHECKING:
    from .engine.types import DraftTree, Piece, RoundRecord
    from .trace import TracedAnswer

LONGEST_PROMPT = 4000  # characters of a prompt that the page repeats
TEXT, BYTES, CONTROL = range(3)  # a token's kind: text, a part of a character, without any text of its own

Quote = Callable[[Sequence[int]], str]
"""Token ids -> their text in quotation marks, on one line."""


def data_of(answers: Sequence[TracedAnswer]) -> dict[str, Any]:
    """{"answers": [...]} for JSON.  Of each answer:

    title, prompt, text   for people; control characters written out
    summary   counts and rates of the whole answer; None where something is not known
    texts     token id -> [text, kind]
    rounds    number 0 is the prompt's pass; see `_round`
    """
    return {"answers": [_answer(answer) for answer in answers]}


def _answer(answer: TracedAnswer) -> dict[str, Any]:
    statistics = answer.statistics or _counted(answer)
    ends = _end_tokens(answer)
    texts = {
        token: spelled(data, "end" if token in ends else answer.names.get(token, ""))
        for token, data in answer.texts.items()
    }
    first, *parts = answer.parts()

    def quote(tokens: Sequence[int]) -> str:
        whole = all(answer.texts[token] for token in tokens)  # else one is known by its name alone
        if whole:
            return quoted(spelled(b"".join(answer.texts[token] for token in tokens))[0])
        return quoted("".join(texts[token][0] for token in tokens))

    rounds = [_prompt_pass(first, statistics, quote)]
    for number, (record, pieces) in enumerate(zip(answer.rounds, parts, strict=True), 1):
        rounds.append(_round(record, pieces, f"Round {number} of {len(parts)}", quote))
    return {
        "title": visible(answer.title),
        "prompt": visible(_shortened(answer.prompt)),
        "text": visible("".join(piece.text for piece in answer.pieces)),
        "summary": _summary(answer, statistics),
        "texts": {str(token): list(text) for token, text in texts.items()},
        "rounds": rounds,
    }


# ---- tokens ---------------------------------------------------------------------------------------------


def spelled(data: bytes, name: str = "") -> tuple[str, int]:
    r"""A token's text and kind.  Bytes that are no whole character are written as \xe2; a control token, which prints
    nothing, is shown by its name."""
    if not data:
        return f"⟨{visible(name)}⟩", CONTROL
    try:
        return visible(data.decode()), TEXT
    except UnicodeDecodeError:
        return visible(data.decode("utf-8", "backslashreplace")), BYTES


def _end_tokens(answer: TracedAnswer) -> set[int]:
    """Ids whose piece carried none: the answer ended with them."""
    return {
        token
        for record, pieces in zip(answer.rounds, answer.parts()[1:], strict=True)
        for token, piece in zip(record.verdict.tokens, pieces, strict=False)
        if piece.token is None
    }


def quoted(text: str) -> str:
    """On one line that is not broken next to the marks."""
    line = text.replace("\n", "↵").replace("\t", "⇥")
    line = re.sub("^ +| +$", lambda spaces: "\N{NO-BREAK SPACE}" * len(spaces[0]), line)
    return f"“{line}”"


def _shortened(text: str) -> str:
    more = len(text) - LONGEST_PROMPT
    return text if more <= 0 else f"{text[:LONGEST_PROMPT]} … ({more} more characters)"


# ---- rounds ---------------------------------------------------------------------------------------------


def _round(record: RoundRecord, pieces: Sequence[Piece], name: str, quote: Quote) -> dict[str, Any]:
    """One round for JSON.

    name, label   its number, and in one line what came of it
    words     three sentences: what was proposed, what was drawn, what it cost
    emitted   [token, source] of every token that was handed out
    root      the token that the tree grows from
    tree      of each node [token, parent, own, path, source]: probability after its parent and of the whole path by the
              drafter, None where it proposed no such path; parent -1 is the root
    accepted  the nodes that the walk went along
    drawn     the token behind them, which was not proposed there; None where the answer ended before
    rows      of the target's pass
    ms        draft, verify, rest, all, and plain: what plain decoding would take for the same tokens, or None
    """
    tree, verdict = record.tree, record.verdict
    tokens, accepted = list(verdict.tokens), list(verdict.accepted)
    handed = zip(tokens, pieces, strict=False)
    return {
        "name": name,
        "label": f"{name}: {_outcome(record)}, {duration(record.seconds)}",
        "words": [_proposed(record, quote), _verified(record, quote), _cost(record)],
        "emitted": [[token, piece.source] for token, piece in handed],
        "root": record.root,
        "tree": _nodes(tree),
        "accepted": accepted,
        "drawn": tokens[len(accepted)] if len(tokens) > len(accepted) else None,
        "rows": len(tree) + 1,
        "ms": _times(record),
    }


def _nodes(tree: DraftTree) -> list[list[Any]]:
    found = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        path, before = tree.logps[node], 0.0 if parent < 0 else tree.logps[parent]
        known = math.isfinite(path) and math.isfinite(before)
        own = rounded(math.exp(path - before)) if known else None
        found.append([token, parent, own, rounded(math.exp(path)) if known else None, source_of(tree, node)])
    return found


def source_of(tree: DraftTree, node: int) -> int:
    """A tree without sources comes from the drafter."""
    return tree.sources[node] if tree.sources else DRAFTED


def _times(record: RoundRecord) -> dict[str, float | None]:
    rest = max(record.seconds - record.draft_s - record.verify_s, 0.0)
    plain = None if record.plain_s is None else 1e3 * record.plain_s * len(record.verdict.tokens)
    return {
        "draft": rounded(1e3 * record.draft_s),
        "verify": rounded(1e3 * record.verify_s),
        "rest": rounded(1e3 * rest),
        "all": rounded(1e3 * record.seconds),
        "plain": None if plain is None else rounded(plain),
    }


def _prompt_pass(pieces: Sequence[Piece], statistics: Statistics, quote: Quote) -> dict[str, Any]:
    """Number 0: the target reads the prompt and draws the first token.  Nothing was timed where it was interrupted."""
    first = next((piece.token for piece in pieces if piece.token is not None), None)
    drew = f"drew the first token, {quote([first])}" if first is not None else "ended the answer at once"
    if not pieces:
        drew = "was interrupted before the first token"
    cached = f", {statistics.cached_tokens} of them known already" if statistics.cached_tokens else ""
    read, took = f"{count(statistics.prompt_tokens, 'token')}{cached}", duration(statistics.prefill_s)
    timed = statistics.prompt_tokens > 0
    return {
        "name": "The prompt",
        "label": f"The prompt: {read}, {took}" if timed else "The prompt",
        "words": [
            f"The target read the prompt ({read}) and {drew}." if timed else f"The target read the prompt and {drew}.",
            "Nothing could be proposed before: the drafter works from the target's hidden states.",
            f"That took {took}, as it does without a drafter." if timed else "How long that took was not measured.",
        ],
        "emitted": [[piece.token, piece.source] for piece in pieces if piece.token is not None],
        "root": None,
        "tree": [],
        "accepted": [],
        "drawn": first,
        "rows": statistics.prompt_tokens - statistics.cached_tokens,
        "ms": None,
    }


# ---- words ----------------------------------------------------------------------------------------------


def _outcome(record: RoundRecord) -> str:
    tokens = count(len(record.verdict.tokens), "token")
    if not record.tree:
        return f"{tokens}, nothing proposed"
    return f"{tokens}, {len(record.verdict.accepted)} of {count(len(record.tree), 'proposal')} accepted"


def _proposed(record: RoundRecord, quote: Quote) -> str:
    tree = record.tree
    if not tree:
        return "The drafter was asked, but nothing was worth checking." if record.asked else "Nothing was proposed."
    levels = max(tree.depths)
    deep = f" on {levels} levels" if levels > 1 else ""
    return f"After {quote([record.root])}, {_proposers(tree)} proposed {count(len(tree), 'token')}{deep}."


def _proposers(tree: DraftTree) -> str:
    sources = {source_of(tree, node) for node in range(len(tree))}
    if sources == {DRAFTED}:
        return "the drafter"
    return "a match with earlier text" if sources == {LOOKED_UP} else "the drafter and a match with earlier text"


def _verified(record: RoundRecord, quote: Quote) -> str:
    tree, verdict = record.tree, record.verdict
    along, own = verdict.tokens[: len(verdict.accepted)], verdict.tokens[len(verdict.accepted) :]
    if not tree:
        return f"The target computed one row and drew {quote(own)}."
    start = f"The target checked {'it' if len(tree) == 1 else 'them all'} in one pass of {len(tree) + 1} rows and drew"
    if not along:
        return f"{start} {quote(own)}, which was not proposed there, so nothing was accepted."
    drew = f"{start} {quote(along)}, {count(len(along), 'token')} as proposed"
    return f"{drew}, and then {quote(own)} of its own." if own else f"{drew}; there the answer ended."


def _cost(record: RoundRecord) -> str:
    tokens = len(record.verdict.tokens)
    gave = f"That gave {count(tokens, 'token')} in {duration(record.seconds)}"
    if record.plain_s is None:
        return f"{gave}; how long plain decoding takes was not measured."
    plain = tokens * record.plain_s
    if not record.tree:
        return f"{gave}, plainly; such a round takes about {duration(plain)}."
    gain = plain - record.seconds
    verdict = f"{duration(abs(gain))} {'saved' if gain > 0 else 'lost'}"
    return f"{gave}; plain decoding would have taken about {duration(plain)}: {verdict}."


def count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def duration(seconds: float) -> str:
    """As milliseconds below ten seconds."""
    milliseconds = 1e3 * seconds
    if milliseconds >= 1e4:
        return f"{seconds:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def rounded(value: float) -> float:
    """Three digits are more than anybody sees."""
    return float(f"{value:.3g}") if abs(value) < 1e3 else round(value)


# ---- the whole answer -----------------------------------------------------------------------------------


def _counted(answer: TracedAnswer) -> Statistics:
    """What an interrupted answer would have told."""
    statistics = Statistics(enabled=True, completion_tokens=sum(piece.token is not None for piece in answer.pieces))
    for record in answer.rounds:
        statistics.record(record.tree, record.verdict)
        statistics.decode_s += record.seconds
        statistics.drafter_s += record.draft_s
    return statistics


def _summary(answer: TracedAnswer, statistics: Statistics) -> dict[str, Any]:
    s = statistics
    return {
        "tokens": s.completion_tokens,
        "rounds": s.rounds,
        "tau": s.acceptance_length,
        "tokens_per_second": s.tokens_per_second,
        "speed_up": s.speed_up,
        "drafted": s.drafted,
        "accepted": s.accepted,
        "by_depth": [
            [accepted, tried] for accepted, tried in zip(s.depth_accepted, s.depth_tried, strict=True) if tried
        ],
        "not_drafting": None if s.enabled else s.reason or "no drafter",
        "interrupted": answer.statistics is None,
    }
