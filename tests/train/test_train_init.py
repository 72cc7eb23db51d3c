"""`--init DIR`: a run that goes on from the checkpoint of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import runs
import tiny

from eagle3_cli.errors import OptionError, PairError
from eagle3_cli.train import Hooks, TrainSettings, train
from eagle3_cli.train.inputs import check_inputs
from eagle3_cli.train.state import read_metrics


@pytest.fixture
def first(tiny_target, tmp_path, monkeypatch) -> TrainSettings:
    runs.ask(monkeypatch, "why")
    values = {"output": tmp_path / "first", "steps": 6, "batch_tokens": 64, "ffn": 96, "norm_output": True}
    return runs.settings(tiny_target.path, tmp_path, 8, **values)


def second_of(first: TrainSettings, **changes: object) -> TrainSettings:
    """The run that goes on from the first one's checkpoint."""
    own = {"draft_vocab": None, "ffn": None, "aux_layers": None, "norm_output": False, "steps": 2}
    own |= {"output": first.output.parent / "second", "init": str(first.output / "checkpoint")}
    return replace(first, **{**own, **changes})


def test_it_starts_where_the_other_ended(first: TrainSettings) -> None:
    train(first)
    told: list[str] = []
    second = second_of(first)
    result = train(second, Hooks(told.append))
    ended = [line for line in read_metrics(first.output / "metrics.jsonl") if line["kind"] == "eval"][-1]
    started = read_metrics(second.output / "metrics.jsonl")[0]
    assert started["step"] == 0
    assert started["held_out"]["loss"] == pytest.approx(ended["held_out"]["loss"], rel=1e-4)
    assert result.plan["draft_vocab"] == 64
    inputs = check_inputs(second)
    assert inputs.aux_layers == (2, 3, 4)
    assert inputs.start is not None
    assert inputs.start.shape.norm_output
    assert inputs.start.shape.ffn == 96


def test_another_checkpoint_in_the_same_folder_is_another_run(first: TrainSettings) -> None:
    train(first)
    train(second_of(first))
    config = first.output / "checkpoint" / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    with pytest.raises(OptionError, match="the checkpoint to start from has changed"):
        train(second_of(first))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn": 64}, "--ffn: has no effect with --init"),
        ({"fc_norm": True}, "--fc-norm: has no effect with --init"),
        ({"objective": "eagle", "ttt_steps": 1}, "cannot go on with --objective eagle"),
        ({"init": "best"}, "expected target, random or the folder of a checkpoint, got best"),
    ],
)
def test_what_does_not_go_together_is_refused(first: TrainSettings, changes: dict[str, object], message: str) -> None:
    (first.output / "checkpoint").mkdir(parents=True)
    with pytest.raises(OptionError, match=message):
        second_of(first, **changes)


def test_a_drafter_of_another_target_is_refused(first: TrainSettings, tmp_path: Path) -> None:
    train(first)
    wider = tiny.write_target(tmp_path / "wider.gguf", replace(tiny.TARGET, width=128))
    with pytest.raises(PairError, match="128"):
        check_inputs(second_of(first, target=wider.path))
