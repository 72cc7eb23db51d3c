"""What to train: every setting with its range, who is told what, and what a run makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..convert.ggml_types import OUTTYPES
from ..errors import OptionError
from ..settings import RuntimeSettings, as_dict, check_name, check_range

LOSSES = ("soft", "lk")
OBJECTIVES = ("eagle3", "eagle")
INITS = ("target", "random")
OPTIMISERS = ("muon", "adamw")
PRECISIONS = ("auto", "no", "bf16")
ENGINES = ("llama.cpp", "transformers")
COMPILE = ("auto", "on", "off")
# What may change between a run and its resume.
_FREE = ("output", "runtime", "checkpoint_minutes", "force", "dry_run", "compile")
_OF_START = ("draft_vocab", "hidden", "heads", "kv_heads", "head_dim", "ffn", "aux_layers", "fc_norm", "norm_output",
             "norm_before_fc", "norm_before_residual")  # fmt: skip
_RUNTIME_KEPT = ("ctx_size", "flash_attn", "cache_type_k", "cache_type_v")  # what the target's states depend on
_RANGES: dict[str, tuple[float, float]] = {
    "tokens": (1, math.inf),
    "answer_tokens": (2, 2**20),
    "max_length": (8, 2**20),
    "draft_vocab": (1, 2**24),
    "hidden": (2, 2**16),
    "heads": (1, 1024),
    "kv_heads": (1, 1024),
    "head_dim": (2, 1024),
    "ffn": (1, 2**20),
    "ttt_steps": (1, 16),
    "decay": (1e-3, 1.0),
    "lr": (1e-9, 1.0),
    "head_lr_factor": (0.0, 100.0),
    "warmup": (0.0, 0.9),
    "epochs": (1e-3, 1e6),
    "steps": (1, 2**40),
    "max_minutes": (1e-3, math.inf),
    "batch_tokens": (8, 2**30),
    "accumulate": (1, 2**16),
    "clip": (1e-6, math.inf),
    "weight_decay": (0.0, 10.0),
    "held_out": (0.0, 0.9),
    "seed": (0, 2**32 - 1),
    "log_steps": (1, math.inf),
    "eval_steps": (1, math.inf),
    "checkpoint_minutes": (1e-3, math.inf),
}


@dataclass(frozen=True)
class TrainSettings:
    """What to train, on what, and how.  A field's flag is its name with dashes; None: chosen as said here.

    target         the GGUF that the drafter is for, or a Hugging Face directory, which transformers runs
    output         folder of the run; one that holds an unfinished run of the same settings is continued
    data           files of conversations; none: the target writes its own user turns
    keep_answers   train on the answers in the data instead of letting the target write them
    tokens         answer tokens that the target writes where there is no data
    answer_tokens  most tokens of one written answer
    max_length     longest sample in tokens; longer conversations are cut at a turn
    states         what computes the target's states: "llama.cpp", as chat does, or "transformers", faster where PyTorch
                   is, from the same weights
    draft_vocab    Vd; None: the most frequent tokens that cover 99.5 % of the answers
    hidden, heads, kv_heads, head_dim, ffn   of the drafter; None: the target's
    ttt_steps      steps of training-time test; 1 is the naive head
    decay          weight of step i in the loss is decay**i
    objective      "eagle": the older recipe, top-layer feature in, feature regression; in PyTorch only, no GGUF
    init           "target": the drafter's layer and head start as the target's; "random"; or the folder of a drafter's
                   checkpoint, whose sizes, switches, draft vocabulary and aux layers are taken over
    optimiser      "muon" for the matrices of the layer and the fusion, AdamW for the rest; or "adamw" for all
    lr             peak learning rate; head_lr_factor times that for the head and its norm
    warmup         share of the training spent on the way up to it
    epochs, steps  length of the training, at most one of them; None and None: one epoch
    max_minutes    the training ends after this many minutes even so (its stages before are not counted)
    batch_tokens   padded tokens of one micro-batch of one process
    accumulate     micro-batches per optimiser step
    held_out       share of the conversations that is not trained on
    log_steps, eval_steps   optimiser steps between two lines of metrics.jsonl, two evaluations; None: ten a run
    precision      of the matrix products, and of a target that is a directory: "auto" is bf16 where the hardware has it
                   (GPU, AMX), else float32
    compile        torch.compile of what repeats: "auto" where it works and the training is long enough to pay for it
    aux_layers     layers whose *inputs* the drafter reads; None: 2, n/2, n-3
    outtype        type of the final GGUF's matrices
    force          start over where the output folder holds a run
    """

    target: Path
    output: Path
    data: tuple[Path, ...] = ()
    keep_answers: bool = False
    tokens: int = 300_000
    answer_tokens: int = 512
    max_length: int = 2048
    states: str = "llama.cpp"
    draft_vocab: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    ttt_steps: int = 7
    decay: float = 0.8
    loss: str = "soft"
    objective: str = "eagle3"
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    init: str = "target"
    optimiser: str = "muon"
    lr: float = 1e-3
    head_lr_factor: float = 0.3
    warmup: float = 0.04
    epochs: float | None = None
    steps: int | None = None
    max_minutes: float | None = None
    batch_tokens: int = 4096
    accumulate: int = 1
    clip: float = 0.5
    weight_decay: float = 0.0
    held_out: float = 0.02
    seed: int = 0
    log_steps: int = 10
    eval_steps: int | None = None
    checkpoint_minutes: float = 10.0
    precision: str = "auto"
    compile: str = "auto"
    aux_layers: tuple[int, int, int] | None = None
    outtype: str = "f16"
    force: bool = False
    dry_run: bool = False
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None:
                check_range(flag(name), value, low, high)
        check_name("--loss", self.loss, LOSSES)
        check_name("--objective", self.objective, OBJECTIVES)
        check_name("--optimiser", self.optimiser, OPTIMISERS)
        check_name("--precision", self.precision, PRECISIONS)
        check_name("--states", self.states, ENGINES)
        check_name("--compile", self.compile, COMPILE)
        check_name("--outtype", self.outtype, OUTTYPES)
        self._check_together()
        self._check_start()

    def _check_together(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise OptionError("--steps: cannot be used with --epochs.", "Leave one of them out.")
        if self.keep_answers and not self.data:
            raise OptionError("--keep-answers: has no effect without --data.", "Leave it out.")
        if self.fc_norm and self.norm_before_fc:
            raise OptionError("--fc-norm: cannot be used with --norm-before-fc.", "Leave one of them out.")
        if self.force and self.dry_run:
            raise OptionError("--force: has no effect with --dry-run.", "Leave one of them out.")
        if self.objective == "eagle" and self.ttt_steps != 1:
            raise OptionError(
                f"--ttt-steps: --objective eagle has no training-time test, expected 1, got {self.ttt_steps}.",
                "Give --ttt-steps 1.",
            )
        if self.aux_layers is not None and len(set(self.aux_layers)) != 3:
            raise OptionError(f"--aux-layers: expected three different layers, got {list(self.aux_layers)}.")

    @property
    def start(self) -> Path | None:
        """Folder of the checkpoint to start from."""
        return None if self.init in INITS else Path(self.init).expanduser()

    def _check_start(self) -> None:
        if self.start is None:
            return
        if not self.start.is_dir():
            choices = ", ".join(INITS)
            raise OptionError(f"--init: expected {choices} or the folder of a checkpoint, got {self.init}.")
        if self.objective == "eagle":
            raise OptionError(
                "--init: an EAGLE-3 drafter cannot go on with --objective eagle.", "Leave one of them out."
            )
        for name in _OF_START:
            if getattr(self, name) not in (None, False):
                raise OptionError(f"{flag(name)}: has no effect with --init {self.init}.", "Leave one of them out.")

    def fixed(self) -> dict[str, Any]:
        """What a run keeps from its start to its end, as JSON values: a resume with others is refused."""
        kept = {name: value for name, value in self.as_dict().items() if name not in _FREE}
        return kept | {name: getattr(self.runtime, name) for name in _RUNTIME_KEPT}

    def as_dict(self) -> dict[str, Any]:
        """Every value as JSON can say it."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, RuntimeSettings):
        return as_dict(value)
    return str(value) if isinstance(value, Path) else value


def _ignore(*_: object) -> None:
    """The hook of a caller who does not listen."""


@dataclass(frozen=True)
class Hooks:
    """Who is told what.

    report     a line of text: the plan, the end of a stage
    progress   (stage, fraction 0..1)
    """

    report: Callable[[str], None] = _ignore
    progress: Callable[[str, float], None] = _ignore


@dataclass(frozen=True)
class TrainResult:
    """What a run made.

    plan        the numbers of --dry-run
    drafter     the GGUF; None in a dry run and for --objective eagle
    checkpoint  folder in SpecForge's layout; None in a dry run
    numbers     losses and acceptance lengths, see report.py
    """

    output: Path
    plan: Mapping[str, Any]
    drafter: Path | None = None
    checkpoint: Path | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
