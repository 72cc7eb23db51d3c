"""What a run will do, before it does it: checks of all inputs, the order of the batches, sizes and times.

Nothing here writes into the output folder.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..convert.target import read_target
from ..errors import FileError, InputError, OptionError
from ..gguf_file import GgufFile
from ..model_files import check_target
from .settings import TrainSettings, flag

if TYPE_CHECKING:
    from .model import DrafterShape
    from .weights import TargetSizes

POOL = 1024  # samples that are sorted by length together; a batch is filled from one pool
MOST_CANDIDATES = 32_000  # of a draft vocabulary chosen by coverage
COVERAGE = 0.995
CONTROL = 3  # enum llama_token_type
PROBE_TOKENS = 256  # of the short measurements
PROBE_ANSWER = 24
PROMPT_SHARE = 1.35  # tokens of a conversation per answer token, before any is written
ADAM_BYTES = 16  # per trained weight: value, gradient, two moments, float32

# ---- the order of the batches ---------------------------------------------------------------------------


def epoch_batches(lengths: Sequence[int] | np.ndarray, budget: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Indices of one epoch's samples, in batches of similar length; batches and samples in random order.

    A batch padded to its longest sample has at most `budget` tokens, or it is one longer sample alone.
    """
    lengths = np.asarray(lengths)
    draw = np.random.default_rng([seed, epoch])
    order = draw.permutation(len(lengths))
    found: list[np.ndarray] = []
    for start in range(0, len(order), POOL):
        pool = order[start : start + POOL]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        first = 0
        for end in range(1, len(pool) + 1):
            if end == len(pool) or (end + 1 - first) * lengths[pool[end]] > budget:
                found.append(pool[first:end])
                first = end
    return [found[i] for i in draw.permutation(len(found))]


class Order:
    """The endless row of batches: epoch after epoch, each in its own order."""

    def __init__(self, lengths: Sequence[int] | np.ndarray, budget: int, seed: int) -> None:
        self._make = lambda epoch: epoch_batches(lengths, budget, seed, epoch)
        self._counts: list[int] = []
        self._current: tuple[int, list[np.ndarray]] = (-1, [])

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        if self._current[0] != epoch:
            self._current = (epoch, self._make(epoch))
        return self._current[1]

    def _count(self, epoch: int) -> int:
        while len(self._counts) <= epoch:
            self._counts.append(len(self._epoch(len(self._counts))))
        return self._counts[epoch]

    def place(self, index: int) -> tuple[int, int]:
        """(epoch, batch within it) of a batch of the row."""
        epoch = 0
        while index >= self._count(epoch):
            index -= self._count(epoch)
            epoch += 1
        return epoch, index

    def batch(self, index: int) -> np.ndarray:
        epoch, within = self.place(index)
        return self._epoch(epoch)[within]

    def length(self, epochs: float) -> int:
        """Batches in so many epochs; a part of one is rounded up."""
        whole = int(epochs)
        return sum(self._count(e) for e in range(whole)) + math.ceil((epochs - whole) * self._count(whole))


def split(reader: Any, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) sample indices, ascending.

    A sample's side follows from what comes before its first answer, so that two answers to one prompt are on one side
    and more data moves no sample.  Where the share leaves nothing for training or for holding out: InputError.
    """
    held = np.array([_fraction(reader.sample(i), seed) < share for i in range(len(reader))], bool)
    if share > 0 and len(held) > 1 and not held.any():  # too few conversations for the share: one
        held[min(range(len(held)), key=lambda i: _fraction(reader.sample(i), seed))] = True
    if held.all():
        raise InputError(
            f"--held-out: expected conversations left to train on, got {len(held)} of {len(held)} held out.",
            "Give more data, or --held-out 0.",
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


def _fraction(sample: Any, seed: int) -> float:
    """0..1 by the tokens before the first answer."""
    answer = np.flatnonzero(np.asarray(sample.answer))
    before = np.asarray(sample.tokens)[: answer[0] if len(answer) else None].astype("<i4")
    digest = hashlib.blake2b(before.tobytes(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def rate(done: float, warmup: float) -> float:
    """Factor of the learning rate when `done` (0..1) of the training is over: a line up, then half a cosine to 0."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (done - warmup) / (1.0 - warmup))))


