"""The EAGLE-3 drafter on llama.cpp: fused features in, a draft tree out.

Its memory position p holds the pair (token at p+1, feature g[p]), so it runs one token ahead of the target: the pair
at the newest committed position P-1 needs the root, the token that the target has just emitted.

A sliding window of w lets position p see the keys at p-w+1..p.  llama.cpp's graph attends to everything in a row's
sequence, so what is behind the window is kept out of the sequence.  Sequence 0 always holds all committed pairs, so
that `truncate` can go back.  The drafter has one layer: a pair's key and value do not depend on what the pair attends
to, only its output does, and of the committed pairs only the root's output is read.  So all others are computed in
sequence 0 as if there were no window, in batches as large as ever, and are exact.  Where a draft reaches behind the
window, the root's pair is computed in sequence 1, which holds the cells of its window, and every sequence of the tree
drops what falls out of the window before the next level.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import _native
from ..context import DECODE, ENCODE, Context
from ..model_files import DrafterInfo
from ..settings import TreeShape
from .target import ALL_ASK, Features
from .tree import ROOT, Candidates, Children, Policy, grow
from .types import DraftTree

FEW = 16  # committed positions that wait for the next draft, which computes logits for all of them
_WINDOWED = 1  # the sequence of the root's row where the tree reaches behind the window


class Drafter(Protocol):
    """What the loop needs of a drafter.

    seconds   spent in llama.cpp
    ready     it knows the newest committed position, so it can draft
    """

    seconds: float

    @property
    def ready(self) -> bool: ...

    def extend(self, tokens: Sequence[int], features: Features | None) -> None:
        """Learn of newly committed tokens and the features of their positions.  Without features it starts anew behind
        them."""

    def draft(self, root: int, policy: Policy) -> DraftTree:
        """Propose continuations of the root, which is emitted but not committed."""

    def truncate(self, past: int) -> int:
        """Forget the committed tokens from `past` on.  Returns how many it still knows: `past`, or one fewer where the
        feature of the newest one is gone and the target has to compute it again."""


class Eagle3Drafter:
    """The drafter of a GGUF file.

    encoder   its capture holds g
    decoder   its capture holds the rows to feed back: after the final norm, or before it ("eagle3_prenorm-0")
    """

    def __init__(self, encoder: Context, decoder: Context, info: DrafterInfo) -> None:
        self._encoder, self._decoder, self._info = encoder, decoder, info
        self._head = _Head(decoder, info)
        self._pairs = 0  # pairs in the decoder's memory: positions 0.._pairs-1 of sequence 0
        self._tokens: list[int] = []  # committed tokens from position _pairs on ...
        self._g = np.empty((0, info.width), np.float32)  # ... and their features, not paired yet
        self._waiting_tokens: list[int] = []  # committed tokens behind those, features not fused yet ...
        self._waiting: list[Features] = []  # ... and the features, float32 [n, 3 * Ht] in pieces
        self._empty = True  # nothing is in the decoder's memory
        self._scratch = _Scratch(1, 1, info.width)

    @property
    def seconds(self) -> float:
        return self._encoder.seconds + self._decoder.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._encoder.seconds = self._decoder.seconds = value

    # --- committed tokens

    @property
    def ready(self) -> bool:
        return bool(self._tokens or self._waiting_tokens)

    def extend(self, tokens: Sequence[int], features: Features | None) -> None:
        """Few wait for the next draft; of more all but the newest few are fused (encoder) and paired (decoder)."""
        if features is None:
            self._start_behind(len(tokens))
            return
        self._waiting_tokens += tokens
        few = len(self._waiting_tokens) <= FEW
        self._waiting.append(features.copy() if few else features)
        if not few:
            self._fuse_waiting()

    def _fuse_waiting(self) -> None:
        if self._waiting_tokens:
            tokens = self._waiting_tokens
            features = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
            self._waiting_tokens, self._waiting = [], []
            self._fuse(tokens, features)

    def _start_behind(self, count: int) -> None:
        """Forget everything: the features of `count` more positions do not exist, and a pair's key and value need its
        own.  Positions stay what they are, so a row sees the pairs behind the gap at their distances."""
        self._pairs += count
        if self.ready:
            self._pairs += len(self._tokens) + len(self._waiting_tokens)
            self._tokens, self._g = [], self._g[:0]
            self._waiting_tokens, self._waiting = [], []
        if not self._empty:
            self._decoder.remove(0, 0)
            self._empty = True

    def _fuse(self, tokens: Sequence[int], features: Features) -> None:
        for start in range(0, len(tokens), self._encoder.rows):
            rows = np.ascontiguousarray(features[start : start + self._encoder.rows])
            if self._info.fc_norm is not None:
                rows = _norm_each(rows, self._info.fc_norm, self._info.eps)
            self._encoder.process(ENCODE, array("i", range(len(rows))), features=rows)
            self._g = np.concatenate([self._g, self._encoder.captured[: len(rows)]])
            self._tokens.extend(tokens[start : start + len(rows)])
            while len(self._tokens) > FEW:
                self._pair(self._tokens[1 : self._decoder.rows + 1], outputs=False)

    def _pair(self, next_tokens: Sequence[int], outputs: bool, sequence: int = 0) -> None:
        """Put the pairs (next token, g) of the oldest unpaired positions into memory, computed in a sequence.

        Asks for the logits of all rows or of none: the graph computes them for every row and llama.cpp copies
        the first ones, whichever rows asked.
        """
        n = len(next_tokens)
        pos, tokens = array("i", range(self._pairs, self._pairs + n)), array("i", next_tokens)
        flags = np.ones(n, np.int8) if outputs else None
        starts, sequences = array("i", range(n + 1)), array("i", [sequence]) * n
        self._decoder.process(DECODE, pos, tokens, starts, sequences, flags, self._g[:n])
        self._empty = False
        if sequence != 0:
            self._decoder.copy(sequence, 0, self._pairs)
        self._pairs += n
        self._g = self._g[n:].copy()
        del self._tokens[:n]

    def truncate(self, past: int) -> int:
        fused = self._pairs + len(self._tokens)
        past = min(past, fused + len(self._waiting_tokens))
        waiting = max(past - fused, 0)
        if waiting < len(self._waiting_tokens):
            self._waiting_tokens = self._waiting_tokens[:waiting]
            self._waiting = [np.concatenate(self._waiting)[:waiting]] if waiting else []
        if waiting:
            self._forget_drafts()
            return past
        unpaired = past - self._pairs
        if unpaired <= 0:
            past, unpaired = max(past - 1, 0), 0
            self._pairs = past
        self._tokens, self._g = self._tokens[:unpaired], self._g[:unpaired]
        self._forget_drafts()
        return past

    def _forget_drafts(self) -> None:
        self._decoder.remove(0, self._pairs)
        self._decoder.keep(0)

    # --- drafting

    def draft(self, root: int, policy: Policy) -> DraftTree:
        """Catch up with the committed tokens and seed level 1 in one batch, then grow level by level."""
        shape, before = policy.limit, self.seconds
        if policy.threads:
            self._encoder.threads = self._decoder.threads = policy.threads
        rows = len(self._tokens) + len(self._waiting_tokens)
        self._fuse_waiting()
        seed = self._seed(root, shape.depth)
        policy.drafted(rows, self.seconds - before)
        if not self._scratch.fits(shape):
            self._scratch = _Scratch(shape.width, shape.depth, self._info.width)
        growth = _Growth(self._decoder, self._head, self._scratch, seed, policy)
        tree = grow(growth.expand, policy)
        if growth.used:
            self._forget_drafts()
        return tree

    def _seed(self, root: int, depth: int) -> _Seed:
        """Pair all that waits; the root's is the last row.  The tree's deepest row is at the root's position + depth-1.

        Behind the window, rows too old for the root to see go first, in a batch of their own.
        """
        tokens, window = [*self._tokens[1:], root], self._info.sliding_window
        newest = self._pairs + len(tokens) - 1
        if window is None or newest + depth - 1 < window:
            self._pair(tokens, outputs=True)
            return _Seed(self._pairs, len(tokens))
        if len(tokens) > window:
            self._pair(tokens[:-window], outputs=False)
            tokens = tokens[-window:]
        self._decoder.copy(0, _WINDOWED, max(newest - window + 1, 0))
        self._pair(tokens, outputs=True, sequence=_WINDOWED)
        return _Seed(self._pairs, len(tokens), _WINDOWED, window)


def _norm_each(features: Features, weights: Any, eps: float) -> Features:
    """RMSNorm of each aux layer's part of the rows by its own weights, float32 [3, Ht]."""
    parts = features.reshape(len(features), *weights.shape)
    return (parts / _root_mean_square(parts, eps) * weights).reshape(features.shape)


