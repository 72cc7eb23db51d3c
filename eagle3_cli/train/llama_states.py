"""The target's states from llama.cpp: with the graph, cache types and kernels of `eagle3 chat`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import _native
from ..context import DECODE, Context, target_settings
from ..errors import FileError, LlamaError
from ..llama import Model, choose_devices
from ..model_files import check_target
from ..placement import placement
from ..probe import amx_crashes
from ..settings import MAX_SEQUENCES, RuntimeSettings
from .capture import CaptureSettings, States
from .samples import Sample

FINAL = "result_norm"  # graph tensor: the state after the final norm, which the head reads


class LlamaRunner:
    """A GGUF in one context whose capture holds the aux layers' inputs and the final state of every row."""

    def __init__(self, settings: CaptureSettings, layers: Sequence[int], longest: int) -> None:
        """longest: tokens of the longest sample, for which the KV cache must have room."""
        self.path, runtime = settings.target, settings.runtime
        self.model, on_gpu = load_model(self.path, runtime)
        self.context: Any = None
        try:
            self.limit = runtime.ctx_size or self.model.n_ctx_train
            self.rows = runtime.batch
            if longest <= self.limit:
                self._make_context(runtime, layers, longest, on_gpu)
        except BaseException:
            self.close()
            raise

    def _make_context(self, runtime: RuntimeSettings, layers: Sequence[int], longest: int, on_gpu: bool) -> None:
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


def load_model(path: Path, runtime: RuntimeSettings) -> tuple[Model, bool]:
    """The target, and whether it is on a GPU.  FileError for a file that cannot be drafted for."""
    check_target(path)
    devices, layers, backend = choose_devices(runtime)
    where = placement(runtime, path, backend)
    model = Model(path, devices, layers, not amx_crashes(), mmap=runtime.mmap, placement=where)
    if model.generates_text and model.keeps_every_position:
        return model, bool(devices)
    fault = (
        "has recurrent layers, and states are captured from several texts at once"
        if model.generates_text
        else "does not generate text"
    )
    described = model.description
    model.close()
    raise FileError(f"{path}: {described} {fault}.")
