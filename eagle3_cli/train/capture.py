"""The target's states of samples, written as shards: what a drafter is trained on.

A GGUF runs in llama.cpp with the graph, cache types and kernels of `eagle3 chat`; a Hugging Face directory runs in
transformers.  Samples are computed several to a batch, as different sequences, and written in their own order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..convert.layers import choose_layers
from ..convert.output import check_space
from ..errors import BackendError, CheckpointError, FileError, LlamaError, OptionError
from ..settings import MAX_SEQUENCES, RuntimeSettings
from .samples import Sample
from .shards import MANIFEST, Header, Manifest, ShardWriter, token_bytes
from .weights import identify, read_head_rows, read_target_sizes

FINAL = "result_norm"  # graph tensor: the state after the final norm, which the head reads
PROBE_TOKENS = 128  # of the batch that is checked and timed before the work begins
PROBE_IDS = 512  # tokens whose logits are computed again from the final state
# Of the logits' root mean square.  llama.cpp multiplies a quantised head with activations of 8 bits: 0.6 % was measured
# on the demo target; a scale, a cap or a bias behind the head gives far more.
HEAD_TOLERANCE = 0.05
_DOWNLOAD = "Download the model again."
TORCH_TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden bfloat16 [n, 3*Ht], final bfloat16 [n, Ht], best int64 [n] of one sample."""


@dataclass(frozen=True)
class CaptureSettings:
    """What to capture and where to.

    target        a GGUF or a Hugging Face directory
    folder        of the shards; what an earlier capture of the same left there is kept
    runtime       how llama.cpp runs; `batch` tokens are computed at a time.  transformers heeds `device` alone
    aux_layers    layers whose inputs are captured, ascending; None: [2, n/2, n-3]
    shard_tokens  after how many tokens a shard is full; None: by size
    dtype         "bf16" or "f32", what transformers computes in
    """

    target: Path
    folder: Path
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    aux_layers: tuple[int, int, int] | None = None
    shard_tokens: int | None = None
    dtype: str = "bf16"


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


def capture(settings: CaptureSettings, samples: Iterable[Sample], progress: Progress | None = None) -> Manifest:
    """Write the states of all samples, those of an unfinished capture apart; returns the complete manifest.

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
        with _runner(settings, header, max(map(len, wanted))) as runner:
            work.run(runner, _measure(settings.target, runner, wanted[writer.done :]))
    else:
        work.report(None)
    return writer.close()


def make_header(settings: CaptureSettings) -> Header:
    """What the manifest of such a capture says, from the target's files alone."""
    sizes = read_target_sizes(settings.target)
    target, template = identify(settings.target)
    in_torch = settings.target.is_dir()
    if in_torch and settings.dtype not in TORCH_TYPES:
        raise OptionError(f"dtype: expected one of {', '.join(TORCH_TYPES)}, got {settings.dtype}.")
    engine = f"transformers {settings.dtype}" if in_torch else "llama.cpp"
    # transformers keeps the last layer's output only after the final norm
    deepest = sizes.layers - 1 if in_torch else sizes.layers
    layers = aux_layers(settings.aux_layers, sizes.layers, deepest)
    return Header(target, layers, sizes.width, sizes.vocab, template, engine)


def aux_layers(chosen: tuple[int, ...] | None, layers: int, deepest: int) -> tuple[int, int, int]:
    """The layers whose inputs are captured.  OptionError for anything but three ascending ids from 1 to `deepest`."""
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
def _runner(settings: CaptureSettings, header: Header, longest: int) -> Iterator[Runner]:
    """The target, loaded.  OptionError where the longest sample does not fit."""
    kind: Any = TransformersRunner if settings.target.is_dir() else LlamaRunner
    runner = kind(settings, header.aux_layers, longest)
    try:
        if longest > runner.limit:
            raise OptionError(
                f"A sample has {longest} tokens, but the context has {runner.limit}.", "Cut conversations to it."
            )
        yield runner
    finally:
        runner.close()


# --- llama.cpp -----------------------------------------------------------------------------------------


