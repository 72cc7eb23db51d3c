"""The objectives against plain autograd over all rows and the whole draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_tools import EMBEDDING, HEAD, SHAPE, V, conversations, fit, make, random_samples

from eagle3_cli.train import loss as loss_module
from eagle3_cli.train.loss import TrainingStep, ttt_loss
from eagle3_cli.train.model import Drafter, FeatureDrafter, collate
from eagle3_cli.train.walk import simulate

D2T = np.arange(0, V, 3)


def by_definition(
    drafter: Drafter, batch: dict[str, torch.Tensor], steps: int, decay: float, kind: str
) -> tuple[torch.Tensor, list[int]]:
    """(loss, rows that count per step), one row at a time."""
    total, weight, counted = torch.zeros(()), 0.0, [0] * steps
    for i, s in enumerate(drafter.unroll(batch, steps)):
        for b, n in enumerate(batch["length"].tolist()):
            for p in range(n - 1):
                if (
                    p + 2 + i >= n
                    or not batch["answer"][b, p + 2 + i]
                    or batch["best"][b, p + 1 + i] not in drafter.d2t
                ):
                    continue
                target = (drafter.target_head @ batch["final"][b, p + 1 + i]).softmax(-1)
                log_q = drafter.logits(s[b, p]).log_softmax(-1)
                cross = -(target * log_q).sum()
                overlap = torch.minimum(target, log_q.exp()).sum()
                blend = torch.exp(-3 * overlap.detach())
                hybrid = blend * (cross + (target * target.log()).sum()) + (1 - blend) * (1 - overlap)
                total = total + decay**i * (cross if kind == "soft" else hybrid)
                weight += decay**i
                counted[i] += 1
    return total / weight, counted


@pytest.mark.parametrize("kind", ["soft", "lk"])
@pytest.mark.parametrize("chunk_rows", [3, 10_000])
def test_loss_and_gradients_are_those_of_the_definition(
    kind: str, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", {"cpu": chunk_rows})
    drafter, batch = make(D2T), collate(random_samples([12, 5, 17]))
    loss, metrics = ttt_loss(drafter, batch, 3, 0.8, kind)
    wanted, counted = by_definition(drafter, batch, 3, 0.8, kind)
    assert metrics["counted"].tolist() == counted
    assert sum(counted) > 5
    torch.testing.assert_close(loss, wanted)
    parameters = list(drafter.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss * 2, parameters), torch.autograd.grad(wanted * 2, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_loss_is_the_same_without_gradients() -> None:
    drafter, batch = make(D2T), collate(random_samples([12, 9]))
    trained, _ = ttt_loss(drafter, batch, 2)
    with torch.no_grad():
        looked_at, _ = ttt_loss(drafter, batch, 2)
    assert not looked_at.requires_grad
    torch.testing.assert_close(looked_at, trained.detach())


def test_a_frozen_head_still_hands_gradients_on() -> None:
    drafter, batch = make(), collate(random_samples([12]))
    ttt_loss(drafter, batch, 2)[0].backward()
    free = drafter.fc.weight.grad.clone()
    drafter.zero_grad()
    drafter.lm_head.requires_grad_(False)
    ttt_loss(drafter, batch, 2)[0].backward()
    torch.testing.assert_close(drafter.fc.weight.grad, free)


def test_padding_changes_neither_loss_nor_metrics() -> None:
    """One sample alone, beside a longer one that counts nothing, and with rubbish behind its end."""
    drafter = make()
    short, long = random_samples([9, 30])
    alone, of_alone = ttt_loss(drafter, collate([short]), 4)
    batch = collate([short, replace(long, answer=np.zeros(30, bool))])
    for name in ("hidden", "final"):
        batch[name][0, 9:] = 100 * torch.randn_like(batch[name][0, 9:])
    batch["tokens"][0, 9:] = 7
    padded, of_padded = ttt_loss(drafter, batch, 4)
    torch.testing.assert_close(padded, alone)
    for name, values in of_alone.items():
        torch.testing.assert_close(of_padded[name], values, msg=name)


@pytest.mark.parametrize("lengths", [[1], [2], [12, 5]])
def test_samples_without_an_answer_give_zero_loss_and_finite_gradients(lengths: list[int]) -> None:
    drafter = make()
    samples = [replace(s, answer=np.zeros(len(s.tokens), bool)) for s in random_samples(lengths)]
    loss, metrics = ttt_loss(drafter, collate(samples), 7)
    loss.backward()
    assert loss.item() == 0
    assert not metrics["counted"].any()
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_a_sample_shorter_than_the_steps_counts_what_it_has() -> None:
    _, metrics = ttt_loss(make(), collate(random_samples([5])), 7)
    assert metrics["counted"].tolist() == [2, 2, 1, 0, 0, 0, 0]


def test_metrics_of_a_perfect_drafter_are_full() -> None:
    """The target's own final states in place of the outputs."""
    batch = collate(random_samples([14]))

    class Perfect(Drafter):
        def unroll(self, batch: object, steps: int) -> list[torch.Tensor]:
            return [final[:, 1 + i :][:, : final.shape[1] - 1] for i in range(steps)]

        def head_input(self, s: torch.Tensor) -> torch.Tensor:
            return s

        @property
        def head(self) -> torch.Tensor:
            return self.target_head

    final = torch.nn.functional.pad(batch["final"], (0, 0, 0, 9))
    _, metrics = ttt_loss(Perfect(SHAPE, torch.arange(V), EMBEDDING, HEAD), batch, 3)
    torch.testing.assert_close(metrics["accuracy"], metrics["counted"])
    torch.testing.assert_close(metrics["acceptance"], metrics["counted"])


