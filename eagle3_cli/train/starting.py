"""Where training starts: a drafter that exists already, to be fitted to the very GGUF that a person runs.

Its checkpoint may be any that `eagle3 convert` reads and the torch graph of model.py can compute.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..convert.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from ..convert.config import Choices, Facts, read_facts
from ..convert.encode import floats
from ..convert.families import Named, detect, sort_tensors
from ..convert.json_files import read_json
from ..convert.layout import flatten
from ..convert.target import Target
from ..convert.tensors import release
from ..convert.vocab import DraftVocab
from ..errors import CheckpointError, OptionError, PairError
from .model import Drafter, DrafterShape, FeatureDrafter
from .weights import TargetSizes

_HEAD, _FUSION, _EMBEDDING = "lm_head.weight", "fc.weight", "embed_tokens.weight"
_NOT_WEIGHTS = ("d2t", "t2d", _EMBEDDING)
_ROWS = 4096  # of two embeddings that are compared at a time

# Relative difference (root of the summed squares) up to which two embeddings are one, rounded or quantised in two
# ways: no quantisation costs half of a matrix, and an unrelated one of the same size differs by more than all of it.
_ROUNDING = 0.5

# Options of `eagle3 convert` alone, in its hints and notes.
_CONVERTS = re.compile(r"--(config|aux-convention)\b")
_CORRECT = "Correct the config in a copy of the checkpoint's folder and give that with --init."


@dataclass(frozen=True)
class StartingPoint:
    """A drafter to continue from.

    d2t          int64 [Vd], absolute ids, ascending
    aux_layers   the *inputs* of these target layers
    tensors      float32, by the names of model.Drafter's parameters; fc.weight for features that nothing scales;
                 without lm_head.weight where the drafter borrows the target's head
    embedding    float32 [V, H] where the checkpoint holds one (embed_tokens)
    notes        how doubtful places of the checkpoint were read, a sentence each, for the user
    """

    shape: DrafterShape
    d2t: Tensor
    aux_layers: tuple[int, int, int]
    tensors: dict[str, Tensor]
    embedding: Tensor | None
    notes: tuple[str, ...] = ()


def read_starting_point(folder: Path, sizes: TargetSizes) -> StartingPoint:
    """Read a drafter's checkpoint: a folder with config.json, as `eagle3 convert` takes it.

    sizes   of the target that the training is for
    FileError for a file that is missing or damaged, PairError for another target's drafter, CheckpointError for what
    llama.cpp's eagle3 graph or the torch module cannot compute.
    """
    checkpoint = open_checkpoint(folder)
    path = checkpoint.folder / "config.json"
    config = read_json(path)
    with _located(checkpoint, path):
        family = detect(config, checkpoint.tensors)
        named = sort_tensors(checkpoint)
        facts = read_facts(flatten(config), named.tensors, family, _target(sizes), Choices())
        _check_computable(facts)
        weights = {_parameter(name): _floats(t) for name, t in named.tensors.items() if name not in _NOT_WEIGHTS}
        embedding = named.tensors.get(_EMBEDDING)
        return StartingPoint(
            shape=_shape(facts, sizes),
            d2t=_sort_vocabulary(facts.vocab, weights),
            aux_layers=facts.aux.inputs,
            tensors=weights,
            embedding=None if embedding is None else _floats(embedding),
            notes=_notes(facts, named, sizes),
        )


def check_embedding(start: StartingPoint, embedding: Tensor) -> None:
    """CheckpointError where a drafter of the target's width has other embeddings than the target, which it would read.

    embedding   the target's, [V, Ht]
    """
    if start.embedding is None or start.shape.own_embeddings:
        return
    difference = _difference(start.embedding, embedding)
    if not difference <= _ROUNDING:
        raise CheckpointError(
            f"--init: {_EMBEDDING}: expected the target's embeddings but for rounding, got ones that differ by "
            f"{difference:.2f} times their size.",
            "Was the drafter made for this target? One of the target's width is trained with the target's embeddings.",
        )


@torch.no_grad()
def start_from_checkpoint(drafter: Drafter, start: StartingPoint) -> None:
    """Set the weights of a drafter of the same shape and vocabulary, whose features may be scaled.

    A head that the checkpoint lacks becomes the target's.  Embeddings of the target's width are none of the drafter's
    weights; they are checked, see `check_embedding`.
    """
    if isinstance(drafter, FeatureDrafter):
        raise OptionError("--init: an EAGLE-3 drafter cannot be trained with --objective eagle.", "Leave one out.")
    if drafter.shape != start.shape or not torch.equal(drafter.d2t.cpu(), start.d2t):
        raise ValueError("the drafter has another shape or draft vocabulary than the one to start from")
    if not drafter.shape.own_embeddings:
        check_embedding(start, drafter.embedding)
    own = dict(drafter.named_parameters())
    for name, weight in start.tensors.items():
        own[name].copy_(weight)
    own[_FUSION].mul_(drafter.scale)
    if _HEAD not in start.tensors:
        own[_HEAD].copy_(drafter.target_head)
    if drafter.shape.own_embeddings and start.embedding is not None:
        own[_EMBEDDING].copy_(start.embedding)


# ---- reading --------------------------------------------------------------------------------------------


def _target(sizes: TargetSizes) -> Target:
    """What the readers need of it.  The path stands for its name in messages; of the context they only say whether the
    drafter was trained for less."""
    return Target(Path("the target"), None, sizes.name, sizes.layers, sizes.width, sizes.vocab, 1, ())


@contextlib.contextmanager
def _located(checkpoint: Checkpoint, config: Path) -> Iterator[None]:
    """Put the file's name in front of messages, and say in hints what helps here."""
    try:
        yield
    except (CheckpointError, PairError) as error:
        about_config = error.message.startswith("config:")
        message = error.message.removeprefix("config:").removeprefix(f"{checkpoint.path}:").lstrip()
        hint = _CORRECT if _CONVERTS.search(error.hint or "") else error.hint
        raise type(error)(f"{config if about_config else checkpoint.path}: {message}", hint) from error


