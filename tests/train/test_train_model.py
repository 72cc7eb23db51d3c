"""The torch graph against llama.cpp's, step by step on the exported file, and what goes into it."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from core_tools import EMBEDDING, HEAD, SHAPE, WEIGHTS, V, export, make, random_samples, state

from eagle3_cli.context import ContextSettings
from eagle3_cli.engine import load, load_engine
from eagle3_cli.engine.tree import FixedShape
from eagle3_cli.errors import InputError, OptionError
from eagle3_cli.settings import PairSettings, RuntimeSettings, TreeShape
from eagle3_cli.train import initial
from eagle3_cli.train.initial import projected_embedding, start_from_target
from eagle3_cli.train.model import Drafter, FeatureDrafter, collate, feature_scale

PROMPT = np.random.default_rng(8).integers(0, V - 3, 21).tolist()
REDUCED = np.arange(0, V, 3)
F32 = 0  # ggml_type

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled, reduced vocabulary": {"scale": True, "d2t": REDUCED},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "another width, own embeddings": {"hidden": 48, "heads": 6, "kv_heads": 3, "head_dim": 8, "d2t": REDUCED},
    "heads wider than the model": {"heads": 8, "kv_heads": 1, "head_dim": 32, "rope_theta": 500.0},
}


class Recorded:
    """The drafter of a pair on llama.cpp with a float32 cache; keeps the logits of every step of a chain."""

    def __init__(self, target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def exact(*values: Any) -> ContextSettings:
            return ContextSettings(*values[:5], F32, F32)

        monkeypatch.setattr(load, "ContextSettings", exact)
        runtime = RuntimeSettings(**tiny.EXACT, ctx_size=256, batch=64, threads=1)
        self.engine = load_engine(PairSettings(target, drafter, depth=4, width=1, nodes=4), runtime)
        self.drafter: Any = self.engine.decoder.drafter
        self.logits: list[np.ndarray] = []
        self.find = self.drafter._head.best
        self.drafter._head.best = self._keep

    def _keep(self, rows: range, ids: Any, logps: Any) -> None:
        context = self.drafter._decoder
        at = context.logits() + 4 * context.n_vocab * (rows.stop - 1)
        self.logits.append(np.array((ctypes.c_float * context.n_vocab).from_address(at)))
        self.find(rows, ids, logps)

    def chain(self, committed: list[int], root: int) -> list[int]:
        self.engine.decoder.prefill(committed)
        return list(self.drafter.draft(root, FixedShape(TreeShape(4, 1, 4))).tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_four_steps_are_llama_cpps(
    kind: str, tiny_target: tiny.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(**KINDS[kind])
    path, _ = export(drafter, tiny_target.path, tmp_path)
    pair = Recorded(tiny_target.path, path, monkeypatch)
    with pair.engine:
        chain = pair.chain(PROMPT[:-1], PROMPT[-1])
    row = len(PROMPT) - 2
    with torch.no_grad():
        outputs = drafter.unroll(collate([state([*PROMPT, *chain], len(PROMPT))]), 4)
        for step, (output, theirs) in enumerate(zip(outputs, pair.logits, strict=True)):
            logits = drafter.logits(output[0, row]).numpy()
            np.testing.assert_allclose(theirs[drafter.d2t], logits, atol=2e-4, rtol=2e-4, err_msg=f"step {step}")
            assert drafter.d2t[logits.argmax()] == chain[step]
            assert np.ptp(logits) > 5  # a flat row would agree with anything


def test_later_rows_and_padding_change_no_earlier_row() -> None:
    drafter = make()
    short, long = random_samples([8, 20])
    longer = replace(short, **{
        name: torch.cat([torch.as_tensor(getattr(short, name)), torch.as_tensor(getattr(long, name))])
        for name in ("tokens", "answer", "hidden", "final", "best")
    })  # fmt: skip
    with torch.no_grad():
        alone, followed = (drafter.unroll(collate([sample]), 3) for sample in (short, longer))
    for i, (a, b) in enumerate(zip(alone, followed, strict=True)):
        torch.testing.assert_close(a[:, : 7 - i], b[:, : 7 - i])


def test_collate_pads_on_the_right_and_to_one_row() -> None:
    batch = collate(random_samples([1, 1]))
    assert {name: tuple(x.shape) for name, x in batch.items()} == {
        "tokens": (2, 2), "answer": (2, 2), "best": (2, 2), "hidden": (2, 2, 192), "final": (2, 2, 64), "length": (2,),
    }  # fmt: skip
    assert not batch["answer"][:, 1].any()


def test_feature_scale_is_the_rms_of_every_channel() -> None:
    samples = random_samples([5, 9])
    scale = feature_scale([replace(s, hidden=s.hidden.bfloat16()) for s in samples])
    rows = torch.cat([s.hidden.bfloat16().float() for s in samples])
    torch.testing.assert_close(scale, rows.square().mean(0).sqrt())
    silent = feature_scale([replace(samples[0], hidden=torch.zeros(5, 192))])
    assert torch.isfinite(1 / silent).all()


def test_state_is_the_checkpoint_and_leaves_the_targets_weights_out() -> None:
    names = set(make().state_dict())
    assert names == {
        "d2t", "scale", "fc.weight", "norm.weight", "lm_head.weight",
        *(f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }  # fmt: skip
    more = set(make(hidden=48, fc_norm=True).state_dict()) - names
    assert more == {"embed_tokens.weight", *(f"fc_norm.{i}.weight" for i in range(3))}


def test_target_weights_are_never_trained() -> None:
    for drafter in (make(), make(hidden=48)):
        trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
        assert not trained & {"embed_tokens.weight", "embedding", "target_head"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "even number"),
        ({"draft_vocab": V + 1}, "larger than the target's"),
        ({"ffn": 0}, "ffn: expected at least 1, got 0"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SHAPE, **changes)


def test_a_scale_before_a_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="not scaled"):
        make(scale=True, fc_norm=True)


def test_feature_drafter_needs_the_targets_width() -> None:
    shape = replace(SHAPE, hidden=48)
    with pytest.raises(OptionError, match="as wide as the target"):
        FeatureDrafter(shape, torch.arange(V), torch.randn(V, 48), HEAD)


# --- where training starts


class Target:
    final_norm = torch.from_numpy(WEIGHTS["output_norm.weight"])
    last_layer = {  # noqa: RUF012
        "self_attn.q_proj.weight": torch.randn(64, 64),
        "self_attn.k_proj.weight": torch.randn(32, 64),
        "self_attn.o_proj.weight": torch.randn(64, 64),
        "mlp.gate_proj.weight": torch.randn(128, 64),
        "input_layernorm.weight": torch.randn(64),
        "post_attention_layernorm.weight": torch.randn(64),
    }


def test_training_starts_from_the_targets_layer_where_shapes_agree() -> None:
    """The tiny drafter's ffn has another width than this target's, so the gate stays random."""
    drafter = make(scale=True)
    gate, q = drafter.midlayer.mlp.gate_proj.weight.clone(), drafter.midlayer.self_attn.q_proj.weight.clone()
    taken = start_from_target(drafter, Target())
    assert set(taken) == {
        "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.o_proj.weight",
        "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight",
        "norm.weight", "lm_head.weight", "fc.weight",
    }  # fmt: skip
    own = drafter.midlayer.self_attn.q_proj.weight
    assert torch.equal(own[:, 64:], Target.last_layer["self_attn.q_proj.weight"])
    torch.testing.assert_close(own[:, :64], 0.1 * q[:, :64])
    assert torch.equal(drafter.midlayer.hidden_norm.weight, Target.last_layer["input_layernorm.weight"])
    assert torch.equal(drafter.midlayer.mlp.gate_proj.weight, gate)
    hidden = random_samples([9])[0].hidden
    newest = hidden[:, 128:]
    assert torch.nn.functional.cosine_similarity(drafter.fuse(hidden), newest, -1).min() > 0.95


def test_rescaling_keeps_the_function_and_makes_weights_of_the_size_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rescaled = make(scale=True)
    plain = copy.deepcopy(rescaled)
    start_from_target(rescaled, Target())
    with monkeypatch.context() as patch:
        patch.setattr(initial, "_rescale", lambda *_: None)
        torch.manual_seed(0)
        start_from_target(plain, Target())
    batch = collate(random_samples([9]))
    plain.fc.weight.data.copy_(rescaled.fc.weight * plain.scale[128:].median())  # the random part was drawn anew
    for ours, theirs in zip(rescaled.unroll(batch, 3), plain.unroll(batch, 3), strict=True):
        torch.testing.assert_close(rescaled.logits(ours), plain.logits(theirs), atol=3e-3, rtol=3e-3)
    assert float(rescaled.fc.weight.detach()[:, 128:].diagonal().median()) == pytest.approx(1.0, rel=0.05)


def test_nothing_is_taken_from_a_target_of_another_width() -> None:
    drafter = make(hidden=48)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    assert start_from_target(drafter, Target()) == []
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def test_nothing_is_taken_where_the_input_is_no_state_between_layers() -> None:
    drafter = FeatureDrafter(SHAPE, torch.arange(V), EMBEDDING, HEAD)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    assert start_from_target(drafter, Target()) == []
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def test_projected_embeddings_keep_what_they_can() -> None:
    torch.testing.assert_close(projected_embedding(EMBEDDING, 80) @ torch.eye(80, 64), EMBEDDING)
    low_rank = torch.randn(50, 8) @ torch.randn(8, 64)
    projected = projected_embedding(low_rank, 8)
    torch.testing.assert_close(projected @ projected.T, low_rank @ low_rank.T, atol=1e-3, rtol=1e-3)


def test_shapes_of_what_the_target_gives_are_checked() -> None:
    with pytest.raises(ValueError, match="target_head"):
        Drafter(SHAPE, torch.arange(V), EMBEDDING, HEAD[:10])
