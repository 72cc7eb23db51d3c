"""The target's states from transformers: of a Hugging Face directory, or of a GGUF whose weights it turns back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import compile_regions
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from transformers.utils.quantization_config import GgufConfig

from ..errors import BackendError, FileError
from .capture import TORCH_TYPES, CaptureSettings, States
from .compiling import Worker, compiles
from .samples import Sample

BATCH_TOKENS = 4096  # with padding, of one forward pass


class TransformersRunner:
    """Samples of like length are computed together, padded on the right, where causal attention needs no mask."""

    def __init__(
        self, settings: CaptureSettings, layers: Sequence[int], compiled: bool, report: Callable[[str], None]
    ) -> None:
        """compiled: through torch.compile where it works.  report: told where it does not."""
        self.path, self.layers = settings.target, list(layers)
        self.device = torch_device(settings.runtime.device)
        self._worker = Worker(self.device.type, settings.runtime.threads)
        self.model = load_model(self.path, TORCH_TYPES[settings.dtype]).to(self.device).eval()
        self.rows = max(settings.runtime.batch, 8 * BATCH_TOKENS)
        self.limit = settings.runtime.ctx_size or int(self.model.config.max_position_embeddings)
        compiled = compiled and compiles(self.device.type, report)
        self.base = compile_regions(self.model.base_model, dynamic=True) if compiled else self.model.base_model

    def states(self, samples: Sequence[Sample]) -> list[States]:
        return self._worker(self._in_order, samples)

    def _in_order(self, samples: Sequence[Sample]) -> list[States]:
        found: dict[int, States] = {}
        for batch in _like_lengths([len(sample) for sample in samples]):
            computed = self._states([samples[i].tokens for i in batch])
            found.update(zip(batch, computed, strict=True))
        return [found[i] for i in range(len(samples))]

    @torch.inference_mode()
    def _states(self, tokens: Sequence[np.ndarray]) -> list[States]:
        """hidden_states[i] is the input of layer i; the last hidden state comes after the final norm."""
        ids = pad_sequence([torch.from_numpy(t).long() for t in tokens], batch_first=True).to(self.device)
        output = self.base(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = [*(output.hidden_states[layer] for layer in self.layers), output.last_hidden_state]
        rows = [torch.cat([state[i, : len(t)] for state in states], dim=1) for i, t in enumerate(tokens)]
        together = torch.cat(rows)
        if not torch.isfinite(together).all():
            raise FileError(f"{self.path}: its states hold NaN or infinite values.", "Try another number type.")
        width = output.last_hidden_state.shape[-1]
        hidden, final = together.split([3 * width, width], dim=1)
        best = torch.cat([self._head(part).argmax(1) for part in final.split(256)])  # never all logits at once
        columns = hidden.bfloat16().cpu(), final.bfloat16().cpu(), best.cpu()
        return list(zip(*(column.split([len(t) for t in tokens]) for column in columns), strict=True))

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def probe(self, sample: Sample, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return self._worker(self._probe, sample, ids)

    @torch.inference_mode()
    def _probe(self, sample: Sample, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(sample.tokens).long().to(self.device)[None]
        logits = self.model(input_ids=tokens, use_cache=False).logits[0][:, torch.from_numpy(ids)]
        final = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        return final.float().cpu(), logits.float().cpu()

    def close(self) -> None:
        self._worker.close()
        del self.base, self.model


def _like_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The samples by length, as many together as BATCH_TOKENS allow, or one."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[i] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def torch_device(device: str) -> torch.device:
    """BackendError where the installed PyTorch has no such device."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "metal": torch.backends.mps.is_available()}
    if device == "auto":
        device = next(name for name in ("cuda", "metal", "cpu") if available[name])
    if not available[device]:
        raise BackendError(f"--device {device}: the installed PyTorch has no such device.", "Use --device cpu.")
    return torch.device("mps" if device == "metal" else device)


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """FileError where transformers cannot load it without code from its folder, or would make up weights that the files
    do not hold."""
    logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if not path.is_dir():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        where["quantization_config"] = GgufConfig(dequantize=True)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **where, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, NotImplementedError) as error:
        raise FileError(f"{path}: transformers cannot load it: {error}") from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise FileError(f"{path}: its weight files lack {missing[0]}.", "Download the model again.")
    return model
