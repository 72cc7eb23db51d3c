"""Continuing from a checkpoint: the same drafter comes back, from every family's files, or the reason why not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from core_tools import AUX, EMBEDDING, HEAD, HT, SHAPE, V, make, random_samples
from safetensors.torch import load_file, save_file

from eagle3_cli.errors import CheckpointError, FileError, InputError, OptionError, PairError
from eagle3_cli.train.export import CheckpointFacts, write_checkpoint
from eagle3_cli.train.model import Drafter, FeatureDrafter, collate, feature_scale
from eagle3_cli.train.starting import StartingPoint, read_starting_point, start_from_checkpoint
from eagle3_cli.train.weights import TargetSizes

sys.path.append(str(Path(__file__).parents[1] / "convert"))

from published import Expect, Published
from published_code import ANGELSLIM, SPECFORGE
from published_files import scaled, write_random
from published_hub import HUB

FACTS = CheckpointFacts(AUX, 8192, bos=tiny.END_OF_TEXT, eos=tiny.IM_END)
SIZES = TargetSizes("llama", HT, V, tiny.TARGET.layers, 1e-5, 4, 2, 16, 96, 10000.0)
REDUCED = np.arange(1, V, 3)
NARROW: dict[str, Any] = {"hidden": 48, "heads": 6, "kv_heads": 3, "head_dim": 8, "d2t": REDUCED}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced vocabulary, other numbers": {"d2t": REDUCED, "eps": 1e-3, "rope_theta": 700.0},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "own embeddings": NARROW,
}
BATCH = collate(random_samples([9, 6]))


def resumed(start: StartingPoint, scale: torch.Tensor | None = None) -> Drafter:
    """A drafter that starts there, from other random weights."""
    torch.manual_seed(5)
    embedding = EMBEDDING if start.shape.hidden == HT else torch.randn(V, start.shape.hidden)
    made = Drafter(start.shape, start.d2t, embedding, HEAD[start.d2t], scale)
    start_from_checkpoint(made, start)
    return made


def assert_same(made: Drafter, original: Drafter) -> None:
    with torch.no_grad():
        for s, expected in zip(made.unroll(BATCH, 3), original.unroll(BATCH, 3), strict=True):
            torch.testing.assert_close(made.logits(s), original.logits(expected), rtol=1e-5, atol=2e-5)


def exported(folder: Path, config: dict[str, Any] | None = None, **kind: Any) -> Path:
    """A random drafter's checkpoint, its config with changes; None removes a key."""
    write_checkpoint(make(**kind), folder, FACTS)
    return configured(folder, config or {})


