"""benchmarks/reproduce.py: both claims on a tiny target, its figures, and what it refuses."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import runs
import tiny

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch

from eagle3_cli.interrupt import Asked
from eagle3_cli.train import Hooks
from eagle3_cli.train.model import Drafter, FeatureDrafter

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
reproduce, heads, figures = (importlib.import_module(name) for name in ("reproduce", "heads", "figures"))

FAST = ("--precision", "no", "--compile", "off", "--threads", "1", "--batch-tokens", "256", "--ttt-steps", "3")
LENGTHS = ("--steps", "2", "--scaling-epochs", "1")
HEADS = {"n_alpha": ["EAGLE", "naive", "EAGLE-3"], "data_scaling": ["1x", "2x", "4x", "8x"]}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def done(run, tmp_path_factory):
    """Both claims, with so few steps that nothing is learnt."""
    output = tmp_path_factory.mktemp("reproduced") / "o"
    assert reproduce.main(["--run", str(run), "-o", str(output), *LENGTHS, *FAST]) == 0
    return output


def refused(capsys, *args):
    """The message and the hint of a command that ends with exit code 2."""
    assert reproduce.main([str(arg) for arg in args]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"])
    return said.err


# ---- results ----


def test_the_results_hold_every_number_of_every_head(done):
    results = json.loads((done / "results.json").read_text())
    assert {part: [head["title"] for head in results[part]["heads"]] for part in HEADS} == HEADS
    for part in HEADS:
        assert results[part]["settings"]["ttt_steps"] == 3
        assert results[part]["data"]["unseen_samples"] == 2
        for head in results[part]["heads"]:
            assert head["tokens"] > head["answer_tokens"] > 0
            assert head["seconds"] > 0 < head["tokens_seen"]
            assert head["loss"] > 0 < head["weights"]
            for name in ("unseen", "held_out"):
                judged = head[name]
                assert 1 <= judged["tau"] <= 4
                assert (
                    len(judged["n_alpha"]) == len(judged["n_alpha_everywhere"]) == len(judged["rows_everywhere"]) == 6
                )
                assert judged["n_alpha"][0] == judged["n_alpha_everywhere"][0]


def test_three_heads_differ_in_nothing_but_what_they_are_trained_for(done):
    first = json.loads((done / "results.json").read_text())["n_alpha"]["heads"]
    assert [(head["objective"], head["ttt_steps"]) for head in first] == [("eagle", 1), ("eagle3", 1), ("eagle3", 3)]
    for key in ("samples", "tokens", "optimiser_steps", "tokens_seen"):
        assert len({head[key] for head in first}) == 1


def test_the_second_claim_has_more_steps_on_more_data_by_the_rule_of_the_paper(done):
    second = json.loads((done / "results.json").read_text())["data_scaling"]
    base = second["data"]["training_tokens"] // 8
    assert second["rule"] == "epochs"
    for factor, head in zip((1, 2, 4, 8), second["heads"], strict=True):
        assert factor * base <= head["tokens"] < factor * base + 64
        assert head["tokens_seen"] == head["tokens"]  # one epoch
    steps = [head["optimiser_steps"] for head in second["heads"]]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


def test_smaller_data_is_part_of_larger(run):
    source = heads.open_source(run)
    sets = heads.nested(source, [100, 200, 400], seed=3)
    assert set(sets[0]) < set(sets[1]) < set(sets[2]) <= set(source.training)
    assert all(source.tokens(chosen) >= tokens for chosen, tokens in zip(sets, (100, 200, 400), strict=True))
    assert not np.array_equal(sets[0], heads.nested(source, [100], seed=4)[0])


def test_the_figures_are_whole_files_that_name_their_curves(done):
    for name in figures.FIGURES.values():
        root = ET.parse(done / name).getroot()
        assert root.tag.endswith("svg")
        assert float(root.get("width").removesuffix("pt")) > 300


def test_the_same_numbers_draw_the_same_bytes(done, tmp_path, capsys, monkeypatch):
    import matplotlib as mpl

    (tmp_path / "results.json").write_text((done / "results.json").read_text())
    monkeypatch.setattr("heads.trained", runs.stop)
    monkeypatch.setitem(mpl.rcParams, "axes.facecolor", "black")
    assert reproduce.main(["-o", str(tmp_path), "--figures-only"]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / name) for name in ("results.json", *figures.FIGURES.values())
    ]
    for name in figures.FIGURES.values():
        assert (tmp_path / name).read_bytes() == (done / name).read_bytes()


def test_numbers_that_do_not_exist_are_gaps(done, tmp_path):
    results = json.loads((done / "results.json").read_text())
    for head in (*results["n_alpha"]["heads"], *results["data_scaling"]["heads"]):
        head["held_out"]["tau"] = None
        head["unseen"]["n_alpha"] = [0.5, None, None, None, None, None]
    for path in figures.draw(results, tmp_path):
        ET.parse(path)


# ---- going on ----


def test_a_second_call_trains_nothing(run, done, monkeypatch):
    before = (done / "results.json").read_bytes()
    monkeypatch.setattr("eagle3_cli.train.loop.Loop._take_step", runs.stop)
    monkeypatch.setattr(figures, "draw", lambda *_: [])
    assert reproduce.main(["--run", str(run), "-o", str(done), *LENGTHS, *FAST]) == 0
    assert (done / "results.json").read_bytes() == before


def test_an_interrupted_head_goes_on_to_the_same_numbers(run, done, tmp_path, monkeypatch, capsys):
    command = ["--run", str(run), "-o", str(tmp_path), "--only", "n-alpha", "--steps", "2", *FAST]
    with monkeypatch.context() as patch:
        patch.setattr("eagle3_cli.train.loop.gentle_interrupt", AskedAtOnce)
        assert reproduce.main(command) == 130
    assert capsys.readouterr().err.endswith("Interrupted. The same command goes on from what is done.\n")
    assert not (tmp_path / "results.json").exists()
    source = heads.open_source(run)
    head = reproduce.n_alpha_heads(source, reproduce._parser().parse_args(command))[0]
    assert [path.name for path in (head.settings.output / "states").iterdir()] == ["state-000000001.safetensors"]
    found = heads.trained(source, head, Hooks())
    unbroken = json.loads((done / "results.json").read_text())["n_alpha"]["heads"][0]
    assert {**found, "title": "EAGLE", "seconds": unbroken["seconds"]} == unbroken


class AskedAtOnce:
    """Ctrl-C during the first step."""

    def __init__(self, **_):
        self.asked = Asked()
        self.asked.number = signal.SIGINT

    def __enter__(self):
        return self.asked

    def __exit__(self, *_):
        return None


def test_the_other_claim_is_added_to_what_is_there(run, done, tmp_path, monkeypatch):
    shutil.copy(done / "results.json", tmp_path)
    monkeypatch.setattr(figures, "draw", lambda *_: [])
    before = json.loads((done / "results.json").read_text())
    asked = []

    def trained(_source, head, _hooks):
        asked.append(head)
        return before["n_alpha"]["heads"][0]

    monkeypatch.setattr(heads, "trained", trained)
    command = ["--run", run, "-o", tmp_path, "--only", "scaling", "--scaling-steps", "1", "--base-tokens", "50", *FAST]
    assert reproduce.main([str(arg) for arg in command]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["n_alpha"] == before["n_alpha"]
    assert results["data_scaling"]["rule"] == "steps"
    assert [head.settings.steps for head in asked] == [1, 1, 1, 1]
    assert len({len(head.indices) for head in asked}) == 4


def test_heads_of_other_settings_are_not_taken_for_these(run, done, capsys):
    said = refused(capsys, "--run", run, "-o", done, "--only", "n-alpha", "--steps", 2, *FAST, "--lr", 0.002)
    assert "--lr was 0.001, is 0.002" in said
    assert "another --output" in said


# ---- acceptance at every position ----


class Reader:
    """Two samples of 5 and 4 tokens whose answers start at tokens 2 and 3."""

    lengths = np.array([5, 4])

    def sample(self, i):
        length = self.lengths[i]
        return heads_sample(length, np.arange(length) >= 2 + i)


def heads_sample(length, answer):
    from eagle3_cli.train.shards import StatedSample

    zeros = torch.zeros(length, 1)
    tokens = torch.zeros(length, dtype=torch.int64)
    return StatedSample(tokens, torch.from_numpy(answer), zeros, zeros, tokens)


def test_acceptance_at_every_position_asks_nothing_of_the_drafts_before(monkeypatch):
    """By hand: of step 0, rows 0, 1, 2 of the first sample and row 1 of the second predict answer tokens, two rightly;
    of step 1 rows 0, 1 and 0, two rightly, one of them after a wrong draft; of step 2 row 0, wrongly."""
    rows = {5: ["110", "110", "100", "000"], 4: ["010", "100", "000"]}
    right = {5: ["010", "110", "000", "000"], 4: ["010", "100", "000"]}

    def match_rows(_drafter, batch, steps):
        assert steps == 4
        tables = [np.zeros((len(batch["length"]), batch["tokens"].shape[1] - 1, steps), bool) for _ in range(2)]
        for table, marks in zip(tables, (right, rows), strict=True):
            for b, length in enumerate(batch["length"].tolist()):
                for p, row in enumerate(marks[length]):
                    table[b, p, :3] = [mark == "1" for mark in row]
        tables[1][batch["length"].tolist().index(5), 0, 2] = True
        return tables

    monkeypatch.setattr(heads, "match_rows", match_rows)
    rates, counted = heads.n_alpha_everywhere(None, Reader(), np.array([0, 1]), steps=4)
    assert rates == [2 / 4, 3 / 3, 0 / 1, None]
    assert counted == [4, 3, 1, 0]


@pytest.mark.parametrize("title", ["EAGLE", "EAGLE-3"])
def test_acceptance_of_both_kinds_of_drafter_equals_a_slow_count(run, title):
    """Each step's outputs are fed back; EAGLE's are features, which its head, the target's, reads."""
    source = heads.open_source(run)
    args = reproduce._parser().parse_args(["-o", "o", "--run", "r", "--steps", "1", *FAST])
    head = next(head for head in reproduce.n_alpha_heads(source, args) if head.title == title)
    drafter = heads.Run(head.settings, source.inputs, source.folder, None).drafter()
    assert type(drafter) is (FeatureDrafter if title == "EAGLE" else Drafter)
    rates, counted = heads.n_alpha_everywhere(drafter, source.unseen, np.arange(2))
    right, seen = [0] * 6, [0] * 6
    for sample in map(source.unseen.sample, range(2)):
        with torch.no_grad():
            outputs = drafter.unroll(heads.collate([sample]), 6)
            drafted = [drafter.d2t[drafter.logits(s[0]).argmax(-1)] for s in outputs]
        for n in range(6):
            for p in range(len(sample) - 2 - n):
                if sample.answer[p + 2 + n]:
                    seen[n] += 1
                    right[n] += int(drafted[n][p] == sample.tokens[p + 2 + n])
    assert counted == seen
    assert rates == [r / s for r, s in zip(right, seen, strict=True)]


