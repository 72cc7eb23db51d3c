"""Rotary position embedding: from the config to what llama.cpp's eagle3 graph honours.

The graph reads rope.freq_base, rope.scaling.{type,factor,original_context_length,attn_factor} and one tensor of
frequency divisors, `rope_freqs`; YaRN's beta_fast, beta_slow and truncate keys are NOT read for this architecture
(llama.cpp 0c1e570, src/llama-model.cpp load_hparams, src/llama-context.cpp).  Since any fixed scaling is a divisor per
frequency times one factor on sin and cos, what the keys cannot say is written as `rope_freqs` and attn_factor.
Formulas: transformers, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

DEFAULT_THETA = 10000.0  # of every implementation that trains drafters; never the target's


@dataclass(frozen=True)
class Rope:
    """theta; dimensions: how many of a head's are rotated, from the first on; scaling: values of
    `eagle3.rope.scaling.*` keys; divisors: float32 [dimensions/2] of `rope_freqs`."""

    theta: float
    dimensions: int
    scaling: dict[str, str | float | int]
    divisors: NDArray[np.float32] | None
    description: str
    notes: tuple[str, ...] = ()


# Keys a scaling dictionary may hold; any other could change the angles and is an error.
_KNOWN = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate", "mrope_section", "mrope_interleaved", "partial_rotary_factor", "finetuned", "extrapolation_factor",
}  # fmt: skip


def read_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """RoPE of a drafter whose heads have head_dim dimensions.

    CheckpointError for a type or a key that llama.cpp cannot run, and for places that contradict each other.
    """
    scaling = _scaling(config)
    theta = _theta(config, scaling)
    kind = _kind(scaling)
    if kind not in RULES:
        raise CheckpointError(
            f"config: rope type {kind!r} is unknown, expected one of {', '.join(RULES)}.",
            "llama.cpp's eagle3 graph cannot run it; use another drafter.",
        )
    dimensions = _rotated(config, scaling, head_dim)
    return RULES[kind](_Request(kind, theta, dimensions, scaling, config.get("max_position_embeddings")))


def _rotated(config: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int) -> int:
    """Rotated dimensions of a head: an even share, by partial_rotary_factor."""
    places = (config, scaling)
    values = [p["partial_rotary_factor"] for p in places if p.get("partial_rotary_factor") is not None]
    if not values:
        return head_dim
    factor = _number("partial_rotary_factor", values[0], least=1e-6)
    dimensions = int(head_dim * factor)
    if values[0] != values[-1] or factor > 1 or dimensions % 2 or dimensions < 2:
        stated = " and ".join(map(str, values))
        raise CheckpointError(f"config: partial_rotary_factor: {stated} of {head_dim} dimensions is no even share.")
    return dimensions


@dataclass(frozen=True)
class _Request:
    kind: str
    theta: float
    dimensions: int
    scaling: Mapping[str, Any]
    context: Any

    def number(self, key: str, default: float | None = None, least: float = 1e-9) -> float:
        return _number(f"rope scaling, {key}", self.scaling.get(key, default), least)

    def frequencies(self) -> NDArray[np.float64]:
        """Radians per position of each pair of dimensions, [dimensions/2]."""
        return 1.0 / self.theta ** (np.arange(0, self.dimensions, 2, dtype=np.float64) / self.dimensions)

    def done(self, detail: str, **more: Any) -> Rope:
        text = f"theta {self.theta:g}" + (f", {self.kind} ({detail})" if detail else "")
        base = {"theta": self.theta, "dimensions": self.dimensions, "scaling": {}, "divisors": None}
        return Rope(**{**base, "description": text, **more})


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one dictionary of RoPE parameters: `rope_parameters` (transformers 5) or `rope_scaling`."""
    found = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"config: {key}: expected an object, got {value!r}.")
        for name, entry in value.items():
            if name not in _KNOWN and entry is not None:
                raise CheckpointError(
                    f"config: {key}: the key {name!r} is unknown and may change the angles.",
                    "If it does not, remove it from a copy of the config and give that with --config.",
                )
    new, old = found.get("rope_parameters", {}), found.get("rope_scaling", {})
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise CheckpointError(f"config: rope_parameters and rope_scaling contradict each other in {name!r}.")
    return {**old, **new}


