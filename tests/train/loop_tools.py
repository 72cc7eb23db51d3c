"""Random states on disk and a small drafter for them: what the training loop needs, without a target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_cli.train import Hooks, TrainSettings
from eagle3_cli.train.loop import Job, Loop
from eagle3_cli.train.manifest import Header, TargetId
from eagle3_cli.train.model import Drafter, DrafterShape
from eagle3_cli.train.samples import Sample
from eagle3_cli.train.shards import ShardReader, ShardWriter
from eagle3_cli.train.walk import simulate

WIDTH, VOCAB = 8, 40
SHAPE = DrafterShape(16, WIDTH, 2, 1, 8, 24, VOCAB, VOCAB - 8)


def sample(draw: np.random.Generator, length: int, prompt: int = 3) -> Sample:
    return Sample(draw.integers(0, VOCAB, length).astype(np.int32), np.arange(length) >= prompt)


def write_shards(folder: Path, lengths: list[int], seed: int = 0) -> ShardReader:
    draw, torch_draw = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    writer = ShardWriter(folder, Header(TargetId("t.gguf", 1, "a", "b"), (2, 3, 4), WIDTH, VOCAB, "", "random"))
    for length in lengths:
        hidden = torch.randn(length, 3 * WIDTH, generator=torch_draw).bfloat16()
        final = torch.randn(length, WIDTH, generator=torch_draw).bfloat16()
        writer.add(sample(draw, length), hidden, final, torch.randint(0, VOCAB, (length,), generator=torch_draw))
    writer.close()
    return ShardReader(folder)


def small_drafter() -> Drafter:
    torch.manual_seed(1)
    d2t = torch.arange(4, VOCAB - 4)
    embedding, head = torch.randn(VOCAB, SHAPE.hidden), torch.randn(VOCAB, WIDTH)
    return Drafter(SHAPE, d2t, embedding, head[d2t])


def settings(**values: Any) -> TrainSettings:
    """In float32, where sums in another order are nearly the same."""
    defaults = {"target": Path("t.gguf"), "output": Path("o"), "ttt_steps": 3, "batch_tokens": 64, "log_steps": 1}
    defaults |= {"precision": "no", "compile": "off"}
    return TrainSettings(**{**defaults, **values})


def new_loop(folder: Path, reader: ShardReader, hooks: Hooks | None = None, **values: Any) -> Loop:
    """A loop over all samples but the last two, which are held out."""
    folder.mkdir(exist_ok=True)
    ids = np.arange(len(reader))
    job = Job(
        small_drafter(),
        reader,
        ids[:-2],
        ids[-2:],
        lambda drafter: simulate(drafter, reader, ids[-2:].tolist(), depth=3),
        folder,
        settings(**values),
    )
    return Loop(job, hooks or Hooks())


if __name__ == "__main__":  # one of several processes; argv: folder of the shards, folder of the run
    torch.set_num_threads(1)
    new_loop(Path(sys.argv[2]), ShardReader(Path(sys.argv[1])), steps=5, eval_steps=5, batch_tokens=40).run()