# ---- what is refused ----


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    said = refused(capsys, "--run", tmp_path, "-o", tmp_path / "o")
    assert said.startswith(f"error: {tmp_path}: expected a run of eagle3 train, got no run.json.\n")


def test_a_run_without_its_draft_vocabulary_is_refused(run, tmp_path, capsys):
    shutil.copy(run / "run.json", tmp_path)
    said = refused(capsys, "--run", tmp_path, "-o", tmp_path / "o")
    assert "expected the stages up to the draft vocabulary, got no vocabulary.safetensors" in said
    assert "eagle3 train" in said.splitlines()[1]


def test_another_target_is_refused(run, tmp_path, capsys):
    other = tiny.write_target(tmp_path / "other.gguf", weights=tiny.target_weights(seed=2)).path
    assert f"{other}: expected the target of {run}" in refused(capsys, "--run", run, "-o", "o", "--target", other)
    moved = shutil.copy(json.loads((run / "run.json").read_text())["settings"]["target"], tmp_path / "moved.gguf")
    assert heads.open_source(run, Path(moved)).settings.target == Path(moved)


def test_more_data_than_there_is_is_refused_before_anything_is_trained(run, tmp_path, capsys):
    there = heads.open_source(run)
    there = there.tokens(there.training)
    wanted = there // 8 + 1
    said = refused(capsys, "--run", run, "-o", tmp_path / "o", "--base-tokens", wanted)
    assert f"--base-tokens: 8 times {wanted} tokens were asked for, and {run} has {there} to train on." in said
    assert f"--base-tokens {there // 8}," in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ([], "--run: expected"),
        (["--run", "r", "--figures-only"], "--run: has no effect with --figures-only"),
        (["--figures-only", "--lr", "0.1"], "--lr: has no effect with --figures-only"),
        (["--run", "r", "--only", "scaling", "--steps", "3"], "--steps: has no effect with --only scaling"),
        (["--run", "r", "--only", "n-alpha", "--base-tokens", "3"], "--base-tokens: has no effect with --only n-alpha"),
        (["--run", "r", "--epochs", "0"], "--epochs: expected a positive number, got 0"),
        (["--figures-only"], "results.json: cannot be read"),
    ],
)
def test_flags_that_say_nothing_are_refused(args, flag, tmp_path, capsys):
    assert flag in refused(capsys, "-o", tmp_path / "o", *args)


