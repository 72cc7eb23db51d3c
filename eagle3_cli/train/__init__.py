"""Training an EAGLE-3 drafter for the very GGUF that a person runs.

    from eagle3_cli.train import TrainSettings, train
    result = train(TrainSettings(target=Path("my.gguf"), output=Path("my-drafter")))

    chats.py     conversations from files           weights.py    what training needs of the target's file
    prompts.py   built-in prompts                   attention.py  attention of training-time test
    render.py    conversations -> samples           model.py      the drafter as a torch module
    answers.py   the target writes answers          loss.py       soft cross-entropy and its kin
    samples.py   the records between them           walk.py       simulated acceptance length
    shards.py    the target's states on disk        vocab.py      draft vocabulary
    capture.py   samples -> shards                  export.py     the checkpoint
    plan.py      checks, sizes and times            loop.py       order of the batches, optimiser steps
    state.py     the output folder, resume          report.py     real acceptance, report.html

Importing this module is cheap: torch and llama.cpp are loaded by `train`.

The stages, each skipped where its result is complete in the output folder:
check everything -> plan -> conversations -> capture -> draft vocabulary -> training -> checkpoint and GGUF -> measure.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..convert.ggml_types import OUTTYPES
from ..errors import InputError, OptionError
from ..settings import RuntimeSettings, as_dict, check_name, check_range

if TYPE_CHECKING:
    from .answers import AnswerSettings, Written
    from .loop import Job
    from .model import Drafter
    from .plan import Inputs, Plan
    from .samples import Conversation, Sample
    from .shards import ShardReader
    from .state import Part, SampleStore

LOSSES = ("soft", "lk")
OBJECTIVES = ("eagle3", "eagle")
INITS = ("target", "random")
PRECISIONS = ("auto", "no", "bf16")
VOCABULARY = "vocabulary.safetensors"  # of a run: d2t, absolute ids, and the features' scale
UNSEEN_TOKENS = 128  # of an answer that acceptance is measured on
BARREN = 64  # conversations without a usable user's turn after which the target is taken to be unable to write them
SAVED_EVERY = 30.0  # seconds between two parts of written answers
SCALED_BY = 200  # samples that the scale is taken from
_FREE = ("output", "runtime", "checkpoint_minutes", "force", "dry_run")  # may change between a run and its resume
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

    target         the GGUF that the drafter is for
    output         folder of the run; one that holds an unfinished run of the same settings is continued
    data           files of conversations; none: the target writes its own user turns
    keep_answers   train on the answers in the data instead of letting the target write them
    tokens         answer tokens that the target writes where there is no data
    answer_tokens  most tokens of one written answer
    max_length     longest sample in tokens; longer conversations are cut at a turn
    draft_vocab    Vd; None: the most frequent tokens that cover 99.5 % of the answers
    hidden, heads, kv_heads, head_dim, ffn   of the drafter; None: the target's
    ttt_steps      steps of training-time test; 1 is the naive head
    decay          weight of step i in the loss is decay**i
    objective      "eagle": the older recipe, top-layer feature in, feature regression; in PyTorch only, no GGUF
    init           the drafter's layer and head start as the target's, or at random
    lr             peak learning rate; head_lr_factor times that for the head and its norm
    warmup         share of the training spent on the way up to it
    epochs, steps  length of the training, at most one of them; None and None: one epoch
    max_minutes    the training ends after this many minutes even so (its stages before are not counted)
    batch_tokens   padded tokens of one micro-batch of one process
    accumulate     micro-batches per optimiser step
    held_out       share of the conversations that is not trained on
    log_steps, eval_steps   optimiser steps between two lines of metrics.jsonl, two evaluations; None: ten a run
    precision      of the matrix products: "auto" is bf16 on a GPU and float32 on a CPU
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
        check_name("--init", self.init, INITS)
        check_name("--precision", self.precision, PRECISIONS)
        check_name("--outtype", self.outtype, OUTTYPES)
        self._check_together()

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


def train(settings: TrainSettings, hooks: Hooks | None = None) -> TrainResult:
    """Train a drafter, or go on with an unfinished run in the output folder.

    InputError before any long work for whatever cannot end well.  KeyboardInterrupt after a Ctrl-C; what is done by
    then is on disk.  Under `accelerate launch` the main process does everything but the training alone.
    """
    from .plan import check_inputs, make_plan, measured
    from .state import RESULT, check_folder, opened

    main = int(os.environ.get("RANK", "0")) == 0
    hooks = hooks if hooks and main else Hooks()
    inputs = check_inputs(settings)
    known = check_folder(settings, inputs.digests)
    plan = make_plan(settings, inputs)
    if settings.dry_run:
        plan = measured(settings, inputs, plan)
        _tell(hooks, plan.lines())
        return TrainResult(settings.output, plan.as_dict())
    if not main:
        return _help(_Run(settings, inputs, settings.output, hooks))
    with opened(settings, inputs.digests) as folder:
        run = _Run(settings, inputs, folder, hooks)
        if (folder / RESULT).is_file():
            hooks.report(f"{folder}: this run is complete; --force starts over.")
            return run.result()
        if not known:
            _tell(hooks, measured(settings, inputs, plan).lines())
        return run.whole()


def _tell(hooks: Hooks, lines: Sequence[str]) -> None:
    for line in lines:
        hooks.report(line)


def _help(run: _Run) -> TrainResult:
    """What another process than the main one does: wait until the data is there, then train with it."""
    from .loop import Loop, accelerator_for

    accelerator_for(run.settings)  # returns when the main process comes to the training
    Loop(run.job(), run.hooks).run()
    return TrainResult(run.folder, {})


def _law(settings: TrainSettings, most: int, greedy: bool = False) -> AnswerSettings:
    """How the target answers, in at most so many tokens."""
    from .answers import AnswerSettings

    law = AnswerSettings(max_tokens=min(most, settings.answer_tokens), seed=settings.seed)
    return replace(law, mix=((1.0, 0.0),)) if greedy else law


@dataclass(frozen=True)
class _Task:
    """What the target writes.

    enough   conversations, all that there are; answer tokens where the target writes user turns, too
    own      None where it does not; else the given user turns, which it is not to write again
    """

    conversations: Iterable[Conversation]
    enough: int
    law: AnswerSettings
    own: tuple[str, ...] | None = None


def _of_its_own(written: Written, task: _Task) -> bool:
    """Whether the target wrote a user's turn and an answer."""
    return bool(written.samples) and any(m["content"] not in (task.own or ()) for m in written.messages[:1])


