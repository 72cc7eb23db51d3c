"""Weights in pages of 2 MB."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from eagle3_cli.huge_pages import HUGE, ask_for, collapse, new_memory, private_memory
from eagle3_cli.llama import Model

M = HUGE


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ([], [(0, 4 * M)], [(0, 4 * M)]),
        ([(0, 4 * M)], [(0, 4 * M)], []),
        ([(4 * M, 6 * M)], [(0, 10 * M)], [(0, 4 * M), (6 * M, 10 * M)]),
        ([(0, 4 * M)], [(2 * M, 8 * M)], [(4 * M, 8 * M)]),
        ([(0, M), (3 * M, 4 * M), (9 * M, 11 * M)], [(0, 12 * M)], [(M, 3 * M), (4 * M, 9 * M), (11 * M, 12 * M)]),
        ([(2 * M, 3 * M)], [(0, M), (5 * M, 7 * M)], [(0, M), (5 * M, 7 * M)]),
        ([], [(4096, 3 * M + 4096)], [(M, 3 * M)]),  # whole pages alone
        ([], [(4096, 2 * M - 4096)], []),
    ],
)
def test_what_is_new_in_whole_pages(before, now, new):
    assert new_memory(before, now) == new


def kilobytes(address: int, key: str) -> int:
    """Of the mapping that this address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


needs_huge_pages = pytest.mark.skipif(
    "[never]" in (Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text() if private_memory() else "[never]"),
    reason="this system has no huge pages",
)


@needs_huge_pages
def test_new_memory_is_asked_for_and_other_memory_is_left_alone():
    old = mmap.mmap(-1, 8 * M, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = private_memory()
    new = mmap.mmap(-1, 8 * M, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ranges = new_memory(before, private_memory())
    place, other = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (new, old))
    assert any(start <= place + 4 * M < end for start, end in ranges)
    assert not any(start <= other + 4 * M < end for start, end in ranges)
    assert ask_for(ranges) >= 6 * M
    for memory in (old, new):
        memory[: 8 * M] = bytes(8 * M)
    assert kilobytes(place + 4 * M, "AnonHugePages") > 0 or kilobytes(place + 4 * M, "THPeligible") == 1
    assert ask_for([]) == 0


@needs_huge_pages
@pytest.mark.parametrize("mmapped", [True, False])
def test_a_model_asks_while_its_buffers_are_empty(tiny_target, monkeypatch, mmapped):
    """Once, before anything is read; then loading goes on and reports to whom it did before."""
    asked, told = [], []
    monkeypatch.setattr("eagle3_cli.llama.ask_for", lambda ranges: asked.append((ranges, len(told))))
    model = Model(tiny_target.path, [], 0, progress=told.append, mmap=mmapped)
    model.close()
    assert len(asked) == 1
    assert asked[0][1] == 0
    assert told[0] == 0.0
    assert told[-1] == 1.0


def test_a_system_that_does_not_tell_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr("eagle3_cli.huge_pages._MAPS", tmp_path / "none")
    assert private_memory() == []
    assert new_memory([], private_memory()) == []


@needs_huge_pages
def test_pages_in_use_are_merged_and_others_are_left_empty():
    memory = mmap.mmap(-1, 12 * M, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -(-place // M) * M
    offset = start - place
    memory[offset : offset + 4 * M] = bytes(4 * M)
    merged = collapse([(start, start + 8 * M)])
    if merged:  # Linux before 6.1 does not know how
        assert merged == 4 * M
        assert kilobytes(start, "AnonHugePages") >= 4096
    assert memory[offset : offset + 4 * M] == bytes(4 * M)
