"""Runs of `eagle3 train` on a tiny target that take a second or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from eagle3_cli.settings import RuntimeSettings
from eagle3_cli.train import TrainSettings


def settings(target: Path, folder: Path, prompts: int, **changes: Any) -> TrainSettings:
    """Of a run in `folder`/o on so many prompts, which the target answers.  changes: other values than those here."""
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i} again"}) for i in range(prompts)))
    values: dict[str, Any] = {
        "target": target,
        "output": folder / "o",
        "data": (folder / "prompts.jsonl",),
        "answer_tokens": 12,
        "max_length": 64,
        "draft_vocab": 64,
        "aux_layers": (2, 3, 4),
        "ttt_steps": 2,
        "steps": 4,
        "batch_tokens": 128,
        "outtype": "f32",
        "precision": "no",
        "runtime": RuntimeSettings(**{**tiny.EXACT, "threads": 1, "batch": 64}),
    }
    return TrainSettings(**{**values, **changes})


def ask(patch: pytest.MonkeyPatch, *texts: str) -> None:
    """Let these be the prompts that acceptance is measured on, and let the measurement of speed be short."""
    asked = [[{"role": "user", "content": text}] for text in texts]
    patch.setattr("eagle3_cli.train.prompts.held_out_prompts", lambda: asked)
    patch.setattr("eagle3_cli.train.plan.PROBE_ANSWER", 2)


class Stopped(Exception):
    pass


def stop(*_args: Any, **_values: Any) -> None:
    """In the place of a function that must not be reached."""
    raise Stopped
