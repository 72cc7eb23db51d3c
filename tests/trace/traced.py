"""An answer made by hand: a round of every kind, tokens of every source, and texts that want out of the page."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log
from pathlib import Path

from eagle3_cli.engine.types import DRAFTED, LOOKED_UP, NO_TREE, DraftTree, Piece, RoundRecord, Statistics, Verdict
from eagle3_cli.trace import Trace

HOSTILE = "</script><script>document.title='owned'</script><!--<img src=x onerror=alert(1)>&amp;\u2028\x1b[31m"
BOTH = DRAFTED | LOOKED_UP
TEXTS = {
    1: b"The",
    2: b" quick",
    3: b" brown",
    4: b" fox",
    5: b".\n",
    6: b"\xe2\x82",
    7: b"\xac",
    8: b"",
    9: HOSTILE.encode(),
    10: b" slow",
}
END = 8

# The -- quick -- brown -- fox (a match only), and slow beside quick
TREE = DraftTree(
    tokens=[2, 3, 4, 10],
    parents=[-1, 0, 1, -1],
    depths=[1, 2, 3, 1],
    logps=[log(0.6), log(0.3), -inf, log(0.2)],
    sources=[DRAFTED, BOTH, LOOKED_UP, DRAFTED],
)
CHAIN = DraftTree([6, 7], [-1, 0], [1, 2], [-inf, -inf], [LOOKED_UP, LOOKED_UP])

WALKED = RoundRecord(1, 10, TREE, Verdict([2, 3, 9], [0, 1]), True, 0.003, 0.020, 0.025, 0.010)
PLAIN = RoundRecord(9, 13, NO_TREE, Verdict([5], []), False, 0.0, 0.0102, 0.0105, 0.010)
MATCHED = RoundRecord(5, 14, CHAIN, Verdict([6, 7, END], [0, 1]), False, 0.0, 0.040, 0.041, 0.010)
ROUNDS = [
    (WALKED, [Piece(" quick", 2, DRAFTED), Piece(" brown", 3, BOTH), Piece(HOSTILE, 9)]),
    (PLAIN, [Piece(".\n", 5)]),
    (MATCHED, [Piece("", 6, LOOKED_UP), Piece("€", 7, LOOKED_UP), Piece("", None, 0, "stop")]),
]


def answer(trace: Trace, title: str = "demo", prompt: str = "Name an animal.") -> None:
    """Let the trace see the whole answer."""
    statistics = Statistics(True, prompt_tokens=11, cached_tokens=4, completion_tokens=7, prefill_s=0.07)
    trace.begin(title, prompt)
    trace.piece(Piece("The", 1))
    for record, pieces in ROUNDS:
        statistics.record(record.tree, record.verdict)
        statistics.decode_s += record.seconds
        trace.round(record)
        for piece in pieces:
            trace.piece(piece)
    trace.end(statistics)


class Words:
    """A vocabulary: what each token prints, and <id> as its name."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self.piece = piece

    def token_text(self, token: int) -> str:
        return f"<{token}>"


def traced(path: Path = Path("trace.html"), **words: str) -> Trace:
    trace = Trace(path, Words(TEXTS.__getitem__))
    answer(trace, **words)
    return trace
