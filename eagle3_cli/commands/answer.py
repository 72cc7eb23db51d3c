"""What the commands need from an engine, and how one answer reaches the screen."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..console import Console

if TYPE_CHECKING:
    from ..engine.types import Piece, Statistics
    from ..settings import Limits, PairSettings, RuntimeSettings, SamplingSettings


class Engine(Protocol):
    """The part of the engine that the command line uses."""

    @property
    def statistics(self) -> Statistics: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def effective(self, sampling: SamplingSettings) -> SamplingSettings: ...
    def tokenize(self, text: str) -> list[int]: ...
    def render(self, messages: list[dict[str, str]]) -> list[int]: ...
    def stream(self, prompt: list[int], sampling: SamplingSettings, limits: Limits) -> Iterator[Piece]: ...
    def logit_gap(self, tokens: list[int], likelier: int, other: int) -> float: ...
    def close(self) -> None: ...


@dataclass
class Answer:
    """What has been said so far.  tokens are the emitted ids, without the end token."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@contextmanager
def loaded(pair: PairSettings, runtime: RuntimeSettings, console: Console) -> Iterator[Engine]:
    """The engine of this pair, closed at the end.  Imported here: --help must not wait for llama.cpp."""
    from ..engine import load_engine

    engine = load_engine(pair, runtime, progress=lambda name, done: console.progress(f"loading {name}", done))
    with closing(engine):
        console.clear_progress()
        for note in engine.notes:
            console.note(note)
        yield engine


def collect(
    pieces: Iterator[Piece],
    answer: Answer,
    show: Callable[[str], None],
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Run the answer to its end, or to where `ended` says so, filling `answer` as it goes.

    The generator is closed in every case, which is when the engine makes its caches fit what was taken.
    """
    try:
        for piece in pieces:
            answer.text += piece.text
            if piece.token is not None:
                answer.tokens.append(piece.token)
            answer.finish_reason = piece.finish_reason
            show(piece.text)
            if ended():
                return
    finally:
        if isinstance(pieces, Generator):
            pieces.close()


def summary(statistics: Statistics) -> str:
    """One line about one answer: tokens, speed, acceptance length."""
    s = statistics
    parts = [f"{s.completion_tokens} tokens"]
    if s.tokens_per_second is not None:
        parts.append(f"{s.tokens_per_second:.1f} tokens/s")
    if s.enabled and s.acceptance_length is not None:
        parts.append(f"acceptance length {s.acceptance_length:.2f} ({s.accepted} of {s.drafted} drafted)")
        if s.speed_up is not None:
            parts.append(f"about {s.speed_up:.2f} times plain decoding, {s.sizes.get(0, 0)} of {s.rounds} rounds plain")
        if s.best_fixed is not None:
            parts.append(f"best fixed setting so far {s.best_fixed}")
    elif not s.enabled:
        parts.append(f"no drafting ({s.reason})" if s.reason else "no drafting")
    cached = f", {s.cached_tokens} of them cached" if s.cached_tokens else ""
    parts.append(f"prompt {s.prompt_tokens} tokens{cached}, {s.prefill_s:.2f} s")
    return ", ".join(parts)