# ---- checks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What was found in the files that the settings name.

    sizes          of the target
    longest        tokens that a sample may have
    aux_layers     the layers whose inputs the drafter reads
    conversations  in the data, and their user turns
    left_out       reason -> conversations of the data that are not used
    digests        sha256 of each data file, what shards.py compares of the target, and the number of processes
    """

    sizes: TargetSizes
    longest: int
    aux_layers: tuple[int, int, int]
    conversations: int
    user_turns: int
    left_out: Mapping[str, int]
    digests: Mapping[str, Any]


def check_inputs(settings: TrainSettings) -> Inputs:
    """Read what can be read in seconds.  An InputError for everything that cannot end well."""
    from .capture import aux_layers
    from .chats import summarise_chats
    from .shards import file_sha256
    from .weights import identify, read_target_sizes

    target = settings.target
    if target.is_dir():
        raise FileError(
            f"{target}: is a folder, expected a GGUF.",
            "Convert the model with llama.cpp's convert_hf_to_gguf.py first.",
        )
    check_target(target)
    _check_template(target)
    sizes = read_target_sizes(target)
    _check_sizes(settings, sizes)
    left_out: Counter[str] = Counter()
    conversations = turns = 0
    for path in settings.data:
        summary = summarise_chats(path)
        conversations += summary.conversations
        turns += summary.user_turns
        left_out += summary.left_out
    identity = {name: value for name, value in asdict(identify(target)[0]).items() if name != "path"}
    digests = {
        "data_sha256": [file_sha256(path) for path in settings.data],
        "target_file": identity,
        "num_processes": processes(),
    }
    layers = aux_layers(settings.aux_layers, sizes.layers, sizes.layers)
    if layers[0] < 2 and settings.objective == "eagle3":
        raise OptionError(
            f"--aux-layers: expected layers from 2 on, got {list(layers)}.",
            "A checkpoint cannot name the input of layer 1: readers take a list that starts with 1 for outputs.",
        )
    context = settings.runtime.ctx_size or read_target(target).context or settings.max_length
    longest = min(settings.max_length, context)
    return Inputs(sizes, longest, layers, conversations, turns, left_out, digests)


def _check_template(path: Path) -> None:
    with GgufFile(path) as file:
        if not file.get("tokenizer.chat_template"):
            raise FileError(
                f"{path}: expected a chat template (tokenizer.chat_template), got none.",
                "A drafter is trained on chats as `eagle3 chat` renders them: take the instruction-tuned model.",
            )


def _check_sizes(settings: TrainSettings, sizes: TargetSizes) -> None:
    missing = [name for name in ("heads", "kv_heads", "head_dim", "ffn") if not getattr(sizes, name)]
    missing = [flag(name) for name in missing if getattr(settings, name) is None]
    if missing:
        raise OptionError(f"{settings.target}: does not say how large its layers are.", f"Give {', '.join(missing)}.")
    size = settings.draft_vocab
    if size is not None and size > sizes.vocab:
        raise OptionError(f"--draft-vocab: expected at most the target's {sizes.vocab} tokens, got {size}.")
    least = len(unskippable(settings.target))
    if size is not None and size < least:
        raise OptionError(f"--draft-vocab: expected at least the target's {least} end and control tokens, got {size}.")
    drafter_shape(settings, sizes, size or sizes.vocab)


def processes() -> int:
    """How many train together: what `accelerate launch` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def unskippable(path: Path) -> list[int]:
    """Ids that every draft vocabulary has: the target's control tokens, its end tokens among them."""
    with GgufFile(path) as file:
        kinds = file.get("tokenizer.ggml.token_type") or []
        ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = [i for i, kind in enumerate(kinds) if kind == CONTROL]
    return sorted({*control, *(end for end in ends if isinstance(end, int))})