def configured(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """The checkpoint with other tensors."""
    path = folder / "model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(path).items()}), path)
    return folder


# ---- there and back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_drafter_comes_back(kind: str, tmp_path: Path) -> None:
    original = make(**KINDS[kind])
    write_checkpoint(original, tmp_path, FACTS)
    start = read_starting_point(tmp_path, SIZES)
    assert (start.shape, start.aux_layers) == (original.shape, AUX)
    assert torch.equal(start.d2t, original.d2t)
    assert (start.embedding is not None) == original.shape.own_embeddings
    assert {t.dtype for t in start.tensors.values()} == {torch.float32}
    assert set(start.tensors) == dict(original.named_parameters()).keys() - {"embed_tokens.weight"}
    assert_same(resumed(start), original)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_features_may_be_scaled_before_and_after(before: bool, after: bool, tmp_path: Path) -> None:
    original = make(REDUCED, scale=before)
    write_checkpoint(original, tmp_path, FACTS)
    scale = 3.0 * feature_scale(random_samples([9])) if after else None
    assert_same(resumed(read_starting_point(tmp_path, SIZES), scale), original)


def test_numbers_of_two_bytes_are_read_as_they_are(tmp_path: Path) -> None:
    original = make()
    write_checkpoint(original, tmp_path, replace(FACTS, dtype="bfloat16"))
    weight = read_starting_point(tmp_path, SIZES).tensors["midlayer.mlp.up_proj.weight"]
    assert torch.equal(weight, original.midlayer.mlp.up_proj.weight.bfloat16().float())


def test_what_is_read_is_no_part_of_the_file(tmp_path: Path) -> None:
    start = read_starting_point(exported(tmp_path), SIZES)
    stored = (tmp_path / "model.safetensors").read_bytes()
    start.tensors["norm.weight"].zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == stored


def test_a_vocabulary_out_of_order_is_sorted_with_its_head(tmp_path: Path) -> None:
    original = make(REDUCED)
    write_checkpoint(original, tmp_path, FACTS)
    order = torch.randperm(len(REDUCED))

    def shuffled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(REDUCED)[order]
        return tensors | {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": ids - torch.arange(len(ids))}

    start = read_starting_point(rewrite(tmp_path, shuffled), SIZES)
    assert start.d2t.tolist() == REDUCED.tolist()
    assert any("not ascending" in note for note in start.notes)
    assert_same(resumed(start), original)


def test_without_d2t_the_head_scores_every_token(tmp_path: Path) -> None:
    without = rewrite(exported(tmp_path), lambda t: {n: v for n, v in t.items() if n not in ("d2t", "t2d")})
    assert torch.equal(read_starting_point(without, SIZES).d2t, torch.arange(V))


def test_a_missing_head_starts_as_the_targets(tmp_path: Path) -> None:
    without = rewrite(exported(tmp_path), lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"})
    start = read_starting_point(without, SIZES)
    assert torch.equal(resumed(start).lm_head.weight, HEAD)
    assert "lm_head.weight is missing: the head starts as the target's" in start.notes


def test_a_copy_of_the_targets_embeddings_is_recognised_in_another_number_type(tmp_path: Path) -> None:
    copied = rewrite(
        exported(tmp_path), lambda t: t | {"embed_tokens.weight": EMBEDDING.to(torch.float8_e4m3fn).half()}
    )
    start = read_starting_point(copied, SIZES)
    assert start.embedding is not None
    assert torch.equal(resumed(start).embedding, EMBEDDING)
    assert any("the target's embeddings, which are used" in note for note in start.notes)


def test_other_embeddings_of_the_targets_width_are_refused(tmp_path: Path) -> None:
    other = rewrite(exported(tmp_path), lambda t: t | {"embed_tokens.weight": EMBEDDING.roll(1, 0).contiguous()})
    start = read_starting_point(other, SIZES)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: expected the target's embeddings"):
        resumed(start)


def test_a_doubtful_feedback_is_said_without_an_option_of_convert(tmp_path: Path) -> None:
    notes = read_starting_point(exported(tmp_path, norm_output=True), SIZES).notes
    assert any("compare with norm_output: false in a copy of its folder" in note for note in notes)
    assert not any("--" in note for note in notes)


# ---- families -------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # layer's prefix, everything's prefix, changes of the config
    "SafeAILab": ("midlayer.", "", {"architectures": ["LlamaForCausalLM"]}),
    "AngelSlim": ("midlayer.", "", {"architectures": ["Eagle3LlamaForCausalLM"]}),
    "ModelOpt": ("layers.0.", "", {"eagle_aux_hidden_state_layer_ids": None}),
    "NeMo": ("layers.0.", "model.", {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 5}),
}


def renamed(tensors: dict[str, torch.Tensor], layer: str, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name.replace("midlayer.", layer): tensor for name, tensor in tensors.items()}


def assert_equal(found: StartingPoint, expected: StartingPoint) -> None:
    assert (found.shape, found.aux_layers) == (expected.shape, expected.aux_layers)
    assert torch.equal(found.d2t, expected.d2t)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())


@pytest.mark.parametrize("family", LAYOUTS)
def test_another_familys_names_give_the_same_tensors(family: str, tmp_path: Path) -> None:
    layer, prefix, changes = LAYOUTS[family]
    folder = exported(tmp_path, d2t=REDUCED)
    expected = read_starting_point(folder, SIZES)
    rewrite(configured(folder, changes), lambda tensors: renamed(tensors, layer, prefix))
    assert_equal(read_starting_point(folder, SIZES), expected)


def test_speculators_nested_config_gives_the_same_tensors(tmp_path: Path) -> None:
    folder = exported(tmp_path, d2t=REDUCED)
    expected = read_starting_point(folder, SIZES)
    layer = json.loads((folder / "config.json").read_text())
    outer = {key: layer.pop(key) for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size")}
    outer |= {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "norm_before_residual": False}
    (folder / "config.json").write_text(json.dumps(outer | {"transformer_layer_config": layer}))
    assert_equal(read_starting_point(rewrite(folder, lambda t: renamed(t, "layers.0.", "")), SIZES), expected)


def test_pytorchs_own_files_are_read(tmp_path: Path) -> None:
    folder = exported(tmp_path, d2t=REDUCED)
    expected = read_starting_point(folder, SIZES)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_equal(read_starting_point(folder, SIZES), expected)


def _why_not(expect: Expect) -> str | None:
    """What a published drafter that llama.cpp runs is refused for."""
    if not expect.final_norm:
        return "final norm"
    if expect.sliding_window:
        return "sliding window"
    return "RoPE without scaling" if expect.rope in ("llama3", "yarn", "linear") else None


PUBLISHED = [e for e in (*HUB, SPECFORGE[0], ANGELSLIM[0]) if isinstance(e.expect, Expect)]


@pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in PUBLISHED])
def test_published_drafters_are_read_or_refused_with_the_reason(entry: Published, tmp_path: Path) -> None:
    small = scaled(entry)
    source = write_random(tmp_path / "checkpoint", small)
    sizes = replace(SIZES, width=small.target.width, vocab=small.target.vocab, layers=small.target.layers)
    expect = small.expect
    assert isinstance(expect, Expect)
    reason = _why_not(expect)
    if reason is not None:
        with pytest.raises(CheckpointError, match=reason):
            read_starting_point(source, sizes)
        return
    start = read_starting_point(source, sizes)
    shape = start.shape
    assert start.aux_layers == expect.aux
    assert (shape.heads, shape.kv_heads, shape.head_dim) == expect.heads
    assert shape.rope_theta == expect.theta
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(shape, name) == getattr(expect, name), name
    assert not any("--" in note for note in start.notes)


