"""The EAGLE-3 drafter on llama.cpp: fused features in, a draft tree out.

Its memory position p holds the pair (token at p+1, feature g[p]), so it runs one token ahead of the target: the pair
at the newest committed position P-1 needs the root, the token that the target has just emitted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .. import _native
from ..context import DECODE, ENCODE, Context
from ..settings import TreeShape
from .target import ALL_ASK, Features
from .tree import ROOT, Candidates, Children, grow
from .types import DraftTree

_FEW = 16  # unpaired positions that wait for the next draft, which computes logits for all of them


class Drafter(Protocol):
    """What the loop needs of a drafter.  `seconds` is time spent in llama.cpp."""

    seconds: float

    def extend(self, tokens: Sequence[int], features: Features) -> None:
        """Learn of newly committed tokens and the features of their positions."""

    def draft(self, root: int, shape: TreeShape) -> DraftTree:
        """Propose continuations of the root, which is emitted but not committed."""

    def truncate(self, past: int) -> int:
        """Forget the committed tokens from `past` on.  Returns how many it still knows: `past`, or one fewer where the
        feature of the newest one is gone and the target has to compute it again."""


class Eagle3Drafter:
    """The drafter of a GGUF file.

    encoder, decoder   contexts of the same model; the encoder's capture holds g, the decoder's the pre-norm output
    d2t                int32 [Vd] absolute ids of the draft vocabulary, or None
    """

    def __init__(self, encoder: Context, decoder: Context, d2t: Any, width: int) -> None:
        self._encoder, self._decoder = encoder, decoder
        self._d2t = d2t
        self._width = width
        self._pairs = 0  # pairs in the decoder's memory: positions 0.._pairs-1 of sequence 0
        self._tokens: list[int] = []  # committed tokens from position _pairs on ...
        self._g = np.empty((0, width), np.float32)  # ... and their features, not paired yet
        self._scratch = _Scratch(1, 1, width)

    @property
    def seconds(self) -> float:
        return self._encoder.seconds + self._decoder.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._encoder.seconds = self._decoder.seconds = value

    # --- committed tokens

    def extend(self, tokens: Sequence[int], features: Features) -> None:
        """Fuse the features (encoder); pair all but the newest of a prompt, leave a few to the next draft's batch."""
        for start in range(0, len(tokens), self._encoder.rows):
            rows = np.ascontiguousarray(features[start : start + self._encoder.rows])
            self._encoder.process(ENCODE, array("i", range(len(rows))), features=rows)
            self._g = np.concatenate([self._g, self._encoder.captured[: len(rows)]])
            self._tokens.extend(tokens[start : start + len(rows)])
            while len(self._tokens) > _FEW:
                self._pair(self._tokens[1 : self._decoder.rows + 1], outputs=False)

    def _pair(self, next_tokens: Sequence[int], outputs: bool) -> None:
        """Put the pairs (next token, g) of the oldest unpaired positions into memory.

        Asks for the logits of all rows or of none: the graph computes them for every row and llama.cpp copies
        the first ones, whichever rows asked.
        """
        n = len(next_tokens)
        pos, tokens = array("i", range(self._pairs, self._pairs + n)), array("i", next_tokens)
        flags = np.ones(n, np.int8) if outputs else None
        self._decoder.process(DECODE, pos, tokens, outputs=flags, features=self._g[:n])
        self._pairs += n
        self._g = self._g[n:].copy()
        del self._tokens[:n]

    def truncate(self, past: int) -> int:
        past = min(past, self._pairs + len(self._tokens))
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

    def draft(self, root: int, shape: TreeShape) -> DraftTree:
        """Catch up with the committed tokens and seed level 1 in one batch, then grow level by level."""
        seed_rows = len(self._tokens)
        self._pair([*self._tokens[1:], root], outputs=True)
        if not self._scratch.fits(shape):
            self._scratch = _Scratch(shape.width, shape.depth, self._width)
        growth = _Growth(self._decoder, self._d2t, self._scratch, self._pairs, seed_rows)
        tree = grow(growth.expand, shape)
        if growth.used:
            self._forget_drafts()
        return tree


class _Growth:
    """The drafter passes of one tree.

    A node's row in the decoder's memory sits in a sequence that holds exactly its ancestors: the first expanded child
    goes on in its parent's sequence, each further one in a copy.
    """

    def __init__(self, decoder: Context, d2t: Any, scratch: _Scratch, past: int, seed_rows: int) -> None:
        """past: position of level-1 nodes.  seed_rows: rows of the batch just processed; the root's is the last."""
        self._decoder, self._d2t, self._past, self._scratch = decoder, d2t, past, scratch
        self._rows = seed_rows
        self._stored = 0  # rows of scratch.outputs in use
        self._output_of: dict[int, int] = {}  # node -> its row there
        self._sequence_of = {ROOT: 0}
        self._level: Sequence[int] = [ROOT]
        self._free = list(range(scratch.sequences - 1, 0, -1))
        self.used: set[int] = set()

    def expand(self, nodes: Sequence[int], pool: Candidates) -> list[Children]:
        """One decoder pass over the nodes of a level; the root was already processed as the seed row."""
        if nodes != [ROOT]:
            self._process(nodes, pool)
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
        position = self._past + pool.depths[nodes[0]] - 1
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
        for node, parent in zip(nodes, parents, strict=True):
            source = self._sequence_of[parent]
            if heirs[parent] == node:
                self._sequence_of[node] = source
                self.used.add(source)
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
        stride = self._decoder.n_vocab
        first = self._decoder.logits() + 4 * stride * (self._rows - rows)
        candidates = stride if self._d2t is None else len(self._d2t)
        _native.topk(first, stride, self._d2t, candidates, ids, logps, ids.shape[1])
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
