"""`eagle3 train`: its flags reach the trainer, its result reaches the user."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from eagle3_cli.commands.train import train as command
from eagle3_cli.errors import FileError
from eagle3_cli.settings import RuntimeSettings
from eagle3_cli.train import TrainResult, TrainSettings

BASE = ("train", "--target", "t.gguf", "-o", "out")


@pytest.fixture
def calls(eagle3, monkeypatch):
    """The settings that the trainer was called with."""
    seen = []

    def train(settings, hooks):
        seen.append(settings)
        hooks.report("the plan")
        hooks.progress("training", 0.5)
        if isinstance(train.error, BaseException):
            raise train.error
        made = None if settings.dry_run else settings.output / "drafter.gguf"
        return TrainResult(settings.output, {"tokens": 5}, made, settings.output / "checkpoint", {"tau": 2.0})

    train.error = None
    monkeypatch.setattr("eagle3_cli.train.train", train)
    seen_and_trainer = seen
    eagle3.trainer = train
    return seen_and_trainer


def test_without_flags_the_defaults_are_those_of_the_settings(eagle3, calls):
    assert eagle3(*BASE).code == 0
    assert calls == [TrainSettings(target=Path("t.gguf"), output=Path("out"))]


def test_every_setting_has_a_flag_and_every_flag_reaches_its_setting(eagle3, calls):
    values = {
        "tokens": 7, "answer_tokens": 8, "max_length": 9, "draft_vocab": 10, "hidden": 12, "heads": 2, "kv_heads": 1,
        "head_dim": 4, "ffn": 11, "ttt_steps": 3, "decay": 0.5, "loss": "lk", "objective": "eagle3", "init": "random",
        "lr": 0.01, "head_lr_factor": 0.1, "warmup": 0.2, "epochs": 2.0, "max_minutes": 3.0, "batch_tokens": 64,
        "accumulate": 2, "clip": 1.5, "weight_decay": 0.1, "held_out": 0.25, "seed": 4, "log_steps": 5,
        "eval_steps": 6, "checkpoint_minutes": 2.0, "precision": "bf16", "outtype": "q8_0",
        "optimiser": "adamw", "states": "transformers", "compile": "off",
    }  # fmt: skip
    switches = ("norm_output", "norm_before_fc", "norm_before_residual", "keep_answers", "force")
    flags = [part for name, value in values.items() for part in ("--" + name.replace("_", "-"), str(value))]
    flags += ["--" + name.replace("_", "-") for name in switches]
    flags += ["--data", "a.jsonl", "--data", "b.txt", "--aux-layers", "2,15,27", "--threads", "3"]
    assert eagle3(*BASE, *flags).err.splitlines()[0] == "the plan"
    assert calls == [
        TrainSettings(
            target=Path("t.gguf"),
            output=Path("out"),
            data=(Path("a.jsonl"), Path("b.txt")),
            aux_layers=(2, 15, 27),
            runtime=RuntimeSettings(threads=3),
            **values,
            **dict.fromkeys(switches, True),
        )
    ]
    tested = {*values, *switches, "target", "output", "data", "aux_layers", "runtime", "steps", "fc_norm", "dry_run"}
    assert {f.name for f in fields(TrainSettings)} == tested
    eagle3(*BASE, "--steps", "5", "--fc-norm", "--dry-run")
    assert (calls[1].steps, calls[1].fc_norm, calls[1].dry_run) == (5, True, True)


def test_the_defaults_that_the_help_page_names_are_those_of_the_settings():
    defaults = TrainSettings(target=Path("t"), output=Path("o"))
    named = 0
    for param in command.params:
        stated = re.search(r"Default: ([\w.]+?)[.,]?(?:\s|$)", getattr(param, "help", None) or "")
        value = getattr(defaults, param.name, None)
        if stated and value not in (None, ()):
            assert stated[1] == (f"{value:g}" if isinstance(value, float) else str(value))
            named += 1
    assert named >= 20


def test_stdout_has_the_drafter_alone(eagle3, calls):
    result = eagle3(*BASE)
    assert result.out == "out/drafter.gguf\n"
    assert "the plan" in result.err


def test_json_is_one_document(eagle3, calls):
    result = eagle3(*BASE, "--json")
    assert json.loads(result.out) == {
        "output": "out", "plan": {"tokens": 5}, "drafter": "out/drafter.gguf", "checkpoint": "out/checkpoint",
        "numbers": {"tau": 2.0},
    }  # fmt: skip


def test_quiet_leaves_stderr_empty(eagle3, calls):
    assert eagle3(*BASE, "-q").err == ""


def test_ctrl_c_says_how_to_go_on_and_ends_with_130(eagle3, calls):
    eagle3.trainer.error = KeyboardInterrupt()
    result = eagle3(*BASE)
    assert (result.code, result.out) == (130, "")
    assert "The same command goes on" in result.err


def test_an_error_keeps_stdout_empty(eagle3, calls):
    eagle3.trainer.error = FileError("t.gguf: no such file.", "Give one.")
    result = eagle3(*BASE, "--json")
    assert (result.code, result.out) == (2, "")
    assert "error: t.gguf: no such file.\nhint: Give one.\n" in result.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--aux-layers", "2,15"], "--aux-layers: expected A,B,C, got 2,15"),
        (["--lr", "7"], "--lr: expected a value from"),
        (["--loss", "hinge"], "hinge"),
        (["--keep-answers"], "--keep-answers: has no effect without --data"),
    ],
)
def test_bad_flags_end_with_2_before_anything_is_loaded(eagle3, calls, flags, message):
    result = eagle3(*BASE, *flags)
    assert result.code == 2
    assert message in result.err
    assert not calls


def test_target_and_output_are_needed(eagle3, calls):
    assert eagle3("train", "-o", "x").code == 2
    assert eagle3("train", "--target", "x").code == 2
