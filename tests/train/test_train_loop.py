"""The training loop: the order of its batches, the mean over micro-batches, resuming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState
from loop_tools import new_loop, sample, small_drafter, write_shards

from eagle3_cli.errors import Eagle3Error, InputError
from eagle3_cli.interrupt import Terminated
from eagle3_cli.train import Hooks, TrainSettings
from eagle3_cli.train.loop import training_step
from eagle3_cli.train.model import collate
from eagle3_cli.train.order import Order, epoch_batches, rate, split
from eagle3_cli.train.state import read_metrics

LENGTHS = [5, 9, 12, 12, 20, 7, 15, 30, 11, 8]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), LENGTHS)


# ---- the order ----


def test_an_epoch_has_every_sample_once_in_batches_within_the_budget():
    lengths = np.random.default_rng(0).integers(4, 100, 5000)
    found = epoch_batches(lengths, 512, seed=1, epoch=0)
    assert sorted(np.concatenate(found)) == list(range(5000))
    assert all(len(b) * lengths[b].max() <= 512 for b in found)
    padded = sum(len(b) * int(lengths[b].max()) for b in found)
    assert padded < 1.1 * lengths.sum()


def test_a_sample_longer_than_the_budget_is_a_batch_of_its_own():
    found = epoch_batches([100, 3, 3], 10, seed=0, epoch=0)
    assert sorted(map(sorted, found)) == [[0], [1, 2]]


def test_the_order_follows_from_seed_and_epoch_alone():
    def order(seed, epoch):
        return np.concatenate(epoch_batches(LENGTHS, 30, seed, epoch)).tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(s, e)) for s, e in [(1, 0), (1, 1), (2, 0)]}) == 3


def test_the_row_of_batches_goes_on_with_the_next_epoch():
    order = Order(LENGTHS, 30, seed=3)
    first = len(epoch_batches(LENGTHS, 30, 3, 0))
    second = epoch_batches(LENGTHS, 30, 3, 1)
    assert order.place(first - 1) == (0, first - 1)
    assert order.place(first) == (1, 0)
    assert order.batch(first + 1).tolist() == second[1].tolist()
    assert order.length(2) == first + len(second)
    assert order.length(1.5) == first + -(-len(second) // 2)


# ---- the split ----


class Samples:
    def __init__(self, samples):
        self.samples, self.lengths = samples, np.array([len(s) for s in samples])

    def __len__(self):
        return len(self.samples)

    def sample(self, i):
        return self.samples[i]


def test_samples_with_one_beginning_are_on_one_side_and_more_data_moves_none():
    draw = np.random.default_rng(0)
    samples = [sample(draw, 10, prompt=4) for _ in range(300)]
    for i in range(0, 300, 2):  # another answer to the same prompt
        samples[i + 1] = samples[i].__class__(
            np.concatenate([samples[i].tokens[:4], samples[i + 1].tokens[4:]]), samples[i].answer
        )
    training, held = split(Samples(samples), 0.2, seed=0)
    assert sorted([*training, *held]) == list(range(300))
    assert 30 < len(held) < 90
    assert {i // 2 for i in held}.isdisjoint(i // 2 for i in training)
    assert set(split(Samples(samples[:200]), 0.2, seed=0)[1]) == {i for i in held if i < 200}


def test_a_small_share_of_few_samples_still_holds_one_out():
    samples = [sample(np.random.default_rng(i), 10) for i in range(5)]
    assert len(split(Samples(samples), 0.001, seed=0)[1]) == 1
    assert len(split(Samples(samples), 0.0, seed=0)[1]) == 0


def test_a_split_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(InputError, match="left to train on"):
        split(Samples([sample(np.random.default_rng(0), 10)] * 3), 0.9999, seed=0)


# ---- the learning rate ----


def test_the_rate_rises_in_a_line_and_falls_as_half_a_cosine():
    assert [rate(x, 0.5) for x in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert rate(0.0, 0.0) == 1.0


# ---- steps ----


def test_accumulated_micro_batches_step_as_their_rows_in_one_batch_do(reader, tmp_path):
    """Two micro-batches with very different numbers of rows give the gradient of the mean over all rows."""
    loop = new_loop(tmp_path, reader, accumulate=2, clip=1e9, batch_tokens=30, steps=2)
    parts = [loop.order.batch(0), loop.order.batch(1)]
    ids = loop.job.training[np.concatenate(parts)]
    alone = small_drafter()
    loss, _ = training_step(alone, loop.job.settings)(collate([reader.sample(int(i)) for i in ids]))
    loss.backward()
    loop.prepared = []  # keep the gradients
    with ThreadPoolExecutor(1) as reading:
        found = loop._take_step(loop._batches(reading))
    assert float(found["sums"][1] / found["sums"][0]) == pytest.approx(loss.item(), rel=1e-5)
    for (name, mine), other in zip(loop.job.drafter.named_parameters(), alone.parameters(), strict=True):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_head_and_its_norm_have_their_own_rate_and_norms_no_decay(reader, tmp_path):
    loop = new_loop(tmp_path, reader, head_lr_factor=0.25, weight_decay=0.1, steps=1, warmup=0.0)
    names = {id(p): name for name, p in loop.job.drafter.named_parameters()}
    described = [group for optimiser in loop.optimisers for group in optimiser.param_groups]
    groups = {names[id(p)]: (g["factor"], g["weight_decay"]) for g in described for p in g["params"]}
    assert set(groups) == {name for name, p in loop.job.drafter.named_parameters() if p.requires_grad}
    assert [type(optimiser).__name__ for optimiser in loop.optimisers] == ["AdamW", "Muon"]
    assert groups["lm_head.weight"] == (0.25, 0.1)
    assert groups["norm.weight"] == (0.25, 0.0)
    assert groups["fc.weight"] == (1.0, 0.1)
    assert groups["midlayer.hidden_norm.weight"] == (1.0, 0.0)


def test_a_loss_that_is_not_finite_stops_the_training(reader, tmp_path):
    loop = new_loop(tmp_path, reader, steps=3)
    with torch.no_grad():
        loop.job.drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(Eagle3Error, match="step 1 is not finite"):
        loop.run()


def test_training_lowers_the_loss_and_logs_every_step(reader, tmp_path):
    loop = new_loop(tmp_path, reader, steps=30, eval_steps=10, lr=0.01)
    last = loop.run()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 31))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 10, 20, 30]
    assert np.mean([t["loss"] for t in train[-5:]]) < np.mean([t["loss"] for t in train[:5]]) - 0.3
    assert len(train[0]["accuracy"]) == 3
    assert last["step"] == 30
    assert last["held_out"]["rows"] > 0
    assert last["simulated"]["tau"] >= 1


def test_minutes_end_a_training_whatever_its_steps(reader, tmp_path):
    loop = new_loop(tmp_path, reader, steps=10**6, max_minutes=1.0, eval_steps=10**6)
    loop.seconds = 59.99999
    loop.run()
    assert 0 < loop.step < 1000


# ---- resuming ----


def numbers(folder):
    """metrics.jsonl without the times."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder / "metrics.jsonl")]


