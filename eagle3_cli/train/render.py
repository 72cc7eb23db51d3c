"""Conversations as the target sees them in `eagle3 chat`: token ids, and which of them are answers.

In chat every answer follows a prompt that the template renders anew from the text of all turns so far.  So here: each
answer stands behind the prompt of its own turn, and what is an answer is known from that position, never from marks
that a template sets.  Where the next prompt begins with exactly the tokens so far, both turns are one sample.  Where
the template changes what was said (it drops old thinking, it trims, it adds an empty thinking block to the last turn
alone), the next turn begins a sample of its own, in which only the new answer counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from ..engine.load import tokenize_rendered
from ..engine.lookup import common_length
from ..errors import PromptError
from ..llama import Model, render_chat
from .samples import Conversation, Sample

PROBES = ("quokka", "Zeppelin")  # contents that no template and no other probe begins with
TOO_LONG = "longer than the context, cut at a turn"
NOTHING_LEFT = "no answer within the context"
NO_TOKENS = "an answer that is not text of this tokenizer"


class Vocabulary(Protocol):
    """A target's tokens, as llama.Model has them of a GGUF.

    path       the target, for messages
    tokenize   ids of a text, with control tokens recognised; add_special: with the BOS that the model wants
    piece      the bytes that a token prints, empty for a control token
    is_end     whether a token ends an answer
    """

    path: Path

    def tokenize(self, text: str, add_special: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...

    def is_end(self, token: int) -> bool: ...


class ChatVocabulary(Vocabulary, Protocol):
    """With the target's chat template: what is known of a Hugging Face directory.

    chat_text      of a conversation, up to where the answer starts.  PromptError where the template refuses
    rendered_ids   ids of such a text, which may begin with the BOS that the model wants
    """

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str: ...

    def rendered_ids(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Turn:
    """prompt: ids up to where the answer starts.  answer: ids, its end token included if it has one."""

    prompt: Sequence[int]
    answer: Sequence[int]


def join_turns(turns: Sequence[Turn]) -> list[Sample]:
    """The samples of one conversation's turns, in order; every answer token is marked in exactly one of them.
    A sample in which nothing can be learnt (no answer token has two tokens before it) is left out."""
    samples = []
    tokens: list[int] = []
    answer: list[bool] = []
    for turn in turns:
        if list(turn.prompt[: len(tokens)]) != tokens:
            samples.append(_sample(tokens, answer))
            tokens, answer = [], []
        new = turn.prompt[len(tokens) :]
        tokens = [*tokens, *new, *turn.answer]
        answer = [*answer, *[False] * len(new), *[True] * len(turn.answer)]
    samples.append(_sample(tokens, answer))
    return [sample for sample in samples if sample.answer[2:].any()]


def _sample(tokens: list[int], answer: list[bool]) -> Sample:
    return Sample(np.array(tokens, np.int32), np.array(answer, bool))


class Renderer:
    """Renders for one target.  longest: tokens that a sample may have.  left_out: reason -> conversations."""

    def __init__(self, model: Model | ChatVocabulary, longest: int) -> None:
        self.model, self.longest = model, longest
        self.left_out: Counter[str] = Counter()

    def _text(self, messages: Conversation) -> str:
        """What the template writes up to where the answer starts."""
        model = self.model
        return render_chat(model, messages) if isinstance(model, Model) else model.chat_text(messages)

    def _ids(self, text: str) -> list[int]:
        """Of what the template wrote."""
        model = self.model
        return tokenize_rendered(model, text) if isinstance(model, Model) else model.rendered_ids(text)

    def prompt(self, messages: Conversation) -> list[int]:
        """Ids up to where the answer starts, as `Engine.render` gives them.  PromptError where the template refuses."""
        try:
            return self._ids(self._text(messages))
        except PromptError:
            if messages[0]["role"] == "system":
                self.check_system()
            raise

    def check_system(self) -> None:
        """PromptError if the template takes a user's turn, but not behind a system message."""
        user = {"role": "user", "content": PROBES[0]}
        self._text([user])
        try:
            self._text([{"role": "system", "content": PROBES[1]}, user])
        except PromptError as error:
            raise PromptError(
                f"{self.model.path.name}: its chat template refuses system messages: {error.message}",
                "Take the system messages out of the data.",
            ) from error

    def samples(self, conversation: Conversation) -> list[Sample]:
        """A conversation with the answers that it has.  What does not fit, or cannot be taken, is counted."""
        turns: list[Turn] = []
        for k, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            prompt, answer = self.prompt(conversation[:k]), self._answer(conversation[:k], message["content"])
            if answer is None:
                self.left_out[NO_TOKENS] += 1
                return []
            if len(prompt) + len(answer) > self.longest:
                self.left_out[TOO_LONG if turns else NOTHING_LEFT] += 1
                break
            turns.append(Turn(prompt, answer))
        else:
            if not turns:
                self.left_out[NOTHING_LEFT] += 1
        return join_turns(turns)

    def _answer(self, messages: Conversation, text: str) -> list[int] | None:
        """Ids of an answer behind its prompt and its end token; None if the tokenizer has none that print this text.

        They are what follows the prompt's ids in the tokens of both together.  Where a token would span the end of the
        prompt the answer is tokenised without it, and behind a line break where the tokenizer puts a space in front.
        """
        model = self.model
        before = self._text(messages)
        prompt = self._ids(before)
        together = self._ids(before + text)
        if together[: len(prompt)] == prompt:
            return self._ended(together[len(prompt) :])
        line_break = model.tokenize("\n", add_special=False)
        behind = model.tokenize("\n" + text, add_special=False)
        candidates = [model.tokenize(text, add_special=False)]
        if behind[: len(line_break)] == line_break:
            candidates.append(behind[len(line_break) :])
        for ids in candidates:
            if b"".join(map(model.piece, ids)) == text.encode():
                return self._ended(ids)
        return None

    def _ended(self, ids: list[int]) -> list[int] | None:
        """With the end token; None if one stands in it, where a real answer would have ended."""
        return None if any(map(self.model.is_end, ids)) else [*ids, self.answer_end]

    @cached_property
    def answer_end(self) -> int:
        """The token with which the template ends an answer."""
        first, second = PROBES
        said = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
        token = self._first_mark([*said, {"role": "user", "content": first}], second)
        if token is None or not self.model.is_end(token):
            raise PromptError(
                f"{self.model.path.name}: its chat template ends an answer with no end token of its vocabulary.",
                "Given answers cannot be kept; let the target write them.",
            )
        return token

    def user_opening(self, messages: Conversation) -> list[int]:
        """Ids from the start of the conversation to where the content of the next user's turn would begin."""
        first, second = (self.prompt([*messages, {"role": "user", "content": probe}]) for probe in PROBES)
        same = common_length(first, second)
        if not same:
            raise PromptError(
                f"{self.model.path.name}: its chat template puts nothing before a user's turn.",
                "The target cannot write user turns; give --data.",
            )
        return first[:same]

    @cached_property
    def user_end(self) -> int | str:
        """With what the template ends a user's turn: a control token, or text where it has none."""
        messages = [{"role": "user", "content": PROBES[0]}]
        token = self._first_mark(messages, PROBES[0])
        if token is not None:
            return token
        behind = self._behind(messages, PROBES[0]).strip()
        if not behind:
            raise PromptError(
                f"{self.model.path.name}: its chat template puts nothing between a user's turn and the answer.",
                "The target cannot write user turns; give --data.",
            )
        return behind.splitlines()[0]

    def _first_mark(self, messages: Conversation, content: str) -> int | None:
        """The control or end token behind a content, with only white space between; None if other text is there."""
        model = self.model
        for token in model.tokenize(self._behind(messages, content), add_special=False):
            piece = model.piece(token)
            if not piece or model.is_end(token):
                return token
            if piece.strip():
                break
        return None

    def _behind(self, messages: Conversation, content: str) -> str:
        """What the template writes behind a content."""
        _, found, behind = self._text(messages).partition(content)
        if not found:
            raise PromptError(f"{self.model.path.name}: its chat template leaves out what was said ({content!r}).")
        return behind
