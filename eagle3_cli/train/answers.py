"""The target writes: answers to user turns, and user turns where there are none.

One llama.cpp context holds many sequences; every step is one batch with the newest token of each sequence that is
writing, and with parts of the prompts of those that begin.  What a sequence writes depends on its conversation and its
number alone, not on its neighbours or on where a run was interrupted, as far as batches of different widths give the
same logits (those of a float32 cache without flash attention nearly do).

An answer is greedy or sampled, by the number of its conversation.  One that falls into a loop is cut behind the first
time round, because a drafter would learn to copy.  After an answer that was cut, the conversation ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path

import numpy as np

from .. import _native
from ..context import DECODE, Context, ContextSettings, target_settings
from ..engine.load import DEFAULT_CONTEXT
from ..engine.sampler import Sampler
from ..errors import FileError, OptionError
from ..llama import Model, choose_devices
from ..model_files import check_target
from ..probe import amx_crashes
from ..settings import (
    MAX_SEQUENCES,
    RuntimeSettings,
    SamplingSettings,
)
from .render import NOTHING_LEFT, TOO_LONG, Renderer, Turn, common_length, join_turns
from .samples import Conversation, Sample

ANSWER_LAW = SamplingSettings(top_k=50, top_p=0.95, min_p=0.0)  # of the answers that are not greedy
USER_LAW = SamplingSettings(temperature=1.0, top_k=0, top_p=0.95, min_p=0.0)
USER_TOKENS = 160  # a user's turn that has not ended by then is rejected
USER_CHARACTERS = 8  # a shorter one is rejected
ATTEMPTS = 4  # user turns that are written before their conversation is given up
LOOP_CHECK = 16  # tokens between two looks for a loop
LONGEST_PERIOD, LOOP_ROUNDS, LOOP_TOKENS, LOOP_SHARE = 64, 3, 48, 0.8
SHORTEST_ANSWER = 8  # tokens of an answer before its loop; shorter ones are dropped

LOOP_CUT, LOOP_DROPPED = "answers cut where they repeat themselves", "answers dropped that only repeat themselves"
LENGTH_CUT = "answers cut at their greatest length"
REJECTED, GIVEN_UP = "user turns rejected", "conversations given up: no usable user turn"
DUPLICATE = "conversations dropped: the same user turn again"


@dataclass(frozen=True)
class AnswerSettings:
    """sequences: conversations at a time.  max_tokens: of one answer.  mix: (share of the conversations, temperature of
    their answers); the shares add up to 1."""

    sequences: int = 32
    max_tokens: int = 512
    mix: tuple[tuple[float, float], ...] = ((0.55, 0.0), (0.225, 0.7), (0.225, 1.0))
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.sequences < MAX_SEQUENCES:
            raise OptionError(f"sequences: expected a value from 1 to {MAX_SEQUENCES - 1}, got {self.sequences}.")
        if self.max_tokens < 1:
            raise OptionError(f"max tokens: expected a value of at least 1, got {self.max_tokens}.")
        if not 0 <= self.seed < 2**32:
            raise OptionError(f"seed: expected a value from 0 to {2**32 - 1}, got {self.seed}.")
        if min((share for share, _ in self.mix), default=-1) < 0 or abs(sum(share for share, _ in self.mix) - 1) > 1e-6:
            raise OptionError(f"mix: expected shares that add up to 1, got {self.mix}.")
        for _, temperature in self.mix:
            replace(ANSWER_LAW, temperature=temperature)  # checks its range

    def temperature(self, number: int) -> float:
        """Of the answers in conversation `number`."""
        drawn = np.random.default_rng([self.seed, number]).random()
        bounds = np.cumsum([share for share, _ in self.mix])
        return self.mix[min(int(np.searchsorted(bounds, drawn, side="right")), len(self.mix) - 1)][1]

    def turn_seed(self, number: int, message: int, attempt: int = 0) -> int:
        """Of the sampler that writes message `message` of conversation `number`; 0 to 2**32 - 2."""
        state = np.random.SeedSequence([self.seed, number, message, attempt]).generate_state(1)
        return int(state[0]) % (2**32 - 1)

    def answer_sampling(self, number: int, message: int) -> SamplingSettings:
        return replace(ANSWER_LAW, temperature=self.temperature(number), seed=self.turn_seed(number, message))


@dataclass(frozen=True)
class Written:
    """One conversation as it was written.  number: its place in the input, from 0.  samples: none where nothing of it
    could be used (the reasons are counted)."""

    number: int
    messages: Conversation
    samples: list[Sample]


@dataclass(frozen=True)
class WriterProgress:
    """conversations finished, tokens written and seconds since `write` began."""

    conversations: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def loop_start(tokens: list[int]) -> int | None:
    """Where the second round of a loop at the end of tokens begins; None without a loop.

    A loop of period p: of the last max(3p, 48) tokens at least four in five equal the token p before, so that a counter
    ("Step 8: ...") does not hide it.
    """
    ids = np.array(tokens, np.int32)
    for period in range(1, min(LONGEST_PERIOD, len(ids) - 1) + 1):
        span = max(LOOP_ROUNDS * period, LOOP_TOKENS)
        if span + period > len(ids):
            continue
        if (ids[-span:] == ids[-span - period : -period]).mean() >= LOOP_SHARE:
            start = len(ids) - span
            while start > period and ids[start - 1] == ids[start - 1 - period]:
                start -= 1
            return start
    return None


def user_fault(text: str, tokens: list[int], model: Model) -> str | None:
    """Why a user's turn that the target wrote cannot be used."""
    if not all(map(model.piece, tokens)):
        return "control tokens in it"
    if len(text) < USER_CHARACTERS:
        return "too short"
    if any(c == "\ufffd" or (c < " " and c not in "\n\t") for c in text):
        return "broken or control characters in it"
    return "repeats itself" if loop_start(tokens) is not None else None


