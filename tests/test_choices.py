"""benchmarks/choices.py: settings of eagle3 train compared on the states of one run of a tiny target."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import runs

pytest.importorskip("torch")

from eagle3_cli.errors import OptionError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
choices = importlib.import_module("choices")

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = ("--common", "--steps 2 --threads 1", "--choice", "base=", "--choice", "lk=--loss lk")
SHARD = "shards/shard-00000.safetensors"


def called(*args):
    """The exit code."""
    return choices.main([str(arg) for arg in args])


def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def compared(run, tmp_path_factory):
    """Both choices, with so few steps that nothing is learnt."""
    output = tmp_path_factory.mktemp("compared") / "o"
    with pytest.MonkeyPatch.context() as patch:
        for captures in ("answers.AnswerWriter", "capture._runner"):
            patch.setattr(f"eagle3_cli.train.{captures}", runs.stop)
        assert called("--run", run, "-o", output, *COMMON) == 0
    return output


# ---- flags ----


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("", {}),
        ("--loss lk --lr 2e-3", {"loss": "lk", "lr": 2e-3}),
        ("--ffn 96 --precision bf16", {"ffn": 96, "precision": "bf16"}),
        ("--steps 7", {"steps": 7}),
        ("--epochs 2", {"epochs": 2.0, "steps": None}),
    ],
)
def test_flags_change_what_they_name_and_nothing_else(run, flags, changes):
    base = choices._settings(run)
    assert choices.with_flags(base, flags.split()) == replace(base, **changes)


def test_steps_win_over_the_epochs_of_the_run(run):
    base = replace(choices._settings(run), steps=None, epochs=3.0)
    assert choices.with_flags(base, ["--steps", "7"]) == replace(base, steps=7, epochs=None)
    with pytest.raises(OptionError, match="--steps: cannot be used with --epochs"):
        choices.with_flags(base, ["--steps", "7", "--epochs", "2"])


def test_what_the_states_depend_on_stays_and_how_to_compute_may_change(run):
    base = choices._settings(run)
    assert base.runtime.cache_type_k == "f32"
    wanted = replace(base.runtime, threads=3, batch=64, device="cpu")
    flags = ["--threads", "3", "--batch-size", "64", "--device", "cpu"]
    assert choices.with_flags(base, flags) == replace(base, runtime=wanted)


# ---- two choices ----


def test_choices_are_trained_on_the_states_of_the_run(run, compared):
    for name in ("base", "lk"):
        assert (compared / name / SHARD).samefile(run / SHARD)
        settings = json.loads((compared / name / "run.json").read_text())["settings"]
        assert (settings["loss"], settings["steps"]) == ("lk" if name == "lk" else "soft", 2)


def test_the_results_hold_both_with_what_they_reach_by_real_decoding(run, compared):
    found = results(compared)
    assert found["run"] == run.name
    assert list(found["choices"]) == ["base", "lk"]
    for name, choice in found["choices"].items():
        numbers = json.loads((compared / name / "result.json").read_text())["numbers"]
        assert {shape: real["tau"] for shape, real in choice["real"].items()} == {
            shape: real["tau"] for shape, real in numbers["real"].items()
        }
        assert choice["real"]["chain 3"]["rounds"] > 0
        assert choice["draft_vocab"] == 64
    base, lk = found["choices"].values()
    assert base["weights"] == lk["weights"]
    assert base["loss"] != lk["loss"]


def test_a_second_call_trains_nothing_and_says_the_same(run, compared, monkeypatch, capsys):
    before = (compared / "results.json").read_bytes()
    monkeypatch.setattr("eagle3_cli.train.loop.Loop._take_step", runs.stop)
    assert called("--run", run, "-o", compared, *COMMON) == 0
    assert (compared / "results.json").read_bytes() == before
    tau = results(compared)["choices"]["lk"]["real"]["chain 3"]["tau"]
    assert f"lk: tau chain 3 {tau:.3f}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_cost_of_the_drafters_is_added_to_the_results(compared, capsys):
    before = results(compared)["choices"]
    assert called("-o", compared, "--time", 1) == 0
    after = results(compared)["choices"]
    assert {name: {**choice, "drafter_ms": after[name]["drafter_ms"]} for name, choice in before.items()} == after
    assert all(choice["drafter_ms"] > 0 for choice in after.values())
    assert capsys.readouterr().out.count("ms a round") == 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--choice", "a=--no-such-flag"], "No such option"),
        (["--choice", "a=--lr 2"], "--lr: expected"),
        (["--choice", "base=", "--choice", "a=--draft-vocab 999"], "--draft-vocab: expected at most"),
        (["--choice", "a=--aux-layers 2,3,5"], "--aux-layers: choices are whole runs on the states of --run"),
        (["--choice", "a=--cache-type-k f16"], "--cache-type-k: choices are"),
        (["--choice", "a=--force"], "--force: choices are"),
        (["--choice", "no-flags"], "--choice: expected NAME=FLAGS, got no-flags"),
        (["--choice", "a/b="], "--choice: expected NAME=FLAGS, got a/b="),
        ([], "Expected --run and at least one --choice"),
        (["--time", 0], "--time: expected a value at least 1, got 0"),
        (["--time", 1], "results.json: cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(run, tmp_path, capsys, args, said):
    assert called("--run", run, "-o", tmp_path / "o", *args) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert called("--run", tmp_path, "-o", tmp_path / "o", "--choice", "a=") == 2
    assert "expected a run of eagle3 train with its states captured" in capsys.readouterr().err


def test_other_flags_under_the_same_name_are_refused(run, compared, capsys):
    assert called("--run", run, "-o", compared, "--common", "--steps 3", "--choice", "base=") == 2
    assert "--steps was 2, is 3" in capsys.readouterr().err
