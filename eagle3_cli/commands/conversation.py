"""A conversation with a model: the messages so far, and the turns that add to them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..console import Console
from ..errors import FileError, InputError, PromptError
from ..interrupt import gentle_interrupt
from ..settings import Limits, SamplingSettings
from .answer import Answer, Engine, collect, summary, thoughtful, watching

if TYPE_CHECKING:
    from ..engine.types import Piece
    from ..messages import Messages
    from ..trace import Trace
    from .chat_show import Display

ANSWER_SHARE = 4  # with overflow "drop" an answer gets this part of the context, or max_tokens if that is less


def never() -> bool:
    return False


@dataclass
class Conversation:
    """The messages so far and the engine that answers them.

    display   shows the answers
    person    somebody types, so a first Ctrl-C ends an answer only
    overflow  what happens when it no longer fits into the context: "stop" or "drop"
    trace     keeps every round; None: nothing does
    stopped   a Ctrl-C ended the last answer; another one leaves
    """

    engine: Engine
    console: Console
    display: Display
    sampling: SamplingSettings
    limits: Limits
    system: str | None = None
    person: bool = True
    overflow: str = "stop"
    trace: Trace | None = None
    stopped: bool = False
    messages: Messages = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    # ---- what was said ----------------------------------------------------------------------------

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def instruct(self, system: str | None) -> None:
        """Put a system message in the place of the one that there is; None: there is none."""
        said = [message for message in self.messages if message["role"] != "system"]
        self.system = system
        self.reset()
        self.messages += said

    def undo(self) -> str:
        """Take the last message and its answer back; returns the message.  InputError where there is none."""
        starts = _user_messages(self.messages)
        if not starts:
            raise InputError("there is no message yet.", "Say something first.")
        text = self.messages[starts[-1]]["content"]
        del self.messages[starts[-1] :]
        return text

    def resume(self, messages: Messages) -> None:
        """Go on with another conversation.  A message at its end that has no answer is answered."""
        first = messages[0]
        self.system = first["content"] if first["role"] == "system" else None
        self.messages = list(messages)
        if self.messages[-1]["role"] == "user":
            self.turn(self.undo())

    # ---- answers ----------------------------------------------------------------------------------

    def retry(self) -> None:
        """Answer the last message again.  The answer that there is stays where no other one comes."""
        before = list(self.messages)
        self.turn(self.undo(), before)

    def rephrase(self, text: str) -> None:
        """Say this in the place of the last message, and answer it; both stay as they are where no answer comes."""
        before = list(self.messages)
        if self.turns:
            self.undo()
        self.turn(text, before)

    def turn(self, text: str, otherwise: Messages | None = None) -> None:
        """Answer one message.  What was said before an interruption stays in the history.

        A message for which there is no room is forgotten: said to a person, PromptError for a pipe.
        otherwise: the messages that there are where no answer comes; None: what there is now.
        """
        self.messages.append({"role": "user", "content": text})
        answer, ended = Answer(), never
        self.stopped = False
        gently: AbstractContextManager[Callable[[], bool]]
        gently = gentle_interrupt(lambda: bool(answer.tokens)) if self.person else nullcontext(never)
        try:
            with gently as ended:
                prompt = self._prompt()
                answer.splitter = thoughtful(self.engine, prompt).splitter
                pieces = self._pieces(prompt, text)
                collect(pieces, answer, self.display.text, ended, self.display.aside)
                self.stopped = answer.finish_reason is None and ended()
        except InputError as error:
            self._take_back(otherwise)
            if not (self.person and isinstance(error, PromptError)):
                raise
            self.console.error(error.message, error.hint)
            return
        except KeyboardInterrupt:
            if ended() or not self.person:  # the second one
                raise
            self.stopped = True
        finally:
            self.display.end()
            self._write_trace(answer)
        self._remember(answer, self.stopped, otherwise)

    def _pieces(self, prompt: list[int], text: str) -> Generator[Piece, None, None]:
        """The answer's pieces, of each of which display and trace learn before it is shown."""
        trace = self.trace
        if trace is not None:
            trace.begin(f"Turn {self.turns}", text)
        rounds = trace.round if trace is not None else None
        pieces = self.engine.stream(prompt, self.sampling, self.limits, *watching(self.console, rounds=rounds))
        try:
            for piece in pieces:
                self.display.source(piece.source)
                if trace is not None:
                    trace.piece(piece)
                yield piece
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _write_trace(self, answer: Answer) -> None:
        """Bring the page up to date.  A page that cannot be written ends a pipe; a person goes on without."""
        if self.trace is None:
            return
        if answer.finish_reason is not None:
            self.trace.end(self.engine.statistics)
        try:
            self.trace.write()
        except FileError as error:
            self.trace = None
            if not self.person:
                raise
            self.console.error(error.message, error.hint)

    def _prompt(self) -> list[int]:
        """The conversation's token ids, which leave room for an answer; for more room old turns may be dropped."""
        cells, messages = self.engine.settings["ctx_size"], self.messages
        prompt = self.engine.render(messages)
        dropped = 0
        if self.overflow == "drop":
            room = min(self.limits.max_tokens or cells, max(cells // ANSWER_SHARE, 1))
            while len(prompt) + room > cells and (shorter := without_oldest_turn(messages)):
                messages, dropped = shorter, dropped + 1
                prompt = self.engine.render(messages)
        if len(prompt) >= cells:
            raise self._no_room(len(prompt), cells)
        if dropped:
            self.messages = messages
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            self.console.report(f"(dropped the oldest {turns}: the context holds {cells} tokens)")
        return prompt

    def _no_room(self, tokens: int, cells: int) -> PromptError:
        """What to say when so many tokens are too many."""
        newest = self.messages
        while shorter := without_oldest_turn(newest):
            newest = shorter
        alone = len(self.engine.render(newest))
        if alone >= cells:
            what = "your message and the system message" if self.system else "your message"
            return PromptError(
                f"{what}: expected at most {cells - 1} tokens (the context holds {cells}), got {alone}.",
                "Shorten it, or raise --ctx-size.",
            )
        return PromptError(
            f"the conversation is full: expected at most {cells - 1} tokens (the context holds {cells}), got {tokens}.",
            "/reset starts over, --overflow drop forgets the oldest turns, --ctx-size sets a larger context.",
        )

    def _take_back(self, otherwise: Messages | None) -> None:
        """Forget the message at the end, which has no answer."""
        if otherwise is None:
            self.messages.pop()
        else:
            self.messages = otherwise

    def _remember(self, answer: Answer, interrupted: bool, otherwise: Messages | None) -> None:
        if interrupted and not answer.text:
            self._take_back(otherwise)
            lost = "your message is dropped" if otherwise is None else "the conversation is as it was"
            self.console.note(f"(stopped before the answer began; {lost}; Ctrl-C again leaves)")
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        if interrupted:
            self.console.note("(stopped) Ctrl-C again leaves.")
        elif answer.finish_reason == "length" and len(answer.tokens) != self.limits.max_tokens:
            next_time = "/reset starts over" if self.overflow == "stop" else "the next message drops the oldest turns"
            self.console.note(f"(the context is full; {next_time})")
        if self.person:
            self.console.note(summary(self.engine.statistics))


def _user_messages(messages: Sequence[dict[str, str]]) -> list[int]:
    """Where each turn begins."""
    return [i for i, message in enumerate(messages) if message["role"] == "user"]


def without_oldest_turn(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The messages without the oldest user message and what answered it, the system message kept; empty where there is
    but one turn."""
    starts = _user_messages(messages)
    return [*messages[: starts[0]], *messages[starts[1] :]] if len(starts) > 1 else []
