"""Whole conversions: what is in the GGUF, whatever the checkpoint's layout and number type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from checkpoints import HEAD_DIM, HEADS, HT, KV_HEADS, VD, F, H, V
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

PLAIN = {
    "fc.weight": "fc.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def values(tensor: Any) -> np.ndarray:
    shape = tuple(reversed(tensor.shape.tolist()))
    return dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type).reshape(shape)


def slowly_permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: pair (j, j + d/2) of each head becomes rows (2j, 2j + 1)."""
    d = weight.shape[0] // heads
    out = np.zeros_like(weight)
    for head in range(heads):
        for j in range(d // 2):
            out[head * d + 2 * j] = weight[head * d + j]
            out[head * d + 2 * j + 1] = weight[head * d + j + d // 2]
    return out


def test_every_tensor_arrives_under_its_name(convert):
    stored = checkpoints.tensors()
    _, _, tensors = convert(stored)
    for source, name in PLAIN.items():
        assert np.array_equal(values(tensors[name]), stored[source][1].astype(np.float32)), name
    assert tensors.keys() == {*PLAIN.values(), "blk.0.attn_q.weight", "blk.0.attn_k.weight", "d2t"}
    assert np.array_equal(tensors["d2t"].data, checkpoints.draft_ids())
    assert tensors["d2t"].tensor_type == GGMLQuantizationType.I64


def test_query_and_key_rows_are_permuted(convert):
    stored = checkpoints.tensors()
    _, _, tensors = convert(stored)
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        expected = slowly_permuted(stored[f"midlayer.self_attn.{name}_proj.weight"][1].astype(np.float32), heads)
        assert np.array_equal(values(tensors[f"blk.0.attn_{name}.weight"]), expected)


def test_permuted_rows_give_the_same_attention_scores():
    """q.k after Hugging Face's split-half rotation equals q.k after ggml's interleaved one on permuted rows."""
    from eagle3_cli.convert.tensors import rotary_order

    rng, half = np.random.default_rng(0), HEAD_DIM // 2
    q, k = rng.normal(size=(2, HEAD_DIM))
    frequencies = 10000.0 ** (-np.arange(half) / half)

    def split_half(x: np.ndarray, position: int) -> np.ndarray:
        a = np.concatenate([frequencies, frequencies]) * position
        return x * np.cos(a) + np.concatenate([-x[half:], x[:half]]) * np.sin(a)

    def interleaved(x: np.ndarray, position: int) -> np.ndarray:
        pairs = x[0::2] + 1j * x[1::2]
        turned = pairs * np.exp(1j * frequencies * position)
        return np.stack([turned.real, turned.imag], axis=1).reshape(-1)

    order = rotary_order(1, HEAD_DIM, HEAD_DIM)
    expected = split_half(q, 7) @ split_half(k, 3)
    assert interleaved(q[order], 7) @ interleaved(k[order], 3) == pytest.approx(expected)


def test_keys_are_those_of_the_eagle3_architecture(convert):
    _, keys, _ = convert()
    assert keys["general.architecture"] == "eagle3"
    mine = {k.removeprefix("eagle3."): v for k, v in keys.items() if k.startswith("eagle3.")}
    eps = mine.pop("attention.layer_norm_rms_epsilon")
    assert eps == pytest.approx(1e-5)
    assert mine == {
        "vocab_size": V, "context_length": 512, "embedding_length": H, "block_count": 1, "feed_forward_length": F,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "rope.dimension_count": HEAD_DIM, "rope.freq_base": 10000.0,
        "target_layers": [2, 12, 21], "target_hidden_size": HT, "norm_before_residual": False, "norm_before_fc": False,
    }  # fmt: skip


def test_tokenizer_is_copied_byte_by_byte(convert, target, tmp_path):
    from eagle3_cli.convert.gguf_header import read_gguf

    _, keys, _ = convert()
    theirs, ours = read_gguf(target).fields, read_gguf(tmp_path / "out.gguf").fields
    names = [name for name in theirs if name.startswith("tokenizer.")]
    assert len(names) == 13
    assert [name for name in ours if name.startswith("tokenizer.")] == names
    assert all(ours[name].raw == theirs[name].raw for name in names)
    assert all(keys[name] == value for name, value in checkpoints.read(target)[0].items() if name in names)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_number_types(convert, dtype, outtype):
    stored = checkpoints.tensors(dtype=dtype)
    _, keys, tensors = convert(stored, outtype=outtype)
    raw = stored["fc.weight"][1]
    exact = (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else raw.astype(np.float32)
    got = values(tensors["fc.weight"])
    tolerance = {"f32": 0.0, "f16": 2**-11 * 4, "bf16": 2**-8 * 4, "q8_0": 0.6 / 127 * 4}[outtype]
    assert np.abs(got - exact).max() <= (0.0 if dtype.lower() == outtype else tolerance)
    assert tensors["fc.weight"].tensor_type.name == outtype.upper()
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    assert keys["general.file_type"] == {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[outtype]


def test_rows_that_do_not_fit_q8_0_stay_f16(tmp_path, target):
    stored = checkpoints.tensors(hidden=48)
    embeddings = np.random.default_rng(2).normal(size=(V, 48)).astype("<f2")
    source = checkpoints.write(
        tmp_path / "c", stored | {"embed_tokens.weight": ("F16", embeddings)}, checkpoints.config(hidden_size=48)
    )
    report = checkpoints.run(source, target, tmp_path / "o.gguf", outtype="q8_0")
    kinds = {row.gguf: (row.gguf_dtype, row.transform) for row in report.tensors}
    assert kinds["output.weight"] == ("F16", "rows of 48 do not fit Q8_0's blocks of 32")
    assert kinds["fc.weight"][0] == "Q8_0"


@pytest.mark.parametrize(
    ("layer", "prefix"), [("layers.0.", ""), ("layers.0.", "model."), ("midlayer.", "model."), ("midlayer.", "")]
)
def test_same_tensors_under_any_prefix_give_the_same_bytes(tmp_path, target, layer, prefix):
    plain = checkpoints.write(
        tmp_path / "a", checkpoints.tensors(), checkpoints.config(architectures=["LlamaForCausalLM"])
    )
    other = checkpoints.write(tmp_path / "b", dict(reversed(checkpoints.tensors(layer, prefix=prefix).items())))
    checkpoints.run(plain, target, tmp_path / "a.gguf")
    checkpoints.run(other, target, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_file_directory_and_index_give_the_same_bytes(tmp_path, target):
    one = checkpoints.write(tmp_path / "one", checkpoints.tensors())
    shards = checkpoints.write_shards(tmp_path / "shards", checkpoints.tensors())
    sources = [one, one / "model.safetensors", shards, shards / "model.safetensors.index.json"]
    made = []
    for source in sources:
        checkpoints.run(source, target, tmp_path / "o.gguf", force=True)
        made.append((tmp_path / "o.gguf").read_bytes())
    assert len(set(made)) == 1


def test_small_blocks_of_rows_change_nothing(convert, tmp_path, monkeypatch):
    convert(outtype="q8_0")
    whole = (tmp_path / "out.gguf").read_bytes()
    monkeypatch.setattr("eagle3_cli.convert.tensors.BLOCK", 700)
    convert(outtype="q8_0")
    assert (tmp_path / "out.gguf").read_bytes() == whole


def test_own_embeddings_and_another_width_than_the_target(tmp_path, target):
    stored = checkpoints.tensors(hidden=32)
    embeddings = np.random.default_rng(2).normal(size=(V, 32)).astype("<f2")
    stored["embed_tokens.weight"] = ("F16", embeddings)
    source = checkpoints.write(tmp_path / "c", stored, checkpoints.config(hidden_size=32, target_hidden_size=HT))
    report = checkpoints.run(source, target, tmp_path / "o.gguf")
    keys, tensors = checkpoints.read(tmp_path / "o.gguf")
    assert (report.embeddings, report.head) == ("own", "own")
    assert (keys["eagle3.embedding_length"], keys["eagle3.target_hidden_size"]) == (32, HT)
    assert np.array_equal(tensors["token_embd.weight"].data, embeddings)


def test_whole_vocabulary_needs_neither_map_nor_head(convert):
    stored = checkpoints.tensors()
    for name in ("d2t", "t2d", "lm_head.weight"):
        del stored[name]
    report, _, tensors = convert(stored, checkpoints.config(draft_vocab_size=None))
    assert (report.embeddings, report.head, report.d2t) == ("target", "target", "identity")
    assert not {"d2t", "output.weight", "token_embd.weight"} & tensors.keys()


def test_tied_flag_beside_a_separate_head_uses_the_head(convert):
    report, _, tensors = convert(config=checkpoints.config(tie_word_embeddings=True))
    assert report.head == "own"
    assert tensors["output.weight"].shape.tolist() == [H, VD]


def test_norm_before_fc_and_norm_before_residual(convert):
    stored = checkpoints.tensors()
    stored["input_norm.weight"] = ("F32", np.arange(3 * HT, dtype="<f4"))
    _, keys, tensors = convert(stored, checkpoints.config(norm_before_fc=True, norm_before_residual=True))
    assert (keys["eagle3.norm_before_fc"], keys["eagle3.norm_before_residual"]) == (True, True)
    assert np.array_equal(tensors["enc.output_norm.weight"].data, np.arange(3 * HT))


def test_head_counts_follow_from_the_tensors(convert):
    _, keys, _ = convert(config=checkpoints.config(num_attention_heads=None, num_key_value_heads=None))
    assert (keys["eagle3.attention.head_count"], keys["eagle3.attention.head_count_kv"]) == (HEADS, KV_HEADS)


def test_target_rope_theta_is_never_copied(convert):
    assert convert()[1]["eagle3.rope.freq_base"] == 10000.0


def test_short_context_is_noted_once(convert):
    report, _, _ = convert()
    assert report.notes == ("trained for 512 positions, the target for 1024: acceptance may fall beyond",)


def test_report_accounts_for_every_tensor(convert):
    stored = checkpoints.tensors()
    stored["midlayer.self_attn.rotary_emb.inv_freq"] = ("F32", np.zeros(8, "<f4"))
    report, _, tensors = convert(stored)
    assert {row.source for row in report.tensors} == stored.keys()
    assert {row.gguf for row in report.tensors} - {None} == tensors.keys()
    left = {row.source: row.transform for row in report.tensors if row.gguf is None}
    assert left == {
        "t2d": "checked against d2t, not stored",
        "midlayer.self_attn.rotary_emb.inv_freq": "not a weight, left out",
    }
    assert report.family == "SpecForge"
    assert json.loads(json.dumps(report.as_dict()))["aux_layers"] == [2, 12, 21]


def test_progress_ends_at_the_total(tmp_path, target):
    from eagle3_cli.convert import ConvertSettings, convert

    seen: list[tuple[str, int, int]] = []
    source = checkpoints.write(tmp_path / "c", checkpoints.tensors())
    convert(ConvertSettings(source, target, tmp_path / "o.gguf"), progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2]


def test_dry_run_checks_everything_and_writes_nothing(tmp_path, target):
    source = checkpoints.write(tmp_path / "c", checkpoints.tensors())
    report = checkpoints.run(source, target, tmp_path / "o.gguf", dry_run=True)
    assert len(report.tensors) == len(checkpoints.tensors())
    assert not (tmp_path / "o.gguf").exists()


def test_importing_is_cheap():
    code = (
        "import sys; import eagle3_cli.convert;"
        "assert not {'numpy', 'gguf', 'torch'} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LOAD = """
import sys, llama_cpp
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
assert model and llama_cpp.llama_model_n_embd(model) == int(sys.argv[2])
"""


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_llama_cpp_loads_it(convert, tmp_path: Path, outtype: str):
    pytest.importorskip("llama_cpp")
    stored = checkpoints.tensors()
    stored["input_norm.weight"] = ("F32", np.ones(3 * HT, "<f4"))
    stored["embed_tokens.weight"] = ("F16", np.ones((V, H), "<f2"))
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 256
    convert(stored, checkpoints.config(rope_scaling=scaling, norm_before_fc=True), outtype=outtype)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "out.gguf"), str(H)],
        env={"GGML_NO_BACKTRACE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
