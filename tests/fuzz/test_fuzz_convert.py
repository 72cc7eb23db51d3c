"""A small part of `make fuzz`: no input makes the converter do anything but convert or refuse."""

from __future__ import annotations

from fuzz_convert import CASES, fuzz


def test_mutated_inputs_are_converted_or_refused():
    seen, faults = fuzz(first=0, count=200, seed=7)
    assert faults == []
    assert len({kind.split(":")[0] for kind in seen}) == len({changed for _, _, changed, _ in CASES})
    assert {kind.split(": ")[1] for kind in seen} == {"exit 0", "exit 2"}