def _check_computable(facts: Facts) -> None:
    """CheckpointError for what eagle3 runs and model.py does not."""
    switches, rope = facts.switches, facts.rope
    if not switches.final_norm:
        raise CheckpointError(
            "config: use_last_layernorm is false: expected a drafter with a final norm, training knows no other.",
            "Use another drafter, or leave --init out.",
        )
    if switches.window is not None:
        raise CheckpointError(
            f"config: expected attention to all positions, got a sliding window of {switches.window}.",
            "Training knows no windows. If your texts stay shorter, it changes nothing: take sliding_window, "
            "use_sliding_window and layer_types out of the config in a copy of the folder.",
        )
    if rope.dimensions != facts.heads.dim:
        raise CheckpointError(
            f"config: partial_rotary_factor: expected RoPE on all {facts.heads.dim} dimensions of a head, got "
            f"{rope.dimensions}.",
            "Use another drafter, or leave --init out.",
        )
    if rope.scaling or rope.divisors is not None:
        raise CheckpointError(
            f"config: expected RoPE without scaling, got {rope.description}.",
            "Training knows only plain RoPE. Take the scaling out of the config in a copy of the folder, and the "
            "drafter learns to do without.",
        )


def _shape(facts: Facts, sizes: TargetSizes) -> DrafterShape:
    switches, heads = facts.switches, facts.heads
    return DrafterShape(
        hidden=facts.hidden,
        target_width=sizes.width,
        heads=heads.count,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        ffn=facts.ffn,
        vocab=sizes.vocab,
        draft_vocab=facts.vocab.size,
        eps=facts.eps,
        rope_theta=facts.rope.theta,
        norm_before_residual=switches.norm_before_residual,
        norm_before_fc=switches.norm_before_fc,
        fc_norm=switches.fc_norm,
        norm_output=switches.norm_output,
    )


def _parameter(slot: str) -> str:
    """The parameter's name, of a name in `families.SLOTS`."""
    return "mid" + slot if slot.startswith("layer.") else slot


def _floats(stored: StoredTensor) -> Tensor:
    found = torch.from_numpy(np.require(floats(stored.data, stored.dtype), requirements="W"))  # a mapped file is not
    release(stored.data)
    if not torch.isfinite(found).all():
        raise CheckpointError(f"{stored.name}: holds NaN or infinite values.", "The checkpoint is damaged.")
    return found


def _sort_vocabulary(vocab: DraftVocab, weights: dict[str, Tensor]) -> Tensor:
    """d2t, ascending; the head's rows are put in the same order."""
    if vocab.ids is None:
        return torch.arange(vocab.size)
    ids, order = torch.from_numpy(vocab.ids.astype(np.int64)).sort()
    weights[_HEAD] = weights[_HEAD][order]
    return ids


def _notes(facts: Facts, named: Named, sizes: TargetSizes) -> tuple[str, ...]:
    notes = [f"aux layers {list(facts.aux.inputs)} (inputs): {facts.aux.how}", *facts.notes]
    if _HEAD not in named.tensors:
        notes.append(f"{_HEAD} is missing: the head starts as the target's")
    if _EMBEDDING in named.tensors and facts.hidden == sizes.width:
        notes.append(f"{_EMBEDDING} is there: compared with the target's embeddings, which are used")
    notes += [f"{tensor.name}: not a weight of the drafter, left out" for tensor in named.ignored]
    return tuple(note.replace("--feedback pre", "norm_output: false in a copy of its folder") for note in notes)


def _difference(values: Tensor, reference: Tensor) -> float:
    """|values - reference| / |reference|, both [rows, columns]."""
    apart, size = 0.0, 0.0
    for first in range(0, len(values), _ROWS):
        rows = slice(first, first + _ROWS)
        wide = reference[rows].to(values.device, torch.float32)
        apart += float((values[rows] - wide).square().sum())
        size += float(wide.square().sum())
    return float(np.sqrt(apart / size)) if size else float("inf")
