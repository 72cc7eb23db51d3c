"""Several prompts in one context say what each of them says alone.

Tokens are compared exactly: the tiny target and its KV cache are float32, and its favourites are clear.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny

from eagle3_cli.engine.parallel import MARGIN, MOST, Parallel, Request, at_once
from eagle3_cli.errors import LlamaError, OptionError
from eagle3_cli.settings import Limits, RuntimeSettings, SamplingSettings

GREEDY = SamplingSettings(temperature=0.0, seed=0)
LONGEST = 96


def prompt(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, tiny.END_OF_TEXT, rng.integers(1, 50))]


def requests(count: int) -> list[Request]:
    """Of many lengths, laws and limits."""
    laws = [
        GREEDY,
        SamplingSettings(seed=5),
        SamplingSettings(temperature=1.5, top_k=0, seed=6),
        SamplingSettings(repeat_penalty=1.3, repeat_last_n=-1, seed=7),
        SamplingSettings(temperature=0.0, grammar='root ::= "the" [a-z ]*', seed=8),
    ]
    return [
        Request(i, prompt(i), laws[i % len(laws)], Limits(max_tokens=1 + 7 * i % 40, stop=("he",) if i % 3 else ()))
        for i in range(count)
    ]


@pytest.fixture
def several(open_engine):
    """several(sequences, batch=64) -> (engine, Parallel); closed after the test."""
    opened = []

    def make(sequences, batch=64):
        engine = open_engine(batch=batch)
        runtime = RuntimeSettings(**{**tiny.EXACT, "threads": 1, "batch": batch})
        opened.append(Parallel(engine.decoder.model, runtime, False, sequences, LONGEST))
        return engine, opened[-1]

    yield make
    for parallel in opened:
        parallel.close()


def alone(engine, request):
    return list(engine.stream(request.prompt, request.sampling, request.limits))


@pytest.mark.parametrize(("sequences", "batch"), [(1, 64), (2, 8), (5, 64), (20, 16)])
def test_each_says_what_it_says_alone(several, sequences, batch):
    engine, parallel = several(sequences, batch)
    asked = requests(13)
    outcomes = {outcome.request.key: outcome for outcome in parallel.answers(iter(asked))}
    assert sorted(outcomes) == list(range(13))
    for request in asked:
        outcome = outcomes[request.key]
        assert outcome.error is None
        assert outcome.pieces == alone(engine, request)
        assert outcome.statistics.completion_tokens == engine.statistics.completion_tokens
        assert outcome.statistics.prompt_tokens == len(request.prompt)


def test_what_prompts_begin_with_alike_is_kept(several):
    engine, parallel = several(1)
    first, second = [*range(20), 30, 31], [*range(20), 40]
    found = list(parallel.answers(Request(i, p, GREEDY, Limits(max_tokens=5)) for i, p in enumerate((first, second))))
    assert [outcome.statistics.cached_tokens for outcome in found] == [0, 20]
    assert found[1].pieces == alone(engine, found[1].request)


def test_a_second_call_begins_anew(several):
    _, parallel = several(3)
    first = [outcome.pieces for outcome in parallel.answers(iter(requests(3)))]
    assert [outcome.pieces for outcome in parallel.answers(iter(requests(3)))] == first


def test_requests_are_taken_only_when_there_is_room(several):
    _, parallel = several(2)
    taken = []

    def feed():
        for request in requests(6):
            taken.append(request.key)
            yield request

    for done, _ in enumerate(parallel.answers(feed()), 1):
        assert len(taken) <= done + 1


def test_likelihoods_are_those_of_one_at_a_time(several):
    from eagle3_cli.engine.types import Watch

    engine, parallel = several(3)
    asked = [Request(i, prompt(i), GREEDY, Limits(max_tokens=4), likeliest=2) for i in range(3)]
    for outcome in parallel.answers(iter(asked)):
        request = outcome.request
        expected = list(engine.stream(request.prompt, GREEDY, request.limits, Watch(likeliest=2)))
        for ours, theirs in zip(outcome.pieces, expected, strict=True):
            assert ours.likelihood.logp == pytest.approx(theirs.likelihood.logp, abs=1e-4)
            assert [token for token, _ in ours.likelihood.top] == [token for token, _ in theirs.likelihood.top]


def test_one_that_cannot_begin_does_not_stop_the_others(several):
    _, parallel = several(2)
    bad = SamplingSettings(logit_bias=((10**6, 1.0),), seed=0)
    asked = [Request(i, prompt(i), bad if i == 1 else GREEDY, Limits(max_tokens=3)) for i in range(4)]
    found = {outcome.request.key: outcome for outcome in parallel.answers(iter(asked))}
    assert isinstance(found[1].error, OptionError)
    assert [found[i].error for i in (0, 2, 3)] == [None, None, None]


def test_one_that_finds_no_way_on_does_not_stop_the_others(several):
    engine, parallel = several(3)
    stuck = SamplingSettings(grammar='root ::= "a"', logit_bias=((97, float("-inf")), (64, float("-inf"))), seed=0)
    asked = [Request(i, prompt(i), GREEDY, Limits(max_tokens=9)) for i in range(3)]
    asked[1] = dataclasses.replace(asked[1], sampling=stuck)
    found = {outcome.request.key: outcome for outcome in parallel.answers(iter(asked))}
    assert isinstance(found[1].error, OptionError)
    assert found[2].pieces == alone(engine, asked[2])


def test_a_pass_that_fails_is_the_error_of_those_in_it_alone(several, monkeypatch):
    engine, parallel = several(2)
    process, calls = parallel._process, []

    def failing(parts):
        calls.append(1)
        process(parts)
        if len(calls) == 2:
            raise LlamaError("no memory.")

    monkeypatch.setattr(parallel, "_process", failing)
    asked = [Request(i, prompt(i), GREEDY, Limits(max_tokens=5)) for i in range(4)]
    found = {outcome.request.key: outcome for outcome in parallel.answers(iter(asked))}
    assert [bool(found[i].error) for i in range(4)] == [True, True, False, False]
    assert [found[i].pieces for i in (2, 3)] == [alone(engine, request) for request in asked[2:]]


def test_closing_early_leaves_it_usable(several):
    engine, parallel = several(2)
    answers = parallel.answers(iter(requests(6)))
    next(answers)
    answers.close()
    request = requests(6)[5]
    assert next(parallel.answers(iter([request]))).pieces == alone(engine, request)


def test_cells_are_what_a_request_may_fill():
    assert Request(0, [1, 2], GREEDY, Limits()).cells(100) == 100
    assert Request(0, [1, 2], GREEDY, Limits(max_tokens=5)).cells(100) == 7
    assert Request(0, [1, 2], GREEDY, Limits(max_tokens=500)).cells(100) == 100


FLAT, LINEAR = [float(n > 0) for n in range(257)], [float(n) for n in range(257)]


@pytest.mark.parametrize(
    ("costs", "rate", "most", "expected"),
    [
        (FLAT, 10.0, 256, MOST - 1),  # a pass over many rows costs nothing more; one less is nearly as fast
        (FLAT, 10.0, 7, 7),
        (FLAT, 10.0, 1, 1),
        (FLAT, 30.0, 8, 8),
        (FLAT, 70.0, 8, 1),  # drafting gives about as much
        (LINEAR, 10.0, 256, 1),  # rows cost what passes cost
        ([0.0, 1.0, 1.0, 2.0, 2.0, *[5.0] * 4], 10.0, 8, 2),  # no more than it takes
    ],
)
def test_so_many_at_once_as_are_fastest(costs, rate, most, expected):
    assert at_once(costs, 0.1, rate, most) == expected


def test_the_margin_counts():
    assert at_once([0.0, 1.0, 1.0], 0.1, 20.0 / MARGIN - 0.1, 2) == 2
    assert at_once([0.0, 1.0, 1.0], 0.1, 20.0 / MARGIN + 0.1, 2) == 1


def test_without_a_measured_pass_it_is_one():
    assert at_once(FLAT, 0.0, 0.0, 8) == 1