@dataclass(frozen=True)
class _Job:
    """What a sequence writes next: a message of this role behind this prompt, of at most so many tokens."""

    role: str
    prompt: list[int]
    sampling: SamplingSettings
    most: int


@dataclass
class _Dialogue:
    """A conversation in the making.  pending: user turns to come; an empty one is written by the target."""

    number: int
    pending: deque[str]
    messages: Conversation
    settings: AnswerSettings
    renderer: Renderer
    turns: list[Turn] = field(default_factory=list)
    own: list[str] = field(default_factory=list)  # user turns that the target wrote
    attempt: int = 0

    @property
    def left_out(self) -> Counter[str]:
        return self.renderer.left_out

    def next_job(self) -> _Job | None:
        """None at the end of the conversation."""
        if not self.pending:
            return None
        writes_user = not self.pending[0]
        user = [] if writes_user else [{"role": "user", "content": self.pending[0]}]
        messages = [*self.messages, *user]
        prompt = self.renderer.user_opening(messages) if writes_user else self.renderer.prompt(messages)
        room = self.renderer.longest - len(prompt)
        if room < 1:
            self.left_out[TOO_LONG if self.turns else NOTHING_LEFT] += 1
            return None
        if writes_user:
            seed = self.settings.turn_seed(self.number, len(messages), self.attempt)
            return _Job("user", prompt, replace(USER_LAW, seed=seed), min(room, USER_TOKENS))
        self.pending.popleft()
        self.messages = messages
        sampling = self.settings.answer_sampling(self.number, len(messages))
        return _Job("assistant", prompt, sampling, min(room, self.settings.max_tokens))

    def take_user(self, tokens: list[int], text: str | None) -> None:
        """tokens: without the last one.  text: without what ended the turn; None where it did not end."""
        fault = "without an end" if text is None else user_fault(text, tokens, self.renderer.model)
        if text is not None and fault is None:
            self.pending[0] = text
            self.own.append(text)
            self.attempt = 0
            return
        self.left_out[f"{REJECTED}: {fault}"] += 1
        self.attempt += 1
        if self.attempt == ATTEMPTS:
            self.left_out[GIVEN_UP] += 1
            self.pending.clear()

    def take_answer(self, prompt: list[int], tokens: list[int], ended: bool) -> None:
        """tokens with the end token, if it came."""
        start = None if ended else loop_start(tokens)
        dropped = start is not None and start < SHORTEST_ANSWER
        if not ended:
            self.pending.clear()
            self.left_out[LENGTH_CUT if start is None else LOOP_DROPPED if dropped else LOOP_CUT] += 1
        if dropped:
            self.messages = self.messages[:-1]
            return
        tokens = tokens[:start]
        self.turns.append(Turn(prompt, tokens))
        text = text_of(self.renderer.model, tokens)
        self.messages = [*self.messages, {"role": "assistant", "content": text}]


def text_of(model: Model, tokens: Iterable[int]) -> str:
    """What chat shows of these tokens."""
    return b"".join(map(model.piece, tokens)).decode("utf-8", "replace")


@dataclass
class _Work:
    dialogue: _Dialogue
    job: _Job
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


