"""The verification rule: the one place that decides what is emitted.  Pure."""

from __future__ import annotations

from collections.abc import Callable

from .tree import ROOT
from .types import DraftTree, Verdict

Draw = Callable[[int], int]
"""node -> token id: one draw of the user's sampler chain at the target's logits after that node (ROOT: after the
root).  A stateful sampler advances by the token it returned."""


def verify(tree: DraftTree, draw: Draw, ends: Callable[[int], bool]) -> Verdict:
    """Walk the tree along tokens drawn from the target.

    At each node ONE token is drawn.  If the tree has it as a child, the walk goes on there; otherwise it is the
    bonus token and the walk ends.  `ends(token)` also ends it: the answer stops at that token, and nothing behind
    it is drawn.  Returns 1..depth+1 emitted tokens and the nodes they matched.

    Lossless: the children are fixed before the draw, so each emitted token has exactly the target's law, whatever
    the drafter proposed; the drafter only decides how many draws one target pass serves.  It is the same law as
    accept / zero / renormalise over the children (EAGLE's code, SpecInfer), in one draw per token.
    """
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    tokens: list[int] = []
    accepted: list[int] = []
    node: int | None = ROOT
    while node is not None:
        token = draw(node)
        tokens.append(token)
        node = child.get((node, token))
        if node is not None:
            accepted.append(node)
        if ends(token):
            break
    return Verdict(tokens, accepted)
