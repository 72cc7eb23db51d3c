"""The target: prefill, tree verification in one forward pass, commit.  KV cells in sequence 0 are committed."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _native
from ..context import DECODE, Context, not_numbers
from ..settings import MAX_SEQUENCES
from .tree import ROOT, leaf_sequences
from .types import NO_TREE, DraftTree, Likelihood

Features = Any
"""float32 [rows, 3 * Ht]: the inputs of the three aux layers side by side, one row per position."""

ALL_ASK = np.ones(MAX_SEQUENCES, np.int8)  # output flags of a tree's rows


def greedy_at(address: int, vocabulary: int, name: str) -> int:
    """The greedy token.  address: of a row of logits, float [vocabulary].  LlamaError, which names the context, where
    no number is the largest."""
    token = int(_native.argmax(address, vocabulary))
    if token < 0:
        raise not_numbers(name)
    return token


def likelihood_at(address: int, vocabulary: int, token: int, most: int) -> Likelihood:
    """Of a token, and the `most` likeliest ones.  address: of a row of logits, float [vocabulary]."""
    count = min(max(most, 1), vocabulary)
    ids, logps = np.empty((1, count), np.int32), np.empty((1, count), np.float32)
    _native.topk(address, vocabulary, None, vocabulary, ids, logps, count)
    row = (ctypes.c_float * vocabulary).from_address(address)
    best = [(int(i), float(logp)) for i, logp in zip(ids[0], logps[0], strict=True) if i >= 0]
    return Likelihood(best[0][1] + row[token] - row[best[0][0]], best[:most])


@dataclass(frozen=True)
class PlainRounds:
    """Tokens that were emitted one a round, the seconds of each round's pass, and the sampler's seconds in all."""

    tokens: Sequence[int]
    seconds: Sequence[float]
    sampling: float


class Target:
    """`past` counts the committed tokens: positions 0..past-1 of sequence 0, and nothing else between rounds."""

    def __init__(
        self, context: Context, every_row: bool = False, in_order: bool = False, recurrent: bool = False
    ) -> None:
        """every_row: the features exist only for rows that ask for logits, so every row of a prompt must.
        in_order: keep the cells in the order of their positions, as plain decoding leaves them.  Attention adds up in
        the order of the cells, so where its kernels do not depend on the batch, only this makes logits equal to the
        last bit (docs/losslessness.md).
        recurrent: its state drops the newest positions of a chain in verification, and else all positions or none."""
        self.context = context
        self._every_row = every_row
        self._in_order = in_order
        self._recurrent = recurrent
        self._settled = True  # the memory holds the committed tokens and nothing else
        self.past = 0
        self._row = 0  # batch row of the logits after the newest committed token
        self._tree: DraftTree = NO_TREE
        self._below: list[list[int]] = []

    @property
    def captures(self) -> bool:
        """Whether the passes to come yield features.  Only a target that serves a drafter can."""
        capture = self.context.capture
        return capture is not None and not capture.paused

    @captures.setter
    def captures(self, wanted: bool) -> None:
        if self.context.capture is not None:
            self.context.capture.paused = not wanted

    @property
    def quick(self) -> bool:
        """Whether plain rounds may come several in a call of `decode_plain`."""
        return self.context.quick and not self.captures

    def prefill(self, tokens: Sequence[int], seen: Callable[[Sequence[int], Features | None], None]) -> None:
        """Commit tokens in chunks.  `seen` gets each chunk with its features, which it must copy, or None.
        Leaves the logits after the last token for `logits_row(ROOT)`."""
        for start in range(0, len(tokens), self.context.rows):
            chunk = tokens[start : start + self.context.rows]
            outputs = np.full(len(chunk), self._every_row, np.int8)
            outputs[-1] |= start + len(chunk) == len(tokens)
            pos = np.arange(self.past, self.past + len(chunk), dtype=np.int32)
            self._settled = False
            self.context.process(DECODE, pos, np.array(chunk, np.int32), outputs=outputs)
            self.past, self._settled = self.past + len(chunk), True
            self._row, self._tree = len(chunk) - 1, NO_TREE
            seen(chunk, self.context.captured[: len(chunk)] if self.captures else None)

    def verify(self, root: int, tree: DraftTree) -> None:
        """One forward pass over [root] + nodes, every row seeing the committed tokens and its ancestors.

        Row 0 is the root at position `past`; node i is row i+1 at past + depth.  Afterwards `logits_row(node)` tells
        where the target's logits after a node are.  Call `commit` or `truncate` before anything else.
        """
        n = len(tree)
        seq_start = seqs = None
        if n:
            self._below = leaf_sequences(tree)
            self._pad_sequences(n)
            seq_start = array("i", [0, *itertools.accumulate(map(len, self._below))])
            seqs = array("i", itertools.chain.from_iterable(self._below))
            for leaf in self._below[0][1:]:
                self.context.copy(0, leaf)
        pos = array("i", [self.past, *(self.past + depth for depth in tree.depths)])
        tokens = array("i", [root, *tree.tokens])
        self._row, self._tree, self._settled = 0, tree, False
        self.context.process(DECODE, pos, tokens, seq_start, seqs, ALL_ASK[: n + 1])
        self.context.logits()  # waits for a GPU, so that the time of a pass is known

    def decode_plain(self, text: Any, most: int, **how: int) -> PlainRounds:
        """Up to `most` rounds without a tree, committed, in one call; only where this is `quick`.

        text: int32, with the root as its last token.  how: the last arguments of `Context.decode_plain`.
        """
        seconds, n = np.empty(most, np.float32), len(text)
        text.extend(itertools.repeat(0, most))
        self._row, self._tree, self._settled = 0, NO_TREE, False
        emitted, sampling = self.context.decode_plain(text, n, self.past, seconds, **how)
        self.past, self._settled = self.past + emitted, True
        return PlainRounds(text[n : n + emitted].tolist(), seconds[:emitted].tolist(), sampling)

    def _pad_sequences(self, nodes: int) -> None:
        """Give the root sequences without leaves, so that trees of one size mostly have one number of sequences.
        llama.cpp then computes with the graph of the last round; building it anew costs about as much as a row."""
        leaves = len(self._below[0])
        if leaves > 1:
            self._below[0] = list(range(min(nodes, -leaves // 4 * -4)))

    def logits_row(self, node: int) -> int:
        """Batch row of the logits after a node of the tree in verification, or after the newest token (ROOT)."""
        return self._row if node == ROOT else node + 1

    def argmax(self, node: int) -> int:
        """The greedy token after a node."""
        return greedy_at(self._logits(node), self.context.n_vocab, self.context.name)

    def likelihood(self, node: int, token: int, most: int) -> Likelihood:
        """Of a token after a node, and the `most` likeliest ones."""
        return likelihood_at(self._logits(node), self.context.n_vocab, token, most)

    def logits(self, node: int) -> Any:
        """The logits after a node, float32 [n_vocab], a copy."""
        row = (ctypes.c_float * self.context.n_vocab).from_address(self._logits(node))
        return np.array(row, np.float32)

    def _logits(self, node: int) -> int:
        """Address of the logits after a node.  llama.cpp keeps the rows that asked: after verify all of them, after a
        prefill the last one alone, unless every row has to ask."""
        row = self.logits_row(node) if self._row == 0 or self._every_row else 0
        return self.context.logits() + 4 * self.context.n_vocab * row

    def commit(self, path: Sequence[int]) -> Features | None:
        """Keep the root and the nodes of `path` (root downwards), free all other cells of the tree.

        Returns the features of the kept positions, a copy; None where they were not captured.
        """
        tree, self._tree = self._tree, NO_TREE
        first, self.past = self.past, self.past + 1 + len(path)
        if tree:
            self._keep_path(first, path, len(tree))
        self._settled = True
        if not self.captures:
            return None
        rows = array("i", [0, *(node + 1 for node in path)])
        kept = np.empty((len(rows), self.context.captured.shape[1]), np.float32)
        _native.gather(self.context.captured, rows, kept)
        return kept

    def _keep_path(self, first: int, path: Sequence[int], nodes: int) -> None:
        """Make sequence 0 the committed path.  first: the root's position."""
        leaves = self._below[0]
        ordered = next((i for i, node in enumerate(path) if node != i), len(path))
        if self._in_order and ordered < len(path):
            leaf = self._below[path[-1] + 1][0]
            self.context.make_contiguous(leaf, first + 1 + ordered, self.past, scratch=len(leaves))
            return
        leaf = self._below[path[-1] + 1 if path else 0][0]
        if leaf != 0:  # sequence 0 is another leaf: leave it where the paths part, go on with the accepted one
            fork = first + 1 + sum(self._below[node + 1][0] == 0 for node in path)
            self.context.remove(0, fork)
            self.context.copy(leaf, 0, fork, self.past)
        elif len(path) < nodes:
            self.context.remove(0, self.past)
        if len(leaves) > 1:
            self.context.keep(0)

    def newest_features(self, token: int) -> Features | None:
        """Compute the newest committed token again, for its features alone: its row goes into another sequence, which
        is then dropped.  A copy; None for recurrent layers, which cannot step back to it."""
        if self._recurrent:
            return None
        captures, self.captures = self.captures, True
        self.context.copy(0, 1, -1, self.past - 1)
        position, sequence = array("i", [self.past - 1]), array("i", [1])
        self.context.process(DECODE, position, array("i", [token]), array("i", [0, 1]), sequence, ALL_ASK[:1])
        features = self.context.captured[:1].copy()
        self.captures = captures
        self.context.keep(0)
        return features

    def truncate(self, past: int) -> int:
        """Forget the committed tokens from position `past` on, and any tree in verification.  Returns how many are
        left: `past`, or none where recurrent layers would have to step back."""
        if self._recurrent and not (self._settled and past == self.past):
            past = 0
        self.past, self._tree, self._settled = past, NO_TREE, True
        self.context.remove(0, past)
        self.context.keep(0)
        return past
