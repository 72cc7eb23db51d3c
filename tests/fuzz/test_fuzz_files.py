"""A small part of `make fuzz`: no file makes a reader of ours do anything but take or refuse it."""

from __future__ import annotations

import os
import signal

import fuzz_files
from fuzz_files import CASES, fuzz


def test_mutated_files_are_taken_or_refused():
    seen, faults = fuzz(first=0, count=400, seed=3)
    assert faults == []
    assert {kind.split(":")[0] for kind in seen} == {f"{case.file}, {case.read.__name__}" for case in CASES}
    assert {kind.split(": ")[1] for kind in seen} == {"taken", "refused", "counts for nothing"}


def test_a_fault_and_a_crash_are_noticed(monkeypatch):
    def fault(path):
        raise RecursionError("too deep")

    def crash(path):
        os.kill(os.getpid(), signal.SIGKILL)

    for read, words in ((fault, "RecursionError: too deep"), (crash, "the process died of signal 9")):
        case = fuzz_files.Case("curve.json", fuzz_files._nest, read)
        monkeypatch.setattr(fuzz_files, "CASES", [case])
        _, faults = fuzz(first=5, count=2, seed=0)
        assert [f.split(" ")[1].rstrip(":") for f in faults] == ["5", "6"]
        assert all(words in f for f in faults)
