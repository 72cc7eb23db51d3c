"""Which of the target's hidden states a drafter reads: the aux layers.

llama.cpp wants the *input* of layer i.  Checkpoints count inputs or outputs and rarely say which; one layer off costs
most of the acceptance and nothing else shows it, so the choice is always reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, OptionError

KEY = "eagle_aux_hidden_state_layer_ids"
MOST_LAYERS = 512  # of a model that llama.cpp loads (LLAMA_MAX_LAYERS)


@dataclass(frozen=True)
class AuxLayers:
    """inputs: three ids, ascending; the hidden state is the input of layer i, and i = number of layers is the last
    layer's output before the final norm.  how: one sentence for the report."""

    inputs: tuple[int, int, int]
    how: str


def choose_layers(config: Mapping[str, Any], n_layers: int | None, convention: str = "auto") -> AuxLayers:
    """The aux layers of a target with n_layers layers (None: not known).

    Rule: first id 1 -> outputs, first id 2 -> inputs, otherwise ids in eagle_config -> outputs, unless the last one
    would then lie behind the last layer, and ids at top level -> inputs (docs/checkpoints.md, "Which layers").
    convention "input" or "output" overrides it.  CheckpointError for anything but three ascending layers of this
    target, and where only the number of its layers could tell.
    """
    found = _lists(config)
    if not found:
        if convention != "auto":
            raise OptionError("--aux-convention: has no effect, the config names no aux layers.", "Leave it out.")
        if n_layers is None:
            raise CheckpointError(
                f"config: no {KEY}, and the default depends on the target's number of layers.",
                f"Give --target, or add {KEY} to a copy of the config and give that with --config.",
            )
        return _default(n_layers)
    readings = [_read(place, ids, n_layers, convention) for place, ids in found]
    if readings[0].inputs != readings[-1].inputs:
        both = "; ".join(f"{place}: {ids}" for place, ids in found)
        raise CheckpointError(
            f"config: {KEY} is there twice and means different layers ({both}).",
            "Remove one of them from a copy of the config and give that with --config.",
        )
    return readings[0]


def _lists(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(place, ids) of each list of ids; null counts as absent."""
    nested = config.get("eagle_config")
    places = [("top level", config.get(KEY)), ("eagle_config", nested.get(KEY) if isinstance(nested, dict) else None)]
    return [(place, ids) for place, ids in places if ids is not None]


def _default(n_layers: int) -> AuxLayers:
    low, middle, high = 2, n_layers // 2, n_layers - 3
    if not low < middle < high:
        raise CheckpointError(
            f"config: no {KEY}, and the default [2, n/2, n-3] does not fit a target of {n_layers} layers.",
            f"Add {KEY} to the config.",
        )
    return AuxLayers((low, middle, high), f"absent from the config, so the default [2, n/2, n-3] of {n_layers} layers")


def _read(place: str, ids: Any, n_layers: int | None, convention: str) -> AuxLayers:
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"config: {KEY} ({place}): expected three layer ids, got {ids!r}.", "llama.cpp fuses exactly three layers."
        )
    if not 1 <= ids[0] < ids[1] < ids[2]:
        raise CheckpointError(f"config: {KEY} ({place}): expected three ascending ids of at least 1, got {ids}.")
    outputs, why = _is_outputs(place, ids, n_layers, convention)
    inputs = tuple(i + 1 for i in ids) if outputs else tuple(ids)
    if n_layers is None and inputs[2] > MOST_LAYERS:
        raise CheckpointError(f"config: {KEY} ({place}): expected ids up to {MOST_LAYERS}, got {ids}.")
    if n_layers is not None and inputs[2] > n_layers:
        meant = f"counted as outputs they are the inputs of layers {list(inputs)}" if outputs else "inputs of layers"
        raise CheckpointError(
            f"config: {KEY} ({place}): {ids} does not fit a target of {n_layers} layers ({meant}).",
            "Is this the right target?"
            + (" If the ids already count inputs, give --aux-convention input." if outputs else ""),
        )
    action = "outputs, one added" if outputs else "inputs"
    return AuxLayers((inputs[0], inputs[1], inputs[2]), f"{ids} ({place}) read as layer {action}: {why}")


def _is_outputs(place: str, ids: list[int], n_layers: int | None, convention: str) -> tuple[bool, str]:
    """Whether ids count layer outputs, and why we think so."""
    if convention != "auto":
        return convention == "output", f"--aux-convention {convention}"
    if ids[0] in (1, 2):
        return ids[0] == 1, f"the first id is {ids[0]}"
    if place != "eagle_config":
        return False, "ids at top level count inputs"
    if n_layers is None:
        raise CheckpointError(
            f"config: {KEY} ({place}): whether {ids} counts layer inputs or outputs depends on the target's layers.",
            "Give --target, or --aux-convention.",
        )
    if ids[2] == n_layers:
        return False, f"counted as outputs, {ids[2]} would lie behind the last of {n_layers} layers"
    return True, "ids in eagle_config count outputs"
