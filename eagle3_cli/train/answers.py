"""The target writes: answers to user turns, and user turns where there are none.

One llama.cpp context holds many sequences; every step is one batch with the newest token of each sequence that is
writing, and with parts of the prompts of those that begin.  What a sequence writes depends on its conversation and its
number alone, not on its neighbours or on where a run was interrupted, as far as batches of different widths give the
same logits (those of a float32 cache without flash attention nearly do).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from .. import _native
from ..context import DECODE, Context, ContextSettings, target_settings
from ..engine.lookup import common_length
from ..engine.sampler import Sampler
from ..llama import Model
from ..settings import RuntimeSettings, context_cells
from .dialogue import AnswerSettings, Dialogue, Dialogues, Job, Writer, WriterProgress, Written
from .llama_states import load_model
from .render import Renderer
from .samples import Conversation


@dataclass
class _Work:
    dialogue: Dialogue
    job: Job
    sampler: Sampler


@dataclass
class _Slot:
    """One sequence of the cache.  held: the ids whose cells it has.  ids: the prompt and what was written behind it."""

    seq: int
    held: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    work: _Work | None = None

    @property
    def todo(self) -> int:
        """Ids that are not in the cache yet; the last one's logits are the next to draw from."""
        return len(self.ids) - len(self.held)

    def stop(self) -> None:
        if self.work:
            self.work.sampler.close()
        self.work = None


class AnswerWriter(Writer):
    """A GGUF that writes, in llama.cpp."""

    def __init__(
        self,
        path: Path,
        runtime: RuntimeSettings,
        settings: AnswerSettings,
        progress: Callable[[WriterProgress], None] = lambda progress: None,
    ) -> None:
        """FileError for a file that cannot write.  progress is called after every batch."""
        super().__init__(settings, progress)
        self._tokens = 0
        self.model, on_gpu = load_model(path, runtime)
        self._owned: list[Model | Context] = [self.model]
        try:
            self.renderer = Renderer(self.model, context_cells(runtime.ctx_size, self.model.n_ctx_train))
            self._context = Context(self.model, "target", self._context_settings(runtime, on_gpu))
            self._owned.insert(0, self._context)
            self._slots = [_Slot(seq) for seq in range(settings.sequences)]
            self._shared = self._prefill_shared()
        except BaseException:
            self.close()
            raise

    def _context_settings(self, runtime: RuntimeSettings, on_gpu: bool) -> ContextSettings:
        sequences = self.settings.sequences + 1  # the last one keeps what all prompts begin with
        rows = max(runtime.batch, sequences)
        # attention over the cells of all sequences would cost more than everything else
        return replace(target_settings(runtime, on_gpu, sequences * self.longest, rows, sequences), unified=False)

    def _prefill_shared(self) -> list[int]:
        """Compute what every conversation without a system message of its own begins with, once."""
        shared = self.renderer.user_opening([])[: self.longest - 1]
        for start in range(0, len(shared), self._context.rows):
            self._process([(self.settings.sequences, start, shared[start : start + self._context.rows], False)])
        return shared

    def write(
        self, conversations: Iterable[Conversation], skip: int = 0, seen: Iterable[str] = ()
    ) -> Iterator[Written]:
        dialogues = Dialogues(conversations, skip, seen, self.settings, self.renderer)
        started, self._tokens = time.perf_counter(), 0
        try:
            while True:
                self._fill_slots(dialogues)
                yield from dialogues.in_order()
                if not any(slot.work for slot in self._slots):
                    return
                self._close_gaps()
                self._step(dialogues)
                self._progress(WriterProgress(dialogues.number - skip, self._tokens, time.perf_counter() - started))
        finally:
            for slot in self._slots:
                self._release(slot)

    def _fill_slots(self, dialogues: Dialogues) -> None:
        for slot in self._slots:
            while slot.work is None:
                dialogue = dialogues.next()
                if dialogue is None:
                    return
                self._go_on(slot, dialogue, dialogues)

    def _close_gaps(self) -> None:
        """Move conversations into the first sequences: llama.cpp computes only neighbouring ones in one pass."""
        for slot in self._slots:
            last = next((other for other in reversed(self._slots) if other.work), slot)
            if slot.work or last.seq < slot.seq:
                continue
            self._context.copy(last.seq, slot.seq)
            slot.held, slot.ids, slot.work = last.held, last.ids, last.work
            last.work = None
            self._release(last)

    def _go_on(self, slot: _Slot, dialogue: Dialogue, dialogues: Dialogues) -> None:
        """Give the slot the conversation's next message to write, in the cells it has; after the last free it."""
        slot.stop()
        job = dialogue.next_job()
        if job is None:
            dialogues.finish(dialogue)
            self._release(slot)
            return
        prompt = job.prompt
        if not slot.held and common_length(self._shared, prompt[:-1]):
            self._context.copy(self.settings.sequences, slot.seq)
            slot.held = list(self._shared)
        same = common_length(slot.held, prompt[:-1])  # the last token is computed, for its logits
        if same < len(slot.held):
            self._context.remove(slot.seq, same)
        slot.held, slot.ids = prompt[:same], list(prompt)
        slot.work = _Work(dialogue, job, Sampler(self.model, job.sampling, prompt, self.longest))

    def _release(self, slot: _Slot) -> None:
        slot.stop()
        if slot.held:
            self._context.remove(slot.seq, -1)
        slot.held, slot.ids = [], []

    def _step(self, dialogues: Dialogues) -> None:
        """One batch: a row for every sequence that writes, and as much of the prompts of others as fits."""
        busy = [(slot, slot.work) for slot in self._slots if slot.work]
        room = self._context.rows - len(busy)  # beside one row for each
        parts, asking, rows = [], [], 0
        for slot, work in busy:
            start, count = len(slot.held), 1 + min(slot.todo - 1, room)
            rows, room, asks = rows + count, room - count + 1, count == slot.todo
            parts.append((slot.seq, start, slot.ids[start : start + count], asks))
            slot.held += slot.ids[start : start + count]
            if asks:
                asking.append((slot, work, rows - 1))
        self._process(parts)
        for rank, (slot, work, row) in enumerate(asking):
            slot.ids.append(self._draw(work.sampler, row, rank))
            self._tokens += 1
            if work.dialogue.take(work.job, slot.ids[len(work.job.prompt) :]):
                self._go_on(slot, work.dialogue, dialogues)

    def _process(self, parts: list[tuple[int, int, list[int], bool]]) -> None:
        """Run one batch.  parts: (sequence, position of the first id, ids, whether the last one asks for logits)."""
        lengths = [len(ids) for _, _, ids, _ in parts]
        rows = sum(lengths)
        outputs = np.zeros(rows, np.int8)
        ends = np.array(list(accumulate(lengths))) - 1
        outputs[ends] = [asks for _, _, _, asks in parts]
        pos = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids, _ in parts]).astype(np.int32)
        tokens = np.concatenate([ids for _, _, ids, _ in parts]).astype(np.int32)
        seqs = np.repeat([seq for seq, _, _, _ in parts], lengths).astype(np.int32)
        self._context.process(DECODE, pos, tokens, np.arange(rows + 1, dtype=np.int32), seqs, outputs)

    def _draw(self, sampler: Sampler, row: int, rank: int) -> int:
        """row: of the batch.  rank: among the rows that asked."""
        if sampler.is_argmax:
            n_vocab = self.model.n_vocab
            return int(_native.argmax(self._context.logits() + 4 * n_vocab * rank, n_vocab))
        return sampler.draw(self._context, row)

    def close(self) -> None:
        for part in self._owned:
            part.close()
