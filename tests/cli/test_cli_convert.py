"""`eagle3 convert`: its flags reach the converter, its report reaches the user."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from eagle3_cli.commands.convert import convert as command
from eagle3_cli.commands.convert import default_output, table
from eagle3_cli.convert import AUX_CONVENTIONS, ConvertSettings, Report, TensorRow
from eagle3_cli.errors import CheckpointError
from eagle3_cli.settings import FEEDBACK


@pytest.fixture
def calls(eagle3, monkeypatch):
    """The settings that the converter was called with; an exception in the list is raised."""
    seen = []

    def convert(settings, progress=None):
        seen.append(settings)
        progress("fc.weight", 0, 0)
        progress("fc.weight", 5, 10)
        rows = (
            TensorRow("fc.weight", (4, 12), "BF16", "fc.weight", (4, 12), "F16", ""),
            TensorRow("d2t", (8,), "I64", None, None, None, "checked"),
        )
        return Report(
            "SpecForge", settings.output, 25_000_000, settings.outtype, settings.target, (2, 15, 27), "top level",
            "target", "own", "own (d2t)", "target" if settings.target else "none", "theta 10000", True, False, True,
            False, True, 2048, rows, ("rope_theta is 100000",), settings.dry_run,
        )  # fmt: skip

    monkeypatch.setattr("eagle3_cli.convert.convert", convert)
    return seen


def test_flags_reach_the_converter(eagle3, calls):
    flags = ["--outtype", "q8_0", "--config", "c.json", "--aux-convention", "input", "--feedback", "post", "--force"]
    assert eagle3("convert", "m.safetensors", "--target", "t.gguf", "-o", "d.gguf", *flags).code == 0
    assert calls == [
        ConvertSettings(
            Path("m.safetensors"), Path("t.gguf"), Path("d.gguf"), "q8_0", Path("c.json"), "input", "post", True
        )
    ]


def test_defaults_are_those_of_the_converter(eagle3, calls):
    eagle3("convert", "m", "--target", "t", "-o", "d")
    assert calls == [ConvertSettings(Path("m"), Path("t"), Path("d"))]


def test_without_a_target_or_an_output(eagle3, calls):
    result = eagle3("convert", "drafters/llama-8b/model.safetensors", "--outtype", "bf16")
    assert calls == [
        ConvertSettings(Path("drafters/llama-8b/model.safetensors"), None, Path("llama-8b-bf16.gguf"), "bf16")
    ]
    assert "tokenizer: none" in result.out


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("eagle.safetensors", "eagle-f16.gguf"),
        ("a/pytorch_model.bin", "a-f16.gguf"),
        ("a/model.safetensors.index.json", "a-f16.gguf"),
        ("/", "drafter-f16.gguf"),
    ],
)
def test_default_output_is_named_after_the_checkpoint(source, name):
    assert default_output(Path(source), "f16") == name


def test_choices_are_those_of_the_converter():
    from eagle3_cli.convert import ggml_types

    choices = {p.name: tuple(p.type.choices) for p in command.params if isinstance(p.type, click.Choice)}
    assert (choices["aux_convention"], choices["feedback"]) == (AUX_CONVENTIONS, FEEDBACK)
    assert set(choices["outtype"]) == set(ggml_types.OUTTYPES)


def test_target_can_come_from_the_variable(eagle3, calls, monkeypatch):
    """Its own: the model that answers is not the one that a checkpoint belongs to."""
    monkeypatch.setenv("EAGLE3_TARGET", "another.gguf")
    monkeypatch.setenv("EAGLE3_CONVERT_TARGET", "t.gguf")
    assert eagle3("convert", "m", "-o", "d").code == 0
    assert calls[0].target == Path("t.gguf")


def test_report_says_what_was_made(eagle3, calls):
    out = eagle3("convert", "m", "--target", "t", "-o", "d.gguf").out
    assert out.splitlines() == [
        "d.gguf: SpecForge checkpoint, f16, 25.0 MB",
        "aux layers: inputs of 2, 15, 27 (top level)",
        "embeddings: target; head: own; draft vocabulary: own (d2t)",
        "switches: norm_before_residual, fc_norm, sliding window 2048",
        "tokenizer: of the target; rope: theta 10000",
        "note: rope_theta is 100000",
    ]


def test_dry_run_needs_no_output_and_lists_the_tensors(eagle3, calls):
    out = eagle3("convert", "m.safetensors", "--target", "t", "--dry-run").out
    assert calls[0].dry_run
    assert calls[0].output == Path("m-f16.gguf")
    assert "source     shape  type  gguf       shape  type  transform" in out
    assert "fc.weight  4x12   BF16  fc.weight  4x12   F16" in out
    assert "would write m-f16.gguf: SpecForge" in out


def test_json_is_one_document(eagle3, calls):
    result = eagle3("convert", "m", "--target", "t", "-o", "d.gguf", "--json")
    assert json.loads(result.out)["aux_layers"] == [2, 15, 27]
    assert result.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["m", "--target", "t", "--feedback", "both"], "both"),
        (["--target", "t", "-o", "d"], "SOURCE"),
        (["m", "--target", "t", "-o", "d", "--outtype", "q1_k"], "q1_k"),
        (["m", "--target", "t", "-o", "d", "--dry-run", "--force"], "--force: has no effect with --dry-run"),
    ],
)
def test_bad_usage_exits_two(eagle3, calls, args, words):
    result = eagle3("convert", *args)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert calls == []


def test_converter_error_is_shown(eagle3, monkeypatch):
    def fail(settings, progress=None):
        raise CheckpointError("m: no tensor norm.weight.", "Is the download complete?")

    monkeypatch.setattr("eagle3_cli.convert.convert", fail)
    result = eagle3("convert", "m", "--target", "t", "-o", "d", "--json")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: m: no tensor norm.weight.\nhint: Is the download complete?\n"


def test_table_of_nothing_is_empty():
    assert table([]) == []
