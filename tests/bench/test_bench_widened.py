"""Variants of a tiny target: the same function, other sizes and types, and what is refused."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny

from eagle3_cli.bench.widened import TYPES, write_variant
from eagle3_cli.convert.gguf_header import read_gguf
from eagle3_cli.engine import load_engine
from eagle3_cli.errors import FileError, OptionError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
variants = importlib.import_module("variants")

FFN, OLD = 256, tiny.TARGET.ffn
PROMPT = list(range(40, 60))
FLOATS = ("f32", "f16", "bf16")
CHANGED = {"general.file_type", "general.name", "llama.feed_forward_length"}


def written(folder, source, outtype, ffn=None):
    path = folder / f"{outtype}-{ffn}.gguf"
    write_variant(source, path, outtype, ffn)
    return path


def tensors(path):
    """name -> (type's name, float32 values)"""
    return {
        t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32))
        for t in gguf.GGUFReader(path).tensors
    }


def said(path):
    """Logits after a prompt, and a greedy answer to it."""
    runtime = RuntimeSettings(**tiny.EXACT, ctx_size=256, batch=32, threads=1)
    with load_engine(PairSettings(path, None, "--no-draft"), runtime) as engine:
        logits = engine.decoder.logits_after(PROMPT)
        pieces = engine.stream(PROMPT, SamplingSettings(temperature=0.0, seed=0), Limits(32))
        return logits, [piece.token for piece in pieces]


# ---- the same function ----


@pytest.mark.parametrize("outtype", TYPES)
def test_a_widened_target_answers_as_the_same_type_does_without(tiny_target, tmp_path, outtype):
    """Only sums may be rounded otherwise, because they have more terms."""
    plain, tokens = said(written(tmp_path, tiny_target.path, outtype))
    widened, wide_tokens = said(written(tmp_path, tiny_target.path, outtype, FFN))
    assert np.abs(plain - widened).max() < 1e-5 * np.abs(plain).max()
    assert wide_tokens == tokens


def test_a_variant_in_f32_is_the_target(tiny_target, tmp_path):
    path = written(tmp_path, tiny_target.path, "f32")
    assert np.array_equal(said(path)[0], said(tiny_target.path)[0])


@pytest.mark.parametrize("outtype", TYPES)
def test_added_columns_are_zero_and_added_rows_as_large_as_the_sources(tiny_target, tmp_path, outtype):
    found = tensors(written(tmp_path, tiny_target.path, outtype, FFN))
    same = tensors(written(tmp_path, tiny_target.path, outtype))
    for block in range(tiny.TARGET.layers):
        down = found.pop(f"blk.{block}.ffn_down.weight")[1]
        assert not down[:, OLD:].any()
        assert np.array_equal(down[:, :OLD], same.pop(f"blk.{block}.ffn_down.weight")[1])
        for part in ("gate", "up"):
            name = f"blk.{block}.ffn_{part}.weight"
            rows, before = found.pop(name)[1], same.pop(name)[1]
            assert rows.shape == (FFN, tiny.TARGET.width)
            assert np.array_equal(rows[:OLD], before)
            assert np.std(rows[OLD:]) == pytest.approx(np.std(before), rel=0.1)
    assert found.keys() == same.keys()
    for name, (kind, values) in found.items():
        assert kind == (outtype.upper() if values.ndim == 2 else "F32")
        assert np.array_equal(values, same[name][1])


def test_the_same_call_writes_the_same_file(tiny_target, tmp_path):
    first = written(tmp_path, tiny_target.path, "q8_0", FFN).read_bytes()
    assert written(tmp_path, tiny_target.path, "q8_0", FFN).read_bytes() == first


@pytest.mark.parametrize("source", ["q4_1", "bf16"])
def test_a_quantised_source_is_read_and_tensors_of_the_wanted_type_are_copied(tiny_target, tmp_path, source):
    path = written(tmp_path, tiny_target.path, source)
    again = tmp_path / "again.gguf"
    write_variant(path, again, source)
    assert again.read_bytes() == path.read_bytes()
    write_variant(path, again, "f32")
    for name, (_, values) in tensors(again).items():
        assert np.array_equal(values, tensors(path)[name][1])


# ---- metadata ----


def test_metadata_are_copied_byte_by_byte_apart_from_what_changed(tmp_path):
    source = tiny.write_target(tmp_path / "source.gguf", general__name="Tiny", general__file_type=0).path
    plain, widened = written(tmp_path, source, "bf16"), written(tmp_path, source, "bf16", FFN)
    before, same, wide = (read_gguf(path) for path in (source, plain, widened))
    assert list(same.fields) == list(wide.fields) == list(before.fields)
    for name, field in before.fields.items():
        assert wide.fields[name].raw == field.raw or name in CHANGED, name
        assert same.fields[name].raw == field.raw or name == "general.file_type", name
    assert wide.value("general.name") == f"Tiny (widened: feed-forward length {FFN})"
    assert wide.value("llama.feed_forward_length") == FFN
    assert wide.value("general.file_type") == same.value("general.file_type") == gguf.LlamaFileType.MOSTLY_BF16
    assert list(wide.tensors) == list(before.tensors)


def test_a_source_without_a_name_is_named_after_its_file(tiny_target, tmp_path):
    wide = read_gguf(written(tmp_path, tiny_target.path, "q4_0", FFN))
    assert wide.value("general.name") == f"target (widened: feed-forward length {FFN})"


