"""From emitted tokens to text: whole characters only, stop strings held back as long as they could still match."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from ..settings import Limits


class TextStream:
    """Releases text that can no longer change or be cut.

    piece   token id -> the bytes it prints, perhaps a part of a character
    stop    the answer ends before the first of these strings; ties go to the earlier start, then the longer one
    """

    def __init__(self, piece: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stop = tuple(stop)
        self._bytes = b""  # the beginning of a character
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; returns the characters that it makes certain.  After a stop string: `stopped` is set."""
        self._decode(self._piece(token), final=False)
        if not self._stop:
            return self._release(len(self._held))
        found = [(at, -len(s)) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found)[0])
        return self._release(len(self._held) - self._partial())

    def finish(self) -> str:
        """What is still held when the answer ends without a stop string; a broken character becomes U+FFFD."""
        self._decode(b"", final=True)
        return "" if self.stopped else self._release(len(self._held))

    def _decode(self, data: bytes, final: bool) -> None:
        data = self._bytes + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._bytes = data[used:]
        self._held += text

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _partial(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest


class AnswerText:
    """One answer as text, token by token, and where it ends.

    piece, is_end   of a token: the bytes it prints, and whether it ends an answer
    most            tokens that there is room for
    emitted         tokens so far, without the end token
    finish_reason   None until the answer has ended: "stop" (end token or stop string) or "length"
    """

    def __init__(self, piece: Callable[[int], bytes], is_end: Callable[[int], bool], limits: Limits, most: int) -> None:
        self._text, self._is_end = TextStream(piece, limits.stop), is_end
        self._ignore_eos, self._most = limits.ignore_eos, most
        self.emitted = 0
        self.finish_reason: str | None = None

    def take(self, token: int) -> tuple[str, int | None]:
        """The characters that a token makes certain, and the token; None for an end token, which is no part of the
        answer."""
        if self._is_end(token) and not self._ignore_eos:
            self.finish_reason = "stop"
            return self._text.finish(), None
        self.emitted += 1
        text = self._text.push(token)
        if self._text.stopped:
            self.finish_reason = "stop"
        elif self.emitted >= self._most:
            self.finish_reason = "length"
            text += self._text.finish()
        return text, token
