"""The heads that `reproduce.py` compares: what they are trained and judged on, and how one is trained.

A head is a run of `eagle3 train` from its training stage on: a folder with its settings, metrics.jsonl, report.html,
the state that it goes on from, and result.json when it is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagle3_cli.convert.json_files import read_json
from eagle3_cli.errors import FileError
from eagle3_cli.settings import RuntimeSettings
from eagle3_cli.train import Hooks, TrainSettings
from eagle3_cli.train.inputs import Inputs, check_compile, check_inputs
from eagle3_cli.train.loop import HELD_OUT_TOKENS, Job, Loop
from eagle3_cli.train.manifest import read_manifest
from eagle3_cli.train.model import Drafter, collate
from eagle3_cli.train.order import Order, epoch_batches, split
from eagle3_cli.train.report import write_page
from eagle3_cli.train.shards import ShardReader
from eagle3_cli.train.stages import Run
from eagle3_cli.train.state import FORMAT, RESULT, RUN, VOCABULARY, check_folder, opened, write_json
from eagle3_cli.train.walk import BATCH_TOKENS, match_rows, simulate

CHAIN = 3  # drafted tokens of the rounds whose acceptance length is told
STEPS = 6  # n = 0..5
_GO_ON = "Let the same eagle3 train go on until it reports its first training step; then it may be stopped."
_RUNTIME = ("ctx_size", "flash_attn", "cache_type_k", "cache_type_v")  # as run.json keeps them

Indices = NDArray[np.int64]


# ---- what the heads are trained and judged on -----------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A run's states.

    folder, settings   of the run
    inputs             what was found in its target
    reader             all samples; `training` and `held_out` are indices into it, of the run's own split
    unseen             greedy answers to prompts that share no template with the training data
    """

    folder: Path
    settings: TrainSettings
    inputs: Inputs
    reader: ShardReader
    unseen: ShardReader
    training: Indices
    held_out: Indices

    def tokens(self, indices: Indices) -> int:
        return int(self.reader.lengths[indices].sum())


def open_source(folder: Path, target: Path | None = None, ffn: int | None = None) -> Source:
    """The run in a folder, finished or not.

    target   where the run's target is now; None: where it was
    ffn      of the heads, for a target whose own is not known
    FileError for what is no run, for one whose draft vocabulary is not chosen yet, and for another target.
    """
    if not (folder / RUN).is_file():
        raise FileError(
            f"{folder}: expected a run of eagle3 train, got no {RUN}.", "Give --run the -o of eagle3 train."
        )
    stored = read_json(folder / RUN)
    if stored.get("format") != FORMAT:
        raise FileError(f"{folder / RUN}: expected format {FORMAT}, got {stored.get('format')}.")
    if not (folder / VOCABULARY).is_file():  # made after everything that is needed
        raise FileError(f"{folder}: expected the stages up to the draft vocabulary, got no {VOCABULARY}.", _GO_ON)
    settings = replace(_settings(stored["settings"], folder, target), ffn=ffn)
    inputs = check_inputs(settings)
    if inputs.digests["target_file"] != stored["settings"]["target_file"]:
        raise FileError(
            f"{settings.target}: expected the target of {folder}, got another file.",
            "Give --target the file that the run was made with.",
        )
    reader, unseen = ShardReader(folder / "shards", False), ShardReader(folder / "unseen", False)
    training, held_out = split(reader, settings.held_out, settings.seed)
    return Source(folder, settings, inputs, reader, unseen, training, held_out)


def _settings(stored: Mapping[str, Any], folder: Path, target: Path | None) -> TrainSettings:
    """Of the run's settings those that its data and states follow from."""
    return TrainSettings(
        target=target or Path(stored["target"]),
        output=folder,
        max_length=stored["max_length"],
        held_out=stored["held_out"],
        seed=stored["seed"],
        aux_layers=stored["aux_layers"] and tuple(stored["aux_layers"]),
        runtime=RuntimeSettings(**{name: stored[name] for name in _RUNTIME}),
    )


def nested(source: Source, tokens: Sequence[int], seed: int) -> list[Indices]:
    """Training indices for so many tokens each, ascending; a smaller set is part of every larger one.

    Each is the shortest beginning of one random order of the training samples that has the tokens.
    """
    order = np.random.default_rng(seed).permutation(source.training)
    reached = np.cumsum(source.reader.lengths[order])
    return [np.sort(order[: int(np.searchsorted(reached, count)) + 1]) for count in tokens]