def test_an_interrupted_and_resumed_training_equals_an_uninterrupted_one_to_the_last_bit(reader, tmp_path):
    values = {"steps": 12, "eval_steps": 4, "accumulate": 2, "batch_tokens": 40}
    whole = new_loop(tmp_path / "whole", reader, **values)
    whole.run()
    interrupted = new_loop(tmp_path / "parts", reader, stop_after(5), **values)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    assert interrupted.step == 5
    resumed = new_loop(tmp_path / "parts", reader, **values)
    assert resumed.step == 5
    resumed.run()
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    for mine, other in zip(resumed.job.drafter.parameters(), whole.job.drafter.parameters(), strict=True):
        assert torch.equal(mine, other)


def stop_after(step, number=signal.SIGINT):
    """Hooks that press Ctrl-C, or send another signal, when that step is done."""

    def progress(label, fraction):
        if label.endswith(f"step {step}"):
            os.kill(os.getpid(), number)

    return Hooks(progress=progress)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_ctrl_c_and_sigterm_save_the_state_after_the_step_and_say_so(reader, tmp_path, number, raised):
    said, before = [], signal.getsignal(number)  # ignored where the suite was started in the background
    hooks = Hooks(report=said.append, progress=stop_after(3, number).progress)
    with pytest.raises(raised):
        new_loop(tmp_path, reader, hooks, steps=10).run()
    assert said == ["stopped after step 3 of 10; the state is saved."]
    assert (tmp_path / "states" / "state-000000003.safetensors").is_file()
    assert signal.getsignal(number) is before


def test_a_resume_drops_the_lines_of_steps_that_it_does_again(reader, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        new_loop(tmp_path, reader, stop_after(3), steps=6).run()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4}\n{"kind": "tr')
    assert max(line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")) == 4
    new_loop(tmp_path, reader, steps=6)
    assert max(line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_weight_sharding_launchers_are_refused(monkeypatch):
    from accelerate import DistributedType

    from eagle3_cli.train import loop

    fake = SimpleNamespace(distributed_type=DistributedType.FSDP)
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: fake)
    with pytest.raises(InputError, match="got FSDP"):
        loop.accelerator_for(TrainSettings(target=Path("t"), output=Path("o")))


@pytest.mark.slow
def test_two_processes_train_as_one_with_two_micro_batches(reader, tmp_path):
    tools = Path(__file__).with_name("loop_tools.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29671"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    subprocess.run(
        [*command, str(tools), str(reader.folder), str(tmp_path / "two")], env=environment, check=True, timeout=300
    )
    new_loop(tmp_path / "one", reader, steps=5, eval_steps=5, batch_tokens=40, accumulate=2).run()
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert [line["tokens"] for line in one if "tokens" in line] == [line["tokens"] for line in two if "tokens" in line]
    for a, b in zip(one, two, strict=True):
        if a["kind"] == "train":
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)


# ---- precision ----


def test_trainings_of_one_process_may_differ_in_precision(reader, tmp_path, monkeypatch):
    """The process group, which accelerate keeps apart from the precision, stays."""
    monkeypatch.setattr(PartialState, "_reset_state", lambda *_: pytest.fail("was reset"))
    losses = {}
    for name, precision in (("first", "no"), ("second", "bf16"), ("third", "no")):
        loop = new_loop(tmp_path / name, reader, steps=2, batch_tokens=40, precision=precision)
        assert loop.accelerator.mixed_precision == precision
        losses[name] = loop.run()["held_out"]["loss"]
    assert losses["third"] == losses["first"] != losses["second"]
    assert losses["second"] == pytest.approx(losses["first"], rel=0.05)
