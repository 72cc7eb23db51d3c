"""Weights in pages of 2 MB.

Decoding reads every weight for every token.  With pages of 4 kB the processor looks up as many addresses as it reads
pages; where it is a virtual machine's, each look-up is two.  Linux gives larger pages to memory that asks for them, and
llama.cpp does not ask.  A model's buffers exist, and are still empty, when its loader reports progress for the first
time: then is the time.  Elsewhere than on Linux, and for weights that are mapped from the file, nothing is done.
"""

from __future__ import annotations

import bisect
import ctypes
from pathlib import Path

HUGE = 2 << 20  # bytes of a page
_ADVICE = 14  # MADV_HUGEPAGE
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
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if ranges else None
    if madvise is None:
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(end - start for start, end in ranges if madvise(start, end - start, _ADVICE) == 0)
