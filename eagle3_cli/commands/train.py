"""`eagle3 train`: a drafter for the GGUF that a person runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..console import Console
from ..convert.ggml_types import OUTTYPES
from ..errors import OptionError
from ..registry import target_path
from ..train.settings import COMPILE, ENGINES, LOSSES, OBJECTIVES, OPTIMISERS, PRECISIONS, TrainSettings
from .build import runtime_settings
from .options import Command, Decorator, option, quiet_option, runtime_options, together

DATA, SHAPE, OBJECTIVE = "Data", "The drafter (default: the target's sizes)", "Objective"
STEPS, FILES = "Training", "The run"


def _flag(heading: str, name: str, help: str, **attrs: Any) -> Decorator[Any]:
    """An option of this command alone, with a variable unless it concerns one run; None leaves the choice to
    TrainSettings, whose default the help shows."""
    variable = name == "--json" or (name not in ("--data", "--force", "--dry-run") and "TRAIN")
    default = TrainSettings.__dataclass_fields__[name[2:].replace("-", "_")].default if name != "--json" else None
    if type(default) in (int, float, str) and "Default:" not in help:
        help += f" Default: {default:g}." if type(default) is float else f" Default: {default}."
    return option(heading, name, variable=variable, help=help, **attrs)


def _number(heading: str, name: str, help: str, kind: type = int) -> Decorator[Any]:
    return _flag(heading, name, help, type=kind, metavar="N" if kind is int else "X")


def _switch(heading: str, name: str, help: str) -> Decorator[Any]:
    return _flag(heading, name, help, is_flag=True)


data_options: Decorator[Any] = together(
    _flag(DATA, "--data", 'Conversations: JSONL of {"messages": [...]} or {"prompt": ...}, or .txt with one prompt a'
          " line; repeatable. Default: the target writes its own.", multiple=True, metavar="FILE"),
    _switch(DATA, "--keep-answers", "Train on the answers in the data; otherwise the target answers anew."),
    _number(DATA, "--tokens", "Answer tokens that the target writes without --data."),
    _number(DATA, "--answer-tokens", "Most tokens of one written answer."),
    _number(DATA, "--max-length", "Longest sample in tokens; conversations are cut at a turn."),
    _flag(DATA, "--states", "What computes the target's states: transformers is faster where PyTorch is.",
          type=click.Choice(ENGINES)),
    _number(DATA, "--held-out", "Share of the conversations that is not trained on.", float),
)  # fmt: skip
shape_options: Decorator[Any] = together(
    _number(SHAPE, "--draft-vocab", "Tokens that the drafter can propose. Default: those that cover 99.5 % of the"
            " answers."),
    _number(SHAPE, "--hidden", "Width."),
    _number(SHAPE, "--ffn", "Width of the feed-forward part."),
    _number(SHAPE, "--heads", "Attention heads."),
    _number(SHAPE, "--kv-heads", "Key/value heads."),
    _number(SHAPE, "--head-dim", "Width of a head."),
    _flag(SHAPE, "--aux-layers", "Target layers whose inputs are read. Default: 2, n/2, n-3.", metavar="A,B,C"),
    _switch(SHAPE, "--fc-norm", "EAGLE 3.1: a norm on each of the three features."),
    _switch(SHAPE, "--norm-output", "EAGLE 3.1: the row fed back is taken after the final norm."),
    _switch(SHAPE, "--norm-before-fc", "One norm over all features."),
    _switch(SHAPE, "--norm-before-residual", "The residual starts behind the hidden norm."),
)  # fmt: skip
objective_options: Decorator[Any] = together(
    _number(OBJECTIVE, "--ttt-steps", "Steps of training-time test; 1 is the naive head."),
    _number(OBJECTIVE, "--decay", "Step i weighs decay^i.", float),
    _flag(OBJECTIVE, "--loss", "Soft cross-entropy, or lk: weighted towards the acceptance rate.",
          type=click.Choice(LOSSES)),
    _flag(OBJECTIVE, "--objective", "eagle: feature regression, for comparison in PyTorch.",
          type=click.Choice(OBJECTIVES)),
    _flag(OBJECTIVE, "--init", "Where the weights start: target, random, or the folder of a drafter's checkpoint.",
          metavar="NAME|DIR"),
)  # fmt: skip
step_options: Decorator[Any] = together(
    _number(STEPS, "--epochs", "Passes over the data. Default: 1.", float),
    _number(STEPS, "--steps", "Optimiser steps instead."),
    _number(STEPS, "--max-minutes", "End the training after so many minutes.", float),
    _flag(STEPS, "--optimiser", "muon: for the layer's matrices, AdamW for the rest.", type=click.Choice(OPTIMISERS)),
    _number(STEPS, "--lr", "Peak learning rate.", float),
    _number(STEPS, "--head-lr-factor", "Times that for the head and its norm.", float),
    _number(STEPS, "--warmup", "Share of the training on the way up to it.", float),
    _number(STEPS, "--batch-tokens", "Tokens of one micro-batch."),
    _number(STEPS, "--accumulate", "Micro-batches per optimiser step."),
    _number(STEPS, "--clip", "Largest norm of the gradient.", float),
    _number(STEPS, "--weight-decay", "AdamW's.", float),
    _flag(STEPS, "--compile", "Use torch.compile. Default: auto, where it works and pays.", type=click.Choice(COMPILE)),
    _flag(STEPS, "--precision", "Of the matrix products. Default: auto, bf16 where the hardware has it.",
          type=click.Choice(PRECISIONS)),
    _number(STEPS, "--seed", "Of the data, the start and the order."),
    _number(STEPS, "--log-steps", "Steps between two lines of metrics.jsonl."),
    _number(STEPS, "--eval-steps", "Steps between two evaluations. Default: ten a run."),
    _number(STEPS, "--checkpoint-minutes", "Minutes between two saved states.", float),
)  # fmt: skip
file_options: Decorator[Any] = together(
    option(FILES, "--target", variable="TRAIN", required=True, metavar="GGUF|DIR",
           help="The model that the drafter is for; a Hugging Face folder runs in transformers."),
    option(FILES, "-o", "--output", variable=False, required=True, metavar="DIR",
           help="Folder of the run; an unfinished run in it is continued."),
    _flag(FILES, "--outtype", "Type of the GGUF's matrices, as for eagle3 convert.", metavar="TYPE",
          type=click.Choice(OUTTYPES)),
    _switch(FILES, "--force", "Start over where the folder holds a run."),
    _switch(FILES, "--dry-run", "Check everything, print sizes and times, write nothing."),
    _switch(FILES, "--json", "Print the result as one JSON document."),
)  # fmt: skip


@click.command(cls=Command)
@file_options
@data_options
@shape_options
@objective_options
@step_options
@runtime_options
@quiet_option
@click.pass_obj
def train(console: Console, **flags: Any) -> None:
    """Train a drafter for a GGUF, from nothing but that file.

    The target answers prompts, its states are captured, and a drafter learns to foresee its tokens. The folder gets a
    checkpoint for vLLM and SGLang, drafter.gguf and report.html. Ctrl-C saves; the same command goes on.

    \b
    Examples:
      eagle3 train --target my.gguf -o my-drafter
      eagle3 train --target my.gguf -o my-drafter --data chats.jsonl --epochs 3
      eagle3 train --target my.gguf -o my-drafter --tokens 2000000 --dry-run
      eagle3 chat --target my.gguf --draft my-drafter/drafter.gguf
      accelerate launch --multi_gpu -m eagle3_cli train --target my.gguf -o my-drafter
    """
    console.quiet = flags.pop("quiet")
    as_json = flags.pop("json")
    from ..train import Hooks
    from ..train import train as run

    settings = train_settings(flags)
    hooks = Hooks(progress=console.progress) if console.quiet else Hooks(console.report, console.progress)
    try:
        result = run(settings, hooks)
    except KeyboardInterrupt:
        console.report("Interrupted. The same command goes on from what is done.")
        raise
    console.clear_progress()
    if as_json:
        console.document(result.as_dict())
    elif result.drafter:
        console.text(f"{result.drafter}\n")
    elif result.checkpoint is None and not settings.dry_run:
        console.text(f"{result.output}\n")


def train_settings(flags: dict[str, Any]) -> TrainSettings:
    """TrainSettings of the flags; what was not given keeps the default there."""
    runtime = runtime_settings(flags)
    given = {name: value for name, value in flags.items() if name in TrainSettings.__dataclass_fields__}
    given = {name: value for name, value in given.items() if value is not None and name not in _PATHS}
    return TrainSettings(
        target=target_path(flags["target"]),
        output=Path(flags["output"]).expanduser(),
        data=tuple(Path(path).expanduser() for path in flags["data"]),
        aux_layers=_layers(flags["aux_layers"]),
        runtime=runtime,
        **given,
    )


_PATHS = ("target", "output", "data", "aux_layers")


def _layers(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    try:
        a, b, c = (int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--aux-layers: expected A,B,C, got {text}.", "For example 2,15,27.") from None
    return a, b, c
