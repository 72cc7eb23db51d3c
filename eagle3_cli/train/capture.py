"""The target's states of samples, written as shards: what a drafter is trained on.

llama.cpp computes them as `eagle3 chat` does (llama_states.py), transformers faster where PyTorch is (torch_states.py).
Samples are computed several to a batch, as different sequences, and written in their own order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ..convert.layers import choose_layers
from ..convert.output import check_space
from ..errors import CheckpointError, FileError, OptionError
from ..settings import MAX_SEQUENCES, RuntimeSettings
from .manifest import MANIFEST, Header, Manifest
from .samples import Sample
from .shards import ShardWriter, token_bytes
from .weights import identify, read_head_rows, read_target_sizes

PROBE_TOKENS = 128  # of the batch that is checked and timed before the work begins
COMPILED_FROM = 100_000  # tokens from which on torch.compile is worth its time
PROBE_IDS = 512  # tokens whose logits are computed again from the final state
# Of the logits' root mean square.  llama.cpp multiplies a quantised head with activations of 8 bits: 0.6 % was measured
# on the demo target; a scale, a cap or a bias behind the head gives far more.
HEAD_TOLERANCE = 0.05
TORCH_TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden bfloat16 [n, 3*Ht], final bfloat16 [n, Ht], best int64 [n] of one sample."""


@dataclass(frozen=True)
class CaptureSettings:
    """What to capture and where to.

    target        a GGUF or a Hugging Face directory
    folder        of the shards; what an earlier capture of the same left there is kept
    runtime       how llama.cpp runs; `batch` tokens are computed at a time.  transformers heeds device and threads
    aux_layers    layers whose inputs are captured, ascending; None: [2, n/2, n-3]
    shard_tokens  after how many tokens a shard is full; None: by size
    engine        "llama.cpp", or "transformers": the only one for a directory.  Of a GGUF it computes with the same
                  weights, turned back to floats, but not with the same rounding
    dtype         "bf16" or "f32", what transformers computes in
    compile       "auto", "on" or "off": transformers' layers go through torch.compile, which takes half a minute and
                  gives 1.5 times the speed on a CPU; "auto" where there is enough to compute
    """

    target: Path
    folder: Path
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    aux_layers: tuple[int, int, int] | None = None
    shard_tokens: int | None = None
    engine: str = "llama.cpp"
    dtype: str = "bf16"
    compile: str = "off"

    @property
    def in_torch(self) -> bool:
        return in_torch(self.target, self.engine)


def in_torch(target: Path, engine: str) -> bool:
    """Whether transformers computes the states."""
    return engine == "transformers" or target.is_dir()


@dataclass(frozen=True)
class CaptureProgress:
    """How far a capture is.  The first one comes before the work begins: it is the estimate.

    done, total          tokens, those of an earlier capture included
    bytes_left           to be written
    tokens_per_second    measured; None where nothing is left to do
    """

    done: int
    total: int
    bytes_left: int
    tokens_per_second: float | None

    @property
    def seconds_left(self) -> float:
        return (self.total - self.done) / self.tokens_per_second if self.tokens_per_second else 0.0


Progress = Callable[[CaptureProgress], None]


class Runner(Protocol):
    """A loaded target.

    rows     tokens of a batch; a longer sample comes alone
    limit    tokens of the longest sample that it can compute
    """

    rows: int
    limit: int

    def states(self, samples: Sequence[Sample]) -> list[States]: ...

    def probe(self, sample: Sample, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, Ht] final states of a sample and [n, len(ids)] its real logits of these tokens."""
        ...

    def close(self) -> None: ...


def capture(
    settings: CaptureSettings,
    samples: Iterable[Sample],
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Write the states of all samples, those of an unfinished capture apart; returns the complete manifest.

    report: told where layers are not compiled because torch.compile does not work
    OptionError or FileError before any long work: aux layers that do not exist, a folder of another capture or of other
    samples, a sample that is empty, too long or not of this target's tokens, a disk that is too small, a target whose
    states cannot be captured.
    """
    wanted = list(samples)
    header = make_header(settings)
    _check_samples(wanted, header.vocab)
    writer = ShardWriter(settings.folder, header, settings.shard_tokens)
    _check_done(settings.folder, writer, wanted)
    work = _Work(writer, wanted, progress or (lambda _: None))
    check_space(settings.folder / MANIFEST, work.bytes_left)
    if work.left:
        compiled = settings.compile == "on" or (settings.compile == "auto" and work.left > COMPILED_FROM)
        with _runner(settings, header, max(map(len, wanted)), compiled, report) as runner:
            work.run(runner, _measure(settings.target, runner, wanted[writer.done :]))
    else:
        work.report(None)
    return writer.close()


def make_header(settings: CaptureSettings) -> Header:
    """What the manifest of such a capture says, from the target's files alone."""
    sizes = read_target_sizes(settings.target)
    target, template = identify(settings.target)
    if settings.in_torch and settings.dtype not in TORCH_TYPES:
        raise OptionError(f"dtype: expected one of {', '.join(TORCH_TYPES)}, got {settings.dtype}.")
    engine = f"transformers {settings.dtype}" if settings.in_torch else "llama.cpp"
    layers = aux_layers(settings.aux_layers, sizes.layers, settings.in_torch)
    return Header(target, layers, sizes.width, sizes.vocab, template, engine)