# ---- refusals -------------------------------------------------------------------------------------------

Case = tuple[dict[str, Any], type[InputError], str]
CONFIGS: dict[str, Case] = {  # changes of a sound config
    "vocabulary": ({"vocab_size": 300}, PairError, f"vocab_size is 300, but the target has {V}"),
    "sliding window": ({"sliding_window": 32, "use_sliding_window": True}, CheckpointError, "sliding window of 32"),
    "linear": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, CheckpointError, "RoPE without scaling"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, CheckpointError, "yarn"),
    "partial RoPE": ({"partial_rotary_factor": 0.5}, CheckpointError, "all 16 dimensions of a head, got 8"),
    "two layers": ({"num_hidden_layers": 2}, CheckpointError, "several decoder layers"),
    "activation": ({"hidden_act": "gelu"}, CheckpointError, "another activation than SiLU"),
    "four aux layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4], "eagle_config": None}, CheckpointError, "three layer ids"
    ),
    "aux layers of a deeper target": (
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 9], "eagle_config": None}, CheckpointError, "target of 5 layers"
    ),
    "another method": ({"architectures": ["DFlashDraftModel"]}, CheckpointError, "DFlash"),
    "an unknown key": ({"embed_scale": 3.0}, CheckpointError, "may change what the drafter computes"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_training_cannot_follow_is_refused(case: str, tmp_path: Path) -> None:
    changes, kind, words = CONFIGS[case]
    with pytest.raises(kind, match=words) as caught:
        read_starting_point(exported(tmp_path, changes), SIZES)
    assert caught.value.message.startswith(f"{tmp_path / 'config.json'}: ")
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "--config" not in caught.value.hint


def test_another_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="made for a target of width 64, but the target has 80") as caught:
        read_starting_point(exported(tmp_path), replace(SIZES, width=80))
    assert caught.value.message.startswith(f"{tmp_path / 'model.safetensors'}: ")


def test_four_features_are_refused(tmp_path: Path) -> None:
    wide = rewrite(exported(tmp_path), lambda t: t | {"fc.weight": torch.zeros(HT, 4 * HT)})
    with pytest.raises(CheckpointError, match="fuses 4 features"):
        read_starting_point(wide, SIZES)


def test_no_final_norm_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path, {"use_last_layernorm": False})
    rewrite(folder, lambda t: {name: tensor for name, tensor in t.items() if name != "norm.weight"})
    with pytest.raises(CheckpointError, match="expected a drafter with a final norm"):
        read_starting_point(folder, SIZES)


def test_a_missing_tensor_is_named_once_with_its_file(tmp_path: Path) -> None:
    rewrite(exported(tmp_path), lambda t: {n: v for n, v in t.items() if n != "midlayer.hidden_norm.weight"})
    with pytest.raises(CheckpointError) as caught:
        read_starting_point(tmp_path, SIZES)
    assert caught.value.message == (
        f"{tmp_path / 'model.safetensors'}: the tensor midlayer.hidden_norm.weight is missing."
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    damaged = rewrite(exported(tmp_path), lambda t: t | {"norm.weight": torch.full((HT,), value)})
    with pytest.raises(CheckpointError, match=r"norm\.weight: holds NaN or infinite values"):
        read_starting_point(damaged, SIZES)


def test_a_folder_without_a_config_or_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="expected one of"):
        read_starting_point(tmp_path, SIZES)
    (exported(tmp_path) / "config.json").unlink()
    with pytest.raises(FileError, match=r"config\.json: cannot be read"):
        read_starting_point(tmp_path, SIZES)


def test_an_eagle3_drafter_is_no_start_for_the_older_objective(tmp_path: Path) -> None:
    start = read_starting_point(exported(tmp_path), SIZES)
    with pytest.raises(OptionError, match="--objective eagle"):
        start_from_checkpoint(FeatureDrafter(SHAPE, torch.arange(V), EMBEDDING, HEAD), start)


def test_a_drafter_of_another_shape_is_the_callers_mistake(tmp_path: Path) -> None:
    start = read_starting_point(exported(tmp_path, d2t=REDUCED), SIZES)
    for other in (make(REDUCED, ffn=128), make(REDUCED + 1)):
        with pytest.raises(ValueError, match="another shape or draft vocabulary"):
            start_from_checkpoint(other, start)
