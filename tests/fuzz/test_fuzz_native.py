"""A small part of `make fuzz`, here without the sanitizers."""

from __future__ import annotations

import fuzz_native
from fuzz_native import Calls, fuzz

from eagle3_cli import _native


def test_every_function_does_its_work_or_refuses():
    seen, faults = fuzz(first=0, count=3000, seed=4)
    assert faults == []
    assert set(seen) == {f"{name}: {how}" for name in Calls.NAMES for how in ("done", "refused")}


def test_an_exception_of_another_kind_is_a_fault(monkeypatch):
    def fails(*_):
        raise MemoryError("gone")

    monkeypatch.setattr(_native, "argmax", fails)
    monkeypatch.setattr(fuzz_native.Calls, "NAMES", ("argmax",))
    seen, faults = fuzz(first=7, count=1, seed=0)
    assert seen == {"fault": 1}
    assert faults == ["case 7: MemoryError: gone"]
