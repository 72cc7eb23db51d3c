"""The checkpoint: what its files say, and the way through `eagle3 convert`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from core_tools import AUX, EMBEDDING, HEAD, HT, SHAPE, V, export, make, random_samples
from safetensors.torch import load_file

from eagle3_cli.errors import OptionError
from eagle3_cli.train.export import CheckpointFacts, checkpoint_config, write_checkpoint
from eagle3_cli.train.model import FeatureDrafter

REDUCED = np.arange(1, V, 3)
FACTS = CheckpointFacts(AUX, 8192, bos=tiny.END_OF_TEXT, eos=tiny.IM_END)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"d2t": REDUCED, "scale": True, "norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "own embeddings": {"hidden": 48, "heads": 6, "kv_heads": 3, "head_dim": 8, "d2t": REDUCED},
}


@pytest.mark.parametrize("kind", KINDS)
def test_convert_reads_the_checkpoint_without_a_remark(kind: str, tiny_target: tiny.TinyModel, tmp_path: Path) -> None:
    drafter = make(**KINDS[kind])
    _, report = export(drafter, tiny_target.path, tmp_path)
    shape = drafter.shape
    assert report.notes == ()
    assert report.family == "SpecForge"
    assert report.aux_layers == AUX
    assert report.embeddings == ("own" if shape.own_embeddings else "target")
    assert report.d2t == ("own (d2t)" if shape.draft_vocab < V else "identity")
    assert (report.norm_before_residual, report.norm_before_fc) == (shape.norm_before_residual, shape.norm_before_fc)
    assert (report.fc_norm, report.norm_output, report.sliding_window) == (False, False, None)


def test_convert_reads_both_switches_of_eagle_3_1(tiny_target: tiny.TinyModel, tmp_path: Path) -> None:
    _, report = export(make(fc_norm=True, norm_output=True), tiny_target.path, tmp_path)
    assert report.fc_norm
    assert report.norm_output


def test_tensors_are_specforges_with_offsets_and_mask(tmp_path: Path) -> None:
    drafter = make(REDUCED)
    write_checkpoint(drafter, tmp_path, FACTS)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {name for name in drafter.state_dict() if name != "scale"} | {"t2d"}
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"].numpy() + np.arange(len(REDUCED))).tolist() == REDUCED.tolist()
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == REDUCED.tolist()
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.float32}


def test_scale_is_folded_into_the_fusion(tmp_path: Path) -> None:
    drafter = make(scale=True)
    write_checkpoint(drafter, tmp_path, FACTS)
    hidden = random_samples([7])[0].hidden
    fc = load_file(tmp_path / "model.safetensors")["fc.weight"]
    torch.testing.assert_close(hidden @ fc.T, drafter.fuse(hidden), atol=1e-4, rtol=1e-4)


def test_weights_can_be_halved(tmp_path: Path) -> None:
    write_checkpoint(make(), tmp_path, replace(FACTS, dtype="bfloat16"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_config_loads_as_transformers_llama_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(make(REDUCED), tmp_path, FACTS)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "LlamaConfig"
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (HT, 1, 16)
    assert (config.vocab_size, config.draft_vocab_size) == (V, len(REDUCED))
    assert config.eos_token_id == tiny.IM_END


@pytest.mark.parametrize(
    ("inputs", "top", "nested"),
    [
        ((2, 15, 27), [2, 15, 27], [1, 14, 26]),
        ((3, 15, 27), [3, 15, 27], None),  # [2, 14, 26] would be taken for inputs
        ((4, 15, 27), [4, 15, 27], [3, 14, 26]),
        ((2, 15, 30), [2, 15, 30], [1, 14, 29]),
    ],
)
def test_aux_layers_come_back_as_they_were(
    inputs: tuple[int, int, int], top: list[int], nested: list[int] | None
) -> None:
    from eagle3_cli.convert.layers import KEY, choose_layers

    config = checkpoint_config(make(), replace(FACTS, aux_layers=inputs))
    assert config[KEY] == top
    assert config["eagle_config"].get(KEY) == nested
    assert choose_layers(config, 30).inputs == inputs


@pytest.mark.parametrize("inputs", [(1, 2, 4), (2, 2, 4), (5, 4, 6)])
def test_aux_layers_that_no_config_can_say_are_refused(inputs: tuple[int, int, int], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected three ascending layers from 2 on"):
        write_checkpoint(make(), tmp_path / "new", replace(FACTS, aux_layers=inputs))
    assert not (tmp_path / "new").exists()


def test_a_feature_drafter_has_no_checkpoint(tmp_path: Path) -> None:
    drafter = FeatureDrafter(SHAPE, torch.arange(V), EMBEDDING, HEAD)
    with pytest.raises(OptionError, match="comparison in torch"):
        write_checkpoint(drafter, tmp_path, FACTS)


def test_an_existing_checkpoint_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(make(seed=1), tmp_path, FACTS)
    drafter = make(seed=2)
    write_checkpoint(drafter, tmp_path, FACTS)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["norm.weight"], drafter.norm.weight)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json"}