def test_a_setting_out_of_range_is_refused_before_anything_is_trained(run, tmp_path, capsys):
    assert "--lr: expected" in refused(capsys, "--run", run, "-o", tmp_path / "o", "--lr", "2")
    assert not (tmp_path / "o").exists()


def test_compiling_where_that_does_not_work_is_refused(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("eagle3_cli.train.compiling.compile_fault", lambda _: "no compiler")
    assert "does not work here: no compiler" in refused(capsys, "--run", run, "-o", tmp_path / "o", "--compile", "on")
    assert not (tmp_path / "o").exists()


def test_several_processes_are_refused(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "expected one process, got 2" in refused(capsys, "--run", run, "-o", tmp_path / "o").lower()


def test_without_matplotlib_nothing_is_trained(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "find_spec", lambda _: None)
    assert "pip install" in refused(capsys, "--run", run, "-o", tmp_path / "o")


def test_a_seed_of_the_heads_leaves_the_runs_split_as_it_is(run):
    source = heads.open_source(run)
    assert len(source.held_out) > 0
    assert sorted([*source.training, *source.held_out]) == list(range(len(source.reader)))
    args = reproduce._parser().parse_args(["-o", "o", "--run", "r", "--steps", "1", "--seed", "5"])
    for head in reproduce.n_alpha_heads(source, args):
        assert head.settings.seed == 5
        assert head.indices is source.training