class AnswerWriter:
    """A loaded target that writes.  Use as a context manager, or call `close`.  Not thread-safe.

    longest    tokens of a prompt and its answer together: runtime.ctx_size, or the trained context, at most 8192
    left_out   reason -> how many, of everything that was cut, rejected or dropped
    """

    def __init__(
        self,
        path: Path,
        runtime: RuntimeSettings,
        settings: AnswerSettings,
        progress: Callable[[WriterProgress], None] = lambda progress: None,
    ) -> None:
        """FileError for a file that cannot write.  progress is called after every batch."""
        check_target(path)
        devices, layers, _ = choose_devices(runtime.device, runtime.gpu_layers)
        self.settings, self._progress, self._tokens = settings, progress, 0
        self.model = Model(path, devices, layers, not amx_crashes())
        self._owned: list[Model | Context] = [self.model]
        try:
            if not (self.model.generates_text and self.model.keeps_every_position):
                raise FileError(f"{path}: {self.model.description} cannot write text in several sequences.")
            self.longest = runtime.ctx_size or min(self.model.n_ctx_train, DEFAULT_CONTEXT)
            self.renderer = Renderer(self.model, self.longest)
            self._context = Context(self.model, "target", self._context_settings(runtime, bool(devices)))
            self._owned.insert(0, self._context)
            self._slots = [_Slot(seq) for seq in range(settings.sequences)]
            self._shared = self._prefill_shared()
        except BaseException:
            self.close()
            raise

    @property
    def left_out(self) -> Counter[str]:
        return self.renderer.left_out

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
        """Write each conversation; yields all of them, in their order.

        Of a conversation its system message and its user turns count; answers that it has are passed over.  A user turn
        with empty content is written by the target.
        skip: the first so many are done already; the rest comes out as it would have without the interruption.
        seen: user turns that the target wrote in those; one that comes again is dropped.
        """
        waiting = islice(enumerate(conversations), skip, None)
        finished: dict[int, _Dialogue] = {}
        known, number, started, self._tokens = set(seen), skip, time.perf_counter(), 0
        try:
            while True:
                self._fill_slots(waiting, finished)
                while number in finished:
                    yield self._written(finished.pop(number), known)
                    number += 1
                if not any(slot.work for slot in self._slots):
                    return
                self._close_gaps()
                self._step(finished)
                self._progress(WriterProgress(number - skip, self._tokens, time.perf_counter() - started))
        finally:
            for slot in self._slots:
                self._release(slot)

    def _written(self, dialogue: _Dialogue, known: set[str]) -> Written:
        duplicate = not known.isdisjoint(dialogue.own)
        known.update(dialogue.own)
        if duplicate:
            self.left_out[DUPLICATE] += 1
        samples = [] if duplicate or not dialogue.turns else join_turns(dialogue.turns)
        return Written(dialogue.number, dialogue.messages, samples)

    def _fill_slots(self, waiting: Iterator[tuple[int, Conversation]], finished: dict[int, _Dialogue]) -> None:
        for slot in self._slots:
            while slot.work is None:
                number, conversation = next(waiting, (-1, []))
                if number < 0:
                    return
                turns = deque(m["content"] for m in conversation if m["role"] == "user")
                system = [m for m in conversation if m["role"] == "system"]
                self._go_on(slot, _Dialogue(number, turns, system, self.settings, self.renderer), finished)

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

    def _go_on(self, slot: _Slot, dialogue: _Dialogue, finished: dict[int, _Dialogue]) -> None:
        """Give the slot the conversation's next message to write, in the cells it has; after the last free it."""
        slot.stop()
        job = dialogue.next_job()
        if job is None:
            finished[dialogue.number] = dialogue
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

    def _step(self, finished: dict[int, _Dialogue]) -> None:
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
            if self._ends(slot.ids[len(work.job.prompt) :], work):
                self._go_on(slot, work.dialogue, finished)

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

    def _ends(self, written: list[int], work: _Work) -> bool:
        """Whether a message ends with its newest token; if so its conversation has taken it."""
        full = len(written) == work.job.most
        if work.job.role == "user":
            ended = self._ended_user(written)
            if ended is None and not full:
                return False
            work.dialogue.take_user(written[:-1], ended)
            return True
        ended_here = self.model.is_end(written[-1])
        loops = not ended_here and len(written) % LOOP_CHECK == 0 and loop_start(written) is not None
        if ended_here or full or loops:
            work.dialogue.take_answer(work.job.prompt, written, ended_here)
            return True
        return False

    def _ended_user(self, written: list[int]) -> str | None:
        """The text of a user's turn without the mark that ends it; None where it goes on."""
        mark = self.renderer.user_end
        if self.model.is_end(written[-1]) or written[-1] == mark:
            return text_of(self.model, written[:-1]).strip()
        if isinstance(mark, str):
            text, found, _ = text_of(self.model, written).partition(mark)
            return text.strip() if found else None
        return None

    def close(self) -> None:
        for part in self._owned:
            part.close()

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
