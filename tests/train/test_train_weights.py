"""What is read of a target equals what its file was written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from states_tools import hf_weights, save_llama

from eagle3_cli.errors import FileError
from eagle3_cli.train.weights import identify, read_head_rows, read_target_sizes, read_target_weights

CONFIG = tiny.TARGET


def last_layer(weights: tiny.Weights) -> dict[str, np.ndarray]:
    prefix = f"model.layers.{CONFIG.layers - 1}."
    named = hf_weights(CONFIG, weights)
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def check(read: Any, weights: tiny.Weights) -> None:
    assert np.array_equal(read.embedding, weights["token_embd.weight"])
    assert np.array_equal(read.head, weights["output.weight"])
    assert np.array_equal(read.final_norm, weights["output_norm.weight"])
    expected = last_layer(weights)
    assert read.last_layer.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(read.last_layer[name], value), name


def test_gguf_gives_the_arrays_it_was_written_from(tiny_target: tiny.TinyModel) -> None:
    check(read_target_weights(tiny_target.path), tiny_target.weights)


def test_hugging_face_folder_gives_the_same(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    folder = save_llama(tmp_path / "hf", CONFIG, tiny_target.weights)
    check(read_target_weights(folder), tiny_target.weights)
    assert read_target_sizes(folder) == read_target_sizes(tiny_target.path) or _eps_differs_in_float32(
        folder, tiny_target.path
    )


def _eps_differs_in_float32(folder: Path, path: Path) -> bool:
    """GGUF stores it in float32, config.json in decimal."""
    a, b = read_target_sizes(folder), read_target_sizes(path)
    return np.float32(a.eps) == np.float32(b.eps) and replace(a, eps=b.eps) == b


def test_sizes_are_the_header_s(tiny_target: tiny.TinyModel) -> None:
    sizes = read_target_sizes(tiny_target.path)
    found = (sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.ffn, sizes.layers, sizes.rope_theta)
    c = CONFIG
    assert found == (c.width, c.heads, c.kv_heads, c.head_dim, c.ffn, c.layers, c.rope_base)
    assert (sizes.name, sizes.vocab) == ("llama", tiny.VOCAB)
    assert sizes.eps == pytest.approx(c.eps)


def test_rows_of_the_head_come_in_the_order_asked_for(tiny_target: tiny.TinyModel) -> None:
    rows = np.array([200, 3, 77])
    read = read_target_weights(tiny_target.path, rows)
    assert np.array_equal(read.head, tiny_target.weights["output.weight"][rows])
    assert read.embedding.shape[0] == tiny.VOCAB
    assert torch.equal(read_head_rows(tiny_target.path, rows), read.head)
    with pytest.raises(FileError, match="264 rows; rows 0 to 264"):
        read_head_rows(tiny_target.path, np.array([0, tiny.VOCAB]))


def test_bfloat16_is_rounded_to_the_nearest(tiny_target: tiny.TinyModel) -> None:
    read = read_target_weights(tiny_target.path, dtype=torch.bfloat16)
    expected = torch.from_numpy(tiny_target.weights["token_embd.weight"]).bfloat16()
    assert torch.equal(read.embedding, expected)
    assert read.final_norm.dtype == torch.float32


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    weights = tiny.target_weights()
    del weights["output.weight"]
    read = read_target_weights(tiny.write_target(tmp_path / "t.gguf", weights=weights).path)
    assert read.head is read.embedding
    rows = np.array([5, 1])
    assert np.array_equal(read_head_rows(tmp_path / "t.gguf", rows), weights["token_embd.weight"][rows])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "IQ4_NL", "TQ2_0"])
def test_number_types_are_decoded_as_the_gguf_package_does(tmp_path: Path, kind: str) -> None:
    config = replace(CONFIG, width=256) if kind == "TQ2_0" else CONFIG
    weights = tiny.target_weights(config)
    quant = gguf.GGMLQuantizationType[kind]
    if kind == "IQ4_NL":
        from eagle3_cli.convert.ggml import quantise

        stored = quantise(weights["token_embd.weight"], kind).reshape(tiny.VOCAB, -1)
    else:
        stored = gguf.quants.quantize(weights["token_embd.weight"], quant)
    path = tmp_path / "t.gguf"
    _write(path, config, weights | {"token_embd.weight": stored}, {"token_embd.weight": quant})
    assert np.array_equal(read_target_weights(path).embedding, gguf.quants.dequantize(stored, quant))


def _write(path: Path, config: tiny.Config, weights: tiny.Weights, kinds: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    tiny._keys(writer, config)
    tiny._vocabulary(writer, tiny.TOKENS)
    for name, value in weights.items():
        writer.add_tensor(name, value, raw_dtype=kinds.get(name))
    tiny._finish(writer, {}, {})


def test_layer_with_other_tensors_is_not_taken_for_a_llama_s(tmp_path: Path) -> None:
    weights = tiny.target_weights()
    weights[f"blk.{CONFIG.layers - 1}.attn_q.bias"] = np.zeros(CONFIG.heads * CONFIG.head_dim, np.float32)
    assert read_target_weights(tiny.write_target(tmp_path / "t.gguf", weights=weights).path).last_layer is None


def test_damaged_targets_are_refused(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    weights = tiny.target_weights()
    del weights["output_norm.weight"]
    with pytest.raises(FileError, match=r"no tensor output_norm\.weight"):
        read_target_weights(tiny.write_target(tmp_path / "a.gguf", weights=weights).path)
    wrong = tiny.target_weights() | {"token_embd.weight": np.zeros((tiny.VOCAB - 1, CONFIG.width), np.float32)}
    with pytest.raises(FileError, match=r"embedding as \[264, 64\], got \[263, 64\]"):
        read_target_weights(tiny.write_target(tmp_path / "b.gguf", weights=wrong).path)
    cut = tmp_path / "c.gguf"
    cut.write_bytes(tiny_target.path.read_bytes()[:-1000])
    with pytest.raises(FileError, match="truncated"):
        read_target_weights(cut)
    with pytest.raises(FileError, match="no such file"):
        read_target_weights(tmp_path / "none.gguf")


def test_identity_tells_targets_apart_and_not_their_places(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_target.path.read_bytes())
    (one, template), (two, same) = identify(tiny_target.path), identify(copy)
    assert (replace(one, path=""), template) == (replace(two, path=""), same)
    other = tiny.write_target(tmp_path / "other.gguf", weights=tiny.target_weights(seed=2))
    changed, _ = identify(other.path)
    assert (changed.size, changed.tokenizer) == (one.size, one.tokenizer)
    assert changed.first_mib != one.first_mib
    tokens = [*tiny.TOKENS[:-4], "other", *tiny.TOKENS[-3:]]
    assert identify(tiny.write_target(tmp_path / "d.gguf", tokens=tokens).path)[0].tokenizer != one.tokenizer
