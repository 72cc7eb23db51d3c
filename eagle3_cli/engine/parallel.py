"""Several prompts answered at once, one token of each per pass, without drafting.

A pass over several rows costs less than as many passes over one row, because the weights are read once.  A drafter
fills the rows with guesses about one answer; where many prompts wait, every row can be a token that counts.  Each
prompt has a sequence of the cache and a sampler of its own, so what it says is what it says alone, as far as batches of
different widths give the same logits (docs/losslessness.md).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from ..context import DECODE, Context, target_settings
from ..errors import Eagle3Error, LlamaError
from ..llama import Model
from ..settings import Limits, RuntimeSettings, SamplingSettings
from .lookup import common_length
from .sampler import Sampler
from .stream import AnswerText
from .target import greedy_at, likelihood_at
from .types import Likelihood, Piece, Statistics

MOST = 32  # prompts at a time that are chosen; whoever names a number may have more
MARGIN = 1.25  # by which several at a time must be foreseen to be faster
NEARLY = 0.95  # of the best rate is good enough for fewer at a time
TRIAL = 32  # passes after which what was foreseen is compared with what was measured


def at_once(costs: Sequence[float], seconds: float, rate: float, most: int) -> int:
    """How many prompts at a time are fastest; 1 where several are not clearly faster than one.

    costs     of a pass by its rows, in passes over one row; the first is of none
    seconds   of a pass over one row; 0: nobody knows
    rate      tokens per second that one prompt at a time gets, with drafting
    """
    numbers = range(2, min(most, MOST, len(costs) - 1) + 1)
    best = max((n / costs[n] for n in numbers), default=0.0)
    if seconds <= 0 or best / seconds < MARGIN * rate:
        return 1
    return next(n for n in numbers if n / costs[n] >= NEARLY * best)


@dataclass(frozen=True)
class Request:
    """key: the caller's own.  prompt: token ids.  sampling: with a seed.  likeliest: as for `Watch`."""

    key: Any
    prompt: Sequence[int]
    sampling: SamplingSettings
    limits: Limits
    likeliest: int | None = None

    def cells(self, most: int) -> int:
        """Tokens that prompt and answer may have together, where a context has room for `most`."""
        tokens = self.limits.max_tokens
        return most if tokens is None else min(most, len(self.prompt) + tokens)


@dataclass
class Outcome:
    """pieces: of the answer.  error: why there is none."""

    request: Request
    pieces: list[Piece] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    error: Eagle3Error | None = None


@dataclass
class _Writing:
    """An answer in the making."""

    outcome: Outcome
    sampler: Sampler
    text: AnswerText

    def take(self, token: int, likelihood: Likelihood | None) -> bool:
        """Add a token that was drawn; whether the answer ends with it."""
        text, emitted = self.text.take(token)
        reason = self.text.finish_reason
        if emitted is None:
            likelihood = None
        self.outcome.pieces.append(Piece(text, emitted, finish_reason=reason, likelihood=likelihood))
        self.outcome.statistics.completion_tokens = self.text.emitted
        return reason is not None


@dataclass
class _Slot:
    """One sequence of the cache.  held: the ids whose cells it has.  ids: the prompt and what was drawn behind it."""

    seq: int
    held: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    writing: _Writing | None = None

    def stop(self) -> None:
        if self.writing is not None:
            self.writing.sampler.close()
        self.writing = None


