"""Names in an index lead nowhere else, and what we write goes through no link."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import checkpoints
import pytest
import torch
from test_convert_bin import Evil

from eagle3_cli.convert.checkpoint import open_checkpoint
from eagle3_cli.convert.load import check_loads
from eagle3_cli.convert.output import replacing
from eagle3_cli.errors import FileError
from eagle3_cli.train import TrainSettings
from eagle3_cli.train.state import LoopState, append_metrics, cut_metrics, opened, save_state

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def shards(tmp_path):
    return checkpoints.write_shards(tmp_path / "checkpoint", checkpoints.tensors())


@pytest.fixture
def precious(tmp_path):
    """A file that nobody may write."""
    path = tmp_path / "precious"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


# --- what an index names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors", "/x.safetensors", "./x.safetensors", "a/../x.safetensors", "a/x.safetensors", "..", ".", "",
        "a\\..\\x.safetensors", "x\0.safetensors", "\x1b[2Jx.safetensors", "x\n.safetensors", "\ud800.safetensors",
        "x" * 300 + ".safetensors", "/dev/zero", "x.safetensors/", "x.gguf",
    ],
)  # fmt: skip
def test_a_name_that_is_no_file_beside_the_index_is_refused(tmp_path, shards, name):
    for place in (tmp_path, Path("/tmp")):
        assert not (place / "x.safetensors").exists()
    (tmp_path / "x.safetensors").write_bytes((shards / SHARD).read_bytes())
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {tensor: name if file == SHARD else file for tensor, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"beside the index, got|named by model\.safetensors\.index\.json but missing"):
        open_checkpoint(shards)


def test_a_link_out_of_the_directory_is_refused(tmp_path, shards):
    (shards / SHARD).rename(tmp_path / "elsewhere.safetensors")
    (shards / SHARD).symlink_to("../elsewhere.safetensors")
    with pytest.raises(FileError, match=r"expected a file in this directory, got a link to .*elsewhere\.safetensors"):
        open_checkpoint(shards)


def test_a_link_within_the_directory_is_a_file_of_it(shards):
    (shards / SHARD).rename(shards / "part")
    (shards / SHARD).symlink_to("part")
    assert open_checkpoint(shards).tensors.keys() == checkpoints.tensors().keys()


def test_a_directory_that_is_a_link_is_its_own_home(tmp_path, shards):
    (tmp_path / "link").symlink_to(shards)
    assert open_checkpoint(tmp_path / "link").tensors.keys() == checkpoints.tensors().keys()


def test_hugging_faces_cache_keeps_its_files_as_blobs(tmp_path, shards):
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(shards.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert open_checkpoint(snapshot).tensors.keys() == checkpoints.tensors().keys()
    (snapshot / SHARD).resolve().rename(tmp_path / "elsewhere")
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="expected a file in this directory"):
        open_checkpoint(snapshot)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="expected an ordinary file"):
        open_checkpoint(tmp_path)


# --- code ------------------------------------------------------------------------------------------------


def test_a_tar_archive_of_old_is_not_loaded(tmp_path):
    """What CVE-2025-32434 is about: torch.load(weights_only=True) of PyTorch before 2.6 ran it."""
    folder = tmp_path / "c"
    folder.mkdir()
    with tarfile.open(folder / "pytorch_model.bin", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            evil = pickle.dumps(Evil(tmp_path / "trap"))
            info = tarfile.TarInfo(name)
            info.size = len(evil)
            archive.addfile(info, io.BytesIO(evil))
    with pytest.raises(FileError, match="refused: this pickle is damaged or holds more than tensors"):
        open_checkpoint(folder)
    assert not (tmp_path / "trap").exists()


@pytest.mark.own_process
def test_loading_the_result_imports_nothing_from_the_current_directory(tmp_path, monkeypatch, tiny_target):
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in ("json", "runpy", "llama_cpp", "numpy", "struct"):
        (folder / f"{name}.py").write_text("open('trap', 'w')\n")
    monkeypatch.chdir(folder)
    check_loads(tiny_target.path)
    assert not (folder / "trap").exists()


# --- what we write ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["nameless", "hidden"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_replaced_and_its_target_stays(tmp_path, monkeypatch, precious, way, dangling):
    if way == "hidden":
        monkeypatch.setattr("eagle3_cli.convert.output._nameless", lambda *_: None)
    output = tmp_path / "out"
    output.symlink_to(tmp_path / "nothing" if dangling else precious)
    with replacing(output) as path:
        path.write_text("new")
    assert not output.is_symlink()
    assert output.read_text() == "new"
    assert not (tmp_path / "nothing").exists()


def settings(folder, **values):
    return TrainSettings(target=Path("t.gguf"), output=folder, **values)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "states", "checkpoint", "shards", "drafter.gguf"])
def test_a_run_with_a_link_in_its_folder_is_not_continued(tmp_path, name):
    with opened(settings(tmp_path / "run"), {}) as folder:
        pass
    elsewhere = tmp_path / "elsewhere"
    if name == "run.json":
        (folder / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (folder / name).symlink_to(elsewhere)
    with (
        pytest.raises(FileError, match=rf"{name}: expected a part of the run itself, got a symbolic link"),
        opened(settings(tmp_path / "run"), {}),
    ):
        pass
    with opened(settings(tmp_path / "run", force=True), {}):
        assert not (folder / name).is_symlink()
    assert elsewhere.exists()


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="needs a system that can refuse links")
def test_the_files_of_a_run_are_not_written_through_links(tmp_path, precious):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileError, match="cannot be written"), opened(settings(folder), {}):
        pass
    assert not (tmp_path / "nothing").exists()
    metrics = folder / "metrics.jsonl"
    metrics.symlink_to(precious)
    with pytest.raises(FileError, match=r"metrics\.jsonl: cannot be written"):
        append_metrics(metrics, {"step": 1})
    metrics.unlink()
    append_metrics(metrics, {"step": 1})
    append_metrics(metrics, {"step": 2})
    metrics.rename(tmp_path / "lines")
    metrics.symlink_to(tmp_path / "lines")
    cut_metrics(metrics, 1)
    assert metrics.read_text() == '{"step": 1}\n'
    assert (tmp_path / "lines").read_text() == '{"step": 1}\n{"step": 2}\n'
    (folder / ".state-000000001.safetensors").symlink_to(precious)
    assert not save_state(folder, LoopState({"x": torch.zeros(1)}, 1, 0.0, 0)).is_symlink()