def _root_mean_square(rows: Any, eps: float) -> Any:
    """What an RMSNorm divides by: over the last axis, which stays with length 1."""
    return np.sqrt(np.square(rows).mean(-1, keepdims=True) + np.float32(eps))


class _Head:
    """From the decoder's logits to children."""

    def __init__(self, decoder: Context, info: DrafterInfo) -> None:
        self._decoder = decoder
        self._d2t = None if info.d2t is None else info.d2t.astype(np.int32)
        self._eps = None if info.final_norm else info.eps

    def best(self, rows: range, ids: Any, logps: Any) -> None:
        """The most probable tokens of these rows of the last batch, all of which asked for logits.

        ids, logps   int32 and float32 [rows, k], out, as in native/eagle3.h, e3_topk
        Without a final norm the logits are head(s), but the graph's, whose norm has only ones, are head(s) / rms(s).
        """
        stride = self._decoder.n_vocab
        first = self._decoder.logits() + 4 * stride * rows.start
        candidates = stride if self._d2t is None else len(self._d2t)
        scales = None
        if self._eps is not None:
            scales = _root_mean_square(self._decoder.captured[rows.start : rows.stop], self._eps)
        _native.topk(first, stride, self._d2t, candidates, ids, logps, ids.shape[1], scales)


@dataclass(frozen=True)
class _Seed:
    """Where a tree starts.

    past       position of level-1 nodes
    rows       of the batch just processed; the root's is the last
    sequence   that the root's row is in
    window     of the rows of the tree; None: they see everything
    """

    past: int
    rows: int
    sequence: int = 0
    window: int | None = None