class Parallel:
    """A context beside the engine's, of the same model.  Close it before the model.

    tokens, seconds, passes   of the passes that computed no prompt
    """

    def __init__(self, model: Model, runtime: RuntimeSettings, on_gpu: bool, sequences: int, longest: int) -> None:
        """longest: cells of one sequence.  LlamaError where there is no memory for all."""
        rows = max(runtime.batch, sequences)
        settings = target_settings(runtime, on_gpu, sequences * longest, rows, sequences)
        self.model, self.longest = model, longest
        # attention over the cells of all sequences would cost more than everything else
        self._context = Context(model, "target", replace(settings, unified=False))
        self._slots = [_Slot(seq) for seq in range(sequences)]
        self.tokens, self.seconds, self.passes = 0, 0.0, 0

    @property
    def rate(self) -> float:
        """Tokens per second, of all answers together; 0 before the first pass."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def answers(self, requests: Iterator[Request]) -> Generator[Outcome, None, None]:
        """Answer all requests, each of which must fit into `longest` cells; the outcomes come as they are done.
        A request is taken when there is room for it."""
        try:
            while True:
                yield from self._fill(requests)
                busy = [slot for slot in self._slots if slot.writing]
                if not busy:
                    return
                self._close_gaps()
                yield from self._step()
        finally:
            for slot in self._slots:
                self._release(slot)

    def _fill(self, requests: Iterator[Request]) -> Iterator[Outcome]:
        """Give every free sequence a request; an outcome for each that cannot begin."""
        for slot in self._slots:
            while slot.writing is None:
                request = next(requests, None)
                if request is None:
                    return
                outcome = Outcome(request)
                try:
                    self._begin(slot, outcome)
                except Eagle3Error as error:
                    outcome.error = error
                    yield outcome

    def _begin(self, slot: _Slot, outcome: Outcome) -> None:
        """Keep what the sequence's cells have in common with the prompt; the last token is computed, for its logits."""
        request = outcome.request
        prompt = list(request.prompt)
        sampler = Sampler(self.model, request.sampling, prompt, self.longest)
        same = common_length(slot.held, prompt[:-1])
        if same < len(slot.held):
            self._context.remove(slot.seq, same)
        slot.held, slot.ids = prompt[:same], prompt
        most = request.cells(self.longest) - len(prompt)
        text = AnswerText(self.model.piece, self.model.is_end, request.limits, most)
        slot.writing = _Writing(outcome, sampler, text)
        outcome.statistics.prompt_tokens, outcome.statistics.cached_tokens = len(prompt), same

    def _release(self, slot: _Slot) -> None:
        slot.stop()
        if slot.held:
            self._context.remove(slot.seq, -1)
        slot.held, slot.ids = [], []

    def _close_gaps(self) -> None:
        """Move answers into the first sequences: llama.cpp computes only neighbouring ones in one pass."""
        for slot in self._slots:
            last = next((other for other in reversed(self._slots) if other.writing), slot)
            if slot.writing or last.seq < slot.seq:
                continue
            self._release(slot)
            self._context.copy(last.seq, slot.seq)
            slot.held, slot.ids, slot.writing = last.held, last.ids, last.writing
            last.writing = None
            self._release(last)

    def _step(self) -> Iterator[Outcome]:
        """One pass: a row for every answer, and as much of the prompts of those that begin as fits."""
        started = time.perf_counter()
        busy = [(slot, slot.writing) for slot in self._slots if slot.writing]
        room = self._context.rows - len(busy)  # beside one row for each
        parts, asking, rows = [], [], 0
        for slot, writing in busy:
            todo = len(slot.ids) - len(slot.held)
            count = 1 + min(todo - 1, room)
            rows, room = rows + count, room - count + 1
            parts.append((slot.seq, len(slot.held), slot.ids[len(slot.held) :][:count], count == todo))
            if count == todo:
                asking.append((slot, writing, rows - 1))
        try:
            self._process(parts)
        except LlamaError as error:  # nobody knows what the cells hold now
            for slot, writing in busy:
                writing.outcome.error, slot.held = error, slot.ids
                self._release(slot)
            yield from (writing.outcome for _, writing in busy)
            return
        for (slot, _), (_, _, ids, _) in zip(busy, parts, strict=True):
            slot.held += ids
        ended = [outcome for rank, each in enumerate(asking) if (outcome := self._draw(*each, rank)) is not None]
        self._count(rows, [writing for _, writing in busy], time.perf_counter() - started)
        yield from ended

    def _draw(self, slot: _Slot, writing: _Writing, row: int, rank: int) -> Outcome | None:
        """The answer's next token; the outcome, if it ends with that.  row: of the batch.  rank: among those that
        ask."""
        n_vocab, likeliest = self.model.n_vocab, writing.outcome.request.likeliest
        try:
            address = self._context.logits() + 4 * n_vocab * rank
            if writing.sampler.is_argmax:
                token = greedy_at(address, n_vocab, self._context.name)
            else:
                token = writing.sampler.draw(self._context, row)
            likelihood = None if likeliest is None else likelihood_at(address, n_vocab, token, likeliest)
        except Eagle3Error as error:
            writing.outcome.error = error
            slot.stop()
            return writing.outcome
        slot.ids.append(token)
        if not writing.take(token, likelihood):
            return None
        slot.stop()
        return writing.outcome

    def _count(self, rows: int, writing: Sequence[_Writing], seconds: float) -> None:
        for each in writing:
            statistics = each.outcome.statistics
            statistics.decode_s += seconds / len(writing)
            statistics.round_tokens = statistics.completion_tokens
        if rows == len(writing):
            self.tokens, self.seconds, self.passes = self.tokens + rows, self.seconds + seconds, self.passes + 1

    def _process(self, parts: Sequence[tuple[int, int, list[int], bool]]) -> None:
        """Run one batch.  parts: (sequence, position of the first id, ids, whether the last one asks for logits)."""
        lengths = [len(ids) for _, _, ids, _ in parts]
        rows = sum(lengths)
        outputs = np.zeros(rows, np.int8)
        outputs[np.array(list(accumulate(lengths))) - 1] = [asks for _, _, _, asks in parts]
        pos = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids, _ in parts]).astype(np.int32)
        tokens = np.concatenate([ids for _, _, ids, _ in parts]).astype(np.int32)
        seqs = np.repeat([seq for seq, _, _, _ in parts], lengths).astype(np.int32)
        self._context.process(DECODE, pos, tokens, np.arange(rows + 1, dtype=np.int32), seqs, outputs)

    def close(self) -> None:
        self._context.close()
