"""The records that flow through one round of decoding.

Positions count tokens from 0.  P is the number of committed tokens (cells in the target's KV cache); the
root is the last emitted token and sits at position P, not yet in the cache.  A node at depth d stands for a
token at position P + d.  Feature g[p] is the fused hidden state of committed position p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DraftTree:
    """Proposed continuations of the root, depth first: a node is followed by its most probable child, if it has one.

    tokens   target vocabulary ids
    parents  index of the parent node, -1 for children of the root
    depths   1 for children of the root
    logps    natural log of the path probability under the drafter; never rises from parent to child
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    depths: Sequence[int] = ()
    logps: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.tokens)


NO_TREE = DraftTree()


@dataclass(frozen=True)
class Verdict:
    """What one walk emitted.

    tokens    1..depth+1 token ids drawn from the target, in order
    accepted  the nodes that the first len(accepted) tokens matched; all but at most the last token came from
              the drafter (the last one too where the walk was cut at it)
    """

    tokens: Sequence[int]
    accepted: Sequence[int]


@dataclass(frozen=True)
class Piece:
    """One emitted token as the caller sees it.

    text          characters that became certain with this token; may be empty
    token         target vocabulary id
    from_draft    the drafter had proposed it
    finish_reason None, or for the last piece "stop" (end token or stop string) or "length".  The last piece of
                  an answer that an end token ended carries token None: the end token is not part of the answer.
    """

    text: str
    token: int | None
    from_draft: bool = False
    finish_reason: str | None = None


@dataclass
class Statistics:
    """Counts and seconds of one answer.  `timings()` and `speculative()` are the JSON blocks.

    depth_tried[d-1]     rounds whose walk stood at depth d-1 with children to match
    depth_accepted[d-1]  rounds that matched one of them
    """

    enabled: bool = False
    reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    depth_tried: list[int] = field(default_factory=list)
    depth_accepted: list[int] = field(default_factory=list)
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    target_s: float = 0.0
    drafter_s: float = 0.0
    sampler_s: float = 0.0

    def record(self, tree: DraftTree, verdict: Verdict) -> None:
        """Count one round."""
        self.rounds += 1
        self.round_tokens += len(verdict.tokens)
        self.drafted += len(tree)
        self.accepted += len(verdict.accepted)
        inner = set(tree.parents)
        reached = [-1, *verdict.accepted][: len(verdict.tokens)]
        while len(self.depth_tried) < len(reached):
            self.depth_tried.append(0)
            self.depth_accepted.append(0)
        for depth, node in enumerate(reached):
            self.depth_tried[depth] += node in inner
            self.depth_accepted[depth] += depth < len(verdict.accepted)

    @property
    def acceptance_length(self) -> float | None:
        """tau: emitted tokens per round, the bonus token included."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that rounds emitted, per second of decoding; the first token belongs to the prefill."""
        return self.round_tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def other_s(self) -> float:
        """Decode time outside llama.cpp calls."""
        return max(0.0, self.decode_s - self.target_s - self.drafter_s - self.sampler_s)

    def timings(self) -> dict[str, float | None]:
        return {
            "load_s": self.load_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "decode_tokens_per_second": self.tokens_per_second,
            "target_s": self.target_s,
            "drafter_s": self.drafter_s,
            "sampler_s": self.sampler_s,
            "other_s": self.other_s,
        }

    def speculative(self) -> dict[str, object]:
        by_depth = [
            {"depth": d + 1, "accepted": a, "tried": t}
            for d, (a, t) in enumerate(zip(self.depth_accepted, self.depth_tried, strict=True))
            if t
        ]
        return {
            "enabled": self.enabled,
            "reason": self.reason,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "accepted_by_depth": by_depth,
            "mean_nodes": self.drafted / self.rounds if self.rounds else None,
        }
