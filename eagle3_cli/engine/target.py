"""The target: prefill, tree verification in one forward pass, commit.  KV cells in sequence 0 are committed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _native
from ..llama import DECODE, Context, captured
from .tree import ROOT, leaf_sequences
from .types import NO_TREE, DraftTree

Features = Any
"""float32 [rows, 3 * Ht]: the inputs of the three aux layers side by side, one row per position."""

NO_FEATURES = np.zeros((0, 0), np.float32)


class Target:
    """`past` counts the committed tokens: positions 0..past-1 of sequence 0, and nothing else between rounds."""

    def __init__(self, context: Context, every_row: bool = False) -> None:
        """every_row: the features exist only for rows that ask for logits, so every row of a prompt must."""
        self.context = context
        self._every_row = every_row
        self.past = 0
        self._captures = context.capture is not None
        self._row = 0  # batch row of the logits after the newest committed token
        self._tree: DraftTree = NO_TREE
        self._below: list[list[int]] = []

    def prefill(self, tokens: Sequence[int], seen: Callable[[Sequence[int], Features], None]) -> None:
        """Commit tokens in chunks.  `seen` gets each chunk with its features, which it must copy.
        Leaves the logits after the last token for `logits_row(ROOT)`."""
        for start in range(0, len(tokens), self.context.rows):
            chunk = tokens[start : start + self.context.rows]
            outputs = np.full(len(chunk), self._every_row, np.int8)
            outputs[-1] |= start + len(chunk) == len(tokens)
            pos = np.arange(self.past, self.past + len(chunk), dtype=np.int32)
            self.context.process(DECODE, pos, np.array(chunk, np.int32), outputs=outputs)
            self.past += len(chunk)
            self._row, self._tree = len(chunk) - 1, NO_TREE
            seen(chunk, self._features(len(chunk)))

    def verify(self, root: int, tree: DraftTree) -> None:
        """One forward pass over [root] + nodes, every row seeing the committed tokens and its ancestors.

        Row 0 is the root at position `past`; node i is row i+1 at past + depth.  Afterwards `logits_row(node)` tells
        where the target's logits after a node are.  Call `commit` or `truncate` before anything else.
        """
        n = len(tree)
        pos = np.full(n + 1, self.past, np.int32)
        tokens = np.full(n + 1, root, np.int32)
        seq_start = seqs = None
        if n:
            pos[1:] += np.asarray(tree.depths, np.int32)
            tokens[1:] = tree.tokens
            self._below = leaf_sequences(tree)
            seq_start = np.cumsum([0, *map(len, self._below)], dtype=np.int32)
            seqs = np.fromiter((s for row in self._below for s in row), np.int32)
            for leaf in self._below[0][1:]:
                self.context.copy(0, leaf)
        self._row, self._tree = 0, tree
        self.context.process(DECODE, pos, tokens, seq_start, seqs, np.ones(n + 1, np.int8))

    def logits_row(self, node: int) -> int:
        """Batch row of the logits after a node of the tree in verification, or after the newest token (ROOT)."""
        return self._row if node == ROOT else node + 1

    def argmax(self, node: int) -> int:
        """The greedy token after a node."""
        return int(_native.argmax(self._logits(node), self.context.n_vocab))

    def logits(self, node: int) -> Any:
        """The logits after a node, float32 [n_vocab], a copy."""
        row = (ctypes.c_float * self.context.n_vocab).from_address(self._logits(node))
        return np.array(row, np.float32)

    def _logits(self, node: int) -> int:
        """Address of the logits after a node.  llama.cpp keeps the rows that asked: after verify all of them, after a
        prefill the last one alone, unless every row has to ask."""
        row = self.logits_row(node) if self._row == 0 or self._every_row else 0
        return self.context.logits() + 4 * self.context.n_vocab * row

    def commit(self, path: Sequence[int]) -> Features:
        """Keep the root and the nodes of `path` (root downwards), free all other cells of the tree.

        Returns the features of the kept positions, a copy.
        """
        tree, self._tree = self._tree, NO_TREE
        first, self.past = self.past, self.past + 1 + len(path)
        if tree:
            self._keep_path(first, path, len(tree))
        if not self._captures:
            return NO_FEATURES
        rows = np.array([0, *(node + 1 for node in path)], np.int32)
        kept = np.empty((len(rows), captured(self.context.capture).shape[1]), np.float32)
        _native.gather(self.context.capture, rows, kept)
        return kept

    def _keep_path(self, first: int, path: Sequence[int], nodes: int) -> None:
        """Make sequence 0 the committed path.  first: the root's position.

        The cells stay in the order of their positions, as plain decoding leaves them: attention adds up in the order
        of the cells, so only then are its sums the same to the last bit.  The tree is depth first, so a path along
        first children is in order already; cells behind another child are moved.
        """
        in_order = next((i for i, node in enumerate(path) if node != i), len(path))
        leaves = self._below[0]
        if in_order < len(path):
            leaf = self._below[path[-1] + 1][0]
            self.context.make_contiguous(leaf, first + 1 + in_order, self.past, scratch=len(leaves))
            return
        if len(path) < nodes:
            self.context.remove(0, self.past)
        if len(leaves) > 1:
            self.context.keep(0)

    def truncate(self, past: int) -> None:
        """Forget the committed tokens from position `past` on, and any tree in verification."""
        self.past, self._tree = past, NO_TREE
        self.context.remove(0, past)
        self.context.keep(0)

    def _features(self, rows: int) -> Features:
        return captured(self.context.capture)[:rows] if self._captures else NO_FEATURES