def _part(written: Sequence[Written], task: _Task, left_out: Mapping[str, int]) -> Part:
    from .state import Part

    own = [m["content"] for w in written for m in w.messages if m["role"] == "user" and task.own is not None]
    return Part([sample for w in written for sample in w.samples], len(written), own, left_out)


class _Run:
    """The stages of one run in its folder.  Each does what is not done yet."""

    def __init__(self, settings: TrainSettings, inputs: Inputs, folder: Path, hooks: Hooks) -> None:
        self.settings, self.inputs, self.folder, self.hooks = settings, inputs, folder, hooks

    def whole(self) -> TrainResult:
        from .loop import Loop
        from .report import finish

        unseen = self._captured("unseen", self._unseen())
        samples = self._conversations()
        self._choose_vocabulary(self._captured("shards", samples))
        del samples, unseen
        job = self.job()
        _tell(self.hooks, self._exact_plan(job).lines())
        loop = Loop(job, self.hooks)
        self.hooks.report(f"training: step {loop.step} of {loop.total}")
        finish(job, self.inputs, loop.run(), self.hooks)
        return self.result()

    def result(self) -> TrainResult:
        """What the finished run in the folder made."""
        from ..convert.json_files import read_json
        from .state import RESULT

        stored = read_json(self.folder / RESULT)
        made = self.settings.objective == "eagle3"
        return TrainResult(
            self.folder,
            stored["plan"],
            self.folder / "drafter.gguf" if made else None,
            self.folder / "checkpoint" if made else None,
            stored["numbers"],
        )

    # ---- conversations ----

    def _unseen(self) -> list[Sample]:
        """The target's greedy answers to prompts unlike any training set."""
        from .prompts import held_out_prompts
        from .state import SampleStore

        store, prompts = SampleStore(self.folder / "unseen_samples"), held_out_prompts()
        if not store.complete:
            self._write(store, _Task(prompts, len(prompts), _law(self.settings, UNSEEN_TOKENS, greedy=True)))
        return store.samples

    def _conversations(self) -> list[Sample]:
        """What is trained on, as tokens: the answers in the data, or the target's own."""
        from .state import SampleStore

        store = SampleStore(self.folder / "samples")
        if not store.complete:
            self._collect(store)
        answers = sum(int(sample.answer.sum()) for sample in store.samples)
        self.hooks.report(f"conversations: {store.conversations}, {answers} answer tokens")
        for reason, count in {**self.inputs.left_out, **store.left_out}.items():
            self.hooks.report(f"{count} times: {reason}")
        if not store.samples:
            raise InputError(
                "No conversation has an answer to train on.", "Give other --data or a larger --max-length."
            )
        return store.samples

    def _collect(self, store: SampleStore) -> None:
        from .chats import read_chats
        from .prompts import prompts, without_data

        s, law = self.settings, _law(self.settings, self.settings.answer_tokens)
        counted_before: Counter[str] = Counter()  # by plan.py, which reported it
        given = (c for path in s.data for c in read_chats(path, counted_before))
        if s.keep_answers:
            self._keep(store, given)
        elif s.data:
            self._write(store, _Task(given, self.inputs.conversations, law))
        else:
            known = tuple(message["content"] for prompt in prompts() for message in prompt)
            self._write(store, _Task(without_data(s.tokens), s.tokens, law, known))

    def _keep(self, store: SampleStore, conversations: Iterable[Conversation]) -> None:
        """The conversations with the answers that they have."""
        from ..llama import Model
        from .render import Renderer
        from .state import Part

        model = Model(self.settings.target, [], 0, False, weights=False)
        try:
            renderer = Renderer(model, self.inputs.longest)
            found = [renderer.samples(conversation) for conversation in conversations]
        finally:
            model.close()
        store.add(Part([sample for samples in found for sample in samples], len(found), (), renderer.left_out))
        store.finish()

    def _write(self, store: SampleStore, task: _Task) -> None:
        """The target's answers, saved every `SAVED_EVERY` seconds."""
        from .answers import AnswerWriter, WriterProgress, Written

        part, told, saved, barren = list[Written](), Counter[str](), time.monotonic(), 0
        done = store.conversations if task.own is None else sum(int(s.answer.sum()) for s in store.samples)

        def progress(now: WriterProgress) -> None:
            self.hooks.progress(f"writing answers, {now.tokens_per_second:.0f} tokens/s", done / max(task.enough, 1))

        runtime = replace(self.settings.runtime, ctx_size=self.inputs.longest)
        with AnswerWriter(self.settings.target, runtime, task.law, progress) as writer:
            try:
                for written in writer.write(task.conversations, store.conversations, (*(task.own or ()), *store.seen)):
                    part.append(written)
                    done += 1 if task.own is None else sum(int(s.answer.sum()) for s in written.samples)
                    barren = 0 if _of_its_own(written, task) else barren + (not written.samples)
                    if task.own is not None and barren == BARREN:
                        raise InputError(
                            f"{self.settings.target}: wrote no usable user's turn in {BARREN} conversations.",
                            "Give it prompts with --data.",
                        )
                    if time.monotonic() - saved > SAVED_EVERY:
                        store.add(_part(part, task, writer.left_out - told))
                        told, saved, part = Counter(writer.left_out), time.monotonic(), []
                    if task.own is not None and done >= task.enough:
                        break
            finally:  # after a Ctrl-C, too
                store.add(_part(part, task, writer.left_out - told))
        store.finish()

    # ---- states, vocabulary, drafter ----

    def _captured(self, name: str, samples: Sequence[Sample]) -> ShardReader:
        from .capture import CaptureProgress, CaptureSettings, capture
        from .shards import ShardReader

        def progress(now: CaptureProgress) -> None:
            self.hooks.progress(f"capturing, {now.tokens_per_second or 0:.0f} tokens/s", now.done / max(now.total, 1))

        folder = self.folder / name
        chosen = CaptureSettings(self.settings.target, folder, self.settings.runtime, self.inputs.aux_layers)
        manifest = capture(chosen, samples, progress)
        self.hooks.report(f"{name}: {manifest.samples} samples, {manifest.tokens} tokens captured")
        return ShardReader(folder)

    def _choose_vocabulary(self, reader: ShardReader) -> None:
        """d2t and the features' scale, from the training part of the samples."""
        import torch
        from safetensors.torch import save

        from ..convert.output import replacing
        from .model import feature_scale
        from .plan import choose_size, split, unskippable
        from .samples import Sample
        from .vocab import count_tokens, coverage, draft_vocabulary

        path = self.folder / VOCABULARY
        if path.is_file():
            return
        training, _ = split(reader, self.settings.held_out, self.settings.seed)
        stated = [reader.sample(int(i)) for i in training]
        counts = count_tokens((Sample(s.tokens.numpy(), s.answer.numpy()) for s in stated), self.inputs.sizes.vocab)
        always = unskippable(self.settings.target)
        size = self.settings.draft_vocab or choose_size(counts, always)
        d2t = draft_vocabulary(counts, size, always)
        scale = feature_scale(stated[:: max(1, len(stated) // SCALED_BY)])
        with replacing(path) as temporary:
            temporary.write_bytes(save({"d2t": torch.from_numpy(d2t), "scale": scale}))
        self.hooks.report(f"draft vocabulary: {len(d2t)} tokens, {coverage(counts, d2t):.2%} of the answers")

    def job(self) -> Job:
        """What the loop works on, from what the stages before left on disk."""
        from .loop import Job
        from .plan import split
        from .shards import ShardReader
        from .walk import simulate

        reader, unseen = ShardReader(self.folder / "shards", False), ShardReader(self.folder / "unseen", False)
        training, held_out = split(reader, self.settings.held_out, self.settings.seed)

        def acceptance(drafter: Drafter) -> dict[str, Any]:
            return simulate(drafter, unseen, range(len(unseen)))

        return Job(self._drafter(), reader, training, held_out, acceptance, self.folder, self.settings)

    def _drafter(self) -> Drafter:
        """As it is before the first step."""
        import torch
        from safetensors.torch import load_file

        from .initial import projected_embedding, start_from_target
        from .model import Drafter, FeatureDrafter
        from .plan import drafter_shape
        from .weights import read_target_weights

        chosen = load_file(self.folder / VOCABULARY)
        d2t, scale = chosen["d2t"], chosen["scale"]
        target = read_target_weights(self.settings.target, d2t.numpy())
        shape = drafter_shape(self.settings, self.inputs.sizes, len(d2t))
        torch.manual_seed(self.settings.seed)
        if self.settings.objective == "eagle":
            made: Drafter = FeatureDrafter(shape, d2t, target.embedding, target.head)
        else:
            words = projected_embedding(target.embedding, shape.hidden) if shape.own_embeddings else target.embedding
            made = Drafter(shape, d2t, words, target.head, None if shape.normed_features else scale)
        if self.settings.init == "target":
            start_from_target(made, target)
        return made

    def _exact_plan(self, job: Job) -> Plan:
        from .plan import Order, make_plan, processes

        lengths = job.reader.lengths[job.training]
        s, group = self.settings, self.settings.accumulate * processes()
        steps = s.steps or math.ceil(Order(lengths, s.batch_tokens, s.seed).length(s.epochs or 1.0) / group)
        counts = (len(lengths), int(lengths.sum()), steps)
        return make_plan(replace(s, draft_vocab=job.drafter.shape.draft_vocab), self.inputs, counts)