def steps_of(source: Source, indices: Indices, settings: TrainSettings, epochs: float) -> int:
    """Optimiser steps of so many passes over some samples."""
    order = Order(source.reader.lengths[indices], settings.batch_tokens, settings.seed)
    return max(1, -(-order.length(epochs) // settings.accumulate))


# ---- one head -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A head to train.  title: for people; settings.output: its folder; indices: the samples that it is trained on."""

    title: str
    settings: TrainSettings
    indices: Indices


def check(source: Source, head: Head) -> None:
    """OptionError where the head's folder holds a head of other settings or data, or where torch.compile is asked for
    and does not work; FileError where the folder holds no head."""
    check_compile(head.settings)
    check_folder(head.settings, _identity(source, head))


def trained(source: Source, head: Head, hooks: Hooks) -> dict[str, Any]:
    """Train a head, or go on with it, and judge it; what is in its result.json, at once where that exists.

    As `check`.  KeyboardInterrupt after a Ctrl-C.
    """
    settings = head.settings
    with opened(settings, _identity(source, head)) as folder:
        if (folder / RESULT).is_file():
            return read_json(folder / RESULT)
        drafter = Run(settings, source.inputs, source.folder, hooks).drafter()
        unseen = partial(simulate, reader=source.unseen, ids=range(len(source.unseen)), chain=CHAIN, depth=STEPS)
        job = Job(drafter, source.reader, head.indices, source.held_out, unseen, folder, settings)
        loop = Loop(job, hooks)
        evaluation = loop.run()
        with loop.accelerator.autocast():
            judged = judge(drafter, source)
        result = {**_facts(source, head, loop), "loss": evaluation["held_out"].get("loss"), **judged}
        write_page(folder, settings, judged)
        for old in sorted(loop.states.glob("state-*.safetensors"))[:-1]:
            old.unlink()
        write_json(folder / RESULT, result)
    return result


def _identity(source: Source, head: Head) -> dict[str, Any]:
    """What a head depends on besides its settings."""
    states = [e.sha256 for name in ("shards", "unseen") for e in read_manifest(source.folder / name).shards]
    parts = [
        "\n".join(states).encode(),
        (source.folder / VOCABULARY).read_bytes(),
        head.indices.astype("<i8").tobytes(),
    ]
    return {
        "target_file": source.inputs.digests["target_file"],
        "training_data": hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest(),
    }


def _facts(source: Source, head: Head, loop: Loop) -> dict[str, Any]:
    """What was trained, on what, and for how long."""
    settings = head.settings
    return {
        "objective": settings.objective,
        "ttt_steps": settings.ttt_steps,
        "weights": sum(p.numel() for p in loop.job.drafter.parameters() if p.requires_grad),
        "samples": len(head.indices),
        "tokens": source.tokens(head.indices),
        "answer_tokens": sum(int(source.reader.sample(int(i)).answer.sum()) for i in head.indices),
        "optimiser_steps": loop.step,
        "tokens_seen": loop.tokens,
        "seconds": round(loop.seconds, 3),
        "device": loop.accelerator.device.type,
        "matrix_products": loop.accelerator.mixed_precision,
        "pytorch": torch.__version__,
    }


# ---- judging --------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(drafter: Drafter, source: Source) -> dict[str, Any]:
    """Acceptance on the unseen prompts and on the held-out samples, of these at most HELD_OUT_TOKENS.

    Each as `walk.simulate` returns it, with `n_alpha_everywhere` and how many rows that counts.
    """
    drafter.eval()
    lengths = source.reader.lengths[source.held_out]
    held_out = source.held_out[np.cumsum(lengths) - lengths < HELD_OUT_TOKENS]
    found = {}
    for name, reader, ids in (
        ("unseen", source.unseen, np.arange(len(source.unseen))),
        ("held_out", source.reader, held_out),
    ):
        rates, rows = n_alpha_everywhere(drafter, reader, ids)
        walked = simulate(drafter, reader, ids.tolist(), CHAIN, STEPS)
        found[name] = {**walked, "n_alpha_everywhere": rates, "rows_everywhere": rows}
    drafter.train()
    return found


def n_alpha_everywhere(
    drafter: Drafter, reader: ShardReader, ids: Indices, steps: int = STEPS
) -> tuple[list[float | None], list[int]]:
    """(Acceptance at chain step n = 0..steps-1, rows counted): as n_alpha of `walk.simulate`, but at every answer
    position that a row predicts, whether or not the drafted tokens before it were right."""
    right, counted = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    for chosen in epoch_batches(reader.lengths[ids], BATCH_TOKENS, 0, 0):
        batch = collate([reader.sample(int(i)) for i in ids[chosen]])
        matches, rows = match_rows(drafter, batch, steps)
        right += (matches & rows).sum((0, 1))
        counted += rows.sum((0, 1))
    return [int(r) / int(c) if c else None for r, c in zip(right, counted, strict=True)], counted.tolist()
