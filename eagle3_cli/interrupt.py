"""What ends a command from outside: Ctrl-C, SIGTERM, SIGHUP.

Each becomes an exception in the main thread, KeyboardInterrupt or `Terminated`, so that unfinished files vanish, child
processes end and the terminal is left in order.  Only a Python function that llama.cpp calls must not raise: ctypes
would print the exception and go on.  A signal that arrives there waits: the function tells llama.cpp to stop
(`stop_wanted`), and `check` raises once llama.cpp has returned.
"""

from __future__ import annotations

import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NoReturn

_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

_called_from_c: set[CodeType] = set()
_waiting: int | None = None  # a signal that arrived where nothing can be raised
_listening = False


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived.  number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# ---- where nothing can be raised ------------------------------------------------------------------------


def called_from_c(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a Python function that a C library calls: signals that arrive in it, or below it, wait for `check`."""
    _called_from_c.add(function.__code__)
    return function


def stop_wanted() -> bool:
    """Whether a signal waits for `check`.  Such a function ends the library's work where the library lets it."""
    return _waiting is not None


def check() -> None:
    """Raise what a waiting signal asks for.  Call it where the library has returned."""
    global _waiting
    if _waiting is not None and _in_main_thread():
        number, _waiting = _waiting, None
        raise _exception(number)


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


def can_wait() -> bool:
    """Whether asking `stop_wanted` makes sense: Python runs handlers in the main thread, and a library that asks from
    another one would wait for the first to let go of the interpreter, each time."""
    return _listening and _in_main_thread()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise what the signal asks for, here or in `check`."""
    global _waiting
    _waiting = number
    while frame is not None:
        if frame.f_code in _called_from_c:
            return
        frame = frame.f_back
    check()


# ---- the whole command ----------------------------------------------------------------------------------


def listen() -> None:
    """Let the signals that end a command raise from now on.  What is ignored (nohup, a job in the background) or
    handled by somebody else stays so."""
    global _listening
    if not _in_main_thread():  # only there can signals be handled
        return
    _listening = True
    for number in _ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def stop_listening() -> None:
    """The interpreter is about to end: from now on a signal ends the process at once, without a traceback."""
    for number in _ENDING:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)


def raising() -> list[int]:
    """The signals that raise where they arrive.  Who handles them in its own way for a while has to put them back."""
    return [number for number in _ENDING if signal.getsignal(number) is _end]


def _end(number: int, frame: FrameType | None) -> None:
    _leave_a_reader_that_does_not_read()
    _raise(number, frame)


def _leave_a_reader_that_does_not_read() -> None:
    """A write to a full pipe would wait once more, for the last line break."""
    from .console import silence

    try:
        blocked = sys.stdout is not None and not select.select([], [sys.stdout], [], 0)[1]
    except (OSError, ValueError):  # closed, no file behind it, or a system where select takes sockets alone
        return
    if blocked:
        silence(sys.stdout)


# ---- one answer, one training ---------------------------------------------------------------------------


class Asked:
    """True once a signal has asked for the end.  number: of that signal, 0 before."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> bool:
        return self.number != 0

    def end(self) -> NoReturn:
        """Raise what the signal asks for."""
        raise _exception(self.number or signal.SIGINT)


@contextmanager
def gentle_interrupt(
    begun: Callable[[], bool] = lambda: True, signals: Sequence[int] = (signal.SIGINT,)
) -> Iterator[Asked]:
    """Within: the first of these signals after `begun` only makes the result true, any other raises as ever.

    So an answer ends between two tokens, where the engine's caches are whole, and a training between two steps.
    """
    asked = Asked()
    if not _in_main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked() or not begun():
            _raise(number, frame)
        else:
            asked.number = number

    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
