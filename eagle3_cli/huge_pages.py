"""Weights and KV caches in pages of 2 MB.

Decoding reads all of them for every token.  With pages of 4 kB the processor looks up as many addresses as it reads
pages; where it is a virtual machine's, each look-up is two.  Linux gives larger pages to memory that asks for them, and
llama.cpp does not ask.  A model's buffers exist, and are still empty, when its loader reports progress for the first
time: then is the time.  A KV cache is zeroed as soon as it exists, so its pages are merged afterwards.  Elsewhere than
on Linux, and for weights that are mapped from the file, nothing is done.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
from pathlib import Path

HUGE = 2 << 20  # bytes of a page
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
_ADVICE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE (Linux 6.1)
_MOST = 1 << 29  # bytes that are merged at most: a copy of them, about 0.3 s
_MAPS = Path("/proc/self/maps")

Range = tuple[int, int]


def private_memory() -> list[Range]:
    """Address ranges of this process that no file is behind, ascending; none where the system does not tell."""
    try:
        lines = _MAPS.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) == 5 and fields[1].startswith("rw-p"):
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def new_memory(before: list[Range], now: list[Range]) -> list[Range]:
    """What is in `now` and not in `before`, both ascending: whole huge pages of it."""
    found = []
    ends = [end for _, end in before]
    for start, end in now:
        at = bisect.bisect_right(ends, start)
        while at < len(before) and before[at][0] < end:
            found.append((start, before[at][0]))
            start = before[at][1]
            at += 1
        found.append((start, end))
    whole = [(-(-start // HUGE) * HUGE, end // HUGE * HUGE) for start, end in found]
    return [(start, end) for start, end in whole if start < end]


def ask_for(ranges: list[Range]) -> int:
    """Ask for huge pages there; bytes that the system has agreed to."""
    return sum(end - start for start, end in ranges if _agreed(start, end - start, _ADVICE))


def collapse(ranges: list[Range]) -> int:
    """Merge the small pages that are in use there; bytes in huge pages afterwards."""
    done = 0
    for start, end in ranges:
        for page in range(start, end, HUGE):
            if done >= _MOST:
                return done
            done += HUGE * _agreed(page, HUGE, _COLLAPSE)  # refused where nothing is in use
    return done


def _agreed(start: int, size: int, advice: int) -> bool:
    """Whether the system takes the advice."""
    return _madvise is not None and _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0
