"""A conversation in the making, whichever engine writes it: what comes next, and what is kept of what was written.

An answer is greedy or sampled, by the number of its conversation.  One that falls into a loop is cut behind the first
time round, because a drafter would learn to copy.  After an answer that was cut, the conversation ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from ..errors import OptionError
from ..settings import MAX_SEQUENCES, SamplingSettings
from .render import NOTHING_LEFT, TOO_LONG, Renderer, Turn, Vocabulary, join_turns
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


class Writer(ABC):
    """A loaded target that writes.  Use as a context manager, or call `close`.  Not thread-safe.

    renderer   of its tokenizer and chat template
    longest    tokens of a prompt and its answer together: runtime.ctx_size, or the trained context, at most 8192
    left_out   reason -> how many, of everything that was cut, rejected or dropped
    """

    renderer: Renderer

    def __init__(self, settings: AnswerSettings, progress: Callable[[WriterProgress], None]) -> None:
        self.settings, self._progress = settings, progress

    @property
    def longest(self) -> int:
        return self.renderer.longest

    @property
    def left_out(self) -> Counter[str]:
        return self.renderer.left_out

    @abstractmethod
    def write(
        self, conversations: Iterable[Conversation], skip: int = 0, seen: Iterable[str] = ()
    ) -> Iterator[Written]:
        """Write each conversation; yields all of them, in their order.

        Of a conversation its system message and its user turns count; answers that it has are passed over.  A user turn
        with empty content is written by the target.
        skip: the first so many are done already; the rest comes out as it would have without the interruption.
        seen: user turns that the target wrote in those; one that comes again is dropped.
        """

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def user_fault(text: str, tokens: list[int], model: Vocabulary) -> str | None:
    """Why a user's turn that the target wrote cannot be used."""
    if not all(map(model.piece, tokens)):
        return "control tokens in it"
    if len(text) < USER_CHARACTERS:
        return "too short"
    if any(c == "\ufffd" or (c < " " and c not in "\n\t") for c in text):
        return "broken or control characters in it"
    return "repeats itself" if loop_start(tokens) is not None else None


@dataclass(frozen=True)
class Job:
    """What a sequence writes next: a message of this role behind this prompt, of at most so many tokens."""

    role: str
    prompt: list[int]
    sampling: SamplingSettings
    most: int


@dataclass
class Dialogue:
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

    def next_job(self) -> Job | None:
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
            return Job("user", prompt, replace(USER_LAW, seed=seed), min(room, USER_TOKENS))
        self.pending.popleft()
        self.messages = messages
        sampling = self.settings.answer_sampling(self.number, len(messages))
        return Job("assistant", prompt, sampling, min(room, self.settings.max_tokens))

    def take(self, job: Job, written: list[int]) -> bool:
        """Whether the message ends with its newest token; if so the conversation has it.

        job: what `next_job` gave last.  written: every token so far, behind the job's prompt
        """
        full = len(written) == job.most
        if job.role == "user":
            ended = ended_user(self.renderer, written)
            if ended is None and not full:
                return False
            self._take_user(written[:-1], ended)
            return True
        ends = self.renderer.model.is_end(written[-1])
        loops = not ends and len(written) % LOOP_CHECK == 0 and loop_start(written) is not None
        if ends or full or loops:
            self._take_answer(job.prompt, written, ends)
            return True
        return False

    def _take_user(self, tokens: list[int], text: str | None) -> None:
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

    def _take_answer(self, prompt: list[int], tokens: list[int], ended: bool) -> None:
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


def text_of(model: Vocabulary, tokens: Iterable[int]) -> str:
    """What chat shows of these tokens."""
    return b"".join(map(model.piece, tokens)).decode("utf-8", "replace")


def ended_user(renderer: Renderer, written: list[int]) -> str | None:
    """The text of a user's turn without the mark that ends it; None where it goes on."""
    model, mark = renderer.model, renderer.user_end
    if model.is_end(written[-1]) or written[-1] == mark:
        return text_of(model, written[:-1]).strip()
    if isinstance(mark, str):
        text, found, _ = text_of(model, written).partition(mark)
        return text.strip() if found else None
    return None


class Dialogues:
    """The conversations that one `write` is given: those to come, and the finished ones until it is their turn.

    number   of the next one that `in_order` gives
    """

    def __init__(
        self,
        conversations: Iterable[Conversation],
        skip: int,
        seen: Iterable[str],
        settings: AnswerSettings,
        renderer: Renderer,
    ) -> None:
        """skip, seen: as for `Writer.write`."""
        self.number = skip
        self._waiting = islice(enumerate(conversations), skip, None)
        self._finished: dict[int, Dialogue] = {}
        self._known = set(seen)
        self._settings, self._renderer = settings, renderer

    def next(self) -> Dialogue | None:
        """The next one to write; None after the last."""
        number, conversation = next(self._waiting, (-1, []))
        if number < 0:
            return None
        turns = deque(m["content"] for m in conversation if m["role"] == "user")
        system = [m for m in conversation if m["role"] == "system"]
        return Dialogue(number, turns, system, self._settings, self._renderer)

    def finish(self, dialogue: Dialogue) -> None:
        self._finished[dialogue.number] = dialogue

    def in_order(self) -> Iterator[Written]:
        """The finished ones, as far as none before them is missing."""
        while self.number in self._finished:
            dialogue = self._finished.pop(self.number)
            self.number += 1
            yield self._written(dialogue)

    def _written(self, dialogue: Dialogue) -> Written:
        duplicate = not self._known.isdisjoint(dialogue.own)
        self._known.update(dialogue.own)
        if duplicate:
            dialogue.left_out[DUPLICATE] += 1
        samples = [] if duplicate or not dialogue.turns else join_turns(dialogue.turns)
        return Written(dialogue.number, dialogue.messages, samples)
