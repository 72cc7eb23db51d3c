"""Decoding with a tree that the budget chooses and with n-gram matches: the same tokens as without."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny
from seconds import tell_seconds

from eagle3_cli.engine import load_engine
from eagle3_cli.engine.tree import FixedShape
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape

GREEDY = SamplingSettings(temperature=0.0, seed=0)
WARM = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11)
LOOP = SamplingSettings(temperature=0.0, seed=0, grammar='root ::= ("abcdefg")*')
PROMPTS = ([5, 6, 7], [65, 66, 67, 68] * 12, list(range(20, 90)))
RUNTIME = RuntimeSettings(**{**tiny.EXACT, "ctx_size": 512, "batch": 64, "threads": 1})

Open = Callable[..., Any]


@pytest.fixture
def open_auto(tiny_target: Any, tiny_drafters: Any, monkeypatch: Any, tmp_path: Any) -> Iterator[Open]:
    """open_auto(drafter or None, **PairSettings) -> Engine that has learned nothing before."""
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))
    opened = []

    def open_one(draft: str | None, threads: int = 1, draft_threads: int = 0, **changes: Any) -> Any:
        path = tiny_drafters[draft].path if draft else None
        pair = PairSettings(tiny_target.path, path, **{"lookup": True, **changes})
        opened.append(load_engine(pair, replace(RUNTIME, threads=threads, draft_threads=draft_threads)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def ask(engine: Any, prompt: list[int], sampling: SamplingSettings, n: int = 120) -> list[int]:
    pieces = list(engine.stream(prompt, sampling, Limits(n, ignore_eos=True)))
    return [piece.token for piece in pieces if piece.token is not None]


@pytest.mark.parametrize("sampling", [GREEDY, WARM, LOOP], ids=["greedy", "sampled", "loop"])
@pytest.mark.parametrize("draft", ["good", "random", None])
def test_the_same_tokens_with_a_chosen_tree(open_auto, draft, sampling, monkeypatch):
    engine, plain = open_auto(draft), open_auto(None, lookup=False, no_draft="--no-draft")
    tell_seconds(engine.decoder.budget, monkeypatch)
    verified = 0
    for prompt in PROMPTS:
        assert ask(engine, prompt, sampling) == ask(plain, prompt, sampling)
        assert engine.decoder.committed == plain.decoder.committed
        verified += engine.statistics.drafted
    assert verified > 0 or (draft is None and sampling is GREEDY)  # whose answers never repeat
    assert plain.decoder.budget is None


def test_repetition_is_looked_up_and_counted(open_auto, monkeypatch):
    """A text that loops is foretold by itself."""
    engine = open_auto(None)
    tell_seconds(engine.decoder.budget, monkeypatch)
    ask(engine, PROMPTS[1], LOOP, 200)
    stats = engine.statistics
    assert stats.enabled
    assert set(stats.drafted_from) == {2}
    assert stats.accepted_from[2] == stats.accepted > 20
    assert stats.acceptance_length > 1.2
    sources = stats.speculative()["sources"]
    assert sources == {"lookup": {"drafted": stats.drafted, "accepted": stats.accepted}}


def test_lookup_alone_with_a_fixed_number_of_tokens(open_auto):
    engine = open_auto(None, nodes=6)
    assert engine.decoder.budget is None
    plain = open_auto(None, lookup=False, no_draft="--no-draft")
    for prompt in PROMPTS:
        assert ask(engine, prompt, GREEDY) == ask(plain, prompt, GREEDY)
    assert max(engine.statistics.sizes) <= 6


def test_a_second_turn_and_a_retry_start_from_the_right_caches(open_auto, monkeypatch):
    engine, plain = open_auto("good"), open_auto(None, lookup=False, no_draft="--no-draft")
    tell_seconds(engine.decoder.budget, monkeypatch)
    first = ask(engine, PROMPTS[0], GREEDY, 40)
    longer = [*PROMPTS[0], *first, 9, 10, 11]
    for prompt in (longer, longer, longer[:20], longer):
        assert ask(engine, prompt, WARM, 60) == ask(plain, prompt, WARM, 60)
        assert len(engine.decoder.lookup) == len(engine.decoder.committed)


def test_what_one_engine_learned_the_next_one_knows(open_auto):
    first = open_auto("good")
    ask(first, PROMPTS[2], GREEDY)
    known = first.decoder.budget.report()
    first.close()
    assert first.learned.is_file()
    second = open_auto("good")
    again = second.decoder.budget.report()
    assert again["verify_cost"].keys() == known["verify_cost"].keys()
    assert again["plain_ms"] == pytest.approx(known["plain_ms"])


def test_a_damaged_file_is_replaced(open_auto):
    first = open_auto("good")
    first.learned.parent.mkdir(parents=True, exist_ok=True)
    first.learned.write_text('{"format": 2, "machine": 7}')
    second = open_auto("good")
    assert second.decoder.budget.machine.target.level is None
    ask(second, PROMPTS[0], GREEDY, 10)
    second.close()
    assert '"target"' in second.learned.read_text()


def test_budget_is_in_the_statistics(open_auto):
    engine = open_auto("good")
    ask(engine, PROMPTS[2], GREEDY, 30)
    shown = engine.statistics.speculative()
    assert shown["budget"]["plain_ms"] > 0
    assert shown["speed_up"] > 0
    assert sum(shown["rounds_by_nodes"].values()) == shown["rounds"]
    assert engine.settings["draft_tokens"] == "auto"


def test_any_number_of_draft_threads_gives_the_same_tokens(open_auto, monkeypatch):
    engine, plain = open_auto("good", threads=2), open_auto(None, lookup=False, no_draft="--no-draft")
    tell_seconds(engine.decoder.budget, monkeypatch)
    numbers = itertools.cycle((1, 2))
    monkeypatch.setattr(engine.decoder.budget.machine.threads, "choose", lambda: next(numbers))
    assert ask(engine, PROMPTS[0], WARM) == ask(plain, PROMPTS[0], WARM)
    assert engine.statistics.draft_rounds > 2
    assert engine.decoder.drafter._decoder.threads in (1, 2)
    assert engine.decoder.drafter._decoder.threads == engine.decoder.drafter._encoder.threads


def test_named_draft_threads_are_kept(open_auto):
    for draft_threads, choices in ((3, (0,)), (0, (1, 2))):
        engine = open_auto("good", threads=2, draft_threads=draft_threads)
        assert engine.decoder.budget.machine.threads.choices == choices
        ask(engine, PROMPTS[0], GREEDY, 30)
        assert engine.decoder.drafter._decoder.threads in ((3,) if draft_threads else (1, 2))


# ---- pauses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain_tokens", [1, 30, 129, 300])
def test_after_a_pause_the_drafter_starts_from_the_newest_token(open_auto, plain_tokens, monkeypatch):
    """Prompt after prompt: nothing is captured, then it is wanted again."""
    engine = open_auto("good", lookup=False)
    decoder, drafter = engine.decoder, engine.decoder.drafter
    tokens = [(7 * i) % 90 for i in range(plain_tokens + 2)]
    monkeypatch.setattr(type(decoder.budget), "expects", property(lambda self: False))
    decoder.prefill(tokens[:-1])
    assert not drafter.ready
    monkeypatch.setattr(type(decoder.budget), "expects", property(lambda self: True))
    decoder.prefill(tokens)
    tree = drafter.draft(33, FixedShape(TreeShape(3, 2, 6)))
    assert len(tree) == 6
    assert drafter._decoder.last_position(0) == plain_tokens + 1
    for past in (plain_tokens, plain_tokens // 2, 1):
        known = drafter.truncate(past)
        assert past - 1 <= known <= past
        assert drafter._decoder.last_position(0) < past


def test_a_drafter_that_lost_the_newest_token_while_nothing_is_captured_starts_behind_it(open_auto, monkeypatch):
    """A retry cuts into what was paired; the target is not asked for features that nobody wants."""
    engine = open_auto("good", lookup=False)
    decoder = engine.decoder
    decoder.prefill(PROMPTS[1])
    decoder.drafter.draft(33, FixedShape(TreeShape(3, 2, 6)))
    monkeypatch.setattr(type(decoder.budget), "expects", property(lambda self: False))
    monkeypatch.setattr(decoder.target, "newest_features", lambda token: pytest.fail("not wanted"))
    decoder.prefill(PROMPTS[1][:20])
    assert not decoder.drafter.ready
    assert decoder.committed == PROMPTS[1][:20]


def test_a_pause_captures_nothing_but_its_last_tokens(open_auto, monkeypatch):
    """While asking is in vain, most passes run without a stop for hidden states, and the drafter is still asked."""
    engine = open_auto("random", lookup=False)
    budget, target = engine.decoder.budget, engine.decoder.target
    dear = lambda nodes: 0.01 * (1 + nodes)  # noqa: E731  a wide batch is as dear as its rows one by one
    tell_seconds(budget, monkeypatch, dear, drafter_level=math.log(0.001))
    captured = []
    verify = target.verify
    monkeypatch.setattr(target, "verify", lambda *tree: (captured.append(target.captures), verify(*tree)))
    ask(engine, PROMPTS[2], GREEDY, 300)
    assert engine.statistics.draft_rounds >= 2
    assert 0 < captured.count(True) < 300 / 2
