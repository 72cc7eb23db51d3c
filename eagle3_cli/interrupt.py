"""Ctrl-C as a wish to stop at the next good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def gentle_interrupt() -> Iterator[Callable[[], bool]]:
    """Within: the first Ctrl-C only makes the returned function true, a second one is a KeyboardInterrupt.

    So an answer ends between two tokens, where the engine's caches are whole, and a training between two steps.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield asked.is_set
        return

    def note(_signal: int, _frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
