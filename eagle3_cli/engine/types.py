"""The records that flow through one round of decoding.

Positions count tokens from 0.  P is the number of committed tokens (cells in the target's KV cache); the
root is the last emitted token and sits at position P, not yet in the cache.  A node at depth d stands for a
token at position P + d.  Feature g[p] is the fused hidden state of committed position p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

DRAFTED, LOOKED_UP = 1, 2  # where a node comes from: the drafter, an n-gram match, or (3) both
SOURCES = {DRAFTED: "drafter", LOOKED_UP: "lookup", DRAFTED | LOOKED_UP: "both"}


@dataclass(frozen=True)
class DraftTree:
    """Proposed continuations of the root, depth first: a node is followed by its most probable child, if it has one.

    tokens   target vocabulary ids
    parents  index of the parent node, -1 for children of the root
    depths   1 for children of the root
    logps    natural log of the path probability under the drafter; never rises from parent to child.  -inf where the
             drafter did not propose the path
    sources  DRAFTED, LOOKED_UP or their sum
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    depths: Sequence[int] = ()
    logps: Sequence[float] = ()
    sources: Sequence[int] = ()

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
class Likelihood:
    """What the target itself thought, before any sampler: natural logs of the softmax of its logits.

    logp   of the token that was drawn
    top    (token, logp) of the likeliest ones, best first
    """

    logp: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Piece:
    """One emitted token as the caller sees it.

    text          characters that became certain with this token; may be empty
    token         target vocabulary id
    source        what had proposed it: DRAFTED, LOOKED_UP or their sum; 0: nothing had
    finish_reason None, or for the last piece "stop" (end token or stop string) or "length".  The last piece of
                  an answer that an end token ended carries token None: the end token is not part of the answer.
    likelihood    of this token and its rivals, where it was asked for
    """

    text: str
    token: int | None
    source: int = 0
    finish_reason: str | None = None
    likelihood: Likelihood | None = None

    @property
    def from_draft(self) -> bool:
        return self.source != 0


@dataclass(frozen=True)
class RoundRecord:
    """One round, for who watches.

    root      the token that the tree grows from; it sits at position `past`
    tree      what was verified
    verdict   what was emitted, and the nodes that it went along
    asked     the drafter was asked, perhaps in vain
    draft_s, verify_s, seconds   in passes of the drafter, in the pass of the target, in all
    plain_s   a pass of the target over one row, as far as the budget knows; None where it does not
    """

    root: int
    past: int
    tree: DraftTree
    verdict: Verdict
    asked: bool
    draft_s: float
    verify_s: float
    seconds: float
    plain_s: float | None


@dataclass(frozen=True)
class Watch:
    """What a caller wants to see beside the answer.

    likeliest   so many of the target's likeliest tokens at every token, with their probabilities; None: none, not even
                the token's own
    rounds      called after every round
    prefill     called after every chunk of the prompt: its tokens that are done, and how many it has
    """

    likeliest: int | None = None
    rounds: Callable[[RoundRecord], None] | None = None
    prefill: Callable[[int, int], None] | None = None


@dataclass
class Statistics:
    """Counts and seconds of one answer.  `timings()` and `speculative()` are the JSON blocks.

    depth_tried[d-1]     rounds whose walk stood at depth d-1 with children to match
    depth_accepted[d-1]  rounds that matched one of them
    sizes                nodes of a tree -> rounds with such a tree
    drafted_from, accepted_from   DRAFTED, LOOKED_UP or their sum -> nodes
    draft_rounds         rounds in which the drafter was asked
    budget               what the budget knows at the end of the answer; None where it did not choose
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
    sizes: dict[int, int] = field(default_factory=dict)
    drafted_from: dict[int, int] = field(default_factory=dict)
    accepted_from: dict[int, int] = field(default_factory=dict)
    draft_rounds: int = 0
    budget: dict[str, object] | None = None
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
        self.sizes[len(tree)] = self.sizes.get(len(tree), 0) + 1
        if not tree:
            return
        for source in tree.sources:
            self.drafted_from[source] = self.drafted_from.get(source, 0) + 1
        for node in verdict.accepted if tree.sources else ():
            source = tree.sources[node]
            self.accepted_from[source] = self.accepted_from.get(source, 0) + 1
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
    def speed_up(self) -> float | None:
        """Over plain decoding, as far as the budget knows what that takes; None where nothing is known."""
        plain_ms = self.budget and self.budget.get("plain_ms")
        rate = self.tokens_per_second
        return rate * float(plain_ms) / 1e3 if rate and isinstance(plain_ms, float) else None

    @property
    def best_fixed(self) -> str | None:
        """The fixed setting that was best for all answers so far, by the budget's estimate; None without one."""
        found = self.budget and self.budget.get("hindsight")
        return f"{found['best_fixed']} (about {found['best_fixed_speed_up']:.2f})" if isinstance(found, dict) else None

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
            "rounds_by_nodes": {str(nodes): self.sizes[nodes] for nodes in sorted(self.sizes)},
            "draft_rounds": self.draft_rounds,
            "sources": {
                name: {"drafted": self.drafted_from[source], "accepted": self.accepted_from.get(source, 0)}
                for source, name in SOURCES.items()
                if source in self.drafted_from
            },
            "speed_up": self.speed_up,
            "budget": self.budget,
        }