def choose_size(counts: np.ndarray, always: Sequence[int]) -> int:
    """Size of the draft vocabulary where none was asked for: the fewest of the most frequent tokens, besides `always`,
    that cover `COVERAGE` of the counted ones, rounded up to a multiple of 64 and at most `MOST_CANDIDATES`."""
    others = np.array(counts, np.int64)
    others[list(always)] = 0
    wanted = COVERAGE * others.sum()
    enough = int(np.searchsorted(np.cumsum(np.sort(others)[::-1]), wanted)) + 1
    size = -(-(len(always) + enough) // 64) * 64
    return min(size, max(MOST_CANDIDATES, len(always)), len(counts))


def drafter_shape(settings: TrainSettings, sizes: TargetSizes, candidates: int) -> DrafterShape:
    """The drafter's sizes: as asked for, otherwise the target's.  OptionError where they do not fit together."""
    from .model import DrafterShape

    chosen = {
        name: getattr(settings, name) or getattr(sizes, name) for name in ("heads", "kv_heads", "head_dim", "ffn")
    }
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return DrafterShape(
        hidden=settings.hidden or sizes.width,
        target_width=sizes.width,
        vocab=sizes.vocab,
        draft_vocab=candidates,
        rope_theta=sizes.rope_theta,
        eps=sizes.eps,
        **chosen,
        **{name: getattr(settings, name) for name in switches},
    )


# ---- sizes and times ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The numbers of a run.  Bytes, seconds; None: not measured.

    parameters   part of the drafter -> weights, trained ones; frozen: the target's embedding and head rows
    conversations, tokens   estimated before they exist
    memory       of the training in one process, estimated
    """

    parameters: Mapping[str, int]
    frozen: int
    draft_vocab: int
    conversations: int
    tokens: int
    steps: int | None
    memory: int
    disk: int
    disk_free: int
    seconds: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        return sum(self.parameters.values())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "trained": self.trained}

    def lines(self) -> list[str]:
        """The plan for people."""
        parts = ", ".join(f"{name} {count / 1e6:.2f}" for name, count in self.parameters.items())
        times = ", ".join(f"{name} {_duration(s)}" for name, s in self.seconds.items() if s is not None)
        return [
            f"drafter: {self.trained / 1e6:.2f} million weights ({parts}), draft vocabulary {self.draft_vocab}",
            f"data: {self.conversations} conversations, {self.tokens} tokens"
            + (f"; {self.steps} optimiser steps" if self.steps else ""),
            f"memory: about {self.memory / 1e9:.2f} GB to train; disk: {self.disk / 1e9:.2f} GB of"
            f" {self.disk_free / 1e9:.1f} GB free",
            *([f"time, from short measurements: {times}"] if times else []),
        ]


def make_plan(settings: TrainSettings, inputs: Inputs, counts: tuple[int, int, int] | None = None) -> Plan:
    """counts: conversations, tokens and optimiser steps, where they are known.  FileError where the disk is too small.

    draft vocabulary: as asked for, or the most that a choice by coverage takes.
    """
    from .shards import token_bytes

    candidates = settings.draft_vocab or min(inputs.sizes.vocab, MOST_CANDIDATES)
    shape = drafter_shape(settings, inputs.sizes, candidates)
    conversations, tokens, steps = counts or _expected(settings, inputs)
    parts, frozen = parameters(shape)
    trained = sum(parts.values())
    disk = int(tokens * (token_bytes(shape.target_width) + 5)) + trained * (
        3 * 12 + 4 + 2
    )  # shards; three states, both drafters
    free = _free(settings.output)
    if disk > free:
        raise FileError(
            f"{settings.output}: {disk / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free.",
            "Choose another --output, or fewer --tokens.",
        )
    memory = trained * ADAM_BYTES + frozen * 4 + _activations(settings, shape)
    return Plan(parts, frozen, candidates, conversations, tokens, steps, memory, disk, free)


def _expected(settings: TrainSettings, inputs: Inputs) -> tuple[int, int, int | None]:
    """Conversations, tokens and steps before anything is written; answers are taken to be half as long as they may."""
    answer = min(settings.answer_tokens, settings.max_length) / 2
    turns = inputs.user_turns or math.ceil(settings.tokens / answer)
    tokens = int(turns * answer * PROMPT_SHARE)
    together = settings.batch_tokens * settings.accumulate * processes()
    steps = settings.steps or math.ceil(tokens * (settings.epochs or 1.0) / together)
    return inputs.conversations or turns, tokens, steps


def parameters(shape: DrafterShape) -> tuple[dict[str, int], int]:
    """(trained weights by part, frozen weights: embedding and the target's head rows)."""
    h, width, dim = shape.hidden, shape.target_width, shape.head_dim
    parts = {
        "fusion": 3 * width * h,
        "attention": 2 * h * dim * (shape.heads + 2 * shape.kv_heads) + h * dim * shape.heads,
        "ffn": 3 * h * shape.ffn,
        "norms": 4 * h + (3 * width if shape.normed_features else 0),
        "head": shape.draft_vocab * h,
    }
    return parts, shape.draft_vocab * width + shape.vocab * h


def _activations(settings: TrainSettings, shape: DrafterShape) -> int:
    """Bytes kept for the backward pass of one micro-batch: rows of every matrix product of every step, in float32.
    The logits are worked on in blocks of rows and do not count."""
    row = 8 * shape.hidden + 4 * shape.ffn + 3 * shape.head_dim * (shape.heads + shape.kv_heads)
    return settings.batch_tokens * (settings.ttt_steps * row + 4 * shape.target_width) * 4


def _free(folder: Path) -> int:
    """Bytes free where the folder is or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def measured(settings: TrainSettings, inputs: Inputs, plan: Plan) -> Plan:
    """The same plan with times, from a short capture and a short training step on this machine.

    Also the proof that both work at all: InputError where the target's states cannot be captured.
    """
    capturing = _capture_speed(settings, inputs)
    seconds: dict[str, float | None] = {"capture": plan.tokens / capturing if capturing else None}
    if not settings.keep_answers:
        seconds["answers"] = plan.tokens / PROMPT_SHARE / _writing_speed(settings, inputs)
    if plan.steps is not None:
        tokens = plan.steps * settings.batch_tokens * settings.accumulate
        if settings.steps is None:
            tokens = int(plan.tokens * (settings.epochs or 1.0) / processes())
        training = tokens / _training_speed(settings, inputs, plan.draft_vocab)
        limit = 60 * settings.max_minutes if settings.max_minutes else math.inf
        seconds["training"] = min(training, limit)
    return replace(plan, seconds=seconds)


def _capture_speed(settings: TrainSettings, inputs: Inputs) -> float | None:
    """Tokens per second."""
    from .capture import CaptureProgress, CaptureSettings, capture
    from .samples import Sample

    ids = np.linspace(0, inputs.sizes.vocab - 1, min(PROBE_TOKENS, settings.max_length)).astype(np.int32)
    told: list[CaptureProgress] = []
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
        chosen = CaptureSettings(
            settings.target, Path(folder), settings.runtime, inputs.aux_layers, engine=settings.states
        )
        capture(chosen, [Sample(ids, np.ones(len(ids), bool))], told.append)
    return told[0].tokens_per_second


def _writing_speed(settings: TrainSettings, inputs: Inputs) -> float:
    """Tokens per second of short answers to as many prompts as are written at a time."""
    from .answers import AnswerSettings, AnswerWriter, WriterProgress

    law = AnswerSettings(max_tokens=PROBE_ANSWER)
    told: list[WriterProgress] = []
    runtime = replace(settings.runtime, ctx_size=inputs.longest)
    with AnswerWriter(settings.target, runtime, law, told.append) as writer:
        list(writer.write([[{"role": "user", "content": f"Count to {i}."}] for i in range(law.sequences)]))
    return told[-1].tokens_per_second


def _training_speed(settings: TrainSettings, inputs: Inputs, candidates: int) -> float:
    """Tokens per second of one process: forward and backward pass on noise, the second of two."""
    import torch

    from .loss import TrainingStep
    from .model import Drafter

    shape = drafter_shape(settings, inputs.sizes, candidates)
    device = "cuda" if torch.cuda.is_available() and settings.runtime.device != "cpu" else "cpu"
    words, head = torch.zeros(shape.vocab, shape.hidden), torch.zeros(candidates, shape.target_width)
    drafter = Drafter(shape, torch.arange(candidates), words, head).to(device)
    step = TrainingStep(drafter, settings.ttt_steps, settings.decay, settings.loss)
    n = min(PROBE_TOKENS, settings.batch_tokens)
    batch = {
        "tokens": torch.randint(candidates, (1, n)),
        "best": torch.randint(candidates, (1, n)),
        "answer": torch.ones(1, n, dtype=torch.bool),
        "hidden": torch.randn(1, n, 3 * shape.target_width),
        "final": torch.randn(1, n, shape.target_width),
        "length": torch.tensor([n]),
    }
    batch = {name: value.to(device) for name, value in batch.items()}
    took = math.inf
    for _ in range(2):
        started = time.monotonic()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and settings.precision != "no"):
            loss, _ = step(batch)
        loss.backward()
        loss.item()  # waits for the device
        took = time.monotonic() - started
    return n / max(took, 1e-9)
