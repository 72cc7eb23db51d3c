"""`--trace`: what happened in every round of an answer, kept while it runs and written as one web page.

    trace.py        what is kept, and the file
    trace_data.py   records -> plain data with words; pure
    trace_page.py   data -> HTML; pure
    trace.html, trace.css, trace.js   the page's parts

The page needs nothing but itself: no network, no other file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .convert.output import check_folder, replacing
from .errors import FileError

if TYPE_CHECKING:
    from .engine.types import Piece, RoundRecord, Statistics
    from .logprobs import Vocabulary

MARK = b'<meta name="generator" content="eagle3 trace">'  # in the head of every page
HEAD = 1024  # bytes within which it stands


@dataclass
class TracedAnswer:
    """What is kept of one answer.

    title, prompt   for the page's reader
    pieces      every piece, in order
    rounds      every round, in order
    starts      of each round: the index of its first piece; the pieces before the first one are of the prompt's pass
    texts       bytes of every token that occurs
    names       vocabulary entries of those that print nothing
    statistics  None while the answer runs, and where it was interrupted
    """

    title: str
    prompt: str
    pieces: list[Piece] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    texts: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    statistics: Statistics | None = None

    def parts(self) -> list[list[Piece]]:
        """The pieces of the prompt's pass, then of each round."""
        bounds = [0, *self.starts, len(self.pieces)]
        return [self.pieces[start:end] for start, end in itertools.pairwise(bounds)]


class Trace:
    """The answers of one call, and the page they become.

    vocabulary   of the model.  Asked while an answer runs, not later, when the model may be gone; a chat that changes
                 its model sets it anew
    """

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self.path, self.vocabulary = path, vocabulary
        self.answers: list[TracedAnswer] = []

    def begin(self, title: str, prompt: str) -> None:
        """An answer starts; what follows is about it."""
        self.answers.append(TracedAnswer(title, prompt))

    def round(self, record: RoundRecord) -> None:
        """Take a round, before its pieces: for `Watch.rounds`."""
        answer = self.answers[-1]
        answer.starts.append(len(answer.pieces))
        answer.rounds.append(record)
        self._spell((record.root, *record.tree.tokens, *record.verdict.tokens))

    def piece(self, piece: Piece) -> None:
        """Take a piece of the answer; every one, in order."""
        self.answers[-1].pieces.append(piece)
        if piece.token is not None:
            self._spell((piece.token,))

    def end(self, statistics: Statistics) -> None:
        """The answer is whole.  Without this it is shown as interrupted."""
        self.answers[-1].statistics = statistics

    def write(self) -> None:
        """Write the page, complete or not at all; nothing where no answer began.  FileError where it cannot be."""
        from .trace_data import data_of
        from .trace_page import page

        if not self.answers:
            return
        text = page(data_of(self.answers)).encode("utf-8", "backslashreplace")
        try:
            with replacing(self.path) as temporary:
                temporary.write_bytes(text)
        except OSError as error:
            raise FileError(f"--trace: {self.path}: cannot be written: {error.strerror or error}.") from error

    def _spell(self, tokens: Iterable[int]) -> None:
        answer = self.answers[-1]
        for token in tokens:
            if token not in answer.texts:
                answer.texts[token] = self.vocabulary.piece(token)
                if not answer.texts[token]:
                    answer.names[token] = self.vocabulary.token_text(token)


def check_writable(path: Path) -> None:
    """Before a model is loaded: FileError unless a page can be written there.  It may replace an earlier page, but no
    other file."""
    if os.path.isdir(path):
        raise FileError(f"--trace: {path}: is a directory, expected a file name.")
    if os.path.lexists(path) and not _is_page(path):
        raise FileError(
            f"--trace: {path}: expected a new file or an earlier trace, found another file.",
            "Give another name, or remove it first.",
        )
    check_folder(path, "--trace")


def _is_page(path: Path) -> bool:
    """Whether it is a file that `Trace.write` made.  A pipe is not opened: nobody might write to it."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return MARK in file.read(HEAD)
    except OSError:
        return False
