"""Which engine speaks for a target: llama.cpp for a GGUF, transformers for a Hugging Face directory.

llama_states.py and torch_states.py are chosen by capture.py in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from .settings import TrainSettings

if TYPE_CHECKING:
    from .dialogue import AnswerSettings, Writer, WriterProgress
    from .render import Renderer


def target_dtype(settings: TrainSettings) -> str:
    """What transformers computes a target in: "bf16" or "f32".  Of a directory as --precision says; of a GGUF bf16."""
    if not settings.target.is_dir() or settings.precision == "bf16":
        return "bf16"
    if settings.precision == "no":
        return "f32"
    from .compiling import fast_bfloat16
    from .torch_states import torch_device

    device = torch_device(settings.runtime.device).type
    return "bf16" if device != "cpu" or fast_bfloat16(device) else "f32"


def open_writer(
    settings: TrainSettings, longest: int, law: AnswerSettings, progress: Callable[[WriterProgress], None]
) -> Writer:
    """The loaded target, to be closed.  longest: tokens of a prompt and its answer together."""
    runtime = replace(settings.runtime, ctx_size=longest)
    if settings.target.is_dir():
        from .torch_answers import TorchAnswerWriter

        return TorchAnswerWriter(settings.target, runtime, law, progress, target_dtype(settings))
    from .answers import AnswerWriter

    return AnswerWriter(settings.target, runtime, law, progress)


@contextmanager
def open_renderer(settings: TrainSettings, longest: int) -> Iterator[Renderer]:
    """Of the target's tokenizer and chat template, without its weights."""
    from .render import Renderer

    if settings.target.is_dir():
        from .hf_tokenizer import HfTokenizer

        yield Renderer(HfTokenizer(settings.target), longest)
        return
    from ..llama import Model

    model = Model(settings.target, [], 0, False, weights=False)
    try:
        yield Renderer(model, longest)
    finally:
        model.close()
