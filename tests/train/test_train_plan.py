"""Settings, the checks before any long work, the numbers of --dry-run, and a whole run on a tiny target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import tiny
import torch

from eagle3_cli.errors import FileError, InputError, OptionError
from eagle3_cli.model_files import read_drafter
from eagle3_cli.settings import RuntimeSettings
from eagle3_cli.train import Hooks, TrainSettings, train
from eagle3_cli.train.inputs import check_inputs, drafter_shape
from eagle3_cli.train.model import Drafter
from eagle3_cli.train.plan import make_plan, measured, parameters
from eagle3_cli.train.state import SampleStore
from eagle3_cli.train.vocab import choose_size, unskippable

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(tiny_target, tmp_path):
    runtime = RuntimeSettings(threads=1, ctx_size=512, batch=64)
    return TrainSettings(target=tiny_target.path, output=tmp_path / "o", aux_layers=(2, 3, 4), runtime=runtime)


# ---- settings ----


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"lr": 0.0}, "--lr"),
        ({"lr": float("nan")}, "--lr"),
        ({"ttt_steps": 0}, "--ttt-steps"),
        ({"held_out": 1.0}, "--held-out"),
        ({"draft_vocab": 0}, "--draft-vocab"),
        ({"steps": 0}, "--steps"),
        ({"loss": "hinge"}, "--loss"),
        ({"outtype": "q9"}, "--outtype"),
        ({"steps": 3, "epochs": 2.0}, "--steps"),
        ({"keep_answers": True}, "--keep-answers"),
        ({"fc_norm": True, "norm_before_fc": True}, "--fc-norm"),
        ({"force": True, "dry_run": True}, "--force"),
        ({"objective": "eagle"}, "--ttt-steps"),
        ({"aux_layers": (2, 2, 3)}, "--aux-layers"),
    ],
)
def test_a_setting_out_of_range_is_an_error_that_names_its_flag(values, flag):
    with pytest.raises(OptionError, match=f"^{flag}: ") as caught:
        TrainSettings(target=Path("t"), output=Path("o"), **values)
    assert caught.value.exit_code == 2


def test_what_a_resume_compares_is_json_and_leaves_out_what_changes_no_result():
    s = TrainSettings(target=Path("t"), output=Path("o"), data=(Path("a"),), aux_layers=(2, 3, 4))
    kept = s.fixed()
    assert json.loads(json.dumps(kept)) == kept
    others = {"output": Path("p"), "force": True, "checkpoint_minutes": 1.0, "runtime": RuntimeSettings(threads=3)}
    assert replace(s, **others).fixed() == kept
    assert replace(s, runtime=RuntimeSettings(cache_type_k="f32")).fixed() != kept
    assert replace(s, seed=1).fixed() != kept


# ---- checks ----


def test_a_target_that_is_not_there_is_refused(settings, tmp_path):
    with pytest.raises(FileError, match="no such file"):
        check_inputs(replace(settings, target=tmp_path / "none.gguf"))


def test_a_folder_without_a_model_is_refused(settings, tmp_path):
    with pytest.raises(FileError, match=r"no config\.json in this directory"):
        check_inputs(replace(settings, target=tmp_path))


def test_a_drafter_as_the_target_is_refused(settings, tiny_drafters):
    with pytest.raises(FileError, match="is an EAGLE-3 drafter"):
        check_inputs(replace(settings, target=tiny_drafters["good"].path))


def test_a_target_without_a_chat_template_is_refused(settings, tmp_path):
    bare = tiny.write_target(tmp_path / "bare.gguf", tokenizer__chat_template=None)
    with pytest.raises(FileError, match="expected a chat template"):
        check_inputs(replace(settings, target=bare.path))


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(settings):
    check_inputs(replace(settings, draft_vocab=tiny.VOCAB))
    with pytest.raises(OptionError, match="at most the target's 264 tokens, got 265"):
        check_inputs(replace(settings, draft_vocab=265))


def test_a_draft_vocabulary_without_room_for_the_end_tokens_is_refused(settings):
    with pytest.raises(OptionError, match="at least the target's 3 end and control tokens, got 2"):
        check_inputs(replace(settings, draft_vocab=2))


@pytest.mark.parametrize("layers", [(2, 3, 6), (4, 3, 2), (0, 2, 3), (1, 2, 3)])
def test_layers_that_cannot_be_captured_or_named_are_refused(settings, layers):
    with pytest.raises(OptionError, match="--aux-layers"):
        check_inputs(replace(settings, aux_layers=layers))


def test_bad_data_is_refused_with_its_line(settings, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(FileError, match=r"d.jsonl:2: "):
        check_inputs(replace(settings, data=(tmp_path / "d.jsonl",)))


def test_heads_that_do_not_fit_together_are_refused(settings):
    with pytest.raises(OptionError, match="cannot share"):
        check_inputs(replace(settings, heads=3, kv_heads=2))


def test_a_disk_that_is_too_small_is_refused(settings, monkeypatch):
    inputs = check_inputs(settings)
    need = make_plan(settings, inputs).disk
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=need - 1))
    with pytest.raises(FileError, match="are needed"):
        make_plan(settings, inputs)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=need))
    make_plan(settings, inputs)


def test_nothing_is_written_before_the_checks_are_over(settings):
    for values in ({"draft_vocab": 10**6}, {"aux_layers": (2, 3, 9)}, {"heads": 3}):
        with pytest.raises(InputError):
            train(replace(settings, **values))
    assert not settings.output.exists()


# ---- numbers ----


@pytest.mark.parametrize("values", [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"hidden": 48, "heads": 2}])
def test_the_counted_weights_are_those_of_the_module(settings, values):
    s = replace(settings, **values)
    shape = drafter_shape(s, check_inputs(s), 100)
    words, head = torch.zeros(shape.vocab, shape.hidden), torch.zeros(100, shape.target_width)
    drafter = Drafter(shape, torch.arange(100), words, head)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert sum(parameters(shape)[0].values()) == trained
    assert parameters(shape)[1] == words.numel() + head.numel()


def test_the_chosen_vocabulary_covers_the_answers_and_has_all_control_tokens(tiny_target):
    always = unskippable(tiny_target.path)
    assert always == [tiny.END_OF_TEXT, tiny.IM_START, tiny.IM_END]
    counts = np.zeros(5000, np.int64)
    counts[:100] = 1000
    counts[100:1000] = 10
    counts[always] = 0
    size = choose_size(counts, always)
    assert size % 64 == 0
    covered = np.sort(counts)[::-1]
    assert covered[: size - len(always)].sum() >= 0.995 * covered.sum() > covered[: size - 64 - len(always)].sum()


def test_the_chosen_vocabulary_is_never_larger_than_the_targets():
    assert choose_size(np.ones(100, np.int64), [1]) == 100
    assert choose_size(np.zeros(100, np.int64), [1]) <= 64


def test_a_dry_run_measures_and_writes_nothing(settings):
    result = train(replace(settings, dry_run=True, max_length=64, draft_vocab=32))
    assert result.drafter is None
    assert not settings.output.exists()
    assert result.plan["seconds"]["capture"] > 0
    assert result.plan["seconds"]["training"] > 0
    assert result.plan["trained"] == sum(result.plan["parameters"].values())
    assert json.dumps(result.as_dict())


def test_a_training_is_planned_no_longer_than_its_minutes(settings):
    s = replace(settings, max_minutes=0.001, steps=10**6, draft_vocab=32)
    inputs = check_inputs(s)
    plan = measured(s, inputs, make_plan(s, inputs))
    assert plan.seconds["training"] == pytest.approx(0.06)
    assert "training 0 s" in plan.lines()[-1]


# ---- a whole run ----


@pytest.fixture
def whole(tiny_target, tmp_path):
    return runs.settings(tiny_target.path, tmp_path, 12)


@pytest.fixture
def two_unseen_prompts(monkeypatch):
    runs.ask(monkeypatch, "why", "how so")


def test_a_run_killed_between_any_two_stages_goes_on_and_ends_as_an_unbroken_one(
    whole, two_unseen_prompts, tmp_path, monkeypatch
):
    """Each attempt dies where the next stage would begin; what the stages before made is not made again."""
    unbroken = train(replace(whole, output=tmp_path / "unbroken"))
    stages = ("stages.Run._collect", "stages.Run._choose_vocabulary", "report.finish", "report.write_json")
    for stage in stages:
        with monkeypatch.context() as patch:
            patch.setattr(f"eagle3_cli.train.{stage}", runs.stop)
            with pytest.raises(runs.Stopped):
                train(whole)
        assert not (whole.output / "result.json").exists()
    with monkeypatch.context() as patch:
        for done in ("answers.AnswerWriter", "capture._runner", "loop.Loop._take_step"):
            patch.setattr(f"eagle3_cli.train.{done}", runs.stop)
        result = train(whole)
    assert result.numbers == unbroken.numbers
    for name in ("drafter.gguf", "checkpoint/model.safetensors"):
        assert (whole.output / name).read_bytes() == (unbroken.output / name).read_bytes()


def test_a_finished_run_has_a_drafter_that_loads_and_numbers_that_agree(whole, two_unseen_prompts):
    said = []
    result = train(whole, Hooks(said.append))
    assert read_drafter(result.drafter, whole.target).aux_layers == (2, 3, 4)
    simulated, real = result.numbers["simulated"], result.numbers["real"]["chain 3"]
    assert (simulated["tau"], simulated["rounds"]) == (real["tau"], real["rounds"])
    assert any(line.startswith("Training and decoding agree") for line in said)
    assert "The run is not finished" not in (whole.output / "report.html").read_text()
    again = train(whole, Hooks(said.append))
    assert again == result
    assert said[-1].endswith("this run is complete; --force starts over.")


def test_a_target_that_writes_no_user_turns_is_refused_without_data(whole, two_unseen_prompts, monkeypatch):
    """The tiny target never ends a turn."""
    monkeypatch.setattr("eagle3_cli.train.stages.BARREN", 2)
    monkeypatch.setattr("eagle3_cli.train.dialogue.USER_TOKENS", 4)
    with pytest.raises(InputError, match=r"wrote no usable user's turn in 2 conversations"):
        train(replace(whole, data=()))


def test_given_answers_are_kept(whole, two_unseen_prompts, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"say {i}", "answer": "the hen"}) for i in range(6))
    )
    train(replace(whole, keep_answers=True))
    samples = SampleStore(whole.output / "samples").samples
    assert len(samples) == 6
    assert len({tuple(s.tokens[s.answer].tolist()) for s in samples}) == 1
