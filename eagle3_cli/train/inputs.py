"""What can be read in seconds before a run: every input is checked, nothing is written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..convert.target import Target, read_target
from ..errors import FileError, OptionError
from ..gguf_file import GgufFile
from ..model_files import check_target
from ..settings import RuntimeSettings
from .settings import TrainSettings, flag
from .vocab import unskippable

if TYPE_CHECKING:
    from .model import DrafterShape
    from .starting import StartingPoint
    from .weights import TargetSizes


_LLAMA_ONLY = ("gpu_layers", "flash_attn", "cache_type_k", "cache_type_v", "draft_threads")


@dataclass(frozen=True)
class Inputs:
    """What was found in the files that the settings name.

    sizes          of the target
    longest        tokens that a sample may have
    aux_layers     the layers whose inputs the drafter reads
    conversations  in the data, and their user turns
    left_out       reason -> conversations of the data that are not used
    digests        sha256 of each data file and of the files to start from, what manifest.py compares of the target, and
                   the number of processes
    start          the drafter to start from, where it is a checkpoint
    """

    sizes: TargetSizes
    longest: int
    aux_layers: tuple[int, int, int]
    conversations: int
    user_turns: int
    left_out: Mapping[str, int]
    digests: Mapping[str, Any]
    start: StartingPoint | None = None


def check_inputs(settings: TrainSettings) -> Inputs:
    """Read what can be read in seconds.  An InputError for everything that cannot end well."""
    from .capture import aux_layers, in_torch
    from .chats import summarise_chats
    from .shards import file_sha256
    from .weights import identify, read_target_sizes

    target = settings.target
    facts = _check_target(settings)
    check_compile(settings)
    sizes = read_target_sizes(target)
    start = _starting_point(settings, sizes, facts)
    _check_sizes(settings, sizes, start)
    left_out: Counter[str] = Counter()
    conversations = turns = 0
    for path in settings.data:
        summary = summarise_chats(path)
        conversations += summary.conversations
        turns += summary.user_turns
        left_out += summary.left_out
    identity = {name: value for name, value in asdict(identify(target)[0]).items() if name != "path"}
    digests = {
        "data_sha256": [file_sha256(path) for path in settings.data],
        "target_file": identity,
        "num_processes": processes(),
        "start_sha256": _files_sha256(settings.start),
    }
    chosen = start.aux_layers if start else settings.aux_layers
    layers = aux_layers(chosen, sizes.layers, in_torch(target, settings.states))
    if layers[0] < 2 and settings.objective == "eagle3":
        raise OptionError(
            f"--aux-layers: expected layers from 2 on, got {list(layers)}.",
            "A checkpoint cannot name the input of layer 1: readers take a list that starts with 1 for outputs.",
        )
    context = settings.runtime.ctx_size or facts.context or settings.max_length
    longest = min(settings.max_length, context)
    return Inputs(sizes, longest, layers, conversations, turns, left_out, digests, start)


def _starting_point(settings: TrainSettings, sizes: TargetSizes, target: Target) -> StartingPoint | None:
    """What --init names, if it fits the target."""
    from ..convert.tokenizer import check_tokenizer
    from .starting import check_embedding, read_starting_point
    from .weights import read_target_weights

    if settings.start is None:
        return None
    start = read_starting_point(settings.start, sizes)
    check_tokenizer(settings.start, target)
    if start.embedding is not None and not start.shape.own_embeddings:
        check_embedding(start, read_target_weights(settings.target, np.zeros(1, np.int64)).embedding)
    return start


def _files_sha256(folder: Path | None) -> list[str]:
    """Of the config and the weights in the folder of a checkpoint."""
    from .shards import file_sha256

    files = [path for kind in ("*.json", "*.safetensors", "*.bin") for path in folder.glob(kind)] if folder else []
    return [file_sha256(path) for path in sorted(files)]


def _check_target(settings: TrainSettings) -> Target:
    """A GGUF or a Hugging Face directory with a chat template.  Of the latter that it can be the target of a
    conversion, too, which comes last."""
    if settings.target.is_dir():
        from .hf_tokenizer import HfTokenizer

        _check_runtime(settings)
        facts = read_target(settings.target)
        HfTokenizer(settings.target)
        return facts
    check_target(settings.target, settings.runtime.ctx_size)
    _check_template(settings.target)
    return read_target(settings.target)


def _check_runtime(settings: TrainSettings) -> None:
    """OptionError for what only llama.cpp heeds."""
    default = RuntimeSettings()
    for name in _LLAMA_ONLY:
        if getattr(settings.runtime, name) != getattr(default, name):
            raise OptionError(
                f"{flag(name)}: has no effect where the target is a folder, which transformers runs.", "Leave it out."
            )


def check_compile(settings: TrainSettings) -> None:
    """OptionError where torch.compile was asked for and does not work where the run computes with PyTorch."""
    from .capture import in_torch
    from .compiling import compile_fault, training_device

    if settings.compile != "on":
        return
    devices = {training_device(settings)}
    if in_torch(settings.target, settings.states):
        from .torch_states import torch_device

        devices.add(torch_device(settings.runtime.device).type)
    for fault in filter(None, map(compile_fault, sorted(devices))):
        raise OptionError(f"--compile on: torch.compile does not work here: {fault}.", "Give --compile off.")


def _check_template(path: Path) -> None:
    with GgufFile(path) as file:
        if not file.get("tokenizer.chat_template"):
            raise FileError(
                f"{path}: expected a chat template (tokenizer.chat_template), got none.",
                "A drafter is trained on chats as `eagle3 chat` renders them: take the instruction-tuned model.",
            )


def _check_sizes(settings: TrainSettings, sizes: TargetSizes, start: StartingPoint | None) -> None:
    if start:
        return
    missing = [name for name in ("heads", "kv_heads", "head_dim", "ffn") if not getattr(sizes, name)]
    missing = [flag(name) for name in missing if getattr(settings, name) is None]
    if missing:
        raise OptionError(f"{settings.target}: does not say how large its layers are.", f"Give {', '.join(missing)}.")
    size = settings.draft_vocab
    if size is not None and size > sizes.vocab:
        raise OptionError(f"--draft-vocab: expected at most the target's {sizes.vocab} tokens, got {size}.")
    least = len(unskippable(settings.target))
    if size is not None and size < least:
        raise OptionError(f"--draft-vocab: expected at least the target's {least} end and control tokens, got {size}.")
    _shape(settings, sizes, size or sizes.vocab)


def processes() -> int:
    """How many train together: what `accelerate launch` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def drafter_shape(settings: TrainSettings, inputs: Inputs, candidates: int) -> DrafterShape:
    """The drafter's sizes: those of the checkpoint to start from; else as asked for, otherwise the target's."""
    return inputs.start.shape if inputs.start else _shape(settings, inputs.sizes, candidates)


def _shape(settings: TrainSettings, sizes: TargetSizes, candidates: int) -> DrafterShape:
    """OptionError where they do not fit together."""
    from .model import DrafterShape

    chosen = {
        name: getattr(settings, name) or getattr(sizes, name) for name in ("heads", "kv_heads", "head_dim", "ffn")
    }
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return DrafterShape(
        hidden=settings.hidden or sizes.width,
        target_width=sizes.width,
        vocab=sizes.vocab,
        draft_vocab=candidates,
        rope_theta=sizes.rope_theta,
        eps=sizes.eps,
        **chosen,
        **{name: getattr(settings, name) for name in switches},
    )
