"""One token's journey: the round of EAGLE-3 decoding, and the answer made of rounds.

    draft    the drafter, fed with the target's hidden states, proposes a tree of continuations of the root
    verify   the target computes the whole tree in one forward pass
    walk     one token is drawn from the target at a time; the walk goes on while the tree contains it
    commit   the accepted path stays in the caches, and its hidden states go to the drafter

Plain decoding is the same loop with an empty tree; where nobody looks at every round, several are one call.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from ..errors import PromptError
from ..llama import Model
from ..settings import Limits, SamplingSettings, TreeShape
from .budget import Budget, Round
from .calibration import temperature_class
from .drafter import Drafter
from .lookup import Lookup, Match, common_length
from .sampler import Sampler
from .stream import AnswerText
from .target import Features, Target
from .tree import ROOT, FixedShape, Policy, cut
from .types import DRAFTED, NO_TREE, DraftTree, Likelihood, Piece, RoundRecord, Statistics, Verdict, Watch
from .verify import verify

NOTHING = Watch()
MOST_AT_A_TIME = 64  # plain rounds in one call


class Decoder:
    """A target and perhaps a drafter, with their caches.  One answer at a time; not thread-safe.

    shape       the draft tree of every round, or the largest where a budget chooses it
    budget      chooses the tree of each round; None: it is always `shape`
    lookup      finds n-gram matches in prompt and answer; None: it is not asked
    chain       every tree is a chain: drafted, or the best match
    committed   the tokens whose cells are in the target's cache
    """

    def __init__(
        self,
        model: Model,
        target: Target,
        drafter: Drafter | None,
        shape: TreeShape,
        budget: Budget | None = None,
        lookup: Lookup | None = None,
        chain: bool = False,
    ) -> None:
        self.model, self.target, self.drafter, self.shape = model, target, drafter, shape
        self.budget, self.lookup, self.chain = budget, lookup, chain
        self.committed: list[int] = []

    @property
    def cells(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.target.context.cells

    # --- an answer

    def answer(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        limits: Limits,
        stats: Statistics,
        watch: Watch = NOTHING,
    ) -> Generator[Piece, None, None]:
        """Emit the answer to a prompt, token by token.  sampling: with a seed.

        PromptError before the first piece if the prompt leaves no room or has a token that the model lacks.  The caches
        stay right if the caller closes the iterator early or an exception passes through: they then hold what was
        committed.
        """
        room = self.cells - len(prompt)
        if not prompt or room < 1:
            raise PromptError(
                f"prompt: expected 1 to {self.cells - 1} tokens (the context holds {self.cells}), got {len(prompt)}.",
                "Shorten it, or raise --ctx-size.",
            )
        if not 0 <= min(prompt) <= max(prompt) < self.model.n_vocab:
            raise PromptError(
                f"prompt: expected token ids from 0 to {self.model.n_vocab - 1}, got {min(prompt)} to {max(prompt)}."
            )
        most = room if limits.max_tokens is None else min(room, limits.max_tokens)
        if self.budget is not None:
            self.budget.begin(temperature_class(sampling.temperature), len(prompt))
        sampler = Sampler(self.model, sampling, prompt, self.cells)
        try:
            yield from _Answer(self, sampler, limits, most, stats, watch).pieces(prompt)
        finally:
            sampler.close()
            if self.budget is not None:
                stats.budget = self.budget.report()

    def prefill(self, prompt: Sequence[int], progress: Callable[[int, int], None] | None = None) -> int:
        """Bring the caches to exactly this prompt, computing only what is new; returns how many tokens were reused.
        At least the last token is computed, for its logits."""
        if self.budget is not None:
            self.target.captures = self.budget.expects
        same = common_length(self.committed, prompt[:-1])

        def seen(tokens: Sequence[int], features: Features | None) -> None:
            self.commit(tokens, features)
            if progress is not None:
                progress(len(self.committed), len(prompt))

        try:
            same = self._reuse(same)
            self.target.prefill(prompt[same:], seen)
        except BaseException:
            self.truncate(len(self.committed))
            raise
        return same

    def _reuse(self, past: int) -> int:
        """Keep exactly the first `past` committed tokens, or none of a recurrent target's; returns how many.  With and
        without a drafter alike, so that both compute the rest of a prompt in the same batches.  The drafter may have
        lost the newest feature; it is computed again."""
        del self.committed[past:]  # first, for an interruption below cuts everything to what is committed
        past = self.target.truncate(past)
        del self.committed[past:]
        lost = self.drafter is not None and self.drafter.truncate(past) < past
        if self.lookup is not None:
            self.lookup.truncate(past)
        if self.drafter is not None and lost:
            newest = self.committed[-1:]
            self.drafter.extend(newest, self.target.newest_features(newest[0]) if self.target.captures else None)
        return past

    def logits_after(self, tokens: Sequence[int]) -> Any:
        """The target's logits after these tokens, float32 [n_vocab], a copy.  Reuses what the cache holds; the last
        token is computed alone if all others are in it."""
        self.prefill(tokens)
        return self.target.logits(ROOT)

    def commit(self, tokens: Sequence[int], features: Features | None) -> None:
        """Take note of tokens whose cells the target has kept, and let the drafter learn from them."""
        if self.drafter is not None:
            self.drafter.extend(tokens, features)
        if self.lookup is not None:
            self.lookup.extend(tokens)
        self.committed.extend(tokens)

    def truncate(self, past: int) -> None:
        """Cut both caches back to at most `past` committed tokens.  Also cleans up after an interrupted round."""
        del self.committed[past:]
        asked = past if self.drafter is None else self.drafter.truncate(past)
        keep = self.target.truncate(asked)
        if self.drafter is not None and keep < asked:
            self.drafter.truncate(keep)
        del self.committed[keep:]
        if self.lookup is not None:
            self.lookup.truncate(keep)


class _Answer:
    """The state of one answer: what was emitted, and where it must end."""

    def __init__(
        self, decoder: Decoder, sampler: Sampler, limits: Limits, most: int, stats: Statistics, watch: Watch
    ) -> None:
        self.decoder, self.sampler, self.most, self.stats = decoder, sampler, most, stats
        self.watch = watch
        self.text = AnswerText(decoder.model.piece, decoder.model.is_end, limits, most)
        # of this round: text, token, finish reason, likelihood
        self.ready: list[tuple[str, int | None, str | None, Likelihood | None]] = []
        self.likelihood: Likelihood | None = None  # of the newest draw
        self.policy: Policy | None = None  # of the round in progress
        # rounds without a tree may come several in a call, for nobody has to look at each
        self.unseen = sampler.address is not None and not limits.stop and watch.rounds is watch.likeliest is None
        self.vocab = 0 if limits.ignore_eos else decoder.model.vocab
        self.verify_s = 0.0  # of its pass of the target

    def pieces(self, prompt: Sequence[int]) -> Iterator[Piece]:
        decoder, stats = self.decoder, self.stats
        started = time.perf_counter()
        stats.cached_tokens = decoder.prefill(prompt, self.watch.prefill)
        stats.prompt_tokens = len(prompt)
        root = self._draw(ROOT)
        self._ends(root)
        stats.prefill_s = time.perf_counter() - started
        self._reset_clocks()
        yield from self._release(())
        while self.text.finish_reason is None:
            started = time.perf_counter()
            try:
                self.policy = self._policy(root)
                at_once = self.policy is None and self.unseen and decoder.target.quick
                root, sources = self.plain_rounds(root, started) if at_once else self.one_round(root, started)
            except BaseException:
                decoder.truncate(len(decoder.committed))
                raise
            yield from self._release(sources)

    def one_round(self, root: int, started: float) -> tuple[int, Sequence[int]]:
        """A round, and what is learned from it.  Returns the next root, and where the first tokens came from."""
        stats, drafter_s = self.stats, self.stats.drafter_s
        tree, verdict = self.round(root)
        stats.record(tree, verdict)
        self._learn(tree, verdict, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        stats.decode_s += seconds
        self._read_clocks()
        if self.watch.rounds is not None:
            self.watch.rounds(self._record(tree, verdict, stats.drafter_s - drafter_s, seconds))
        return verdict.tokens[-1], [tree.sources[i] if tree.sources else DRAFTED for i in verdict.accepted]

    def plain_rounds(self, root: int, started: float) -> tuple[int, Sequence[int]]:
        """Rounds without a tree, in one call (native/plain.c).  Returns the next root, and an empty sequence."""
        decoder, budget, lookup = self.decoder, self.decoder.budget, self.decoder.lookup
        most, repeating = min(self.most - self.text.emitted, MOST_AT_A_TIME), 0
        if budget is not None:
            most = min(most, budget.resting)
            if lookup is not None and budget.long_enough <= lookup.longest:
                repeating = int(budget.long_enough)
        text = lookup.text(root) if repeating and lookup is not None else array("i", [root])
        rounds = decoder.target.decode_plain(
            text, most, vocab=self.vocab, sampler=self.sampler.address or 0, repeating=repeating
        )
        decoder.commit([root, *rounds.tokens[:-1]], None)
        for token, seconds in zip(rounds.tokens, rounds.seconds, strict=True):
            self.stats.record(NO_TREE, Verdict([token], []))
            self._ends(token)
            if budget is not None:
                budget.rest(1, seconds)
        self.sampler.seconds += rounds.sampling
        self.stats.decode_s += time.perf_counter() - started
        self._read_clocks()
        return rounds.tokens[-1], ()

    def round(self, root: int) -> tuple[DraftTree, Verdict]:
        """Draft, verify, walk, commit."""
        decoder = self.decoder
        tree = self._draft(root)
        started = time.perf_counter()
        decoder.target.verify(root, tree)
        self.verify_s = time.perf_counter() - started
        verdict = verify(tree, self._draw, self._ends)
        path = verdict.accepted[: len(verdict.tokens) - 1]  # the last emitted token is the next root
        features = decoder.target.commit(path)
        decoder.commit([root, *verdict.tokens[:-1]], features)
        return tree, verdict

    def _draft(self, root: int) -> DraftTree:
        decoder, policy = self.decoder, self.policy
        if policy is None:
            return NO_TREE
        if isinstance(policy, Round):
            decoder.target.captures = policy.captures
        if decoder.drafter is not None and policy.asks:
            self.stats.draft_rounds += 1
            return decoder.drafter.draft(root, policy)
        return cut(policy.pool, policy.size())

    @property
    def room(self) -> tuple[int, int]:
        """Depth and nodes of the largest tree: no deeper than the answer can still get, and it has to fit the cache."""
        decoder = self.decoder
        return max(self.most - self.text.emitted - 1, 0), max(decoder.cells - len(decoder.committed) - 1, 0)

    def _policy(self, root: int) -> Policy | None:
        """How this round's tree grows; None: there is none."""
        decoder, budget, lookup, shape = self.decoder, self.decoder.budget, self.decoder.lookup, self.decoder.shape
        if budget is not None and budget.resting > 0 and not (lookup and lookup.repeats(root, budget.long_enough)):
            return None
        depth, nodes = self.room
        if depth < shape.depth or nodes < shape.nodes:
            shape = TreeShape(max(1, min(depth, shape.depth)), shape.width, min(nodes, shape.nodes) if depth else 0)
        matches: Sequence[Match] = ()
        if lookup is not None:
            matches = lookup.find(root, min(depth, shape.nodes), count=1 if decoder.chain else 2)
        if budget is not None:
            ready = decoder.drafter is not None and decoder.drafter.ready
            return budget.round(shape, matches, ready, len(decoder.committed), decoder.chain)
        if shape.nodes < 1 or (decoder.drafter is None and not matches):
            return None
        policy = FixedShape(shape)
        for match in () if decoder.chain and decoder.drafter is not None else matches:
            policy.pool.add_match(match.tokens, match.length, match.rank)
        return policy

    def _draw(self, node: int) -> int:
        target = self.decoder.target
        if self.sampler.is_argmax:
            token = target.argmax(node)
        else:
            token = self.sampler.draw(target.context, target.logits_row(node))
        if self.watch.likeliest is not None:
            self.likelihood = target.likelihood(node, token, self.watch.likeliest)
        return token

    def _ends(self, token: int) -> bool:
        """Take an emitted token; does the answer end with it?"""
        text, emitted = self.text.take(token)
        likelihood = self.likelihood if emitted is not None else None
        self.ready.append((text, emitted, self.text.finish_reason, likelihood))
        return self.text.finish_reason is not None

    def _release(self, sources: Sequence[int]) -> Iterator[Piece]:
        """Hand out the round's pieces; sources: of the first ones, which had been proposed."""
        ready, self.ready = self.ready, []
        self.stats.completion_tokens = self.text.emitted
        for i, (text, token, finish_reason, likelihood) in enumerate(ready):
            yield Piece(text, token, sources[i] if i < len(sources) else 0, finish_reason, likelihood)

    def _record(self, tree: DraftTree, verdict: Verdict, draft_s: float, seconds: float) -> RoundRecord:
        decoder = self.decoder
        past = len(decoder.committed) - len(verdict.tokens)
        asked = self.policy is not None and self.policy.asks and decoder.drafter is not None
        plain_s = decoder.budget.machine.target.seconds if decoder.budget is not None else 0.0
        return RoundRecord(
            decoder.committed[past], past, tree, verdict, asked, draft_s, self.verify_s, seconds, plain_s or None
        )

    def _learn(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """Tell the budget what the round cost and emitted."""
        if self.decoder.budget is None:
            return
        if self.policy is None:
            self.decoder.budget.rest(len(verdict.tokens), self.verify_s)
            return
        assert isinstance(self.policy, Round)
        drafter = self.decoder.drafter
        inside = self.verify_s + self.sampler.seconds - self.stats.sampler_s
        inside += drafter.seconds - self.stats.drafter_s if drafter is not None else 0.0
        self.decoder.budget.learn(self.policy, verdict.tokens, len(tree), self.verify_s, max(seconds - inside, 0.0))

    def _reset_clocks(self) -> None:
        self.decoder.target.context.seconds = self.sampler.seconds = 0.0
        if self.decoder.drafter is not None:
            self.decoder.drafter.seconds = 0.0

    def _read_clocks(self) -> None:
        self.stats.target_s = self.decoder.target.context.seconds
        self.stats.sampler_s = self.sampler.seconds
        if self.decoder.drafter is not None:
            self.stats.drafter_s = self.decoder.drafter.seconds