def _theta(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> float:
    values = [v for v in (config.get("rope_theta"), scaling.get("rope_theta")) if v is not None]
    if not values:
        return DEFAULT_THETA
    if values[0] != values[-1]:
        raise CheckpointError(f"config: rope_theta is {values[0]!r} at top level, {values[-1]!r} in rope_parameters.")
    return _number("rope_theta", values[0], least=1.0 + 1e-6)


def _kind(scaling: Mapping[str, Any]) -> str:
    kinds = [scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None]
    if any(not isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"config: rope type: expected text, got {kinds!r}.")
    names = {k.lower() for k in kinds}
    if names == {"default", "mrope"}:  # transformers writes both for Qwen-VL
        return "mrope"
    if len(names) > 1:
        raise CheckpointError(f"config: rope_type {kinds[0]!r} and type {kinds[1]!r} contradict each other.")
    if not names and scaling.get("factor") is not None:
        raise CheckpointError("config: rope scaling has a factor but no rope_type.", "Add rope_type to the config.")
    return names.pop() if names else "mrope" if "mrope_section" in scaling else "default"


def _plain(request: _Request) -> Rope:
    if request.kind == "default":
        return request.done("")
    return request.done("text positions, equal to plain RoPE")


def _linear(request: _Request) -> Rope:
    factor = request.number("factor", least=1.0)
    return request.done(f"factor {factor:g}", scaling={"type": "linear", "factor": factor})


def _dynamic(request: _Request) -> Rope:
    """Plain RoPE up to the trained length; beyond it transformers rescales with the length, llama.cpp cannot."""
    context = int(_number("max_position_embeddings", request.context, least=1))
    note = f"rope type dynamic: equal to plain RoPE up to {context} positions; beyond them acceptance may fall"
    return request.done(f"plain up to {context} positions", notes=(note,))


def _llama3(request: _Request) -> Rope:
    """Long wavelengths are divided by factor, short ones kept, those between interpolated."""
    factor = request.number("factor", least=1.0)
    low, high = request.number("low_freq_factor"), request.number("high_freq_factor")
    original = request.number("original_max_position_embeddings", least=1)
    if high <= low:
        raise CheckpointError(f"config: rope scaling: expected high_freq_factor above {low:g}, got {high:g}.")
    turns = original * request.frequencies() / (2 * math.pi)  # full turns within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors = 1.0 / ((1.0 - smooth) / factor + smooth)
    detail = f"factor {factor:g}, low {low:g}, high {high:g}, original context {original:g}"
    return request.done(detail, divisors=divisors.astype(np.float32))


def _yarn(request: _Request) -> Rope:
    """YaRN by keys where llama.cpp's fixed betas 32 and 1 and rounded ramp apply, otherwise by rope_freqs."""
    factor = request.number("factor", least=1.0)
    original = int(request.number("original_max_position_embeddings", request.context, least=1))
    fast, slow = request.number("beta_fast", 32.0), request.number("beta_slow", 1.0)
    truncate = request.scaling.get("truncate") is not False
    if request.number("extrapolation_factor", 1.0) != 1.0:
        raise CheckpointError("config: rope scaling: extrapolation_factor: llama.cpp's eagle3 graph only knows 1.")
    usual = 0.1 * math.log(factor) + 1.0
    magnitude = _magnitude(request, factor, usual)
    detail = f"factor {factor:g}, original context {original}, magnitude {magnitude:.4g}"
    if (fast, slow, truncate) == (32.0, 1.0, True):
        scaling: dict[str, str | float | int] = {"type": "yarn", "factor": factor, "original_context_length": original}
        if not math.isclose(magnitude, usual, rel_tol=1e-6):
            scaling["attn_factor"] = magnitude / usual
        return request.done(detail, scaling=scaling)
    if fast <= slow:
        raise CheckpointError(f"config: rope scaling: expected beta_fast above beta_slow, got {fast:g} and {slow:g}.")
    divisors = _yarn_divisors(request, factor, _ramp_ends(request, original, (fast, slow), truncate))
    return request.done(
        f"{detail}, betas {fast:g} and {slow:g}, written as rope_freqs",
        scaling={"attn_factor": magnitude},
        divisors=divisors.astype(np.float32),
    )


def _magnitude(request: _Request, factor: float, usual: float) -> float:
    """The factor on sin and cos: given, or from mscale and mscale_all_dim (DeepSeek), or 0.1 ln(factor) + 1."""
    for key in ("attention_factor", "attn_factor"):
        if request.scaling.get(key) is not None:
            return request.number(key)
    if request.scaling.get("mscale") and request.scaling.get("mscale_all_dim"):
        scales = (0.1 * request.number(key) * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim"))
        return next(scales) / next(scales)
    return usual


def _ramp_ends(request: _Request, original: int, betas: tuple[float, float], truncate: bool) -> tuple[float, float]:
    """Pair numbers at which a frequency makes beta_fast and beta_slow turns within the original context."""
    low, high = (
        request.dimensions * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(request.theta)) for beta in betas
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0.0), min(high, request.dimensions - 1.0)


def _yarn_divisors(request: _Request, factor: float, ends: tuple[float, float]) -> NDArray[np.float64]:
    pairs = np.arange(request.dimensions // 2, dtype=np.float64)
    keep = 1.0 - np.clip((pairs - ends[0]) / max(ends[1] - ends[0], 0.001), 0.0, 1.0)
    return 1.0 / ((1.0 - keep) / factor + keep)


RULES = {
    "default": _plain, "mrope": _plain, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip


def _number(where: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e30:
        raise CheckpointError(f"config: {where}: expected a number of at least {least:g}, got {value!r}.")
    return float(value)
