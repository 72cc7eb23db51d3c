"""Number types: the same types and bytes as llama.cpp's quantiser gives, values that do not fit, blocks of rows."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from checkpoints import HT, VD, V
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp as lib

from eagle3_cli.convert import check, plan
from eagle3_cli.convert.encode import decode, encode, magnitude
from eagle3_cli.convert.ggml import dequantise, quantise
from eagle3_cli.convert.ggml_types import KINDS, OUTTYPES
from eagle3_cli.convert.parallel import in_order
from eagle3_cli.convert.tensors import release, rotary_order
from eagle3_cli.errors import CheckpointError, FileError
from eagle3_cli.llama import function

QUANTISED = [kind for kind, layout in KINDS.items() if layout.scales]
STORED = [kind for kind in KINDS if kind not in ("I64", "F32")]


def drafter(sizes: dict[str, int], own_head: bool = True) -> tuple[checkpoints.Tensors, dict[str, Any]]:
    """Tensors (F32) and config of a drafter with its own embeddings; H, F, heads, kv and dim come from sizes."""
    h, f, heads, kv, dim = (sizes[k] for k in ("H", "F", "heads", "kv", "dim"))
    shapes = {
        "fc.weight": (h, 3 * HT), "midlayer.input_layernorm.weight": (h,), "midlayer.hidden_norm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * h), "midlayer.self_attn.k_proj.weight": (kv * dim, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv * dim, 2 * h), "midlayer.self_attn.o_proj.weight": (h, heads * dim),
        "midlayer.post_attention_layernorm.weight": (h,), "midlayer.mlp.gate_proj.weight": (f, h),
        "midlayer.mlp.up_proj.weight": (f, h), "midlayer.mlp.down_proj.weight": (h, f), "norm.weight": (h,),
        "lm_head.weight": (VD, h), "embed_tokens.weight": (V, h),
    }  # fmt: skip
    rng = np.random.default_rng(5)
    made: checkpoints.Tensors = {n: ("F32", rng.normal(0, 0.05, s).astype("<f4")) for n, s in shapes.items()}
    if own_head:
        made["d2t"] = ("I64", checkpoints.draft_ids() - np.arange(VD))
    else:
        del made["lm_head.weight"]
    config = checkpoints.config(
        hidden_size=h, intermediate_size=f, num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim,
        draft_vocab_size=VD if own_head else None,
    )  # fmt: skip
    return made, config


# Rows of 256 elements and more in all matrices but fc, rows that fit only blocks of 32, and rows that fit neither.
DRAFTERS = {
    "four query heads to a key head": ({"H": 256, "F": 512, "heads": 4, "kv": 1, "dim": 64}, True),
    "two query heads to a key head": ({"H": 256, "F": 512, "heads": 4, "kv": 2, "dim": 64}, True),
    "rows that do not fit 256": ({"H": 96, "F": 288, "heads": 4, "kv": 1, "dim": 24}, True),
    "rows that do not fit 32": ({"H": 48, "F": 80, "heads": 4, "kv": 1, "dim": 20}, True),
    "embeddings without a head": ({"H": HT, "F": 256, "heads": 4, "kv": 1, "dim": 64}, False),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def written(request, tmp_path_factory, target) -> tuple[Path, Path]:
    """(checkpoint, the drafter that it makes in F32)."""
    folder = tmp_path_factory.mktemp("written")
    checkpoint = checkpoints.write(folder / "checkpoint", *drafter(*DRAFTERS[request.param]))
    checkpoints.run(checkpoint, target, folder / "f32.gguf", outtype="f32")
    return checkpoint, folder / "f32.gguf"


def llama_quantize(source: Path, output: Path, file_type: int) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 2
    code = lib.llama_model_quantize(os.fsencode(source), os.fsencode(output), ctypes.byref(params))
    assert code == 0


@pytest.mark.parametrize("outtype", [outtype for outtype in OUTTYPES if outtype != "f32"])
def test_types_and_bytes_are_those_of_llama_quantize(written, target, tmp_path, outtype):
    checkpoint, f32 = written
    checkpoints.run(checkpoint, target, tmp_path / "ours.gguf", outtype=outtype)
    llama_quantize(f32, tmp_path / "theirs.gguf", plan.FILE_TYPES[outtype])
    our_keys, ours = checkpoints.read(tmp_path / "ours.gguf")
    their_keys, theirs = checkpoints.read(tmp_path / "theirs.gguf")
    types = {name: tensor.tensor_type.name for name, tensor in ours.items()}
    assert types == {name: tensor.tensor_type.name for name, tensor in theirs.items()}
    for name, tensor in ours.items():
        assert tensor.data.tobytes() == theirs[name].data.tobytes(), name
    assert our_keys["general.file_type"] == their_keys["general.file_type"] == plan.FILE_TYPES[outtype]
    assert our_keys["general.quantization_version"] == their_keys["general.quantization_version"]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_bytes_follow_from_the_values_and_not_from_the_source_type(tmp_path, target, dtype):
    """A checkpoint in F16 or BF16 gives the quantised file of the same values in F32."""
    stored, config = drafter(*DRAFTERS["two query heads to a key head"])
    half, wide = {}, {}
    for name, (kind, values) in stored.items():
        raw = values if kind == "I64" else checkpoints.bf16(values) if dtype == "BF16" else values.astype("<f2")
        half[name] = (kind if kind == "I64" else dtype, raw)
        wide[name] = (kind, values if kind == "I64" else decode(raw.view(np.uint8), dtype).reshape(values.shape))
    for name, tensors in (("half", half), ("wide", wide)):
        source = checkpoints.write(tmp_path / name, tensors, config)
        checkpoints.run(source, target, tmp_path / f"{name}.gguf", outtype="q4_k_m")
    assert (tmp_path / "half.gguf").read_bytes() == (tmp_path / "wide.gguf").read_bytes()


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_blocks_of_rows_give_the_bytes_of_a_whole_tensor(tmp_path, target, monkeypatch, outtype):
    source = checkpoints.write(tmp_path / "c", *drafter(*DRAFTERS["four query heads to a key head"]))
    for name, block in (("whole", 1 << 30), ("rows", 2000)):
        monkeypatch.setattr("eagle3_cli.convert.tensors.BLOCK", block)
        checkpoints.run(source, target, tmp_path / f"{name}.gguf", outtype=outtype)
    assert (tmp_path / "rows.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_tables_agree_with_the_library():
    block = function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    size = function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    for name, kind in KINDS.items():
        number = GGMLQuantizationType[name]
        assert (kind.number, kind.block, kind.size) == (number, block(number), size(number)), name
        assert (kind.block, kind.size) == GGML_QUANT_SIZES[number]
    assert OUTTYPES.keys() == plan.FILE_TYPES.keys()


def test_half_precision_is_that_of_numpy():
    bits = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(dequantise(bits, "BF16").view(np.uint32), bits.astype(np.uint32) << 16)
    assert np.array_equal(dequantise(bits, "F16"), bits.view(np.float16).astype(np.float32), equal_nan=True)
    numbers = bits.view(np.float16)[np.isfinite(bits.view(np.float16))].astype(np.float32)
    between = np.concatenate([numbers, numbers * np.float32(1 + 2**-12), (numbers[1:] + numbers[:-1]) / 2])
    assert np.array_equal(quantise(between, "F16").view(np.uint16), between.astype(np.float16).view(np.uint16))


# --- values that do not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q8_0", "Q4_K"])
def test_nan_and_infinity_are_found_in_every_type(dtype, kind, value):
    values = np.zeros((2, 256), np.float32)
    values[1, 77] = value
    data = checkpoints.bf16(values) if dtype == "BF16" else values.astype(checkpoints.NAMES[dtype])
    with pytest.raises(CheckpointError, match=r"fc.weight: holds NaN or infinite"):
        encode(data, dtype, kind, "fc.weight")


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_magnitude_is_the_largest_absolute_value(dtype):
    values = np.array([[0.5, -3.0], [1.25, 2.0]], np.float32)
    data = checkpoints.bf16(values) if dtype == "BF16" else values.astype(checkpoints.NAMES[dtype])
    assert magnitude(data, dtype) == 3.0
    assert magnitude(data[:, 0], dtype) == 1.25


# Largest magnitude that a block of both signs can hold, in units of its largest float16 number, scale or minimum.
FULL_SCALE = {
    "F16": 1, "BF16": np.inf, "Q8_0": 127, "Q4_0": 8, "Q5_0": 16, "Q4_1": 1, "Q5_1": 1, "Q2_K": 15, "Q3_K": 128,
    "Q4_K": 63, "Q5_K": 63, "Q6_K": 4096, "IQ4_NL": 127, "IQ4_XS": 4064,
}  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
def test_a_large_value_is_kept_or_refused(kind):
    """Beyond the range of its scales ggml writes infinities, or zeros where its own sums overflow."""
    for largest in 3 * 10.0 ** np.arange(4, 39):
        values = np.random.default_rng(1).normal(size=(2, 256)).astype(np.float32)
        values *= np.float32(largest) / np.abs(values).max()
        if largest < 65504 * FULL_SCALE[kind]:
            assert check._equal(values, encode(values, "F32", kind, "fc.weight"), "F32", kind)
            continue
        with pytest.raises(
            CheckpointError, match=f"fc.weight: its largest value .* does not fit into {kind}"
        ) as caught:
            encode(values, "F32", kind, "fc.weight")
        assert caught.value.hint == "Use --outtype bf16 or f32."


def test_the_largest_values_of_each_type_fit_and_the_next_do_not():
    for kind, largest, next_one in [("F16", 65519.0, 65520.0), ("BF16", 3.3895e38, 3.3961777e38)]:
        assert np.isfinite(decode(encode(np.array([largest], "<f4"), "F32", kind, "w"), kind)).all()
        with pytest.raises(CheckpointError, match=f"does not fit into {kind}"):
            encode(np.array([next_one], "<f4"), "F32", kind, "w")
    with pytest.raises(CheckpointError, match=r"1e\+300 does not fit into F32"):
        encode(np.array([1e300]), "F64", "F32", "w")


def test_a_scale_that_overflows_is_an_error_of_the_conversion(refused):
    stored, config = drafter(*DRAFTERS["two query heads to a key head"])
    stored["midlayer.mlp.up_proj.weight"][1][3, 5] = 1e9
    message = refused(stored, config, outtype="q4_k_m")
    assert "midlayer.mlp.up_proj.weight: its largest value 1e+09 does not fit into Q4_K" in message


# --- the check -------------------------------------------------------------------------------------------


def awkward() -> dict[str, np.ndarray]:
    """Rows that quantise badly: outliers, few values, one sign, very different scales, next to nothing."""
    rng, shape = np.random.default_rng(3), (64, 512)
    sign = rng.choice([-1.0, 1.0], shape)
    return {
        "normal": rng.normal(size=shape), "uniform": rng.uniform(-1, 1, shape), "one sign": rng.uniform(0.9, 1, shape),
        "negative": -rng.exponential(size=shape), "heavy tails": rng.standard_t(2, shape), "signs": sign,
        "sparse": rng.normal(size=shape) * (rng.random(shape) < 0.05),
        "log-normal": sign * np.exp(rng.normal(0, 2, shape)),
        "outliers": np.where(rng.random(shape) < 1 / 128, 20 * sign, rng.uniform(-1, 1, shape)),
        "scales": rng.normal(size=shape) * np.repeat(10.0 ** rng.uniform(-3, 0, (64, 32)), 16, axis=1),
        "constant": np.full(shape, 0.3), "zeros": np.zeros(shape),
        "ramp": np.linspace(-1, 1, 512) * rng.random((64, 1)),
        "tiny": rng.normal(size=shape) * 1e-6, "vanishing": rng.normal(size=shape) * 1e-30,
    }  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
def test_the_check_accepts_what_the_encoder_makes_of_awkward_values(kind):
    for name, made in awkward().items():
        for scale in (0.02, 1.0, 100.0):
            values = np.clip(made * scale, -6e4, 6e4).astype("<f4")
            assert check._equal(values, encode(values, "F32", kind, name), "F32", kind), name


def damaged(encoded: np.ndarray, kind: str, rows: int) -> dict[str, np.ndarray]:
    """Plausible mistakes, each in an otherwise right encoding of a matrix with 512 columns."""
    table, blocks = encoded.reshape(rows, -1), encoded.reshape(-1, KINDS[kind].size * max(1, 256 // KINDS[kind].block))
    swapped, unpermuted, shifted, one_block = (
        table.copy(),
        table[rotary_order(2, 32, 32)],
        np.roll(blocks, 1, 0),
        blocks.copy(),
    )
    swapped[[5, 6]] = table[[6, 5]]
    one_block[[3, 4]] = blocks[[4, 3]]
    zero = blocks.copy()
    zero[7] = 0
    return {"two rows": swapped, "RoPE": unpermuted, "shift": shifted, "two blocks": one_block, "zeros": zero}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("kind", STORED)
def test_the_check_finds_swapped_rows_blocks_and_a_wrong_permutation(kind, dtype):
    values = np.random.default_rng(4).normal(0, 0.02, (64, 512)).astype("<f4")
    data = checkpoints.bf16(values) if dtype == "BF16" else values
    encoded = encode(data, dtype, kind, "w")
    assert check._equal(data, encoded, dtype, kind)
    for mistake, wrong in damaged(encoded, kind, 64).items():
        assert not check._equal(data, wrong.reshape(-1), dtype, kind), mistake


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_check_finds_a_scale_that_is_not_finite_or_off(kind):
    values = np.random.default_rng(4).normal(0, 0.02, (4, 512)).astype("<f4")
    encoded = encode(values, "F32", kind, "w")
    at = KINDS[kind].scales[0]
    (scale,) = encoded[at : at + 2].view(np.float16)
    for wrong in (np.nan, np.inf, -scale, scale * 3):
        broken = encoded.copy()
        broken[at : at + 2] = np.array([wrong], np.float16).view(np.uint8)
        assert not check._equal(values, broken, "F32", kind)


@pytest.mark.parametrize("outtype", ["bf16", "q8_0", "q4_k_m"])
def test_a_file_with_two_rows_exchanged_is_not_kept(tmp_path, target, monkeypatch, outtype):
    from eagle3_cli.convert import writer

    def exchanged(data: Any, dtype: str, kind: str, name: str) -> Any:
        return encode(data[::-1] if name.endswith("v_proj.weight") else data, dtype, kind, name)

    monkeypatch.setattr(writer, "encode", exchanged)
    source = checkpoints.write(tmp_path / "c", *drafter(*DRAFTERS["two query heads to a key head"]))
    with pytest.raises(FileError, match=r"blk.0.attn_v.weight reads back as other values in rows 0 to 127"):
        checkpoints.run(source, target, tmp_path / "o.gguf", outtype=outtype)
    assert not (tmp_path / "o.gguf").exists()


# --- memory and threads ----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system cannot be asked to drop pages")
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell what is resident")
def test_released_pages_no_longer_count_as_memory(tmp_path):
    path = tmp_path / "pages.bin"
    np.arange(1 << 20, dtype="<i8").tofile(path)

    def resident() -> int:
        """Kilobytes of the mapping that are in memory."""
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        return sum(int(next(x for x in lines if x.startswith("Rss")).split()[1]) for line in lines if str(path) in line)

    data = np.asarray(np.memmap(path, np.uint8, "r")).view("<i8")[3:].reshape(-1, 1)
    expected = int(data.sum())
    assert resident() >= 8000
    release(data[1000:-1000])
    assert resident() <= 100
    assert int(data.sum()) == expected


def test_releasing_never_changes_an_array(tmp_path):
    path = tmp_path / "pages.bin"
    np.zeros(1 << 14, np.uint8).tofile(path)
    private = np.memmap(path, np.uint8, "c")
    private[:] = 7
    for data in (private, np.full(1 << 14, 7, np.uint8), np.array([7])):
        release(data)
        assert (data == 7).all()


def test_results_come_in_the_order_of_the_items():
    assert list(in_order(lambda n: n * n, range(1000))) == [n * n for n in range(1000)]


def test_an_error_comes_in_its_place_and_nothing_is_begun_after_it():
    begun = []

    def work(n: int) -> int:
        begun.append(n)
        return 1 // (20 - n)

    results = in_order(work, range(10_000))
    assert [next(results) for _ in range(20)] == [1 // (20 - n) for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert len(begun) < 100
