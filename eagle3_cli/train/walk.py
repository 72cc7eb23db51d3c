"""Acceptance simulated without decoding: walk rounds over text that the target wrote.

The target's next tokens are known, so a chain draft is right as far as the drafter's most probable tokens equal them.
This holds at any temperature: a token that the target drew is what verification would have compared with.  Rounds are
walked exactly as engine/loop.py does it.  With root t[r] the first step of the draft is row r-1 and predicts t[r+1];
a of the drafted tokens match, a + 1 are emitted, and the next root is t[r+a+1].  Averages over all positions flatter,
because rounds start where the last one failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .loss import counted_rows
from .model import Batch, Drafter, StatedSample, collate

BATCH_TOKENS = 4096
CHUNK_ROWS = 512  # rows whose logits exist at a time


class Answer(NamedTuple):
    """Tokens start..end of an answer, both included.

    cut   it was ended by a token limit rather than by its end token, so no draft ever reached its last token
    """

    start: int
    end: int
    cut: bool = False


@dataclass
class Walk:
    """Counts of rounds, with the meaning of engine.types.Statistics.

    tried[d]      rounds in which the first d drafted tokens were right and one more was drafted
    accepted[d]   of these, rounds in which that one was right, too
    """

    rounds: int = 0
    emitted: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float | None:
        """tau: emitted tokens per round, the bonus token included."""
        return self.emitted / self.rounds if self.rounds else None


def answers_of(answer: NDArray[np.bool_]) -> list[Answer]:
    """The runs of true in bool [n]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], answer, [False]]).astype(np.int8)))
    return [Answer(int(start), int(stop) - 1) for start, stop in edges.reshape(-1, 2)]


def walk(matches: NDArray[np.bool_], answers: Sequence[Answer], chain: int, total: Walk | None = None) -> Walk:
    """Walk the rounds of some answers of one sample with drafts of `chain` tokens; added to `total`.

    matches   bool [rows, depth >= chain]: at step i row p predicts t[p+2+i] rightly
    The first token of an answer comes from the prompt's logits and is the first root.
    """
    total = total or Walk()
    total.tried += [0] * (chain - len(total.tried))
    total.accepted += [0] * (chain - len(total.accepted))
    for answer in answers:
        root = max(answer.start, 1)
        while root < answer.end:
            left = answer.end - root
            drafted = min(chain, left - answer.cut)
            right = matches[root - 1, :drafted]
            accepted = drafted if right.all() else int(right.argmin())
            for depth in range(min(accepted + 1, drafted)):
                total.tried[depth] += 1
                total.accepted[depth] += depth < accepted
            total.rounds += 1
            total.emitted += min(accepted + 1, left)
            root += min(accepted + 1, left)
    return total


class Reader(Protocol):
    """What `simulate` needs of shards.ShardReader."""

    def __len__(self) -> int: ...
    def sample(self, i: int) -> StatedSample: ...


def simulate(drafter: Drafter, reader: Reader, ids: Sequence[int], chain: int = 3, depth: int = 6) -> dict[str, Any]:
    """Simulated acceptance over the answers of some samples.

    tau            for drafts of `chain` tokens; None where no answer has two tokens
    tau_by_chain   the same for drafts of 1..depth tokens
    rounds         of the chain
    depth_tried, depth_accepted   of the chain, as in engine.types.Statistics
    n_alpha        acceptance at chain step n = 0..depth-1, whose input holds n estimated features, over all positions
                   of the answers at which the n drafted tokens before were right: a wrong one ends the round, so no
                   draft is ever continued from it.  None where there is no such position.
    """
    walks = [Walk() for _ in range(max(chain, depth))]
    right, seen = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    for samples in _batches(reader, ids):
        found, counted = match_rows(drafter, collate(samples), len(walks))
        for sample, matches, rows in zip(samples, found, counted, strict=True):
            answers = answers_of(np.asarray(sample.answer, bool))
            for length, total in enumerate(walks, start=1):
                walk(matches, answers, length, total)
            before = np.ones(len(matches), bool)
            for n in range(depth):
                seen[n] += (before & rows[:, n]).sum()
                before &= matches[:, n]
                right[n] += before.sum()
    chosen = walks[chain - 1]
    return {
        "tau": chosen.acceptance_length,
        "tau_by_chain": [total.acceptance_length for total in walks[:depth]],
        "rounds": chosen.rounds,
        "depth_tried": chosen.tried,
        "depth_accepted": chosen.accepted,
        "n_alpha": [int(a) / int(b) if b else None for a, b in zip(right, seen, strict=True)],
    }


def _batches(reader: Reader, ids: Sequence[int]) -> Iterator[list[StatedSample]]:
    """Samples of similar length, at most BATCH_TOKENS with padding (or one sample)."""
    batch: list[StatedSample] = []
    for sample in sorted((reader.sample(i) for i in ids), key=lambda sample: len(sample.tokens)):
        if batch and len(sample.tokens) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


@torch.no_grad()
def match_rows(drafter: Drafter, batch: Batch, steps: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(matches, counted), bool [B, L - 1, steps] each: at step i row p predicts t[p+2+i] rightly, and that token
    belongs to an answer at all."""
    device = drafter.d2t.device
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    outputs = drafter.unroll(batch, steps)
    rows = counted_rows(batch, steps)
    next_tokens = rows.at(batch["tokens"][:, 1:])
    matches = torch.zeros((*outputs[0].shape[:2], steps), dtype=torch.bool, device=device)
    counted = torch.zeros_like(matches)
    for i, output in enumerate(outputs):
        best = drafter.d2t[_most_probable(drafter, rows.of_step(output, i))]
        valid, row = rows.valid[i], rows.row(i)
        matches[rows.sample[valid], row[valid], i] = (best == next_tokens)[valid]
        counted[rows.sample[valid], row[valid], i] = True
    return matches.cpu().numpy(), counted.cpu().numpy()


def _most_probable(drafter: Drafter, outputs: torch.Tensor) -> torch.Tensor:
    """Draft index of the most probable token of each row."""
    found = [drafter.logits(part).argmax(-1) for part in outputs.split(CHUNK_ROWS)]
    return torch.cat(found) if found else outputs.new_empty(0, dtype=torch.int64)
