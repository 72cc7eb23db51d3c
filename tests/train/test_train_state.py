"""The output folder of a run and the states in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_cli.errors import FileError, OptionError
from eagle3_cli.train import TrainSettings
from eagle3_cli.train.samples import Sample
from eagle3_cli.train.state import (
    RUN,
    LoopState,
    Part,
    SampleStore,
    check_folder,
    load_state,
    opened,
    save_state,
    state_path,
)


def settings(folder, **values):
    return TrainSettings(target=Path("t.gguf"), output=folder, **values)


def state(step):
    tensors = {"model.fc.weight": torch.full((4, 4), float(step)), "rng": torch.get_rng_state()}
    return LoopState(tensors, step, step * 1.5, step * 100)


# ---- the folder ----


def test_a_new_folder_is_made_with_the_settings_of_the_run(tmp_path):
    with opened(settings(tmp_path / "a" / "b", lr=0.5), {"data_sha256": []}) as folder:
        stored = json.loads((folder / RUN).read_text())["settings"]
    assert stored["lr"] == 0.5
    assert stored["data_sha256"] == []


def test_the_same_settings_go_on_with_what_is_there(tmp_path):
    with opened(settings(tmp_path / "o"), {}) as folder:
        (folder / "metrics.jsonl").write_text("kept")
    free = {"checkpoint_minutes": 1.0, "dry_run": True}
    assert check_folder(settings(tmp_path / "o", **free), {})
    with opened(settings(tmp_path / "o"), {}) as folder:
        assert (folder / "metrics.jsonl").read_text() == "kept"


def test_other_settings_are_refused_by_name(tmp_path):
    with opened(settings(tmp_path / "o", data=(Path("a"),)), {"data_sha256": ["1"]}):
        pass
    with pytest.raises(OptionError, match=r"--ttt-steps was 7, is 3; --lr was 0.001, is 0.01") as caught:
        check_folder(settings(tmp_path / "o", data=(Path("a"),), lr=0.01, ttt_steps=3), {"data_sha256": ["1"]})
    assert caught.value.exit_code == 2
    with pytest.raises(OptionError, match="the data has changed"):
        check_folder(settings(tmp_path / "o", data=(Path("a"),)), {"data_sha256": ["2"]})


def test_force_starts_over_and_keeps_what_is_not_of_the_run(tmp_path):
    with opened(settings(tmp_path / "o"), {}) as folder:
        (folder / "metrics.jsonl").write_text("old")
        save_state(folder / "states", state(1))
        (folder / "notes.txt").write_text("mine")
    with opened(settings(tmp_path / "o", lr=0.5, force=True), {}) as folder:
        assert sorted(p.name for p in folder.iterdir()) == [".lock", "notes.txt", RUN]


def test_a_folder_of_something_else_is_refused_even_with_force(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FileError, match="got other files"):
        check_folder(settings(tmp_path, force=True), {})
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "o").write_text("x")
    with pytest.raises(FileError, match="expected a folder"):
        check_folder(settings(tmp_path / "o"), {})


def test_a_run_of_another_format_is_refused(tmp_path):
    (tmp_path / RUN).write_text('{"format": 99}')
    with pytest.raises(FileError, match="expected format 1, got 99"):
        check_folder(settings(tmp_path), {})


def test_two_runs_cannot_have_one_folder(tmp_path):
    with (
        opened(settings(tmp_path / "o"), {}),
        pytest.raises(FileError, match="another run"),
        opened(settings(tmp_path / "o"), {}),
    ):
        pass
    with opened(settings(tmp_path / "o"), {}):  # the first one is over
        pass


# ---- states ----


def test_a_state_is_read_back_as_it_was(tmp_path):
    save_state(tmp_path / "s", state(7))
    found = load_state(tmp_path / "s")
    assert (found.step, found.seconds, found.tokens) == (7, 10.5, 700)
    assert {n: t.tolist() for n, t in found.tensors.items()} == {n: t.tolist() for n, t in state(7).tensors.items()}


def test_the_newest_two_states_are_kept(tmp_path):
    for step in (1, 2, 10):
        save_state(tmp_path / "s", state(step))
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [state_path(tmp_path, s).name for s in (2, 10)]
    assert load_state(tmp_path / "s").step == 10


def test_no_state_is_none(tmp_path):
    assert load_state(tmp_path / "none") is None


def test_a_damaged_state_is_named(tmp_path):
    path = save_state(tmp_path / "s", state(1))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FileError, match=r"state-000000001.safetensors: expected a whole state"):
        load_state(tmp_path / "s")


KILLED = """
import os, signal, sys, torch
from pathlib import Path
import safetensors.torch
from eagle3_cli.train.state import LoopState, save_state

def half(tensors, path, metadata):
    data = safetensors.torch.save(tensors, metadata)
    Path(path).write_bytes(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

safetensors.torch.save_file = half
save_state(Path(sys.argv[1]), LoopState({"a": torch.ones(100)}, 9, 0.0, 0))
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_older_state_usable(tmp_path):
    save_state(tmp_path / "s", state(5))
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "s")], timeout=60)
    assert done.returncode == -9
    assert len(list((tmp_path / "s").iterdir())) == 2  # the half is there, under a name that is not read
    assert load_state(tmp_path / "s").step == 5
    save_state(tmp_path / "s", state(6))
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [state_path(tmp_path, s).name for s in (5, 6)]


# ---- conversations as tokens ----


def test_samples_are_read_back_in_order_and_go_on_where_they_stopped(tmp_path):
    samples = [Sample(np.arange(n, dtype=np.int32), np.arange(n) > 1) for n in (3, 5, 2, 4)]
    SampleStore(tmp_path / "s").add(Part(samples[:3], 4, ["hello"], {"too long": 1}))
    resumed = SampleStore(tmp_path / "s")
    assert not resumed.complete
    resumed.add(Part(samples[3:], 1, [], {"too long": 1}))
    resumed.add(Part([], 2))
    resumed.finish()
    found = SampleStore(tmp_path / "s")
    assert [s.tokens.tolist() for s in found.samples] == [s.tokens.tolist() for s in samples]
    assert [s.answer.tolist() for s in found.samples] == [s.answer.tolist() for s in samples]
    assert (found.conversations, found.seen, found.left_out) == (7, ["hello"], {"too long": 2})
    assert found.complete


def test_a_damaged_part_is_named(tmp_path):
    SampleStore(tmp_path / "s").add(Part([Sample(np.arange(5, dtype=np.int32), np.ones(5, bool))], 1))
    path = tmp_path / "s" / "part-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FileError, match=r"part-00000.safetensors: expected conversations"):
        SampleStore(tmp_path / "s")
