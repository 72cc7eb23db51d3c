"""Converted files answer: `eagle3 convert`, then `eagle3 generate`, for every kind of drafter."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tiny
from checkpoints import HT, config

from eagle3_cli.__main__ import run

NORMS: checkpoints.Tensors = {f"fc_norm.{i}.weight": ("F32", np.full(HT, i + 0.5, "<f4")) for i in range(3)}
INPUT_NORM: checkpoints.Tensors = {"input_norm.weight": ("F32", np.ones(3 * HT, "<f4"))}
IDS = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention"]}
RUN = ["--temp", "0", "-n", "24", "--threads", "1", "-c", "512", "--flash-attn", "off", "--cache-type-k", "f32",
       "--cache-type-v", "f32", "--json"]  # fmt: skip


def without(*names: str) -> checkpoints.Tensors:
    return {k: v for k, v in checkpoints.tensors().items() if k not in names}


KINDS: dict[str, tuple[checkpoints.Tensors, dict[str, Any]]] = {
    "plain": (checkpoints.tensors(), config(**IDS)),
    "norm before fc": (
        checkpoints.tensors() | INPUT_NORM,
        config(norm_before_fc=True, norm_before_residual=True, **IDS),
    ),
    "EAGLE 3.1": (checkpoints.tensors() | NORMS, config(fc_norm=True, norm_output=True, **IDS)),
    "sliding window": (checkpoints.tensors(), config(**IDS, **SLIDING)),
    "no final norm": (without("norm.weight"), config(eagle_config={"use_last_layernorm": False}, **IDS)),
    "partial RoPE": (checkpoints.tensors(), config(partial_rotary_factor=0.5, **IDS)),
    "borrowed head": (without("lm_head.weight", "d2t", "t2d"), config(draft_vocab_size=None, **IDS)),
}


@pytest.fixture
def answer(tiny_target: tiny.TinyModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """answer(drafter or None, *flags) -> the JSON document of one answer to a long prompt."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))

    def ask(drafter: Path | None, *flags: str) -> dict[str, Any]:
        drafting = ["--draft", str(drafter), "--draft-tokens", "8"] if drafter else ["--no-draft"]
        pair = ["--target", str(tiny_target.path), *drafting]
        args = ["generate", "the inner thing and then the other", *pair, *RUN, *flags]
        assert run(args) == 0
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    return ask


@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_drafter_runs_and_changes_nothing(answer, tiny_target, tmp_path, kind, with_target):
    source = checkpoints.write(tmp_path / "c", *KINDS[kind])
    checkpoints.run(source, tiny_target.path if with_target else None, tmp_path / "d.gguf", outtype="f32")
    drafted, plain = answer(tmp_path / "d.gguf"), answer(None)
    assert drafted["text"] == plain["text"]
    assert drafted["speculative"]["drafted"] > 0
    assert drafted["settings"]["feedback"] == ("post" if kind == "EAGLE 3.1" else "pre")


def test_both_ways_of_feedback_can_be_had_from_one_file(answer, tiny_target, tmp_path):
    source = checkpoints.write(tmp_path / "c", *KINDS["EAGLE 3.1"])
    checkpoints.run(source, tiny_target.path, tmp_path / "d.gguf")
    assert answer(tmp_path / "d.gguf", "--feedback", "pre")["settings"]["feedback"] == "pre"
    checkpoints.run(source, tiny_target.path, tmp_path / "e.gguf", feedback="pre")
    assert answer(tmp_path / "e.gguf")["settings"]["feedback"] == "pre"
