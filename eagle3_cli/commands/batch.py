"""`eagle3 generate --batch`: one answer for every line of a file, in one file that can be continued."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..batch import Line, digests, nothing_in, read_lines
from ..batch_file import opened, settings_of
from ..console import Console
from ..errors import Eagle3Error
from ..prompt import STDIN
from ..settings import PairSettings
from .answer import loaded
from .batch_answers import Answerer, How, in_order

if TYPE_CHECKING:
    from ..engine.types import Statistics


@dataclass(frozen=True)
class Batch:
    """One call.  source, output: names of files, "-" for stdin and stdout."""

    source: str
    output: str
    pair: PairSettings
    how: How
    stats: bool = False

    def sink(self, console: Console) -> AbstractContextManager[Sink]:
        """Where the outcomes go."""
        if self.output == STDIN:
            return nullcontext(Screen(console))
        how = self.how
        more = {"logprobs": how.likeliest, "hide_thinking": how.hide_thinking}
        settings = settings_of(self.pair, how.runtime, how.defaults, more)
        return opened(Path(self.output).expanduser(), settings)


class Sink(Protocol):
    """A file of answers, or what takes its place; see `AnswerFile`.  ordinary: it can be put in order in the end."""

    ordinary: bool

    def check(self, digests: list[str]) -> None: ...
    def has(self, line: Line) -> bool: ...
    def add(self, line: Line, record: dict[str, Any]) -> None: ...
    def finish(self) -> None: ...


class Screen:
    """stdout, from which nothing can be continued."""

    ordinary = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def check(self, digests: list[str]) -> None:
        pass

    def has(self, line: Line) -> bool:
        return False

    def add(self, line: Line, record: dict[str, Any]) -> None:
        self._console.record({"index": line.index, **record})

    def finish(self) -> None:
        pass


@dataclass
class Tally:
    """What has been done.

    kept     prompts that were answered before this call
    rounds, round_tokens   those in which something could be drafted, and what they gave
    """

    kept: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    decoded: int = 0
    decode_s: float = 0.0

    @property
    def done(self) -> int:
        return self.kept + self.answered + self.failed

    def add(self, record: dict[str, Any], statistics: Statistics) -> None:
        if "error" in record:
            self.failed += 1
            return
        self.answered += 1
        self.tokens += statistics.completion_tokens
        self.prompt_tokens += statistics.prompt_tokens
        self.cached_tokens += statistics.cached_tokens
        if statistics.enabled:
            self.rounds += statistics.rounds
            self.round_tokens += statistics.round_tokens
        self.decoded += statistics.round_tokens
        self.decode_s += statistics.decode_s

    def summary(self) -> str:
        """One line for --stats."""
        parts = [f"{self.answered} prompts answered"]
        parts += [f"{self.kept} answered before"] if self.kept else []
        parts += [f"{self.failed} failed"] if self.failed else []
        parts.append(f"{self.tokens} tokens")
        if self.decode_s:
            parts.append(f"{self.decoded / self.decode_s:.1f} tokens/s")
        if self.rounds:
            parts.append(f"acceptance length {self.round_tokens / self.rounds:.2f}")
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        return ", ".join([*parts, f"prompts {self.prompt_tokens} tokens{cached}"])


def answer_all(console: Console, batch: Batch) -> None:
    """Answer every line that is not answered yet.  Eagle3Error in the end if some could not be."""
    known = digests(batch.source)
    with batch.sink(console) as sink:
        if known is not None:
            sink.check(known)
        run = _Run(console, batch, sink, len(known or ()))
        lines = run.waiting()
        first = next(lines, None)
        if first is None and not run.tally.done:
            raise nothing_in(batch.source)
        try:
            if first is not None:
                run.answer(itertools.chain([first], lines))
            sink.finish()
        except KeyboardInterrupt:
            if batch.output != STDIN:
                console.report("Interrupted. The same command goes on from what is done.")
            raise
    if batch.stats:
        console.report(run.tally.summary())
    if run.tally.failed:
        raise _incomplete(batch, run.tally)


@dataclass
class _Run:
    """total: lines of the source, 0 where nobody knows yet."""

    console: Console
    batch: Batch
    sink: Sink
    total: int
    tally: Tally = field(default_factory=Tally)

    def waiting(self) -> Iterator[Line]:
        """The lines that have no answer yet; counts those that have."""
        for line in read_lines(self.batch.source):
            if self.sink.has(line):
                self.tally.kept += 1
            else:
                yield line

    def answer(self, lines: Iterator[Line]) -> None:
        with loaded(self.batch.pair, self.batch.how.runtime, self.console) as engine:
            self._show_progress()
            with closing(Answerer(engine, self.batch.how).answers(lines)) as done:
                for line, record, statistics in done if self.sink.ordinary else in_order(done):
                    self.sink.add(line, record)
                    self.tally.add(record, statistics)
                    self._show_progress()
            self.console.clear_progress()

    def _show_progress(self) -> None:
        if self.total:
            done = self.tally.done
            self.console.progress(f"{done} of {self.total} prompts, {self.tally.tokens} tokens", done / self.total)


def _incomplete(batch: Batch, tally: Tally) -> Eagle3Error:
    where = "stdout" if batch.output == STDIN else batch.output
    again = "" if batch.output == STDIN else " The same command tries them again."
    return Eagle3Error(
        f"{tally.failed} of {tally.done} prompts could not be answered.", f"Their lines in {where} say why.{again}"
    )
