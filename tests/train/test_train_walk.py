"""Walking rounds: by hand, and against the real decoding loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from core_tools import Stated, conversations, export, fit, make, random_samples

from eagle3_cli.engine import load_engine
from eagle3_cli.engine.types import Statistics
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings
from eagle3_cli.train import walk as walk_module
from eagle3_cli.train.model import Drafter, collate
from eagle3_cli.train.walk import Answer, Walk, answers_of, match_rows, simulate, walk

GREEDY = SamplingSettings(temperature=0)
CHAIN, LONGEST = 3, 24


class Samples:
    def __init__(self, samples: list[Stated]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, i: int) -> Stated:
        return self.samples[i]


def rows(text: str) -> np.ndarray:
    return np.array([[c == "1" for c in row] for row in text.split()])


def test_runs_of_answer_tokens_are_found() -> None:
    assert answers_of(np.array([0, 1, 1, 0, 0, 1], bool)) == [Answer(1, 2), Answer(5, 5)]
    assert answers_of(np.array([1, 1], bool)) == [Answer(0, 1)]
    assert answers_of(np.zeros(4, bool)) == []


def test_a_walk_by_hand() -> None:
    """Tokens 0..9, the answer is 3..9, chains of 2.  Roots: 3 (row 2, both right), 6 (row 5, none), 7 (row 6, one),
    and 9 ends it."""
    matches = rows("00 00 11 11 11 01 10 11 11")
    found = walk(matches, [Answer(3, 9)], 2)
    assert found == Walk(rounds=3, emitted=6, tried=[3, 2], accepted=[2, 1])
    assert found.acceptance_length == 2


def test_a_draft_that_reaches_the_end_emits_no_bonus() -> None:
    """The draft of row 0 is t[2] and t[3], where t[3] ends the answer."""
    matches = rows("110 100 000")
    assert walk(matches, [Answer(1, 3)], 3) == Walk(1, 2, [1, 1, 0], [1, 1, 0])
    assert walk(matches, [Answer(1, 3, cut=True)], 3) == Walk(1, 2, [1, 0, 0], [1, 0, 0])


def test_answers_of_one_token_have_no_rounds() -> None:
    assert walk(rows("11 11"), [Answer(1, 1)], 2).acceptance_length is None


def test_n_alpha_counts_rows_whose_earlier_drafts_were_right(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = random_samples([6])[0]
    matches = rows("001 110 100 000 000")  # the answer is 3..5; row 1 is the first to predict one of its tokens
    counted = rows("011 111 110 100 000")
    monkeypatch.setattr(walk_module, "match_rows", lambda *_: (matches[None], counted[None]))
    found = simulate(make(), Samples([sample]), [0], chain=2, depth=3)
    assert found["n_alpha"] == [2 / 3, 1 / 2, 0.0]


def test_matches_are_the_favourites_that_come_true() -> None:
    drafter, samples = make(np.arange(0, tiny.VOCAB, 2)), random_samples([14, 9])
    matches, counted = match_rows(drafter, collate(samples), 3)
    with torch.no_grad():
        outputs = drafter.unroll(collate(samples), 3)
    for b, sample in enumerate(samples):
        n = len(sample.tokens)
        for p in range(n - 1):
            for i in range(3):
                in_answer = p + 2 + i < n and bool(sample.answer[p + 2 + i])
                assert counted[b, p, i] == in_answer
                with torch.no_grad():
                    favourite = drafter.d2t[drafter.logits(outputs[i][b, p]).argmax()]
                assert matches[b, p, i] == (in_answer and favourite == sample.tokens[p + 2 + i])


def test_batches_of_any_size_give_the_same_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = conversations(5)
    drafter = make()
    fit(drafter, samples, 6)
    together = simulate(drafter, Samples(samples), range(5))
    monkeypatch.setattr(walk_module, "BATCH_TOKENS", 1)
    assert simulate(drafter, Samples(samples), range(5)) == together
    assert together["tau"] > 1


def test_all_prompt_samples_have_no_acceptance_length() -> None:
    sample = random_samples([8])[0]
    found = simulate(make(), Samples([replace(sample, answer=np.zeros(8, bool))]), [0])
    assert found["tau"] is None
    assert found["n_alpha"] == [None] * 6


# --- against real decoding


@pytest.fixture(scope="module")
def trained() -> tuple[Drafter, list[Stated]]:
    """Half-trained, so that rounds end at every depth."""
    samples = conversations(8, LONGEST)
    drafter = make(scale=True)
    fit(drafter, samples[:4], 10)
    return drafter, samples


@pytest.fixture(scope="module")
def engine(
    trained: tuple[Drafter, list[Stated]], tiny_target: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    path: Path = export(trained[0], tiny_target.path, tmp_path_factory.mktemp("walk"))[0]
    runtime = RuntimeSettings(**tiny.EXACT, ctx_size=256, batch=64, threads=1)
    with load_engine(PairSettings(tiny_target.path, path, depth=CHAIN, width=1, nodes=CHAIN), runtime) as engine:
        yield engine


def test_simulated_rounds_are_those_of_real_decoding(trained: tuple[Drafter, list[Stated]], engine: Any) -> None:
    drafter, samples = trained
    depths: set[int] = set()
    for sample in samples:
        prompt = int(np.argmax(sample.answer))
        tokens = sample.tokens.tolist()
        pieces = list(engine.stream(tokens[:prompt], GREEDY, Limits(max_tokens=LONGEST)))
        assert [piece.token for piece in pieces] == tokens[prompt:]
        real: Statistics = engine.statistics
        matches, _ = match_rows(drafter, collate([sample]), CHAIN)
        found = walk(matches[0], [Answer(prompt, len(tokens) - 1, cut=True)], CHAIN)
        assert (found.rounds, found.emitted) == (real.rounds, real.round_tokens)
        counts = [(tried, accepted) for tried, accepted in zip(found.tried, found.accepted, strict=True) if tried]
        by_depth: Any = real.speculative()["accepted_by_depth"]
        assert counts == [(depth["tried"], depth["accepted"]) for depth in by_depth]
        depths |= {d for d in range(CHAIN) if found.accepted[d] < found.tried[d]}
    assert depths == {0, 1, 2}  # rounds ended at every depth


def test_simulated_tau_is_that_of_real_decoding(trained: tuple[Drafter, list[Stated]], engine: Any) -> None:
    drafter, samples = trained
    total = Statistics()
    for sample in samples:
        prompt = int(np.argmax(sample.answer))
        for _ in engine.stream(sample.tokens.tolist()[:prompt], GREEDY, Limits(max_tokens=LONGEST)):
            pass
        total.rounds += engine.statistics.rounds
        total.round_tokens += engine.statistics.round_tokens
    found = simulate(drafter, Samples(samples), range(len(samples)), chain=CHAIN)
    assert found["tau"] == total.acceptance_length
    assert found["tau_by_chain"][CHAIN - 1] == found["tau"]
    assert 1.2 < found["tau"] < 3.9
