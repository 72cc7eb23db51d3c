"""What the commands need from an engine, and how one answer reaches the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..console import Console
from ..logprobs import entries
from ..thinking import Thinking, opened_by

if TYPE_CHECKING:
    from ..engine.types import Likelihood, Piece, RoundRecord, Statistics, Watch
    from ..settings import Limits, PairSettings, RuntimeSettings, SamplingSettings


class Engine(Protocol):
    """The part of the engine that the command line uses.  decoder.model has the tokens: `piece` and `token_text`."""

    @property
    def decoder(self) -> Any: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def effective(self, sampling: SamplingSettings) -> SamplingSettings: ...
    def tokenize(self, text: str) -> list[int]: ...
    def render(self, messages: list[dict[str, str]]) -> list[int]: ...
    def stream(
        self, prompt: list[int], sampling: SamplingSettings, limits: Limits, watch: Watch = ...
    ) -> Iterator[Piece]: ...
    def logit_gap(self, tokens: list[int], likelier: int, other: int) -> float: ...
    def close(self) -> None: ...


@dataclass
class Answer:
    """What has been said so far.

    tokens        the emitted ids, those of the thinking among them, without the end token
    thinking      what a reasoning model thought, which is not part of the text
    likelihoods   one for each token, where they were asked for
    splitter      tells thinking and text apart; None: everything is text
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    thinking: str = ""
    likelihoods: list[Likelihood] = field(default_factory=list)
    splitter: Thinking | None = None

    def take(self, piece: Piece) -> tuple[str, str]:
        """Add a piece; returns what it makes certain of the thinking and of the text."""
        if piece.token is not None:
            self.tokens.append(piece.token)
        if piece.likelihood is not None:
            self.likelihoods.append(piece.likelihood)
        self.finish_reason = piece.finish_reason
        thinking, text = "", piece.text
        if self.splitter is not None:
            thinking, text = self.splitter.push(piece.text)
            if piece.finish_reason is not None:
                rest = self.splitter.finish()
                thinking, text = thinking + rest[0], text + rest[1]
        self.thinking += thinking
        self.text += text
        return thinking, text

    def thoughts(self, hidden: bool) -> dict[str, str]:
        """For JSON: the thinking, where there is some to be seen."""
        return {"thinking": self.thinking} if self.thinking and not hidden else {}

    def logprobs(self, engine: Engine, likeliest: int | None) -> dict[str, Any]:
        """For JSON: the likelihoods, where so many were asked for."""
        if likeliest is None:
            return {}
        return {"logprobs": entries(engine.decoder.model, self.tokens, self.likelihoods)}


def usage(statistics: Statistics) -> dict[str, int]:
    """For JSON: what the answer took, in tokens."""
    return {"prompt_tokens": statistics.prompt_tokens, "completion_tokens": statistics.completion_tokens}


def watching(
    console: Console | None = None, likeliest: int | None = None, rounds: Callable[[RoundRecord], None] | None = None
) -> tuple[Watch, ...]:
    """What `stream` takes after the limits to be watched; nothing where nobody watches.  console: shows how far a long
    prompt has been read."""
    prefill = reading(console) if console is not None and console.terminal else None
    if likeliest is None and rounds is None and prefill is None:
        return ()
    from ..engine.types import Watch

    return (Watch(likeliest, rounds, prefill),)


def reading(console: Console, patience: float = 2.0) -> Callable[[int, int], None]:
    """Takes tokens that are read and tokens in all, and shows a bar from so many seconds on, until the last is read."""
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        if done >= total:
            console.clear_progress()
        elif time.monotonic() - started >= patience:
            console.progress("reading the prompt", done / total)

    return show


def thoughtful(engine: Engine, prompt: list[int]) -> Answer:
    """An empty answer to this prompt, whose thinking will be told from its text."""
    return Answer(splitter=Thinking(opened_by(prompt, engine.decoder.model.piece)))


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


def ignore(_text: str) -> None:
    """Show nothing."""


def collect(
    pieces: Iterator[Piece],
    answer: Answer,
    show: Callable[[str], None],
    ended: Callable[[], bool] = lambda: False,
    aside: Callable[[str], None] = ignore,
) -> None:
    """Run the answer to its end, or to where `ended` says so, filling `answer` as it goes.  aside: shows its thinking.

    The generator is closed in every case, which is when the engine makes its caches fit what was taken.
    """
    try:
        for piece in pieces:
            thinking, text = answer.take(piece)
            aside(thinking)
            show(text)
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