# ---- what is refused ----


@pytest.mark.parametrize(
    ("outtype", "ffn", "message"),
    [
        ("q4_k", None, r"--type: expected one of f32, f16, bf16, q8_0, q4_0, q4_1, got q4_k\."),
        ("bf16", OLD, r"--ffn: expected more than the 96 of the source, got 96\."),
        ("bf16", 0, r"--ffn: expected more than the 96 of the source, got 0\."),
        ("q4_0", 100, r"--ffn: expected a multiple of 32 for q4_0, got 100\."),
        ("q4_1", 130, r"--ffn: expected a multiple of 32 for q4_1, got 130\."),
    ],
)
def test_a_type_or_a_length_that_does_not_fit(tiny_target, tmp_path, outtype, ffn, message):
    with pytest.raises(OptionError, match=message):
        write_variant(tiny_target.path, tmp_path / "o.gguf", outtype, ffn)
    assert not list(tmp_path.iterdir())


def test_a_source_whose_rows_are_no_whole_blocks(tmp_path):
    source = tiny.write_target(tmp_path / "source.gguf", replace(tiny.TARGET, ffn=80)).path
    with pytest.raises(FileError, match=r"ffn_down.weight: expected rows of a multiple of 32 for q4_0, got 80\."):
        write_variant(source, tmp_path / "o.gguf", "q4_0", 128)
    write_variant(source, tmp_path / "o.gguf", "bf16", 81)
    assert tensors(tmp_path / "o.gguf")["blk.0.ffn_down.weight"][1].shape == (tiny.TARGET.width, 81)


def test_another_architecture(tiny_drafters, tmp_path):
    with pytest.raises(FileError, match=r"random\.gguf: expected the architecture llama, got eagle3\."):
        write_variant(tiny_drafters["random"].path, tmp_path / "o.gguf", "bf16")


def test_a_block_without_a_gate_and_one_of_another_length(tmp_path):
    weights = tiny.target_weights()
    gate = weights.pop("blk.3.ffn_gate.weight")
    source = tiny.write_target(tmp_path / "source.gguf", weights=weights).path
    with pytest.raises(FileError, match=r"blk\.3\.ffn_gate\.weight: expected shape \[96, 64\], got no such tensor\."):
        write_variant(source, tmp_path / "o.gguf", "bf16")
    tiny.write_target(source, weights={**weights, "blk.3.ffn_gate.weight": gate[:64]})
    with pytest.raises(FileError, match=r"blk\.3\.ffn_gate\.weight: expected shape \[96, 64\], got \[64, 64\]\."):
        write_variant(source, tmp_path / "o.gguf", "bf16")


def test_a_bias_is_refused_only_where_it_would_have_to_grow(tmp_path):
    weights = {**tiny.target_weights(), "blk.0.ffn_up.bias": np.zeros(OLD, np.float32)}
    source = tiny.write_target(tmp_path / "source.gguf", weights=weights).path
    with pytest.raises(FileError, match=r"blk\.0\.ffn_up\.bias: expected no bias"):
        write_variant(source, tmp_path / "o.gguf", "bf16", FFN)
    write_variant(source, tmp_path / "o.gguf", "bf16")


def test_damaged_sources_and_outputs_that_cannot_be(tiny_target, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_target.path.read_bytes()[:-200])
    with pytest.raises(FileError, match=r"cut\.gguf: truncated: \S+ ends behind the end of the file"):
        write_variant(cut, tmp_path / "o.gguf", "bf16")
    with pytest.raises(FileError, match="no such directory"):
        write_variant(tiny_target.path, tmp_path / "absent" / "o.gguf", "bf16")
    with pytest.raises(FileError, match="is a directory"):
        write_variant(tiny_target.path, tmp_path, "bf16")
    with pytest.raises(OptionError, match="is also the source"):
        write_variant(cut, cut, "bf16")
    part = tiny.write_target(tmp_path / "part.gguf", split__count=2).path
    with pytest.raises(FileError, match=r"part\.gguf: expected a model in one file, got a part of 2\."):
        write_variant(part, tmp_path / "o.gguf", "bf16")


def test_a_failure_leaves_an_old_output_as_it_was(tmp_path):
    weights = tiny.target_weights()
    weights["blk.4.ffn_down.weight"] = np.full_like(weights["blk.4.ffn_down.weight"], np.nan)
    source = tiny.write_target(tmp_path / "source.gguf", weights=weights).path
    output = tmp_path / "o.gguf"
    output.write_text("old")
    with pytest.raises(FileError, match=r"source\.gguf: blk\.4\.ffn_down\.weight: holds NaN or infinite values\."):
        write_variant(source, output, "bf16")
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.gguf", "source.gguf"]


# ---- the program ----


def test_the_program_writes_a_variant_and_says_its_size(tiny_target, tmp_path, capsys):
    output = tmp_path / "o.gguf"
    assert variants.main([str(tiny_target.path), "-o", str(output), "--type", "q4_0", "--ffn", str(FFN)]) == 0
    assert read_gguf(output).value("llama.feed_forward_length") == FFN
    assert f"{output}: 0 MB in" in capsys.readouterr().err
    assert variants.main([str(tiny_target.path), "-o", str(output), "--ffn", "3"]) == 2
    assert "error: --ffn: expected more than" in capsys.readouterr().err
