"""What EAGLE-3 proposes, computed row by row in float64, and the comparison with what llama.cpp proposes.

The drafter's cache is float16 in both; on a CPU without flash attention they are equal to about three digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny
from reference import DrafterReference, TargetReference, grow_fully, tokens_to

from eagle3_cli.engine.types import DraftTree
from eagle3_cli.settings import TreeShape

TOLERANCE = 1e-2  # of values of size 1 to 10


class Drafting:
    """What EAGLE-3 proposes after some committed tokens and a root, computed row by row.

    since   the first position whose features the drafter ever got
    """

    def __init__(
        self, target: tiny.TinyModel, drafter: tiny.TinyModel, committed: list[int], root: int, since: int = 0
    ) -> None:
        config, own = drafter.config, drafter.weights
        reader = TargetReference(target.weights, target.config)
        _, inputs = reader.read(committed)
        aux = inputs[:, list(config.aux_layers)].reshape(len(committed), -1)
        embedding = own.get("token_embd.weight", target.weights["token_embd.weight"])
        head = own.get("output.weight", target.weights["output.weight"])
        self.model = DrafterReference(own, config, embedding, head, drafter.d2t)
        self.past = len(committed)
        self.rows: dict[tuple[int, ...], Any] = {}  # path -> (its row of memory, output, log-probabilities)
        self.known = range(self.past - since)  # rows of the committed pairs
        for row in self.known:
            p = since + row
            out, _, logps = self.model.row([*committed, root][p + 1], self.model.fuse(aux[p]), p, range(row))
        self.rows[()] = self.known[-1], out, logps

    def node(self, path: tuple[int, ...]) -> Any:
        if path not in self.rows:
            _, feature, _ = self.node(path[:-1])
            ancestors = [self.node(path[:i])[0] for i in range(1, len(path))]
            position = self.past + len(path) - 1
            row = len(self.model.layer.keys)
            out, _, logps = self.model.row(path[-1], feature, position, [*self.known, *ancestors])
            self.rows[path] = row, out, logps
        return self.rows[path]

    def grow(self, shape: TreeShape) -> DraftTree:
        return grow_fully(lambda path: self.model.best(self.node(path)[2], shape.width), shape)

    def logp(self, path: tuple[int, ...]) -> float:
        """Log-probability of a path under the drafter."""
        ids = list(range(tiny.VOCAB)) if self.model.d2t is None else self.model.d2t.tolist()
        return sum(self.node(path[:i])[2][ids.index(token)] for i, token in enumerate(path))


def agree(tree: DraftTree, drafting: Drafting, shape: TreeShape) -> None:
    """Every node has the reference's probability, and no better node was left out (near-ties may be swapped)."""
    wanted = drafting.grow(shape)
    logps = [drafting.logp(tokens_to(tree, node)) for node in range(len(tree))]
    np.testing.assert_allclose(tree.logps, logps, atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(sorted(tree.logps), sorted(wanted.logps), atol=TOLERANCE, rtol=TOLERANCE)
