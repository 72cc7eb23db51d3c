"""The lines of a batch and an engine -> what is written for each line; several at a time where that is faster."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..batch import Defaults, Line, id_of, record_of, task_of
from ..errors import Eagle3Error, LlamaError, OptionError
from ..settings import Limits, RuntimeSettings, SamplingSettings
from .answer import Answer, Engine, collect, ignore, thoughtful, usage, watching

if TYPE_CHECKING:
    from ..engine.parallel import Outcome, Parallel, Request
    from ..engine.types import Statistics

AHEAD = 64  # lines that are looked at to see how much room each needs
ENOUGH = 48  # tokens that one at a time has to have written before several are considered


@dataclass(frozen=True)
class How:
    """likeliest: as for --logprobs.  at_once: prompts at a time; None: as many as pay."""

    defaults: Defaults
    runtime: RuntimeSettings
    likeliest: int | None = None
    hide_thinking: bool = False
    at_once: int | None = 1


@dataclass
class Prepared:
    """A line that is ready to be answered, or what is wrong with it.  record: what is written of it so far."""

    line: Line
    record: dict[str, Any] = field(default_factory=lambda: {"id": None})
    prompt: list[int] = field(default_factory=list)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    limits: Limits = field(default_factory=Limits)
    answer: Answer = field(default_factory=Answer)

    @property
    def failed(self) -> bool:
        return "error" in self.record

    def fail(self, error: Eagle3Error) -> None:
        where = self.line.where
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        self.record["error"] = f"{message} {error.hint}" if error.hint else message


Done = tuple[Line, dict[str, Any], "Statistics"]


def in_order(done: Iterable[Done]) -> Iterator[Done]:
    """All of them, each as soon as those before it are there; the first is that of line 0."""
    waiting: dict[int, Done] = {}
    due = 0
    for each in done:
        waiting[each[0].index] = each
        while due in waiting:
            yield waiting.pop(due)
            due += 1


class Answerer:
    """Answers lines with one engine."""

    def __init__(self, engine: Engine, how: How) -> None:
        self.engine, self.how = engine, how

    def answers(self, lines: Iterator[Line]) -> Generator[Done, None, None]:
        """What is written for each line, as it is done: in order one at a time, in any order where several are answered
        together.  Close it before the engine."""
        at_once, rate = self.how.at_once, 0.0
        if at_once is None:
            at_once, rate = yield from self._first(lines)
        rest: Iterator[Prepared] = map(self._prepared, lines)
        if at_once > 1:
            ahead = list(itertools.islice(rest, max(AHEAD, at_once)))
            rest = itertools.chain(ahead, rest)
            parallel = self._parallel(at_once, ahead)
            if parallel is not None:
                with closing(parallel):
                    yield from self._together(parallel, rest, rate)
        yield from map(self._alone, rest)

    # ---- one line

    def _prepared(self, line: Line) -> Prepared:
        prepared, defaults = Prepared(line), self.how.defaults
        try:
            record = record_of(line)
            prepared.record["id"] = id_of(record, line.where)
            task = task_of(record, line.where, defaults)
            if isinstance(task.prompt, str):
                prepared.prompt = self.engine.tokenize(task.prompt)
            else:
                prepared.prompt = self.engine.render(task.prompt)
                prepared.answer = thoughtful(self.engine, prepared.prompt)
            prepared.sampling, prepared.limits = self.engine.effective(task.sampling), task.limits
        except Eagle3Error as error:
            prepared.fail(error)
        return prepared

    def _alone(self, prepared: Prepared) -> Done:
        if not prepared.failed:
            watch = watching(likeliest=self.how.likeliest)
            try:
                pieces = self.engine.stream(prepared.prompt, prepared.sampling, prepared.limits, *watch)
                collect(pieces, prepared.answer, ignore)
            except Eagle3Error as error:
                prepared.fail(error)
        return self._done(prepared, self.engine.statistics)

    def _done(self, prepared: Prepared, statistics: Statistics) -> Done:
        answer = prepared.answer
        if not prepared.failed:
            prepared.record |= {
                "text": answer.text,
                **answer.thoughts(self.how.hide_thinking),
                "finish_reason": answer.finish_reason,
                "usage": usage(statistics),
                "seed": prepared.sampling.seed,
                **answer.logprobs(self.engine, self.how.likeliest),
            }
        return prepared.line, prepared.record, statistics

    # ---- several lines at a time

    def _first(self, lines: Iterable[Line]) -> Generator[Done, None, tuple[int, float]]:
        """Answer lines one at a time until it is known how fast that is; returns how many at a time are best, and the
        tokens per second that one at a time gets."""
        tokens, seconds = 0, 0.0
        for line in lines:
            done = self._alone(self._prepared(line))
            if "error" not in done[1]:
                tokens, seconds = tokens + done[2].round_tokens, seconds + done[2].decode_s
            yield done
            if tokens >= ENOUGH:
                break
        return self._best(tokens / seconds if seconds else 0.0)

    def _best(self, rate: float) -> tuple[int, float]:
        budget = self.engine.decoder.budget
        if budget is None or not rate or not self.engine.decoder.model.keeps_every_position:
            return 1, rate
        from ..engine.parallel import MOST, at_once

        target = budget.machine.target
        return at_once(target.costs, target.seconds, rate, MOST), rate

    def _parallel(self, at_once: int, ahead: list[Prepared]) -> Parallel | None:
        """A context for so many prompts like these; None where it would have room for no two.  What nobody asked for
        by number takes no more cells than the engine has."""
        from ..engine.parallel import Parallel

        settings, model = self.engine.settings, self.engine.decoder.model
        if not model.keeps_every_position:
            raise OptionError(
                f"--parallel {at_once}: {model.path.name} has recurrent layers, which hold one text at a time here.",
                "Leave it out.",
            )
        cells = settings["ctx_size"]
        needs = [each for prepared in ahead if not prepared.failed and (each := self._cells(prepared)) is not None]
        longest = max(needs, default=cells)
        chosen = self.how.at_once is None
        number = min(at_once, len(needs), cells // longest if chosen else at_once)
        if number < 2:
            return None
        runtime = replace(self.how.runtime, flash_attn=settings["flash_attn"])
        try:
            return Parallel(model, runtime, settings["device"] != "cpu", number, longest)
        except LlamaError:
            if chosen:
                return None
            raise

    def _cells(self, prepared: Prepared) -> int | None:
        """That the line can fill; None for a prompt that is too long for the engine."""
        cells = self.engine.settings["ctx_size"]
        if not 0 < len(prepared.prompt) < cells:
            return None
        return self._request(prepared).cells(cells)

    def _request(self, prepared: Prepared) -> Request:
        from ..engine.parallel import Request

        return Request(prepared, prepared.prompt, prepared.sampling, prepared.limits, self.how.likeliest)

    def _together(self, parallel: Parallel, lines: Iterator[Prepared], rate: float) -> Iterator[Done]:
        """Answer lines with it for as long as it is faster than `rate`, tokens per second; the others are left."""
        from ..engine.parallel import TRIAL

        beside: deque[Done] = deque()  # faults, and what needs more room

        def requests() -> Iterator[Request]:
            while parallel.passes < TRIAL or parallel.rate > rate:
                prepared = next(lines, None)
                if prepared is None:
                    return
                cells = None if prepared.failed else self._cells(prepared)
                if cells is None or cells > parallel.longest:
                    beside.append(self._alone(prepared))
                else:
                    yield self._request(prepared)

        with closing(parallel.answers(requests())) as outcomes:
            for outcome in outcomes:
                while beside:
                    yield beside.popleft()
                yield self._outcome(outcome)
        yield from beside

    def _outcome(self, outcome: Outcome) -> Done:
        prepared: Prepared = outcome.request.key
        if outcome.error is not None:
            prepared.fail(outcome.error)
        else:
            for piece in outcome.pieces:
                prepared.answer.take(piece)
        return self._done(prepared, outcome.statistics)
