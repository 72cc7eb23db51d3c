"""`eagle3 inspect`: every kind of file, alone and with a target, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import tiny
from checkpoints import LAYERS, config

from eagle3_cli.__main__ import run


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Any:
    """inspect(*args) -> (exit code, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        code = run(["inspect", *map(str, args)])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def pair(tiny_target: tiny.TinyModel, tiny_drafters: dict[str, tiny.TinyModel]) -> tuple[Path, Path]:
    return tiny_target.path, tiny_drafters["good"].path


def test_a_target(inspect, pair):
    code, out, err = inspect(pair[0])
    assert (code, err) == (0, "")
    assert "llama model" in out
    assert f"{tiny.TARGET.layers} layers, {tiny.VOCAB} tokens, width 64, trained context 8192" in out
    assert "chat template: yes" in out
    assert out.endswith("runs: yes\n")


def test_a_drafter(inspect, pair):
    code, out, _ = inspect(pair[1])
    assert code == 0
    assert "EAGLE-3 drafter" in out
    assert "aux layers: inputs of 1, 2, 4\n" in out
    assert "embeddings: own; head: own; draft vocabulary: identity" in out
    assert "switches: norm_before_residual\n" in out


def test_a_pair_that_fits(inspect, pair):
    code, out, _ = inspect(pair[1], "--target", pair[0])
    assert (code, out.splitlines()[-1]) == (0, f"fits {pair[0]}: yes")


def test_a_pair_that_does_not_fit_says_why_and_fails(inspect, pair, tmp_path):
    other = tiny.write_target(tmp_path / "other.gguf", tokens=[*tiny.TOKENS[:7], "other", *tiny.TOKENS[8:]])
    code, out, err = inspect(pair[1], "--target", other.path)
    assert (code, err) == (1, "")
    assert f"fits {other.path}: no, " in out
    assert "its token 7 is" in out
    facts = json.loads(inspect(pair[1], "--target", other.path, "--json")[1])
    assert (facts["usable"], facts["target"]) == (False, str(other.path))


def test_a_checkpoint(inspect, target, tmp_path):
    source = checkpoints.write(tmp_path / "c", checkpoints.tensors(dtype="BF16"))
    code, out, _ = inspect(source, "--target", target)
    assert code == 0
    assert "SpecForge checkpoint, 15 tensors (13 BF16, 1 I64, 1 BOOL)" in out
    assert f"aux layers: inputs of 2, 12, 21 (absent from the config, so the default [2, n/2, n-3] of {LAYERS}" in out
    assert out.endswith(f"fits {target}: yes\n")
    assert list(tmp_path.iterdir()) == [source]


def test_a_checkpoint_that_needs_a_target_says_so(inspect, tmp_path):
    code, out, _ = inspect(checkpoints.write(tmp_path / "c", checkpoints.tensors()))
    assert code == 1
    assert "converts: no, " in out
    assert "Give --target" in out


def test_a_checkpoint_that_cannot_run_says_what_it_is(inspect, target, tmp_path):
    source = checkpoints.write(tmp_path / "c", checkpoints.tensors(), config(architectures=["DFlashDraftModel"]))
    code, out, _ = inspect(source, "--json")
    facts = json.loads(out)
    assert code == 1
    assert facts["kind"] == "checkpoint"
    assert "names DFlash" in facts["reason"]


def test_a_converted_file_says_what_its_checkpoint_said(inspect, target, tmp_path):
    settings = config(norm_output=True, sliding_window=9, use_sliding_window=True, norm_before_residual=True)
    source = checkpoints.write(tmp_path / "c", checkpoints.tensors(), settings)
    checkpoints.run(source, target, tmp_path / "d.gguf")
    before = json.loads(inspect(source, "--target", target, "--json")[1])
    after = json.loads(inspect(tmp_path / "d.gguf", "--json")[1])
    same = ("aux_layers", "embeddings", "head", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
            "final_norm", "sliding_window")  # fmt: skip
    assert [before[k] for k in same] == [after[k] for k in same]
    assert after["made_for"] == "Tiny target"
    assert after["vocabulary"] == "own"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.gguf", None, "no such file or directory"),
        ("notes.txt", b"hello", "expected a .safetensors or .bin file"),
        ("cut.gguf", b"GGUF\x03\x00", "truncated or damaged"),
        ("cut.safetensors", b"\x08", "expected a safetensors header"),
    ],
)
def test_what_cannot_be_read_is_an_error(inspect, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = inspect(tmp_path / name)
    assert (code, out) == (2, "")
    assert words in err


def test_a_target_for_a_target_has_no_effect(inspect, pair):
    code, out, err = inspect(pair[0], "--target", pair[0])
    assert (code, out) == (2, "")
    assert "--target: has no effect" in err
