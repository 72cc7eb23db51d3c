"""What a run will take, before it does it: sizes, and times from short measurements.

Nothing here writes into the output folder.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FileError
from .compiling import Worker
from .engines import target_dtype
from .inputs import Inputs, drafter_shape, processes
from .settings import TrainSettings
from .vocab import MOST_CANDIDATES

if TYPE_CHECKING:
    from .model import DrafterShape

PROBE_TOKENS = 256  # of the short measurements
PROBE_ANSWER = 24
PROMPT_SHARE = 1.35  # tokens of a conversation per answer token, before any is written
ADAM_BYTES = 16  # per trained weight: value, gradient, two moments, float32
PYTORCH_BYTES = 600_000_000  # the process before it has loaded anything
GAPS = 1.25  # memory between tensors that none fits into, as a factor: measured 1.2 to 1.4 on a CPU


@dataclass(frozen=True)
class Plan:
    """The numbers of a run.  Bytes, seconds; None: not measured.

    parameters   part of the drafter -> weights, trained ones; frozen: the target's embedding and head rows
    conversations, tokens   estimated before they exist
    memory       of the training in one process, estimated
    """

    parameters: Mapping[str, int]
    frozen: int
    draft_vocab: int
    conversations: int
    tokens: int
    steps: int | None
    memory: int
    disk: int
    disk_free: int
    seconds: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        return sum(self.parameters.values())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "trained": self.trained}

    def lines(self) -> list[str]:
        """The plan for people."""
        parts = ", ".join(f"{name} {count / 1e6:.2f}" for name, count in self.parameters.items())
        times = ", ".join(f"{name} {_duration(s)}" for name, s in self.seconds.items() if s is not None)
        return [
            f"drafter: {self.trained / 1e6:.2f} million weights ({parts}), draft vocabulary {self.draft_vocab}",
            f"data: {self.conversations} conversations, {self.tokens} tokens"
            + (f"; {self.steps} optimiser steps" if self.steps else ""),
            f"memory: about {self.memory / 1e9:.2f} GB to train; disk: {self.disk / 1e9:.2f} GB of"
            f" {self.disk_free / 1e9:.1f} GB free",
            *([f"time, from short measurements: {times}"] if times else []),
        ]


def make_plan(
    settings: TrainSettings, inputs: Inputs, counts: tuple[int, int, int] | None = None, draft_vocab: int | None = None
) -> Plan:
    """FileError where the disk is too small.

    counts        conversations, tokens and optimiser steps, where they are known
    draft_vocab   where it is known; None: as asked for, or the most that a choice by coverage takes
    """
    from .shards import token_bytes

    most = settings.draft_vocab or min(inputs.sizes.vocab, MOST_CANDIDATES)
    shape = drafter_shape(settings, inputs, draft_vocab or most)
    candidates = shape.draft_vocab
    conversations, tokens, steps = counts or _expected(settings, inputs)
    parts, frozen = parameters(shape)
    trained = sum(parts.values())
    disk = int(tokens * (token_bytes(shape.target_width) + 5)) + trained * (
        3 * 12 + 4 + 2
    )  # shards; three states, both drafters
    free = _free(settings.output)
    if disk > free:
        raise FileError(
            f"{settings.output}: {disk / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free.",
            "Choose another --output, or fewer --tokens.",
        )
    memory = PYTORCH_BYTES + int(GAPS * (trained * ADAM_BYTES + frozen * 4 + _activations(settings, shape)))
    return Plan(parts, frozen, candidates, conversations, tokens, steps, memory, disk, free)


def _expected(settings: TrainSettings, inputs: Inputs) -> tuple[int, int, int | None]:
    """Conversations, tokens and steps before anything is written; answers are taken to be half as long as they may."""
    answer = min(settings.answer_tokens, settings.max_length) / 2
    turns = inputs.user_turns or math.ceil(settings.tokens / answer)
    tokens = int(turns * answer * PROMPT_SHARE)
    together = settings.batch_tokens * settings.accumulate * processes()
    steps = settings.steps or math.ceil(tokens * (settings.epochs or 1.0) / together)
    return inputs.conversations or turns, tokens, steps


def parameters(shape: DrafterShape) -> tuple[dict[str, int], int]:
    """(trained weights by part, frozen weights: embedding and the target's head rows)."""
    h, width, dim = shape.hidden, shape.target_width, shape.head_dim
    parts = {
        "fusion": 3 * width * h,
        "attention": 2 * h * dim * (shape.heads + 2 * shape.kv_heads) + h * dim * shape.heads,
        "ffn": 3 * h * shape.ffn,
        "norms": 4 * h + (3 * width if shape.normed_features else 0),
        "head": shape.draft_vocab * h,
    }
    return parts, shape.draft_vocab * width + shape.vocab * h


def _activations(settings: TrainSettings, shape: DrafterShape) -> int:
    """Bytes kept for the backward pass of one micro-batch: rows of every matrix product of every step, in float32.
    The logits are worked on in blocks of rows and do not count."""
    row = 8 * shape.hidden + 4 * shape.ffn + 3 * shape.head_dim * (shape.heads + shape.kv_heads)
    return settings.batch_tokens * (settings.ttt_steps * row + 4 * shape.target_width) * 4


def _free(folder: Path) -> int:
    """Bytes free where the folder is or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def measured(settings: TrainSettings, inputs: Inputs, plan: Plan) -> Plan:
    """The same plan with times, from a short capture and a short training step on this machine.

    Also the proof that both work at all: InputError where the target's states cannot be captured.
    """
    capturing = _capture_speed(settings, inputs)
    seconds: dict[str, float | None] = {"capture": plan.tokens / capturing if capturing else None}
    if not settings.keep_answers:
        seconds["answers"] = plan.tokens / PROMPT_SHARE / _writing_speed(settings, inputs)
    if plan.steps is not None:
        tokens = plan.steps * settings.batch_tokens * settings.accumulate
        if settings.steps is None:
            tokens = int(plan.tokens * (settings.epochs or 1.0) / processes())
        training = tokens / Worker("cpu")(_training_speed, settings, inputs, plan.draft_vocab)
        limit = 60 * settings.max_minutes if settings.max_minutes else math.inf
        seconds["training"] = min(training, limit)
    return replace(plan, seconds=seconds)


def _capture_speed(settings: TrainSettings, inputs: Inputs) -> float | None:
    """Tokens per second."""
    from .capture import CaptureProgress, CaptureSettings, capture
    from .samples import Sample

    ids = np.linspace(0, inputs.sizes.vocab - 1, min(PROBE_TOKENS, settings.max_length)).astype(np.int32)
    told: list[CaptureProgress] = []
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
        chosen = CaptureSettings(
            settings.target,
            Path(folder),
            settings.runtime,
            inputs.aux_layers,
            engine=settings.states,
            dtype=target_dtype(settings),
        )
        capture(chosen, [Sample(ids, np.ones(len(ids), bool))], told.append)
    return told[0].tokens_per_second


def _writing_speed(settings: TrainSettings, inputs: Inputs) -> float:
    """Tokens per second of short answers to as many prompts as are written at a time."""
    from .dialogue import AnswerSettings, WriterProgress
    from .engines import open_writer

    law = AnswerSettings(max_tokens=PROBE_ANSWER)
    told: list[WriterProgress] = []
    with open_writer(settings, inputs.longest, law, told.append) as writer:
        list(writer.write([[{"role": "user", "content": f"Count to {i}."}] for i in range(law.sequences)]))
    return told[-1].tokens_per_second


def _training_speed(settings: TrainSettings, inputs: Inputs, candidates: int) -> float:
    """Tokens per second of one process: forward and backward pass on noise, the second of two."""
    import torch

    from .compiling import mixed_precision, training_device
    from .loss import TrainingStep
    from .model import Drafter

    shape = drafter_shape(settings, inputs, candidates)
    device = training_device(settings)
    words, head = torch.zeros(shape.vocab, shape.hidden), torch.zeros(candidates, shape.target_width)
    drafter = Drafter(shape, torch.arange(candidates), words, head).to(device)
    step = TrainingStep(drafter, settings.ttt_steps, settings.decay, settings.loss)
    n = min(PROBE_TOKENS, settings.batch_tokens)
    batch = {
        "tokens": torch.randint(candidates, (1, n)),
        "best": torch.randint(candidates, (1, n)),
        "answer": torch.ones(1, n, dtype=torch.bool),
        "hidden": torch.randn(1, n, 3 * shape.target_width),
        "final": torch.randn(1, n, shape.target_width),
        "length": torch.tensor([n]),
    }
    batch = {name: value.to(device) for name, value in batch.items()}
    took = math.inf
    for _ in range(2):
        started = time.monotonic()
        with torch.autocast(device, torch.bfloat16, enabled=mixed_precision(settings) == "bf16"):
            loss, _ = step(batch)
        loss.backward()
        loss.item()  # waits for the device
        took = time.monotonic() - started
    return n / max(took, 1e-9)
