"""The stages of a run in its folder: each does what is not done yet, so that a run goes on wherever it ended."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .settings import Hooks, TrainResult, TrainSettings
from .state import VOCABULARY

if TYPE_CHECKING:
    from torch import Tensor

    from .dialogue import AnswerSettings, Written
    from .inputs import Inputs
    from .loop import Job
    from .model import Drafter, DrafterShape
    from .plan import Plan
    from .samples import Conversation, Sample
    from .shards import ShardReader
    from .state import Part, SampleStore
    from .weights import TargetWeights

UNSEEN_TOKENS = 128  # of an answer that acceptance is measured on
BARREN = 64  # conversations without a usable user's turn after which the target is taken to be unable to write them
SAVED_EVERY = 30.0  # seconds between two parts of written answers
SCALED_BY = 200  # samples that the scale is taken from


def tell(hooks: Hooks, lines: Sequence[str]) -> None:
    for line in lines:
        hooks.report(line)


def _law(settings: TrainSettings, most: int, greedy: bool = False) -> AnswerSettings:
    """How the target answers, in at most so many tokens."""
    from .dialogue import AnswerSettings

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


class Run:
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
        tell(self.hooks, self._exact_plan(job).lines())
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
        from .engines import open_renderer
        from .state import Part

        with open_renderer(self.settings, self.inputs.longest) as renderer:
            found = [renderer.samples(conversation) for conversation in conversations]
        store.add(Part([sample for samples in found for sample in samples], len(found), (), renderer.left_out))
        store.finish()

    def _write(self, store: SampleStore, task: _Task) -> None:
        """The target's answers, saved every `SAVED_EVERY` seconds."""
        from .dialogue import WriterProgress, Written
        from .engines import open_writer

        part, told, saved, barren = list[Written](), Counter[str](), time.monotonic(), 0
        done = store.conversations if task.own is None else sum(int(s.answer.sum()) for s in store.samples)

        def progress(now: WriterProgress) -> None:
            self.hooks.progress(f"writing answers, {now.tokens_per_second:.0f} tokens/s", done / max(task.enough, 1))

        with open_writer(self.settings, self.inputs.longest, task.law, progress) as writer:
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
        from .engines import target_dtype
        from .shards import ShardReader

        def progress(now: CaptureProgress) -> None:
            self.hooks.progress(f"capturing, {now.tokens_per_second or 0:.0f} tokens/s", now.done / max(now.total, 1))

        folder = self.folder / name
        s = self.settings
        layers, dtype = self.inputs.aux_layers, target_dtype(s)
        chosen = CaptureSettings(s.target, folder, s.runtime, layers, engine=s.states, dtype=dtype, compile=s.compile)
        manifest = capture(chosen, samples, progress, self.hooks.report)
        self.hooks.report(f"{name}: {manifest.samples} samples, {manifest.tokens} tokens captured")
        return ShardReader(folder)

    def _choose_vocabulary(self, reader: ShardReader) -> None:
        """d2t and the features' scale, from the training part of the samples."""
        import torch
        from safetensors.torch import save

        from ..convert.output import replacing
        from .model import feature_scale
        from .order import split
        from .samples import Sample
        from .vocab import choose_size, count_tokens, coverage, draft_vocabulary, unskippable

        path = self.folder / VOCABULARY
        if path.is_file():
            return
        training, _ = split(reader, self.settings.held_out, self.settings.seed)
        stated = [reader.sample(int(i)) for i in training]
        counts = count_tokens((Sample(s.tokens.numpy(), s.answer.numpy()) for s in stated), self.inputs.sizes.vocab)
        if self.inputs.start:
            d2t = self.inputs.start.d2t.numpy()
        else:
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
        from .order import split
        from .shards import ShardReader
        from .walk import simulate

        reader, unseen = ShardReader(self.folder / "shards", False), ShardReader(self.folder / "unseen", False)
        training, held_out = split(reader, self.settings.held_out, self.settings.seed)

        def acceptance(drafter: Drafter) -> dict[str, Any]:
            return simulate(drafter, unseen, range(len(unseen)))

        return Job(self.drafter(), reader, training, held_out, acceptance, self.folder, self.settings)

    def drafter(self) -> Drafter:
        """As it is before the first step."""
        import torch
        from safetensors.torch import load_file

        from .initial import start_from_target
        from .inputs import drafter_shape
        from .model import Drafter, FeatureDrafter
        from .starting import start_from_checkpoint
        from .weights import read_target_weights

        chosen = load_file(self.folder / VOCABULARY)
        d2t, scale = chosen["d2t"], chosen["scale"]
        target = read_target_weights(self.settings.target, d2t.numpy())
        shape = drafter_shape(self.settings, self.inputs, len(d2t))
        torch.manual_seed(self.settings.seed)
        if self.settings.objective == "eagle":
            made: Drafter = FeatureDrafter(shape, d2t, target.embedding, target.head)
        else:
            made = Drafter(
                shape, d2t, self._embedding(target, shape), target.head, None if shape.normed_features else scale
            )
        if self.inputs.start:
            start_from_checkpoint(made, self.inputs.start)
        elif self.settings.init == "target":
            start_from_target(made, target)
        return made

    def _embedding(self, target: TargetWeights, shape: DrafterShape) -> Tensor:
        """What the drafter reads of tokens, [V, H]."""
        from .initial import projected_embedding

        start = self.inputs.start
        if not shape.own_embeddings:
            return target.embedding
        own = start.embedding if start else None
        return projected_embedding(target.embedding, shape.hidden) if own is None else own

    def _exact_plan(self, job: Job) -> Plan:
        from .inputs import processes
        from .order import Order
        from .plan import make_plan

        lengths = job.reader.lengths[job.training]
        s, group = self.settings, self.settings.accumulate * processes()
        steps = s.steps or math.ceil(Order(lengths, s.batch_tokens, s.seed).length(s.epochs or 1.0) / group)
        counts = (len(lengths), int(lengths.sum()), steps)
        return make_plan(s, self.inputs, counts, job.drafter.shape.draft_vocab)
