"""Samples of the tiny target and drafters for it, without shards: states come from reference.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from reference import TargetReference

from eagle3_cli.convert import ConvertSettings, Report, convert
from eagle3_cli.train.export import CheckpointFacts, write_checkpoint
from eagle3_cli.train.loss import ttt_loss
from eagle3_cli.train.model import Drafter, DrafterShape, collate, feature_scale

torch.set_num_threads(1)

AUX = (2, 3, 4)
HT, V = tiny.TARGET.width, tiny.VOCAB
WEIGHTS = tiny.target_weights()
EMBEDDING, HEAD = (torch.from_numpy(WEIGHTS[f"{name}.weight"]) for name in ("token_embd", "output"))
SHAPE = DrafterShape(HT, HT, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=V, draft_vocab=V)


@dataclass(frozen=True)
class Stated:
    """As shards.StatedSample, with float32 states."""

    tokens: Any
    answer: Any
    hidden: torch.Tensor
    final: torch.Tensor
    best: torch.Tensor


def state(tokens: list[int], prompt: int) -> Stated:
    """A sample with the target's states; the answer starts at token `prompt`."""
    logits, inputs = TargetReference(WEIGHTS, tiny.TARGET).read(tokens)
    return _stated(tokens, prompt, logits, inputs)


def write_answer(prompt: list[int], count: int) -> Stated:
    """The greedy answer of the target to a prompt."""
    target, tokens, logits, inputs = TargetReference(WEIGHTS, tiny.TARGET), list(prompt), [], []
    for position in range(len(prompt) + count):
        logits.append(target.row(tokens[position], position, range(position)))
        inputs.append(np.array(target.inputs))
        if position + 1 == len(tokens) < len(prompt) + count:
            tokens.append(int(logits[-1].argmax()))
    return _stated(tokens, len(prompt), np.array(logits), np.array(inputs))


def _stated(tokens: list[int], prompt: int, logits: np.ndarray, inputs: np.ndarray) -> Stated:
    last = inputs[:, -1]
    final = last / np.sqrt((last * last).mean(-1, keepdims=True) + tiny.TARGET.eps) * WEIGHTS["output_norm.weight"]
    hidden = inputs[:, list(AUX)].reshape(len(tokens), -1)
    answer = np.arange(len(tokens)) >= prompt
    as_float = [torch.from_numpy(x).float() for x in (hidden, final)]
    return Stated(np.array(tokens, np.int32), answer, *as_float, torch.from_numpy(logits.argmax(-1)))


def random_samples(lengths: list[int], seed: int = 0) -> list[Stated]:
    """Random tokens; the second half of each is the answer."""
    rng = np.random.default_rng(seed)
    return [state(rng.integers(0, V - 3, n).tolist(), (n + 1) // 2) for n in lengths]


@functools.cache
def conversations(count: int, answer: int = 16) -> list[Stated]:
    """Short prompts with the target's greedy answers."""
    rng = np.random.default_rng(3)
    return [write_answer(rng.integers(0, V - 3, int(rng.integers(3, 8))).tolist(), answer) for _ in range(count)]


def make(d2t: np.ndarray | None = None, scale: bool = False, seed: int = 0, **changes: Any) -> Drafter:
    """A random drafter for the tiny target; changes of the shape."""
    ids = torch.arange(V) if d2t is None else torch.from_numpy(np.asarray(d2t, np.int64))
    shape = replace(SHAPE, draft_vocab=len(ids), **changes)
    torch.manual_seed(seed)
    embedding = EMBEDDING if shape.hidden == HT else torch.randn(V, shape.hidden)
    drafter = Drafter(shape, ids, embedding, HEAD[ids], feature_scale(random_samples([9])) if scale else None)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
        drafter.lm_head.weight *= 4  # favourites clear enough for two engines to agree on
    return drafter


def fit(drafter: Drafter, samples: list[Stated], steps: int, ttt: int = 4, kind: str = "soft") -> float:
    """Train on all samples at once; returns the last loss."""
    batch = collate(samples)
    optimiser = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=8e-3, betas=(0.9, 0.95))
    for _ in range(steps):
        optimiser.zero_grad()
        loss, _ = ttt_loss(drafter, batch, ttt, kind=kind)
        loss.backward()
        optimiser.step()
    return loss.item()


def export(drafter: Drafter, target: Path, folder: Path, aux: tuple[int, int, int] = AUX) -> tuple[Path, Report]:
    """The drafter as a GGUF with F32 matrices, by way of its checkpoint."""
    write_checkpoint(drafter, folder, CheckpointFacts(aux, 8192, bos=tiny.END_OF_TEXT, eos=tiny.IM_END))
    output = folder / "drafter.gguf"
    return output, convert(ConvertSettings(folder, target, output, outtype="f32"))