class LlamaRunner:
    """A GGUF in one context whose capture holds the aux layers' inputs and the final state of every row."""

    def __init__(self, settings: CaptureSettings, layers: Sequence[int], longest: int) -> None:
        """longest: tokens of the longest sample, for which the KV cache must have room."""
        from ..llama import Model, choose_devices
        from ..model_files import check_target
        from ..probe import amx_crashes

        self.path, runtime = settings.target, settings.runtime
        check_target(self.path)
        devices, gpu_layers, _ = choose_devices(runtime.device, runtime.gpu_layers)
        self.model = Model(self.path, devices, gpu_layers, not amx_crashes())
        self.context: Any = None
        try:
            self._check_model()
            self.limit = runtime.ctx_size or self.model.n_ctx_train
            self.rows = runtime.batch
            if longest <= self.limit:
                self._make_context(runtime, layers, longest, bool(devices))
        except BaseException:
            self.close()
            raise

    def _check_model(self) -> None:
        if not self.model.generates_text:
            raise FileError(f"{self.path}: {self.model.description} does not generate text.")
        if not self.model.keeps_every_position:
            raise FileError(f"{self.path}: {self.model.description} has recurrent layers; eagle3 cannot draft for it.")

    def _make_context(self, runtime: RuntimeSettings, layers: Sequence[int], longest: int, on_gpu: bool) -> None:
        from .. import _native
        from ..context import Context, target_settings

        names = [*(f"l_out-{layer - 1}" for layer in layers), FINAL]
        self._capture = _native.Capture(names, self.model.n_embd, self.rows)
        cells, sequences = max(self.rows, longest), min(MAX_SEQUENCES, self.rows)
        context = target_settings(runtime, on_gpu, cells, self.rows, sequences)
        self.context = Context(self.model, "target", context, self._capture)

    def states(self, samples: Sequence[Sample]) -> list[States]:
        """Of samples that fit into one batch together, or of one longer sample in several."""
        tokens = np.concatenate([sample.tokens for sample in samples])
        pos = np.concatenate([np.arange(len(sample), dtype=np.int32) for sample in samples])
        sequences = np.repeat(np.arange(len(samples), dtype=np.int32), [len(sample) for sample in samples])
        parts = [slice(start, start + self.rows) for start in range(0, len(tokens), self.rows)]
        try:
            computed = [self._batch(tokens[part], pos[part], sequences[part]) for part in parts]
        finally:
            self.context.remove(-1, 0)
        lengths = [len(sample) for sample in samples]
        hidden, final, best = (torch.cat(column).split(lengths) for column in zip(*computed, strict=True))
        return list(zip(hidden, final, best, strict=True))

    def _batch(self, tokens: np.ndarray, pos: np.ndarray, sequences: np.ndarray) -> States:
        """Every row asks for logits: of the last layer llama.cpp computes only those rows."""
        from .. import _native
        from ..context import DECODE

        n, ask = len(tokens), np.ones(len(tokens), np.int8)
        self.context.process(DECODE, pos, tokens, np.arange(n + 1, dtype=np.int32), sequences, ask)
        rows = torch.from_numpy(self.context.captured[:n])
        if not torch.isfinite(rows).all():
            raise LlamaError(
                f"{self.path}: its states hold NaN or infinite values.", "Try another --cache-type-k or -v."
            )
        address, vocab = self.context.logits(), self.model.n_vocab
        best = torch.tensor([_native.argmax(address + 4 * vocab * row, vocab) for row in range(n)])
        states = rows.to(torch.bfloat16)  # to the nearest, ties to even
        at = 3 * self.model.n_embd
        return states[:, :at], states[:, at:], best

    def probe(self, sample: Sample, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """FileError where the graph of this architecture does not have the captured tensors."""
        import ctypes

        try:
            self.states([sample])
        except LlamaError as error:
            fault = self._capture.check(len(sample))
            if fault is None:
                raise
            raise FileError(
                f"{self.path}: the states of {self.model.description} cannot be captured: {fault}.",
                "llama.cpp's graph of this architecture does not name them.",
            ) from error
        n, vocab = len(sample), self.model.n_vocab
        rows = (ctypes.c_float * (n * vocab)).from_address(self.context.logits())
        logits = np.ctypeslib.as_array(rows).reshape(n, vocab)[:, ids]
        final = self.context.captured[:n, 3 * self.model.n_embd :].copy()
        return torch.from_numpy(final), torch.from_numpy(logits)

    def close(self) -> None:
        if self.context is not None:
            self.context.close()
        self.model.close()


# --- transformers --------------------------------------------------------------------------------------


class TransformersRunner:
    """A Hugging Face directory.  A batch is computed sample by sample: there is nothing to pad and nothing to mask."""

    def __init__(self, settings: CaptureSettings, layers: Sequence[int], longest: int) -> None:
        self.path, self.layers = settings.target, list(layers)
        self.device = _torch_device(settings.runtime.device)
        self.model = _load_transformers(self.path, TORCH_TYPES[settings.dtype]).to(self.device).eval()
        self.rows = settings.runtime.batch
        self.limit = settings.runtime.ctx_size or int(self.model.config.max_position_embeddings)

    def states(self, samples: Sequence[Sample]) -> list[States]:
        return [self._states(sample.tokens) for sample in samples]

    @torch.inference_mode()
    def _states(self, tokens: np.ndarray) -> States:
        """hidden_states[i] is the input of layer i; the last hidden state comes after the final norm."""
        ids = torch.from_numpy(tokens).long().to(self.device)[None]
        output = self.model.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
        hidden = torch.cat([output.hidden_states[layer][0] for layer in self.layers], dim=1)
        final, head = output.last_hidden_state[0], self.model.get_output_embeddings()
        best = torch.cat([head(part).argmax(1) for part in final.split(self.rows)])  # never all logits at once
        if not (torch.isfinite(hidden).all() and torch.isfinite(final).all()):
            raise FileError(f"{self.path}: its states hold NaN or infinite values.", "Try another number type.")
        return hidden.bfloat16().cpu(), final.bfloat16().cpu(), best.cpu()

    @torch.inference_mode()
    def probe(self, sample: Sample, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(sample.tokens).long().to(self.device)[None]
        logits = self.model(input_ids=tokens, use_cache=False).logits[0][:, torch.from_numpy(ids)]
        final = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        return final.float().cpu(), logits.float().cpu()

    def close(self) -> None:
        del self.model


def _torch_device(device: str) -> torch.device:
    """BackendError where the installed PyTorch has no such device."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "metal": torch.backends.mps.is_available()}
    if device == "auto":
        device = next(name for name in ("cuda", "metal", "cpu") if available[name])
    if not available[device]:
        raise BackendError(f"--device {device}: the installed PyTorch has no such device.", "Use --device cpu.")
    return torch.device("mps" if device == "metal" else device)


def _load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """FileError where transformers cannot load it, or would make up weights that the files do not hold."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise FileError(f"{path}: reading a Hugging Face directory needs the package transformers.") from error
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise FileError(f"{path}: transformers cannot load it: {error}") from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise FileError(f"{path}: its weight files lack {missing[0]}.", _DOWNLOAD)
    return model
