"""Which samples are trained on, in what order, and at what rate: functions of their arguments alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError

POOL = 1024  # samples that are sorted by length together; a batch is filled from one pool


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
