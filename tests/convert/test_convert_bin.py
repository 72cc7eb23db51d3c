"""PyTorch's .bin files: the same bytes as from safetensors, and no pickle ever runs code (vllm 11126, EAGLE 100)."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch

from eagle3_cli.convert.checkpoint import open_checkpoint
from eagle3_cli.errors import FileError

TORCH = {"F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "BOOL": torch.bool}


def state(dtype: str = "F16") -> dict[str, torch.Tensor]:
    made = {}
    for name, (kind, values) in checkpoints.tensors(dtype=dtype).items():
        if kind == "BF16":
            made[name] = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
        else:
            made[name] = torch.from_numpy(values.copy()).to(TORCH[kind])
    return made


def write(folder: Path, value: Any, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(value, folder / "pytorch_model.bin", **options)
    (folder / "config.json").write_text(json.dumps(checkpoints.config()))
    return folder


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("zipped", [True, False])
def test_same_bytes_as_from_safetensors(tmp_path, target, dtype, zipped):
    pickled = write(tmp_path / "bin", state(dtype), _use_new_zipfile_serialization=zipped)
    plain = checkpoints.write(tmp_path / "safetensors", checkpoints.tensors(dtype=dtype))
    checkpoints.run(pickled, target, tmp_path / "a.gguf")
    checkpoints.run(plain, target, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_shards_with_an_index(tmp_path, target):
    folder, whole = write(tmp_path / "c", {}), state()
    (folder / "pytorch_model.bin").unlink()
    weight_map = {}
    for i in range(2):
        part = dict(list(whole.items())[i::2])
        torch.save(part, folder / f"pytorch_model-{i}.bin")
        weight_map.update(dict.fromkeys(part, f"pytorch_model-{i}.bin"))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_checkpoint(folder).tensors.keys() == whole.keys()
    (folder / "pytorch_model-1.bin").unlink()
    with pytest.raises(FileError, match=r"named by pytorch_model\.bin\.index\.json but missing"):
        open_checkpoint(folder)


def test_safetensors_come_first(tmp_path):
    checkpoints.write(tmp_path, checkpoints.tensors())
    write(tmp_path, {})
    assert open_checkpoint(tmp_path).path.name == "model.safetensors"


def test_parameters_and_views_are_tensors_too(tmp_path):
    wide = torch.arange(12.0).reshape(3, 4)
    stored = open_checkpoint(write(tmp_path, {"p": torch.nn.Parameter(wide), "v": wide[:, 1:3], "t": wide.T})).tensors
    assert np.array_equal(stored["p"].data, wide.numpy())
    assert np.array_equal(stored["v"].data, wide[:, 1:3].numpy())
    assert np.array_equal(stored["t"].data, wide.T.numpy())


class Evil:
    """A pickle of this creates a file when it is loaded in the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_that_runs_code_is_refused(tmp_path, plain):
    folder, trap = write(tmp_path / "c", {"norm.weight": Evil(tmp_path / "trap")}), tmp_path / "trap"
    if plain:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(trap)))
    with pytest.raises(FileError, match=r"refused: this pickle is damaged or holds more than tensors"):
        open_checkpoint(folder)
    assert not trap.exists()
    if plain:
        pickle.loads((folder / "pytorch_model.bin").read_bytes())
        assert trap.is_dir(), "the trap works where it is not refused"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.zeros(2)], "expected a dictionary of tensors by name, got list"),
        ({"a": 3}, "'a': expected a plain tensor, got int"),
        ({"a": {"b": torch.zeros(2)}}, "expected a plain tensor, got dict"),
        ({1: torch.zeros(2)}, "expected a dictionary of tensors by name"),
        ({"a\n": torch.zeros(2)}, "expected a printable name"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "unknown type complex64"),
        ({"a": torch.zeros(2).to_sparse()}, "expected a plain tensor"),
        ({"a": torch.zeros(1).expand(1 << 50)}, "larger than what the file stores for it"),
        ({}, "holds no tensors"),
    ],
)
def test_anything_but_tensors_by_name_is_an_error(tmp_path, value, words):
    with pytest.raises(FileError, match=words):
        open_checkpoint(write(tmp_path, value))


@pytest.mark.parametrize("size", [0, 1, 100, 3000])
def test_a_truncated_file_is_an_error(tmp_path, size):
    path = write(tmp_path, state()) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FileError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)


def test_without_torch_the_message_says_what_to_do(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__
    missing = lambda name, *a, **k: real("no_such_module" if name == "torch" else name, *a, **k)  # noqa: E731
    write(tmp_path, state())
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(FileError) as caught:
        open_checkpoint(tmp_path)
    assert "needs PyTorch" in caught.value.message
    assert "safetensors" in caught.value.hint
