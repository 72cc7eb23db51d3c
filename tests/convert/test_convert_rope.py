"""RoPE: what is written makes llama.cpp turn queries and keys by the angles that the config asks for.

`written` computes cos and sin as ggml does from the keys (ggml/src/ggml-cpu/ops.cpp rope_yarn, src/llama-context.cpp),
`wanted` as transformers does from the config (modeling_rope_utils.py), both slowly and position by position.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from eagle3_cli.convert.rope import Rope, read_rope
from eagle3_cli.errors import CheckpointError

DIM = 64


def wanted(p: dict[str, Any], theta: float, position: int) -> list[tuple[float, float]]:
    kind, factor = p.get("rope_type", p.get("type", "default")), p.get("factor", 1.0)
    magnitude = 1.0
    turned = []
    for i in range(0, DIM, 2):
        f = 1.0 / theta ** (i / DIM)
        if kind == "linear":
            f /= factor
        if kind == "llama3":
            length, old = 2 * math.pi / f, p["original_max_position_embeddings"]
            smooth = (old / length - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
            if length > old / p["low_freq_factor"]:
                f /= factor
            elif length >= old / p["high_freq_factor"]:
                f = (1 - smooth) * f / factor + smooth * f
        if kind == "yarn":
            ends = [
                DIM * math.log(p["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (p.get("beta_fast", 32), p.get("beta_slow", 1))
            ]
            if p.get("truncate", True):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], DIM - 1)
            ramp = min(1.0, max(0.0, (i // 2 - low) / (high - low)))
            f = f / factor * ramp + f * (1 - ramp)
            magnitude = p.get("attention_factor") or mscale(p, factor)
        turned.append((magnitude * math.cos(position * f), magnitude * math.sin(position * f)))
    return turned


def mscale(p: dict[str, Any], factor: float) -> float:
    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0

    return scale(p["mscale"]) / scale(p["mscale_all_dim"]) if "mscale" in p else scale(1)


def written(rope: Rope, position: int) -> list[tuple[float, float]]:
    scale = 1.0 / float(rope.scaling.get("factor", 1.0))
    yarn = rope.scaling.get("type") == "yarn"
    magnitude = float(rope.scaling.get("attn_factor", 1.0))
    if yarn:  # llama-context.cpp sets it to get_mscale / (1 + 0.1 ln factor) = 1; rope_yarn multiplies again
        magnitude *= 1.0 + 0.1 * math.log(1.0 / scale)
        old = float(rope.scaling["original_context_length"])
        ends = [DIM * math.log(old / (b * 2 * math.pi)) / (2 * math.log(rope.theta)) for b in (32, 1)]
        low, high = max(0, math.floor(ends[0])), min(DIM - 1, math.ceil(ends[1]))
    turned = []
    for pair in range(DIM // 2):
        divisor = 1.0 if rope.divisors is None else float(rope.divisors[pair])
        far = position * rope.theta ** (-2 * pair / DIM) / divisor
        angle = scale * far
        if yarn:
            mix = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
            angle = angle * (1 - mix) + far * mix
        turned.append((magnitude * math.cos(angle), magnitude * math.sin(angle)))
    return turned


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    {},
    {"rope_type": "default"},
    {"type": "linear", "factor": 4.0},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0},
    YARN | {"beta_fast": 16.0},
    YARN | {"truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    YARN | {"beta_slow": 2.0, "attention_factor": 1.2},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 5e5])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_angles(scaling, theta, place):
    rope = read_rope({"rope_theta": theta, place: scaling}, DIM)
    for position in (0, 1, 17, 900):
        assert np.allclose(written(rope, position), wanted(scaling, theta, position), atol=2e-4)


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": None}, 10000.0),
        ({"rope_theta": 1000000}, 1e6),
        ({"rope_parameters": {"rope_theta": 2e6, "rope_type": "default"}}, 2e6),
        ({"rope_theta": 2e6, "rope_parameters": {"rope_theta": 2e6}}, 2e6),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 10000.0),
        ({"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [16, 24, 24]}}, 10000.0),
        ({"rope_scaling": None, "rope_theta": 1e4}, 10000.0),
    ],
)
def test_plain_rope(config, theta):
    rope = read_rope(config, DIM)
    assert (rope.theta, rope.scaling, rope.divisors) == (theta, {}, None)


def test_old_and_new_name_of_the_type_mean_the_same():
    old = {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}
    a, b = read_rope({"rope_scaling": old}, DIM), read_rope({"rope_scaling": LLAMA3}, DIM)
    assert a.divisors is not None
    assert np.array_equal(a.divisors, b.divisors)


def test_llama3_divisors_are_a_tensor_of_float32():
    divisors = read_rope({"rope_scaling": LLAMA3}, DIM).divisors
    assert divisors is not None
    assert (divisors.dtype, divisors.shape, divisors[0], divisors[-1]) == (np.float32, (DIM // 2,), 1.0, 8.0)


def test_usual_yarn_is_written_as_keys():
    rope = read_rope({"rope_scaling": YARN}, DIM)
    assert rope.scaling == {"type": "yarn", "factor": 32.0, "original_context_length": 4096}
    assert rope.divisors is None


def test_dynamic_is_plain_with_a_note():
    rope = read_rope({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}, DIM)
    assert (rope.scaling, rope.divisors) == ({}, None)
    assert "up to 2048 positions" in rope.notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is unknown"),
        ({"rope_scaling": {"rope_type": "su"}}, "'su' is unknown"),
        ({"rope_scaling": {"rope_type": 3}}, "expected text"),
        ({"rope_scaling": {"factor": 2.0}}, "no rope_type"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "contradict"),
        ({"rope_scaling": {"type": "linear"}}, "factor: expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor: expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor above 1"),
        ({"rope_scaling": YARN | {"beta_fast": 1.0}}, "beta_fast above beta_slow"),
        ({"rope_scaling": YARN | {"extrapolation_factor": 0.5}}, "extrapolation_factor"),
        ({"rope_scaling": YARN | {"twist": 2}}, "'twist' is unknown"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "max_position_embeddings"),
        ({"rope_scaling": [1]}, "expected an object"),
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 3.0}}, "contradict each other in 'factor'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0 at top level"),
        ({"rope_theta": -1}, "rope_theta: expected a number"),
        ({"rope_theta": True}, "rope_theta: expected a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "'full_attention' is unknown"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(config, words):
    with pytest.raises(CheckpointError, match=words):
        read_rope(config, DIM)


def test_scaling_reaches_the_file(convert):
    import checkpoints

    _, keys, tensors = convert(config=checkpoints.config(rope_scaling=YARN | {"attention_factor": 1.0}))
    assert keys["eagle3.rope.scaling.type"] == "yarn"
    assert keys["eagle3.rope.scaling.factor"] == 32.0
    assert keys["eagle3.rope.scaling.original_context_length"] == 4096
    assert keys["eagle3.rope.scaling.attn_factor"] == pytest.approx(1 / (1 + 0.1 * math.log(32)))
    _, _, tensors = convert(config=checkpoints.config(rope_scaling=LLAMA3))
    assert tensors["rope_freqs.weight"].shape.tolist() == [checkpoints.HEAD_DIM // 2]
