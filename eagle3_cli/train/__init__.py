"""Training an EAGLE-3 drafter for the very GGUF that a person runs.

    from eagle3_cli.train import TrainSettings, train
    result = train(TrainSettings(target=Path("my.gguf"), output=Path("my-drafter")))

    chats.py         conversations from files           inputs.py      every input checked
    prompts.py       built-in prompts                   plan.py        sizes and times
    render.py        conversations -> samples           state.py       the output folder, resume
    samples.py       the records between them           stages.py      what a run does, in order
    dialogue.py      a conversation in the making       vocab.py       draft vocabulary
    answers.py       the target writes, in llama.cpp    model.py       the drafter as a torch module
    torch_answers.py or in transformers                 attention.py   attention of training-time test
    hf_tokenizer.py  of a Hugging Face directory        loss.py        soft cross-entropy and its kin
    engines.py       which of the two                   initial.py     where the weights start
    capture.py       samples -> states on disk          starting.py    or from which checkpoint
    llama_states.py  computed by llama.cpp              order.py       order of the batches
    torch_states.py  or by transformers                 compiling.py   how PyTorch computes
    shards.py        the states on disk                 loop.py        optimiser steps
    manifest.py      and whose they are                 walk.py        simulated acceptance length
    weights.py       what else is needed of the target  export.py      the checkpoint
    settings.py      every setting and its range        report.py      real acceptance, report.html

Importing this module is cheap: torch and llama.cpp are loaded by `train`.

The stages, each skipped where its result is complete in the output folder:
check everything -> plan -> conversations -> capture -> draft vocabulary -> training -> checkpoint and GGUF -> measure.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .settings import Hooks, TrainResult, TrainSettings

if TYPE_CHECKING:
    from .stages import Run

__all__ = ["Hooks", "TrainResult", "TrainSettings", "train"]


def train(settings: TrainSettings, hooks: Hooks | None = None) -> TrainResult:
    """Train a drafter, or go on with an unfinished run in the output folder.

    InputError before any long work for whatever cannot end well.  KeyboardInterrupt after a Ctrl-C; what is done by
    then is on disk.  Under `accelerate launch` the main process does everything but the training alone.
    """
    from .compiling import keep_memory
    from .inputs import check_inputs
    from .plan import make_plan, measured
    from .stages import Run, tell
    from .state import RESULT, check_folder, opened

    keep_memory()  # before any thread has an arena of its own
    main = int(os.environ.get("RANK", "0")) == 0
    hooks = hooks if hooks and main else Hooks()
    inputs = check_inputs(settings)
    for note in inputs.start.notes if inputs.start else ():
        hooks.report(f"--init: {note}")
    known = check_folder(settings, inputs.digests)
    plan = make_plan(settings, inputs)
    if settings.dry_run:
        plan = measured(settings, inputs, plan)
        tell(hooks, plan.lines())
        return TrainResult(settings.output, plan.as_dict())
    if not main:
        return _help(Run(settings, inputs, settings.output, hooks))
    with opened(settings, inputs.digests) as folder:
        run = Run(settings, inputs, folder, hooks)
        if (folder / RESULT).is_file():
            hooks.report(f"{folder}: this run is complete; --force starts over.")
            return run.result()
        if not known:
            tell(hooks, measured(settings, inputs, plan).lines())
        return run.whole()


def _help(run: Run) -> TrainResult:
    """What another process than the main one does: wait until the data is there, then train with it."""
    from .loop import Loop, accelerator_for

    accelerator_for(run.settings)  # returns when the main process comes to the training
    Loop(run.job(), run.hooks).run()
    return TrainResult(run.folder, {})
