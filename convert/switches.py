"""What a drafter computes differently from the plain EAGLE-3 layer: its norms, its feedback, its window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, OptionError
from .checkpoint import StoredTensor
from .config_keys import flag, integer
from .families import SPECFORGE, Family

FC_NORMS = tuple(f"fc_norm.{i}.weight" for i in range(3))


@dataclass(frozen=True)
class Switches:
    """With the names of docs/checkpoints.md.

    norm_before_residual   the residual is the normalised feature
    norm_before_fc         one norm over the three features together
    fc_norm                one norm for each of the three features (EAGLE 3.1)
    norm_output            the row fed back is taken after the final norm (EAGLE 3.1)
    final_norm             false: the head reads the layer's output as it is
    window                 keys that a query sees, its own included; None for all
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    final_norm: bool
    window: int | None


def read_switches(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], family: Family, feedback: str, notes: list[str]
) -> Switches:
    """Every switch, from the config and from the tensors that must go with it.

    feedback   "auto" takes the config's norm_output, "pre" and "post" override it
    CheckpointError or OptionError at the first contradiction; remarks are added to notes.
    """
    before_fc = _agrees(config, "norm_before_fc", tensors, ("input_norm.weight",), notes)
    each = _agrees(config, "fc_norm", tensors, FC_NORMS, notes)
    if before_fc and each:
        raise CheckpointError("config: norm_before_fc and fc_norm exclude each other, but both are true.")
    final = _final_norm(config, tensors, notes)
    return Switches(
        norm_before_residual=_norm_before_residual(config, family, notes),
        norm_before_fc=before_fc,
        fc_norm=each,
        norm_output=_norm_output(config, family, feedback, final, notes),
        final_norm=final,
        window=_window(config, notes),
    )


def _agrees(
    config: Mapping[str, Any],
    key: str,
    tensors: Mapping[str, StoredTensor],
    names: tuple[str, ...],
    notes: list[str],
) -> bool:
    """A flag that comes with tensors: all of them are there, or none, and the config says the same."""
    stated, there = flag(config, key), [name for name in names if name in tensors]
    if there and len(there) < len(names):
        missing = next(name for name in names if name not in there)
        raise CheckpointError(f"the tensor {missing} is missing, but {there[0]} is there.")
    if stated is None and there:
        notes.append(f"{there[0]} is there and {key} is not in the config: taken as true")
    elif bool(stated) != bool(there):
        raise CheckpointError(
            f"config: {key} is {str(stated).lower()}, but the tensor {names[0]} is {'there' if there else 'missing'}.",
            "Use the complete checkpoint with its own config.",
        )
    return bool(there)


def _norm_before_residual(config: Mapping[str, Any], family: Family, notes: list[str]) -> bool:
    stated = flag(config, "norm_before_residual")
    if stated is None and family.norm_before_residual:
        notes.append(f"norm_before_residual is not in the config: true, as vLLM reads {family.name} files")
    return family.norm_before_residual if stated is None else stated


def _final_norm(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], notes: list[str]) -> bool:
    there, stated = "norm.weight" in tensors, flag(config, "use_last_layernorm")
    if not there and stated is not False:
        raise CheckpointError(
            "the tensor norm.weight is missing.",
            "Is the download complete? Only a config that says use_last_layernorm: false makes it superfluous.",
        )
    if there and stated is False:
        raise CheckpointError("config: use_last_layernorm is false, but the tensor norm.weight is there.")
    if not there:
        notes.append(
            "no final norm: this version of eagle3 runs the drafter without one; llama-server applies one, which keeps"
            " the order of its proposals and changes their probabilities"
        )
    return there


def _norm_output(config: Mapping[str, Any], family: Family, feedback: str, final_norm: bool, notes: list[str]) -> bool:
    stated = flag(config, "norm_output")
    post = feedback == "post" if feedback != "auto" else bool(stated)
    if post and not final_norm:
        if feedback == "post":
            raise OptionError("--feedback post: this drafter has no final norm.", "Leave it out.")
        raise CheckpointError("config: norm_output is true, but use_last_layernorm is false: there is no final norm.")
    if feedback != "auto" and stated is not None and stated != post:
        notes.append(f"norm_output is {str(stated).lower()} in the config, --feedback {feedback} overrides it")
    elif post and feedback == "auto" and family == SPECFORGE:
        notes.append(
            "norm_output is true; SpecForge files from before mid-September 2026 say so and were trained without:"
            " if acceptance is low, compare with --feedback pre"
        )
    if post:
        notes.append("EAGLE 3.1 feedback: llama-server feeds the row before the final norm back and accepts less")
    return post


def _window(config: Mapping[str, Any], notes: list[str]) -> int | None:
    """The sliding window of the one layer.  layer_types decides where it is there, otherwise use_sliding_window."""
    window, context = integer(config, "sliding_window"), integer(config, "max_position_embeddings")
    used = flag(config, "use_sliding_window")
    if not _slides(config, window, used, context):
        return None
    if window is None:
        raise CheckpointError("config: the layer has sliding-window attention, but there is no sliding_window.")
    notes.append(f"sliding window of {window} positions: eagle3 keeps to it, llama-server attends to all positions")
    return window


def _slides(config: Mapping[str, Any], window: int | None, used: bool | None, context: int | None) -> bool:
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        raise CheckpointError(f"config: layer_types: expected a list, got {types!r}.")
    if unknown := [t for t in types if t not in ("full_attention", "sliding_attention")]:
        raise CheckpointError(f"config: layer_types: expected full_attention or sliding_attention, got {unknown[0]!r}.")
    if len(set(types)) > 1:
        raise CheckpointError(f"config: layer_types is {types!r}, but the drafter has one layer.", "Keep its own type.")
    if types:
        slides = types[0] == "sliding_attention"
        if slides and used is False:
            raise CheckpointError(f"config: layer_types is {types!r}, but use_sliding_window is false.")
        return slides
    if window is not None and used is None and (context is None or window < context):
        raise CheckpointError(
            f"config: sliding_window is {window}, and neither layer_types nor use_sliding_window says if it is used.",
            "Add use_sliding_window to a copy of the config and give that with --config.",
        )
    # Qwen's configs slide from layer max_window_layers on, and a drafter has layer 0
    return bool(used) and not integer(config, "max_window_layers")
