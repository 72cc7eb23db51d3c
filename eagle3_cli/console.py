"""The only writer to stdout and stderr.

stdout carries the answer or one JSON document, nothing else.  Errors and requested reports go to stderr;
notes and progress go there too, but only when it is a terminal.  A reader that closed stdout is a
`BrokenPipeError` for `__main__`; a stderr that cannot be written is ignored, because nobody is reading.

What a model or a file says may hold sequences that move the cursor, change a terminal's title or write its clipboard.
On a terminal the answer's control characters are shown as JSON writes them (\\u001b), unless --raw-output; through a
pipe its bytes are what the model said.  On stderr they are always shown: a log ends up on a terminal, too.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import IO, Any

from .errors import Eagle3Error

RED, DIM, BOLD = "31;1", "2", "1"
CLEAR_LINE = "\r\x1b[K"
BAR = 24  # characters of a progress bar

# C0 but line break and tab (a carriage return overwrites the line), DEL and C1, of which each makes one sequence with
# what follows; line and paragraph separator; embeddings, overrides and isolates of text direction, which show a text in
# another order than it has.  Marks of direction (U+200E, U+200F) and joiners stay: scripts and emoji need them.
_SHOWN = {
    code: f"\\u{code:04x}"
    for codes in (range(0x20), range(0x7F, 0xA0), range(0x2028, 0x202F), range(0x2066, 0x206A))
    for code in codes
    if chr(code) not in "\n\t"
}


def visible(text: str) -> str:
    """The text with its control characters written out.  Character by character, so a sequence that is split over
    several texts is caught, too."""
    return text.translate(_SHOWN)


class Console:
    """Where a command's output goes.

    quiet   silences notes and progress, never errors or reports
    raw     control characters of the answer reach a terminal as they are
    """

    def __init__(self, quiet: bool = False, raw: bool = False) -> None:
        self.quiet = quiet
        self.raw = raw
        self._last = "\n"
        self._progress = ""
        self._aside = False  # an unfinished line of it is on stderr

    # ---- stdout -----------------------------------------------------------------------------------

    def text(self, text: str, style: str = "") -> None:
        """A part of the answer, shown at once.  style: SGR codes, for a terminal that `shows_styles`."""
        last = text[-1:]
        if not self.raw and _is_terminal(sys.stdout):
            text = visible(text)
        self._answer(f"\x1b[{style}m{text}\x1b[0m" if style and text else text, last)

    def drawn(self, text: str) -> None:
        """A part of the answer that was laid out for this terminal; no control character of a model is left in it."""
        self._answer(text, text[-1:])

    @property
    def shows_styles(self) -> bool:
        """Whether stdout is a terminal that has colours and underlines."""
        return _is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"

    def _answer(self, text: str, last: str) -> None:
        """Write to stdout.  last: the character that is at the end of what somebody sees."""
        if not text or sys.stdout is None:
            return
        self.clear_progress()
        self._end_aside()
        self._last = last
        try:
            sys.stdout.write(_encodable(text, sys.stdout))
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Eagle3Error(
                f"stdout: {error.strerror or error}.", "The answer could not be written there."
            ) from error

    def end_text(self) -> None:
        """Close the answer's last line if the answer did not, and that of what was said beside it."""
        self._end_aside()
        if self._last != "\n":
            self.text("\n")

    def document(self, value: Any) -> None:
        """One JSON document: indented on a terminal, one line elsewhere.  What `visible` writes out is still JSON."""
        self._json(value, indent=2 if _is_terminal(sys.stdout) else None)

    def record(self, value: Any) -> None:
        """One of many JSON documents, each on a line of its own."""
        self._json(value, indent=None)

    def _json(self, value: Any, indent: int | None) -> None:
        utf8 = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
        self.text(json.dumps(json_ready(value), ensure_ascii=not utf8, indent=indent, allow_nan=False) + "\n")

    # ---- stderr -----------------------------------------------------------------------------------

    def error(self, message: str, hint: str | None = None) -> None:
        self._stderr(f"{self._paint('error:', RED)} {visible(message)}\n")
        if hint:
            self._stderr(f"{self._paint('hint:', BOLD)} {visible(hint)}\n")

    def report(self, text: str) -> None:
        """Something the user asked for beside the answer (--stats, the demo's numbers)."""
        self._stderr(visible(text) + "\n")

    def note(self, text: str) -> None:
        """Something nice to know; only on a terminal."""
        if self.terminal and not self.quiet:
            self._stderr(self._paint(visible(text), DIM) + "\n")

    def aside(self, text: str) -> None:
        """A part of what a model says beside the answer, its thinking: dimmed, as it comes."""
        if text and not self.quiet:
            self.clear_progress()
            self._write_stderr(self._paint(visible(text), DIM))
            self._aside = text[-1] != "\n"

    def _end_aside(self) -> None:
        if self._aside:
            self._aside = False
            self._write_stderr("\n")

    def prompt_mark(self, mark: str) -> None:
        """Ask for a line where `input` must not: on stderr, because stdout is not a terminal."""
        if self.terminal:
            self._stderr(mark)

    def progress(self, label: str, fraction: float) -> None:
        """A bar that rewrites itself: `fraction` 0..1.  Only on a terminal that can clear a line."""
        if not self.terminal or self.quiet or os.environ.get("TERM") == "dumb":
            return
        fraction = min(1.0, max(0.0, fraction))
        line = f"[{'#' * int(BAR * fraction):{BAR}}] {fraction:4.0%} {visible(label)}"
        if line != self._progress:
            self._stderr(CLEAR_LINE + self._paint(line, DIM))
            self._progress = line

    def clear_progress(self) -> None:
        if self._progress:
            self._progress = ""
            self._write_stderr(CLEAR_LINE)

    @property
    def terminal(self) -> bool:
        """Whether somebody is looking at stderr."""
        return _is_terminal(sys.stderr)

    def traceback(self, text: str) -> None:
        self._stderr(visible(text))

    def _stderr(self, text: str) -> None:
        self.clear_progress()
        self._end_aside()
        self._write_stderr(text)

    def _write_stderr(self, text: str) -> None:
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(_encodable(text, sys.stderr))
            sys.stderr.flush()
        except (OSError, ValueError):
            silence(sys.stderr)

    def _paint(self, text: str, code: str) -> str:
        plain = not self.terminal or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return text if plain else f"\x1b[{code}m{text}\x1b[0m"


def silence(stream: IO[str] | None) -> None:
    """Send what is left in the stream's buffer nowhere, so that the interpreter's last flush cannot fail."""
    try:
        if stream is not None:
            target = os.open(os.devnull, os.O_WRONLY)
            os.dup2(target, stream.fileno())
            os.close(target)
    except (OSError, ValueError):  # closed, or no file behind it
        pass


def json_ready(value: Any) -> Any:
    """The same value in what JSON can say: infinities as "inf" and "-inf", not-a-number as null."""
    if isinstance(value, dict):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _encodable(text: str, stream: IO[str]) -> str:
    """Characters that the stream's encoding lacks become question marks instead of a crash."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