def test_feature_objective_predicts_the_next_final_state() -> None:
    samples = conversations(6)
    torch.manual_seed(0)
    drafter = FeatureDrafter(SHAPE, torch.arange(V), EMBEDDING, HEAD)
    batch = collate(samples)
    loss, _ = ttt_loss(drafter, batch, 1, kind="eagle")
    rows, errors = 0, torch.zeros(())
    s = drafter.unroll(batch, 1)[0]
    for b, sample in enumerate(samples):
        for p in range(len(sample.tokens) - 2):
            if sample.answer[p + 2]:
                errors += torch.nn.functional.smooth_l1_loss(s[b, p], sample.final[p + 1])
                rows += 1
    cross, _ = by_definition(drafter, batch, 1, 1.0, "soft")
    torch.testing.assert_close(loss, errors / rows + 0.1 * cross)
    assert fit(drafter, samples, 20, ttt=1, kind="eagle") < 0.8 * loss.item()


def test_feature_objective_refuses_test_time_steps_and_other_drafters() -> None:
    batch = collate(random_samples([6]))
    with pytest.raises(ValueError, match="FeatureDrafter"):
        ttt_loss(make(), batch, 1, kind="eagle")
    with pytest.raises(ValueError, match="one step"):
        ttt_loss(FeatureDrafter(SHAPE, torch.arange(V), EMBEDDING, HEAD), batch, 2, kind="eagle")


@pytest.mark.parametrize(("kind", "count"), [("soft", 20), ("lk", 6)])
def test_drafter_overfits_a_few_conversations(kind: str, count: int) -> None:
    samples = conversations(count)
    drafter = make(scale=True)
    fit(drafter, samples, 40, kind=kind)

    class Reader:
        def __len__(self) -> int:
            return count

        def sample(self, i: int) -> object:
            return samples[i]

    found = simulate(drafter, Reader(), range(count), chain=3, depth=4)
    assert found["tau"] > 3.5  # of 3.75: an answer's 15 tokens after its first take four rounds
    assert min(found["n_alpha"]) > 0.9


def test_a_training_step_trains_every_parameter() -> None:
    step = TrainingStep(make(norm_before_fc=True, norm_output=True), steps=3, kind="lk")
    step(collate(random_samples([12, 8])))[0].backward()
    assert all(p.grad is not None and p.grad.any() for p in step.parameters())


@pytest.fixture
def compiled_once() -> Iterator[None]:
    """Compiling again is an error.  By torch's own patch: pytest's monkeypatch takes the setting away for good."""
    import torch._dynamo

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("kind", ["soft", "lk"])
def test_compiled_parts_give_the_same_and_are_compiled_once(kind: str) -> None:
    drafter = make(scale=True)
    plain, compiled = TrainingStep(drafter, 4, kind=kind), TrainingStep(drafter, 4, kind=kind, compiled=True)
    parts = drafter.midlayer.before_attention, drafter.midlayer.after_attention
    for lengths in ([12, 8], [12], [20, 19, 5], [7, 7], [30, 2], [9], [40], [11, 3, 6, 8]):
        batch = collate(random_samples(lengths))
        found = []
        for step, of_layer in ((plain, (drafter.midlayer._before_attention, drafter.midlayer._after_attention)),
                               (compiled, parts)):  # fmt: skip
            drafter.midlayer.before_attention, drafter.midlayer.after_attention = of_layer
            loss, _ = step(batch)
            found.append((loss, *torch.autograd.grad(loss, list(drafter.parameters()))))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_bfloat16_autocast_comes_close() -> None:
    drafter, batch = make(), collate(random_samples([12, 8]))
    exact, _ = ttt_loss(drafter, batch, 3)
    half = {**batch, "hidden": batch["hidden"].bfloat16(), "final": batch["final"].bfloat16()}
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = ttt_loss(drafter, half, 3)
    assert loss.dtype == torch.float32
    loss.backward()
    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.02)
    assert torch.isfinite(drafter.lm_head.weight.grad).all()