def aux_layers(chosen: tuple[int, ...] | None, layers: int, in_torch: bool) -> tuple[int, int, int]:
    """The layers whose inputs are captured, of a target of so many.  OptionError for anything but three ascending ids
    from 1 to the deepest: transformers keeps the last layer's output only after the final norm."""
    deepest = layers - 1 if in_torch else layers
    if chosen is None:
        try:
            return choose_layers({}, layers).inputs
        except CheckpointError as error:
            raise OptionError(
                f"--aux-layers: the default [2, n/2, n-3] does not fit a target of {layers} layers.",
                f"Choose three layers from 1 to {deepest}.",
            ) from error
    if len(chosen) != 3 or not 1 <= chosen[0] < chosen[1] < chosen[2] <= deepest:
        given = ",".join(map(str, chosen))
        raise OptionError(f"--aux-layers {given}: expected three ascending layers from 1 to {deepest}.")
    return chosen[0], chosen[1], chosen[2]


def _check_samples(samples: Sequence[Sample], vocab: int) -> None:
    if not samples:
        raise OptionError("There is nothing to capture: no samples.", "Give more or longer conversations.")
    for i, sample in enumerate(samples):
        if not len(sample):
            raise OptionError(f"sample {i}: has no tokens.")
        if not 0 <= sample.tokens.min() <= sample.tokens.max() < vocab:
            span = f"{sample.tokens.min()} to {sample.tokens.max()}"
            raise OptionError(f"sample {i}: expected token ids from 0 to {vocab - 1}, got {span}.")


def _check_done(folder: Path, writer: ShardWriter, samples: Sequence[Sample]) -> None:
    """FileError unless the samples on disk are the first of these."""
    for i, (tokens, answer) in enumerate(writer.stored()):
        same = i < len(samples) and np.array_equal(tokens, samples[i].tokens)
        if not same or not np.array_equal(answer, samples[i].answer):
            raise FileError(
                f"{folder}: sample {i} there is not sample {i} of this data.",
                "Resume with the same data, or capture into another folder.",
            )


# --- the work ------------------------------------------------------------------------------------------


def batches(lengths: Sequence[int], first: int, rows: int, shard_tokens: int) -> Iterator[range]:
    """Samples first, first+1, ... in batches of at most `rows` tokens; a longer sample comes alone.

    A batch ends where a shard is full: what a sample is computed together with depends on its shard alone, so a
    resumed capture gives the same bytes.
    """
    start, tokens, in_shard = first, 0, 0
    for i in range(first, len(lengths)):
        if i > start and (tokens + lengths[i] > rows or i - start == MAX_SEQUENCES):
            yield range(start, i)
            start, tokens = i, 0
        tokens, in_shard = tokens + lengths[i], in_shard + lengths[i]
        if in_shard >= shard_tokens:
            yield range(start, i + 1)
            start, tokens, in_shard = i + 1, 0, 0
    if start < len(lengths):
        yield range(start, len(lengths))


class _Work:
    """The samples that are not on disk yet, and how far they are."""

    def __init__(self, writer: ShardWriter, samples: Sequence[Sample], progress: Progress) -> None:
        self.writer, self.samples, self.progress = writer, samples, progress
        self.lengths = [len(sample) for sample in samples]
        self.total = sum(self.lengths)
        self.done = sum(self.lengths[: writer.done])

    @property
    def left(self) -> int:
        return self.total - self.done

    @property
    def bytes_left(self) -> int:
        return self.left * token_bytes(self.writer.manifest.header.width)

    def report(self, speed: float | None) -> None:
        self.progress(CaptureProgress(self.done, self.total, self.bytes_left, speed))

    def run(self, runner: Runner, speed: float) -> None:
        self.report(speed)
        started, computed = time.monotonic(), 0
        for batch in batches(self.lengths, self.writer.done, runner.rows, self.writer.shard_tokens):
            samples = [self.samples[i] for i in batch]
            for sample, states in zip(samples, runner.states(samples), strict=True):
                self.writer.add(sample, *states)
                computed += len(sample)
                self.done += len(sample)
            self.report(computed / max(time.monotonic() - started, 1e-9))


def _measure(target: Path, runner: Runner, samples: Sequence[Sample]) -> float:
    """Tokens per second of a short batch, after checking that its logits are the product of head and final state."""
    tokens = np.concatenate([sample.tokens[:PROBE_TOKENS] for sample in samples[:PROBE_TOKENS]])[:PROBE_TOKENS]
    tokens = tokens[: min(runner.rows, runner.limit)]
    sample = Sample(tokens, np.zeros(len(tokens), bool))
    ids = np.unique(np.linspace(0, read_target_sizes(target).vocab - 1, PROBE_IDS).astype(np.int64))
    final, logits = runner.probe(sample, ids)
    difference = final @ read_head_rows(target, ids).T - logits
    error = float(difference.square().mean().sqrt() / logits.square().mean().sqrt())
    if not error <= HEAD_TOLERANCE:
        raise FileError(
            f"{target}: its logits are not the product of its head and its final state: they differ by {error:.0%}.",
            "Models with a scale, a cap or a bias behind the head cannot be trained for.",
        )
    started = time.monotonic()
    runner.states([sample])
    return len(tokens) / max(time.monotonic() - started, 1e-9)


@contextlib.contextmanager
def _runner(
    settings: CaptureSettings, header: Header, longest: int, compiled: bool, report: Callable[[str], None]
) -> Iterator[Runner]:
    """The target, loaded.  OptionError where the longest sample does not fit."""
    if settings.in_torch:
        from .torch_states import TransformersRunner

        runner: Runner = TransformersRunner(settings, header.aux_layers, compiled, report)
    else:
        from .llama_states import LlamaRunner

        runner = LlamaRunner(settings, header.aux_layers, longest)
    try:
        if longest > runner.limit:
            raise OptionError(
                f"A sample has {longest} tokens, but the context has {runner.limit}.", "Cut conversations to it."
            )
        yield runner
    finally:
        runner.close()