class _Growth:
    """The drafter passes of one tree.

    A node's row in the decoder's memory sits in a sequence that holds exactly its ancestors, as far as the window goes:
    the first expanded child goes on in its parent's sequence, each further one in a copy.
    """

    def __init__(self, decoder: Context, head: _Head, scratch: _Scratch, seed: _Seed, policy: Policy) -> None:
        self._decoder, self._head, self._scratch, self._seed = decoder, head, scratch, seed
        self._policy = policy
        self._rows = seed.rows  # of the newest batch
        self._stored = 0  # rows of scratch.outputs in use
        self._output_of: dict[int, int] = {}  # node -> its row there
        self._sequence_of = {ROOT: seed.sequence}
        self._level: Sequence[int] = [ROOT]
        self._free = [s for s in range(scratch.sequences - 1, 0, -1) if s != seed.sequence]
        self.used: set[int] = {seed.sequence} - {0}

    def expand(self, nodes: Sequence[int], pool: Candidates) -> list[Children]:
        """One decoder pass over the nodes of a level; the root was already processed as the seed row."""
        if nodes != [ROOT]:
            before = self._decoder.seconds
            self._process(nodes, pool)
            self._policy.drafted(len(nodes), self._decoder.seconds - before)
        first = self._stored
        self._stored += len(nodes)
        self._scratch.outputs[first : self._stored] = self._decoder.captured[self._rows - len(nodes) : self._rows]
        self._output_of.update(zip(nodes, range(first, self._stored), strict=True))
        self._level = nodes
        return self._children(len(nodes))

    def _process(self, nodes: Sequence[int], pool: Candidates) -> None:
        """Rows (token, parent's output) of nodes at one depth."""
        n = len(nodes)
        parents = [pool.parents[node] for node in nodes]
        position = self._seed.past + pool.depths[nodes[0]] - 1
        sequences = self._branch(nodes, parents, position)
        features = self._scratch.features[:n]
        _native.gather(self._scratch.outputs, array("i", [self._output_of[p] for p in parents]), features)
        tokens = array("i", [pool.tokens[node] for node in nodes])
        starts, positions = array("i", range(n + 1)), array("i", [position] * n)
        self._decoder.process(DECODE, positions, tokens, starts, sequences, ALL_ASK[:n], features)
        self._rows = n

    def _branch(self, nodes: Sequence[int], parents: Sequence[int], position: int) -> Any:
        """The sequence of each node, int32.  Sequences that no node of this level goes on with are used again."""
        heirs = {parent: node for node, parent in zip(reversed(nodes), reversed(parents), strict=True)}
        dead = (self._sequence_of[node] for node in self._level if node not in heirs)
        self._free.extend(sequence for sequence in dead if sequence != 0)  # 0 holds the committed pairs
        oldest = 0 if self._seed.window is None else max(position - self._seed.window + 1, 0)
        for node, parent in zip(nodes, parents, strict=True):
            source = self._sequence_of[parent]
            if heirs[parent] == node:
                self._sequence_of[node] = source
                self.used.add(source)
                if oldest > 0:  # the heir comes first, so its siblings copy what is left
                    self._decoder.remove(source, 0, oldest)
                continue
            sequence = self._sequence_of[node] = self._free.pop()
            if sequence in self.used:
                self._decoder.remove(sequence, 0)
            self._decoder.copy(source, sequence, -1, position)
            self.used.add(sequence)
        return array("i", [self._sequence_of[node] for node in nodes])

    def _children(self, rows: int) -> list[Children]:
        """The most probable tokens of the last `rows` rows of logits."""
        ids, logps = self._scratch.ids[:rows], self._scratch.logps[:rows]
        self._head.best(range(self._rows - rows, self._rows), ids, logps)
        return [
            [child for child in zip(row_ids, row_logps, strict=True) if child[0] >= 0]
            for row_ids, row_logps in zip(ids.tolist(), logps.tolist(), strict=True)
        ]


class _Scratch:
    """Arrays for one shape of tree, kept from round to round.

    outputs    float32 [1 + width * depth, H] drafter outputs of the expanded nodes, the root's first
    features   float32 [width, H] inputs of one level
    ids, logps int32 and float32 [width, width] children of one level; a drafter may know fewer tokens than width
    """

    def __init__(self, width: int, depth: int, hidden: int) -> None:
        self.width, self.depth, self.sequences = width, depth, 2 * width
        self.outputs = np.empty((1 + width * depth, hidden), np.float32)
        self.features = np.empty((width, hidden), np.float32)
        self.ids = np.empty((width, width), np.int32)
        self.logps = np.empty((width, width), np.float32)

    def fits(self, shape: TreeShape) -> bool:
        return self.width == shape.width and self.depth >= shape.depth
