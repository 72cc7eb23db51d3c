"""The comparison itself: it must see every kind of difference.  Needs neither the script nor the network."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreeing_cases import agreeing_cases
from choice_cases import choice_cases
from compare import script_failure, summary, surprises
from drafters import Drafter, byte_level_bpe, write_checkpoint
from fault_cases import fault_cases
from gguf import GGUFWriter
from gguf_difference import differences
from loading import loadable
from stored_files import array, sentencepiece_model

from eagle3_cli.convert.checkpoint import open_checkpoint


def write(path: Path, tensors: dict[str, np.ndarray[Any, Any]], **keys: int) -> Path:
    writer = GGUFWriter(path, "eagle3")
    for name, value in keys.items():
        writer.add_uint32(name, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONES = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("tensors", "keys", "expected"),
    [
        ({"a.weight": ONES}, {"n": 1}, {}),
        ({"a.weight": ONES}, {"n": 2}, {"n": "differs"}),
        ({"a.weight": ONES}, {}, {"n": "only eagle3"}),
        ({"a.weight": ONES}, {"n": 1, "m": 1}, {"m": "only script"}),
        ({"a.weight": ONES * 2}, {"n": 1}, {"a.weight": "differs"}),
        ({"a.weight": ONES * np.float32(1 + 2**-23)}, {"n": 1}, {"a.weight": "rounding"}),
        ({"a.weight": ONES * np.float32(1 + 2**-20)}, {"n": 1}, {"a.weight": "differs"}),
        ({"a.weight": ONES.T}, {"n": 1}, {"a.weight": "shape"}),
        ({"a.weight": ONES.astype(np.float16)}, {"n": 1}, {"a.weight": "type"}),
        ({"b.weight": ONES}, {"n": 1}, {"a.weight": "only eagle3", "b.weight": "only script"}),
    ],
)
def test_each_kind_of_difference_is_seen(
    tmp_path: Path, tensors: dict[str, Any], keys: dict[str, int], expected: dict[str, str]
) -> None:
    ours = write(tmp_path / "ours.gguf", {"a.weight": ONES}, n=1)
    script = write(tmp_path / "script.gguf", tensors, **keys)
    assert differences(ours, script) == expected


def test_a_key_of_another_width_is_a_difference(tmp_path: Path) -> None:
    files = [tmp_path / "ours.gguf", tmp_path / "script.gguf"]
    for path, add in zip(files, (GGUFWriter.add_uint32, GGUFWriter.add_uint64), strict=True):
        writer = GGUFWriter(path, "eagle3")
        add(writer, "n", 1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert differences(*files) == {"n": "differs"}


def test_unexpected_other_and_missing_differences_are_surprises() -> None:
    found = {"a": "differs", "b": "only script", "c": "differs"}
    assert surprises(found, found) == []
    assert surprises(found, {"a": "differs", "b": "only eagle3"}) == [
        "unexpected: b: only script",
        "unexpected: c: differs",
    ]
    assert surprises({}, {"a": "differs"}) == ["no longer there: a: differs"]


def test_summary_counts_what_both_files_have_as_identical() -> None:
    found = {"k": "differs", "l": "only script", "m": "only eagle3", "a.weight": "type", "d2t": "only eagle3"}
    assert summary(found, (10, 5)) == (
        "keys 8 identical, 1 differs, 1 only eagle3, 1 only script; tensors 3 identical, 1 only eagle3, 1 type"
    )


@pytest.mark.parametrize(
    ("log", "failure"),
    [("INFO done\n\nexit 0\n", ""), ("INFO x\nKeyError: 'y'\n\nexit 1\n", "KeyError: 'y'"), ("\nexit -6\n", "exit -6")],
)
def test_failure_is_the_scripts_last_line(tmp_path: Path, log: str, failure: str) -> None:
    (tmp_path / "log").write_text(log)
    assert script_failure(tmp_path / "log") == failure


def test_a_file_that_llama_cpp_refuses_is_not_loadable(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.gguf", {"a.weight": ONES})
    assert loadable([bad]) == {bad: False}


def test_cases_have_distinct_names_and_one_outcome_each() -> None:
    cases = [*agreeing_cases(), *choice_cases(), *fault_cases()]
    assert len({case.name for case in cases}) == len(cases)
    for case in choice_cases() + fault_cases():
        assert case.differs or case.refused or case.script_fails or not case.loads, case.name
        assert not (case.differs and (case.refused or case.script_fails)), case.name
    assert not any(case.refused or case.script_fails for case in agreeing_cases())


@pytest.mark.parametrize("parts", [1, 3])
def test_checkpoints_hold_the_tensors_they_were_made_of(tmp_path: Path, parts: int) -> None:
    drafter = Drafter(dtype="F32")
    write_checkpoint(tmp_path / "c", drafter.tensors(), drafter.config(), parts)
    read = open_checkpoint(tmp_path / "c").tensors
    assert {name: t.shape for name, t in read.items() if name not in ("d2t", "t2d")} == drafter.shapes()
    assert np.array_equal(read["d2t"].data + np.arange(64), drafter.ids())
    assert json.loads((tmp_path / "c" / "config.json").read_text())["draft_vocab_size"] == 64


def test_bf16_is_the_upper_half_of_a_float32() -> None:
    dtype, shape, rows = array("BF16", np.array([1.0, -2.5], np.float32))
    assert (dtype, shape) == ("BF16", (2,))
    assert [struct.unpack("<f", struct.pack("<I", int(v) << 16))[0] for v in rows(0, 2)] == [1.0, -2.5]


def test_tokenizers_have_as_many_tokens_as_asked_for() -> None:
    assert sentencepiece_model(300).count(b"\x0a") >= 300
    made = byte_level_bpe(512)
    ids = [*made["model"]["vocab"].values(), *(token["id"] for token in made["added_tokens"])]
    assert ids == list(range(512))
