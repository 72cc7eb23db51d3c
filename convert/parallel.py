"""Work on blocks of rows by all cores: ggml's conversions and numpy's larger operations release the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..llama import physical_cores

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_THREADS = 16  # beyond these the file system is the limit


def in_order(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """work(item) of each item, in the items' order, computed ahead by threads.  Equal to map(work, items).

    At most two results per thread are kept.  An exception of work is raised in its place; no further work begins then,
    nor after the iterator is closed.
    """
    threads = min(MOST_THREADS, physical_cores())
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
