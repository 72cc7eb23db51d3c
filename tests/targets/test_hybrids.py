"""Targets with recurrent layers: a chain where llama.cpp can take their state back, else plain decoding alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tiny
from architectures import HYBRIDS, OTHER_HYBRIDS
from engines import GREEDY, PROMPT, answer, close, drafter_for, running, samplings, script
from scripted import Propose, tree_of
from seconds import tell_seconds

from eagle3_cli.engine import Engine, load_engine
from eagle3_cli.engine.tree import ROOT
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.errors import OptionError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape

CHAIN = (5, 1, 5)
RUNTIME = RuntimeSettings(**{**tiny.EXACT, "ctx_size": 256, "batch": 16, "threads": 1})
NAMES = [*HYBRIDS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_HYBRIDS)]
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.parametrize("name", NAMES)]


def chain(tokens: Sequence[int]) -> DraftTree:
    return tree_of([(token, i - 1, i + 1) for i, token in enumerate(tokens)])


def partly_right(text: Sequence[int], seed: int) -> Propose:
    """Chains that go along with a text for a random number of tokens, none and all of them included."""
    rng = np.random.default_rng(seed)

    def propose(so_far: list[int], shape: TreeShape) -> DraftTree:
        length = int(rng.integers(0, min(shape.depth, shape.nodes) + 1))
        coming = list(text[len(so_far) : len(so_far) + length])
        right = int(rng.integers(0, length + 1))
        return chain([token if i < right else (token + 1) % 256 for i, token in enumerate(coming)])

    return propose


def guess(engine: Engine, text: Sequence[int], seed: int) -> None:
    script(engine, partly_right(text, seed))


def test_hidden_states_and_logits_are_the_references_after_every_step_back(models, name):
    """Of a prompt in several batches, of a chain, and of what follows each part of it that may be kept."""
    model = models(name)
    proposed = [10, 12, 15, 9]
    with running(model.path, drafter_for(model), CHAIN) as engine:
        for kept in range(len(proposed) + 1):
            engine.decoder.truncate(0)
            target, chunks = engine.decoder.target, []
            target.prefill(PROMPT, lambda tokens, features: chunks.append(features.copy()))  # noqa: B023
            text = [*PROMPT, 99, *proposed]
            logits, inputs = model.read(text)
            features = inputs[:, model.aux].reshape(len(text), -1)
            close(np.concatenate(chunks), features[: len(PROMPT)], model)
            target.verify(99, chain(proposed))
            for node in range(ROOT, len(proposed)):
                close(target.logits(node), logits[len(PROMPT) + 1 + node], model)
            part = slice(len(PROMPT), len(PROMPT) + 1 + kept)
            close(target.commit(range(kept)), features[part], model)
            target.verify(7, DraftTree())
            close(target.logits(ROOT), model.read([*text[: part.stop], 7])[0][-1], model)


def test_answers_are_those_of_plain_decoding(models, name):
    model = models(name)
    with running(model.path, None) as plain, running(model.path, drafter_for(model), CHAIN) as engine:
        for seed, sampling in enumerate(samplings(model)):
            engine.decoder.truncate(0)
            wanted = answer(plain, sampling)
            assert len({*wanted}) > 4
            assert answer(engine, sampling) == wanted
            assert engine.statistics.drafted > 50
            assert set(engine.statistics.sizes) <= {0, 1, 2, 3, 4, 5}
            drafter = engine.decoder.drafter
            guess(engine, [*PROMPT, *wanted], seed)
            assert answer(engine, sampling) == wanted
            assert engine.statistics.accepted > 5
            assert engine.statistics.rounds > 5
            engine.decoder.drafter = drafter


LOOP = SamplingSettings(temperature=0.0, seed=0, grammar='root ::= ("abcdefg")*')


@pytest.mark.parametrize("sampling", [GREEDY, LOOP], ids=["greedy", "loop"])
@pytest.mark.parametrize("drafts", [True, False], ids=["drafter", "lookup"])
def test_a_chosen_chain_and_matches_of_the_text_never_make_a_tree(models, name, drafts, sampling, monkeypatch):
    model = models(name)
    with running(model.path, None) as plain:
        wanted = answer(plain, sampling, most=100)
    draft = drafter_for(model) if drafts else None
    with load_engine(PairSettings(model.path, draft, lookup=True), RUNTIME) as engine:
        tell_seconds(engine.decoder.budget, monkeypatch)
        trees: list[DraftTree] = []
        verify = engine.decoder.target.verify
        monkeypatch.setattr(
            engine.decoder.target, "verify", lambda root, tree: (trees.append(tree), verify(root, tree))
        )
        assert answer(engine, sampling, most=100) == wanted
    assert all(list(tree.parents) == list(range(-1, len(tree) - 1)) for tree in trees)
    if sampling is LOOP:
        assert max(map(len, trees)) > 1


def test_a_text_that_goes_on_is_kept_and_one_that_parts_is_computed_anew(models, name):
    model = models(name)
    with running(model.path, None) as plain, running(model.path, drafter_for(model), CHAIN) as engine:
        first = answer(engine)
        more = [*PROMPT, *first, *PROMPT[:9]]
        assert answer(engine, prompt=more) == answer(plain, prompt=more)
        assert engine.statistics.cached_tokens == len(PROMPT) + len(first) - 1
        other = [*PROMPT[:30], 3, 4, 5]
        assert answer(engine, prompt=other) == answer(plain, prompt=other)
        assert engine.statistics.cached_tokens == 0


def test_an_answer_that_is_left_early_leaves_a_usable_state(models, name):
    model = models(name)
    with running(model.path, None) as plain, running(model.path, drafter_for(model), CHAIN) as engine:
        pieces = engine.stream(PROMPT, GREEDY, Limits(20))
        taken = [next(pieces).token for _ in range(5)]
        pieces.close()
        more = [*PROMPT, *taken, 8, 9]
        assert answer(engine, prompt=more) == answer(plain, prompt=more)


@pytest.mark.parametrize("where", ["verify", "commit"])
def test_an_error_within_a_round_drops_the_state(models, name, monkeypatch, where):
    model = models(name)
    with running(model.path, None) as plain, running(model.path, drafter_for(model), CHAIN) as engine:
        target = engine.decoder.target
        real, calls = getattr(target, where), []

        def fails(*args):
            calls.append(1)
            if len(calls) == 3:
                if where == "verify":
                    real(*args)
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(target, where, fails)
        with pytest.raises(KeyboardInterrupt):
            answer(engine)
        assert engine.decoder.committed == []
        assert target.context.last_position() == -1
        assert answer(engine) == answer(plain)


def test_a_batch_of_one_row_is_enough(models, name):
    """llama.cpp asserts that a batch has room for more rows than it steps back."""
    model = models(name)
    with running(model.path, None) as plain, running(model.path, drafter_for(model), CHAIN, batch=1) as engine:
        assert answer(engine) == answer(plain)


@pytest.mark.parametrize("cells", [2, 3, 5, 9])
def test_the_smallest_contexts(models, name, cells):
    model = models(name)
    with (
        running(model.path, None, ctx_size=cells) as plain,
        running(model.path, drafter_for(model), CHAIN, ctx_size=cells) as engine,
    ):
        assert answer(engine, prompt=PROMPT[:1]) == answer(plain, prompt=PROMPT[:1])


def test_a_tree_is_refused_and_depth_follows_the_tokens(models, name):
    model = models(name)
    with (
        pytest.raises(OptionError, match=r"--draft-width 3: target.gguf, .* has recurrent layers, which cannot hold a"),
        running(model.path, drafter_for(model), (4, 3, 8)),
    ):
        pass
    with load_engine(PairSettings(model.path, drafter_for(model), nodes=9), RUNTIME) as engine:
        assert engine.decoder.shape == TreeShape(9, 1, 9)
    with load_engine(PairSettings(model.path, drafter_for(model), depth=3), RUNTIME) as engine:
        assert engine.decoder.shape == TreeShape(3, 1, 3)
