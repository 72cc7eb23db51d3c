"""Reading safetensors: each defect is one error, and no bytes at all are a traceback."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct

import checkpoints
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_cli.convert.checkpoint import open_checkpoint
from eagle3_cli.convert.gguf_header import read_gguf
from eagle3_cli.convert.safetensors import open_file
from eagle3_cli.errors import Eagle3Error, FileError

GOOD = {"a": ("F32", np.arange(6, dtype="<f4").reshape(2, 3)), "b": ("BF16", np.arange(2, dtype="<u2"))}
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def test_values_and_shapes(path):
    path.write_bytes(checkpoints.safetensors_bytes(GOOD))
    tensors = open_file(path)
    assert list(tensors) == ["a", "b"]
    assert np.array_equal(tensors["a"].data, GOOD["a"][1])
    assert (tensors["b"].dtype, tensors["b"].data.dtype) == ("BF16", np.uint16)


def test_files_of_the_safetensors_package_can_be_read(path):
    numpy = pytest.importorskip("safetensors.numpy")
    values = {"x": np.arange(12, dtype=np.float16).reshape(3, 4), "y": np.array([True, False])}
    numpy.save_file(values, path, metadata={"format": "pt"})
    tensors = open_file(path)
    assert np.array_equal(tensors["x"].data, values["x"])
    assert (tensors["y"].dtype, tensors["y"].data.tolist()) == ("BOOL", [1, 0])


DEFECTS = [
    ({"a": ENTRY | {"dtype": "F37"}, "b": B}, "unknown dtype 'F37'"),
    ({"a": ENTRY | {"dtype": 3}, "b": B}, "unknown dtype 3"),
    ({"a": ENTRY | {"shape": [2, -3]}, "b": B}, "expected a shape"),
    ({"a": ENTRY | {"shape": [2, True]}, "b": B}, "expected a shape"),
    ({"a": ENTRY | {"shape": "23"}, "b": B}, "expected a shape"),
    ({"a": ENTRY | {"shape": [2, 4]}, "b": B}, "has 32 bytes, data_offsets 24"),
    ({"a": ENTRY | {"shape": [2**62, 2**62]}, "b": B}, "data_offsets 24"),
    ({"a": ENTRY | {"data_offsets": [24, 0]}, "b": B}, r"expected data_offsets \[begin, end\]"),
    ({"a": ENTRY | {"data_offsets": [0]}, "b": B}, r"expected data_offsets \[begin, end\]"),
    ({"a": ENTRY | {"data_offsets": [4, 28]}, "b": B}, "starts at byte 4 of the data, expected 0"),
    ({"a": ENTRY, "b": B | {"data_offsets": [20, 24]}}, "starts at byte 20 of the data, expected 24"),
    ({"a": ENTRY}, "describes 24 bytes of data, the file holds 28"),
    ({"a": {"dtype": "F32"}, "b": B}, "expected dtype, shape and data_offsets"),
    ({"a": [1], "b": B}, "expected dtype, shape and data_offsets"),
    ({"": ENTRY, "b": B}, "printable name"),
    ({"a\x1b[2J": ENTRY, "b": B}, "printable name"),
    ({"__metadata__": [1], "a": ENTRY, "b": B}, "__metadata__"),
    ({"__metadata__": {"format": 1}, "a": ENTRY, "b": B}, "__metadata__"),
    ([1], "expected an object"),
]


@pytest.mark.parametrize(("header", "words"), DEFECTS, ids=[w for _, w in DEFECTS])
def test_a_bad_header_says_what_is_wrong(path, header, words):
    path.write_bytes(checkpoints.safetensors_bytes(GOOD, header))
    with pytest.raises(FileError, match=words):
        open_file(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "got a file of 0 bytes"),
        (b"abc", "got a file of 3 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "the header claims"),
        (struct.pack("<Q", 100) + b"{}", "the header claims 100 bytes"),
        (struct.pack("<Q", 2) + b"[]", "expected an object, got list"),
        (struct.pack("<Q", 2) + b"{x", "unreadable safetensors header"),
        (struct.pack("<Q", 2) + b"\xff\xff", "unreadable safetensors header"),
        (struct.pack("<Q", 60000) + b'{"a":' * 12000, "unreadable safetensors header"),
        (struct.pack("<Q", 14) + b'{"a":1, "a":2}', "'a' occurs twice"),
        (b"version https://git-lfs.github.com/spec/v1\n", "header claims"),
    ],
)
def test_files_that_are_no_safetensors(path, content, words):
    path.write_bytes(content)
    with pytest.raises(FileError, match=words):
        open_file(path)


def test_truncated_and_extended_data(path):
    good = checkpoints.safetensors_bytes(GOOD)
    for content in (good[:-1], good + b"\0"):
        path.write_bytes(content)
        with pytest.raises(FileError, match="describes 28 bytes of data"):
            open_file(path)


# --- directories and indexes -----------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    return checkpoints.write_shards(tmp_path / "shards", checkpoints.tensors())


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def rename_shard(name):
    def change(index):
        index["weight_map"]["fc.weight"] = name

    return change


def test_a_missing_shard_is_named(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileError, match=r"model-00002-of-00003.safetensors: this shard is named by .* but missing"):
        open_checkpoint(shards)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index["weight_map"].pop("norm.weight"), "holds 'norm.weight', which .* does not place here"),
        (lambda index: index.pop("weight_map"), "expected a 'weight_map'"),
        (lambda index: index.update(weight_map={"a": 1}), "expected a 'weight_map'"),
        (lambda index: index.update(weight_map={}), "no tensors"),
        (rename_shard("model-00002-of-00003.safetensors"), "holds 'fc.weight', which .* does not place here"),
        (
            lambda index: index["weight_map"].update(x="model-00002-of-00003.safetensors"),
            "places 'x' here, but it is not",
        ),
        (rename_shard("../secret.safetensors"), "beside the index"),
        (rename_shard("/etc/secret.safetensors"), "beside the index"),
        (rename_shard("notes.txt"), "beside the index"),
    ],
)
def test_an_index_that_does_not_match_its_shards(shards, change, words):
    edit_index(shards, change)
    with pytest.raises(FileError, match=words):
        open_checkpoint(shards)


def test_folders_without_one_clear_checkpoint(tmp_path, shards):
    with pytest.raises(FileError, match=r"expected one of model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"x")
    with pytest.raises(FileError, match=r"expected a \.safetensors or \.bin file"):
        open_checkpoint(tmp_path / "notes.txt")
    (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(FileError, match="several checkpoints"):
        open_checkpoint(shards)


def test_one_file_of_any_name_will_do(tmp_path):
    folder = checkpoints.write(tmp_path / "c", checkpoints.tensors())
    (folder / "model.safetensors").rename(folder / "drafter.safetensors")
    assert open_checkpoint(folder).path.name == "drafter.safetensors"


# --- fuzzing ---------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(data=st.data())
@settings(max_examples=300)
def test_mutated_files_are_read_or_refused(tmp_path, data):
    content = bytearray(checkpoints.safetensors_bytes(GOOD))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.safetensors"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), 5, 40, len(content) - 3]))])
    with contextlib.suppress(Eagle3Error):
        for tensor in open_file(path).values():
            tensor.data.sum()


@given(key=st.sampled_from(["dtype", "shape", "data_offsets"]), value=json_values)
def test_any_header_value_is_read_or_refused(tmp_path, key, value):
    header = {"a": ENTRY | {key: value}, "b": B}
    (tmp_path / "m.safetensors").write_bytes(checkpoints.safetensors_bytes(GOOD, header))
    with contextlib.suppress(Eagle3Error):
        open_file(tmp_path / "m.safetensors")


CONFIG_KEYS = [
    *checkpoints.config(), "rope_scaling", "rope_parameters", "rope_theta", "eagle_config", "sliding_window",
    "eagle_aux_hidden_state_layer_ids", "layer_types", "norm_before_fc", "quantization_config", "target_hidden_size",
]  # fmt: skip


@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, min_size=1, max_size=3))
@settings(max_examples=200)
def test_any_config_is_read_or_refused(tmp_path, target, changes):
    folder = tmp_path / "c"
    if folder.exists():
        (folder / "config.json").write_text(json.dumps(checkpoints.config() | changes))
    else:
        checkpoints.write(folder, checkpoints.tensors(), checkpoints.config() | changes)
    try:
        checkpoints.run(folder, target, tmp_path / "o.gguf", dry_run=True)
    except Eagle3Error as error:
        error.message.encode()


@given(data=st.data())
@settings(max_examples=200)
def test_mutated_gguf_headers_are_read_or_refused(tmp_path, target, data):
    path = tmp_path / "t.gguf"
    shutil.copy(target, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(Eagle3Error):
        read_gguf(path)
