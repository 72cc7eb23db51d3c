"""A reasoning model's thinking, told from its answer.

Most such models begin with a tag like <think>, or their chat template has written it already, and go on with the answer
behind the closing tag.  Only the beginning counts: an answer that speaks of the tag further on stays whole.  gpt-oss
writes messages, each for a channel:

    <|channel|>analysis<|message|>...<|start|>assistant<|channel|>final<|message|>...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

PAIRS = {
    "<think>": "</think>",  # Qwen, DeepSeek and most others
    "[THINK]": "[/THINK]",  # Magistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
}
TAGS = frozenset(tag.encode() for pair in PAIRS.items() for tag in pair)
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
TAIL = 16  # tokens of a prompt's end that can hold the opening tag and white space behind it

_Place = Enum("_Place", ["BEGINNING", "INSIDE", "BEHIND", "ANSWER", "CHANNELS"])


def opened_by(prompt: Sequence[int], piece: Callable[[int], bytes]) -> str | None:
    """The opening tag with which a prompt ends, as some chat templates leave it.  piece: the bytes of a token."""
    tail = b"".join(map(piece, prompt[-TAIL:])).decode("utf-8", "replace").rstrip()
    return next((tag for tag in PAIRS if tail.endswith(tag)), None)


class Thinking:
    """Splits a text that comes in parts.  White space around the thinking and the tags themselves are dropped; what may
    still become a tag is held back."""

    def __init__(self, opened: str | None = None) -> None:
        """opened: the opening tag that the prompt has already, so that the text begins inside."""
        self._close = PAIRS[opened] if opened else None
        self._place = _Place.BEGINNING
        self._begun = False  # some thinking has been handed out
        self._held = ""
        self._channels = _Channels()

    def push(self, text: str) -> tuple[str, str]:
        """What became certain with this text: of the thinking, of the answer."""
        self._held += text
        return self._take(last=False)

    def finish(self) -> tuple[str, str]:
        """What is still held, at the end of the text."""
        return self._take(last=True)

    def _take(self, last: bool) -> tuple[str, str]:
        thinking = ""
        if self._place is _Place.BEGINNING:
            self._begin(last)
        if self._place is _Place.CHANNELS:
            text, self._held = self._held, ""
            return self._channels.take(text, last)
        if self._place is _Place.INSIDE:
            thinking = self._think(last)
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is not _Place.ANSWER:
            return thinking, ""
        answer, self._held = self._held, ""
        return thinking, answer

    def _begin(self, last: bool) -> None:
        """Leave BEGINNING as soon as it is certain whether the text begins with a tag."""
        body = self._held.lstrip()
        tag = next((tag for tag in (*PAIRS, CHANNEL) if body.startswith(tag)), None)
        if tag == CHANNEL:
            self._place = _Place.CHANNELS
        elif tag is not None:
            self._held, self._close, self._place = body[len(tag) :], PAIRS[tag], _Place.INSIDE
        elif last or not any(tag.startswith(body) for tag in (*PAIRS, CHANNEL)):
            self._place = _Place.INSIDE if self._close else _Place.ANSWER

    def _think(self, last: bool) -> str:
        """Thinking that can be handed out; behind the closing tag the place is BEHIND."""
        assert self._close is not None
        if not self._begun:
            self._held = self._held.lstrip()
        at = self._held.find(self._close)
        if at >= 0:
            said, self._held = self._held[:at].rstrip(), self._held[at + len(self._close) :]
            self._place = _Place.BEHIND
            return said
        end = len(self._held) if last else len(self._held) - _begun_tag(self._held, self._close)
        said = self._held[:end].rstrip()
        self._held = "" if last else self._held[len(said) :]
        self._begun = self._begun or bool(said)
        return said


class _Channels:
    """Messages for channels: "analysis" is thinking, every other one is for the reader.  Two messages of one kind are
    parted by an empty line."""

    def __init__(self) -> None:
        self._held = ""
        self._thinks: bool | None = None  # of the message at hand; None: in its header
        self._spoken = {True: False, False: False}  # whether there was text of each kind
        self._gap = ""  # what parts the next text from it

    def take(self, text: str, last: bool) -> tuple[str, str]:
        self._held += text
        said = {True: "", False: ""}
        while self._thinks is not None or self._read_header():
            assert self._thinks is not None
            at = self._held.find(START)
            end = at if at >= 0 else len(self._held) - (0 if last else _begun_tag(self._held, START))
            body, self._held = self._held[:end], self._held[end:]
            if body:
                said[self._thinks] += self._gap + body
                self._gap, self._spoken[self._thinks] = "", True
            if at < 0:
                break
            self._thinks = None
        return said[True], said[False]

    def _read_header(self) -> bool:
        """Whether the header of the next message is complete."""
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return False
        self._thinks, self._held = header.rpartition(CHANNEL)[2].split()[:1] == ["analysis"], rest
        self._gap = "\n\n" if self._spoken[self._thinks] else ""
        return True


def _begun_tag(text: str, tag: str) -> int:
    """Length of the longest end of a text with which the tag begins."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
