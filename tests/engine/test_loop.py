"""Whole answers of a tiny real model: speculation changes nothing but speed.

Tokens are compared exactly: the tiny target and its KV cache are float32, and its favourites are clear.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tiny
from scripted import ScriptedDrafter, constant, perfect, random_trees

from eagle3_cli.engine import load_engine, loop
from eagle3_cli.engine.target import Target
from eagle3_cli.engine.tree import FixedShape
from eagle3_cli.engine.types import DraftTree, Piece, Statistics, Verdict, Watch
from eagle3_cli.errors import LlamaError, OptionError, PromptError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape

GREEDY = SamplingSettings(temperature=0.0)
SHAPES = [(1, 1, 1), (3, 1, 3), (4, 4, 8), (8, 10, 60)]
PROMPTS = [
    [int(t) for t in np.random.default_rng(s).integers(0, tiny.END_OF_TEXT, n)] for s, n in enumerate((3, 17, 40))
]
PROMPT = PROMPTS[1]
N = 40


@dataclass
class Answer:
    pieces: list[Piece]
    statistics: Statistics

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces if piece.token is not None]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish_reason(self) -> str | None:
        return self.pieces[-1].finish_reason

    @property
    def shown(self) -> tuple[list[int], str, str | None, int]:
        """Everything that must not depend on the drafter."""
        return self.tokens, self.text, self.finish_reason, self.statistics.completion_tokens


def ask(engine, prompt=PROMPT, sampling=GREEDY, **limits) -> Answer:
    limits.setdefault("max_tokens", N)
    return Answer(list(engine.stream(prompt, sampling, Limits(**limits))), engine.statistics)


def with_drafter(open_engine, propose, shape=(4, 4, 8), **runtime):
    """An engine whose real drafter is replaced by a scripted one."""
    engine = open_engine("random", shape, **runtime)
    engine.decoder.drafter = ScriptedDrafter(propose)
    return engine


@pytest.fixture
def plain(open_engine):
    """plain(prompt, sampling, **limits) -> the answer without a drafter, from a fresh engine."""
    return lambda *args, **limits: ask(open_engine(None), *args, **limits)


# --- the same tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers_are_the_same_with_and_without_a_drafter(open_engine, plain, shape, prompt):
    answer = ask(open_engine("good", shape), prompt, max_tokens=80)
    assert answer.shown == plain(prompt, max_tokens=80).shown
    assert answer.statistics.accepted > 10


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_are_the_same_with_llamas_default_cache_and_attention(open_engine, shape):
    runtime = {"flash_attn": "auto", "cache_type_k": "f16", "cache_type_v": "f16"}
    answer = ask(open_engine("good", shape, **runtime), max_tokens=80)
    assert answer.shown == ask(open_engine(None, **runtime), max_tokens=80).shown


SAMPLED = {
    "top-p": SamplingSettings(temperature=0.8, top_p=0.9, seed=11),
    "everything": SamplingSettings(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=12),
    "penalties": SamplingSettings(temperature=0.8, repeat_penalty=1.3, presence_penalty=0.4, seed=13),
    "greedy penalties": SamplingSettings(temperature=0.0, repeat_penalty=1.3, frequency_penalty=0.6),
    "dry": SamplingSettings(temperature=0.7, dry_multiplier=0.8, seed=14),
    "xtc": SamplingSettings(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.05, seed=18),
    "dynamic temperature": SamplingSettings(temperature=0.8, dynatemp_range=0.5, top_n_sigma=2.0, seed=19),
    "mirostat": SamplingSettings(temperature=0.8, mirostat=1, mirostat_ent=2.0, seed=20),
    "mirostat 2": SamplingSettings(temperature=0.8, mirostat=2, mirostat_ent=2.0, seed=21),
    "adaptive-p": SamplingSettings(
        temperature=1.0, samplers=("min_p", "temperature", "adaptive_p"), adaptive_target=0.4, seed=22
    ),
    "adaptive-p and grammar": SamplingSettings(
        grammar="root ::= [a-z ]{60}", samplers=("temperature", "adaptive_p"), adaptive_target=0.4, seed=23
    ),
    "bias": SamplingSettings(temperature=0.8, logit_bias=((191, -np.inf), (65, 2.0)), seed=15),
    "grammar": SamplingSettings(temperature=0.9, grammar="root ::= ([a-f]+ [g-z]){20}", seed=16),
    "greedy grammar": SamplingSettings(temperature=0.0, grammar="root ::= [a-z ]+"),
    "grammar and penalties": SamplingSettings(
        temperature=0.9, grammar="root ::= [a-z ]{60}", repeat_penalty=1.2, seed=17
    ),
}


@pytest.mark.parametrize("shape", [(3, 1, 3), (4, 4, 8), (8, 10, 60)])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_same_seed_gives_the_same_answer_with_and_without_a_drafter(open_engine, plain, name, shape):
    answer, without = ask(open_engine("good", shape), PROMPT, SAMPLED[name]), plain(PROMPT, SAMPLED[name])
    assert answer.shown == without.shown
    assert answer.statistics.drafted > 0


def test_different_seeds_give_different_answers(open_engine):
    engine = open_engine("good")
    settings = [SamplingSettings(temperature=1.5, seed=seed) for seed in (1, 2)]
    assert ask(engine, PROMPT, settings[0]).tokens != ask(engine, PROMPT, settings[1]).tokens


@pytest.mark.parametrize("drafter", ["random", "borrowing", "narrow", "end"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED["top-p"]])
def test_useless_drafters_change_nothing(open_engine, plain, drafter, sampling):
    answer = ask(open_engine(drafter, (3, 3, 8)), PROMPT, sampling)
    assert answer.shown == plain(PROMPT, sampling).shown
    assert answer.statistics.drafted > answer.statistics.accepted


def test_a_grammar_is_not_broken_by_a_drafter_that_proposes_a_code_fence(open_engine, plain):
    """vLLM 36138: the proposals are neither allowed nor harmful."""
    fence = [*b"```json"]
    sampling = SamplingSettings(temperature=0.8, grammar='root ::= "{" [a-z"]* "}"', seed=3)

    def propose(so_far, shape):
        n = min(shape.depth, shape.nodes, len(fence))
        return DraftTree(fence[:n], range(-1, n - 1), range(1, n + 1), [-float(i) for i in range(n)])

    answer = ask(with_drafter(open_engine, propose), PROMPT, sampling)
    assert answer.shown == plain(PROMPT, sampling).shown
    assert answer.text.startswith("{")
    assert answer.statistics.accepted == 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 3), (4, 4, 16), (7, 3, 21)])
def test_a_perfect_drafter_is_accepted_to_the_last_node(open_engine, plain, shape):
    wanted = plain()
    engine = with_drafter(open_engine, perfect([*PROMPT, *wanted.tokens]), shape)
    answer = ask(engine)
    assert answer.shown == wanted.shown
    depth = shape[0]
    rounds = -(-(N - 1) // (depth + 1))  # the first token belongs to the prefill
    assert answer.statistics.rounds == rounds
    assert answer.statistics.round_tokens == N - 1
    assert answer.statistics.accepted == N - 1 - rounds
    for tried, accepted in zip(answer.statistics.depth_tried, answer.statistics.depth_accepted, strict=True):
        assert tried == accepted


def test_pieces_say_which_tokens_the_drafter_had_proposed(open_engine, plain):
    """With depth 3: the first token, then three drafted and a bonus token per round."""
    wanted = plain(max_tokens=14)
    engine = with_drafter(open_engine, perfect([*PROMPT, *wanted.tokens]), (3, 2, 6))
    drafted = [piece.from_draft for piece in ask(engine, max_tokens=14).pieces]
    assert drafted == [False, *[True, True, True, False] * 3, False]
    assert not any(piece.from_draft for piece in wanted.pieces)


@pytest.mark.parametrize("token", [tiny.IM_END, tiny.END_OF_TEXT, 0, 65])
def test_a_drafter_that_always_proposes_one_token_changes_nothing(open_engine, plain, token):
    assert ask(with_drafter(open_engine, constant(token))).shown == plain().shown


# --- where an answer ends ----------------------------------------------------------------------------------------


class WithEnd:
    """A model whose only end token is the given one."""

    def __init__(self, monkeypatch, end: int) -> None:
        monkeypatch.setattr("eagle3_cli.llama.Model.is_end", lambda model, token: token == end)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_end_token_anywhere_in_a_block_cuts_exactly_before_it(open_engine, plain, monkeypatch, shape):
    """transformers 47912: each produced token in turn is declared the end."""
    tokens = plain(max_tokens=24).tokens
    engine = with_drafter(open_engine, perfect([*PROMPT, *tokens]), shape)
    real = open_engine("good", shape)
    for i, end in enumerate(tokens):
        cut = tokens.index(end)
        WithEnd(monkeypatch, end)
        for each in (engine, real):
            answer = ask(each, max_tokens=24)
            assert answer.tokens == tokens[:cut], f"end token {i}"
            assert answer.text == "".join(piece.text for piece in answer.pieces)
            assert answer.text.encode("utf-8", "replace") == text_of(each, tokens[:cut])
            assert answer.finish_reason == "stop"
            assert answer.pieces[-1].token is None
            assert answer.statistics.completion_tokens == cut
            assert [p.finish_reason for p in answer.pieces[:-1]] == [None] * cut
            assert each.decoder.committed == [*PROMPT, *tokens[:cut]][: len(each.decoder.committed)]
            check_caches(each.decoder)


def text_of(engine, tokens: list[int]) -> bytes:
    data = b"".join(map(engine.decoder.model.piece, tokens))
    return data.decode("utf-8", "replace").encode()


def test_ignore_eos_goes_on_behind_an_end_token(open_engine, plain, monkeypatch):
    tokens = plain(max_tokens=24).tokens
    WithEnd(monkeypatch, tokens[5])
    for engine in (open_engine(None), with_drafter(open_engine, perfect([*PROMPT, *tokens]))):
        answer = ask(engine, max_tokens=24, ignore_eos=True)
        assert (answer.tokens, answer.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_of_max_tokens_gives_exactly_so_many(open_engine, plain, shape):
    tokens = plain(max_tokens=14).tokens
    engine = with_drafter(open_engine, perfect([*PROMPT, *tokens]), shape)
    for n in range(1, 14):
        answer = ask(engine, max_tokens=n)
        assert answer.tokens == tokens[:n]
        assert answer.finish_reason == "length"
        assert answer.statistics.completion_tokens == n
        assert answer.pieces[-1].token == tokens[n - 1]
        check_caches(engine.decoder)


def test_no_tree_is_verified_that_max_tokens_would_cut(open_engine, plain):
    """One token left: nothing to draft.  The last token never needs a node of its own."""
    tokens = plain(max_tokens=10).tokens
    shapes = []
    propose = perfect([*PROMPT, *tokens])

    def watch(so_far, shape):
        shapes.append((len(so_far) - len(PROMPT), shape.depth))
        return propose(so_far, shape)

    ask(with_drafter(open_engine, watch, (8, 2, 16)), max_tokens=6)
    assert shapes == [(1, 4)]


def test_stop_strings_cut_the_same_text_with_and_without_a_drafter(open_engine, plain):
    # A grammar makes letters; every pair of neighbouring letters is tried as a stop string.
    sampling = SamplingSettings(temperature=0.0, grammar="root ::= [a-z]+")
    whole = plain(PROMPT, sampling, max_tokens=20)
    engine = with_drafter(open_engine, perfect([*PROMPT, *whole.tokens]), (4, 2, 8))
    without = open_engine(None)
    for i in range(len(whole.text) - 2):
        stop = whole.text[i : i + 3]
        answer = ask(engine, PROMPT, sampling, max_tokens=20, stop=(stop,))
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.finish_reason == "stop"
        assert answer.shown == ask(without, PROMPT, sampling, max_tokens=20, stop=(stop,)).shown
        check_caches(engine.decoder)


def test_a_stop_string_that_never_comes_changes_nothing(open_engine, plain):
    answer = ask(open_engine("good"), stop=("no such text", "nor this"))
    assert answer.shown == plain().shown


def test_text_is_the_decoded_bytes_of_the_tokens(open_engine):
    engine = open_engine("good")
    answer = ask(engine, max_tokens=60)
    assert answer.text.encode() == text_of(engine, answer.tokens)


@pytest.mark.parametrize(
    ("shape", "prompt_length"), list(itertools.product([(1, 1, 1), (8, 10, 60)], [1, 100, 254, 255]))
)
def test_the_end_of_the_context_is_reached_exactly(open_engine, shape, prompt_length):
    """llama.cpp 10547: prompt and answer fill the context to the last cell, then the answer ends with "length"."""
    prompt = (PROMPTS[2] * 10)[:prompt_length]
    engine = open_engine("good", shape, ctx_size=256)
    cells = engine.decoder.cells
    assert cells == 256
    answer = ask(engine, prompt, max_tokens=None, ignore_eos=True)
    assert len(prompt) + len(answer.tokens) == cells
    assert answer.finish_reason == "length"
    assert answer.tokens == ask(open_engine(None, ctx_size=256), prompt, max_tokens=None, ignore_eos=True).tokens


def test_a_context_of_128_with_a_prompt_of_100_and_a_tree_of_60(open_engine):
    """llama.cpp rounds the context up; the engine reports and uses what there is."""
    engine = open_engine("good", (8, 10, 60), ctx_size=128)
    prompt = (PROMPTS[2] * 3)[:100]
    answer = ask(engine, prompt, max_tokens=None)
    assert engine.settings["ctx_size"] == engine.decoder.cells >= 128
    assert len(prompt) + len(answer.tokens) == engine.decoder.cells


def test_a_drafter_trained_on_short_contexts_works_beyond_them(open_engine, tiny_drafters, tiny_target, tmp_path):
    """vLLM 48894: the drafter's file says 64 positions, the prompt has 200 tokens."""
    good = tiny_drafters["good"]
    short = tiny.write_drafter(tmp_path / "short.gguf", good.config, good.weights, eagle3__context_length=64)
    prompt = (PROMPTS[2] * 5)[:200]
    wanted = ask(open_engine("good"), prompt)
    pair = PairSettings(tiny_target.path, short.path, None, 4, 4, 8)
    with load_engine(pair, RuntimeSettings(ctx_size=512, batch=64, threads=1)) as engine:
        answer = ask(engine, prompt)
    assert answer.shown == wanted.shown
    assert answer.statistics.accepted == wanted.statistics.accepted > 5


@pytest.mark.parametrize("drafter", [None, "good"])
def test_a_prompt_that_fills_the_context_is_refused_before_anything_happens(open_engine, drafter):
    engine = open_engine(drafter, ctx_size=256)
    ask(engine, max_tokens=3)
    committed = list(engine.decoder.committed)
    for prompt in ([], [1] * 256, [1] * 1000):
        with pytest.raises(PromptError, match=f"expected 1 to 255 tokens .* got {len(prompt)}"):
            ask(engine, prompt)
    assert engine.decoder.committed == committed


def test_a_wrong_option_is_refused_before_anything_happens(open_engine):
    engine = open_engine("good")
    with pytest.raises(OptionError):
        ask(engine, PROMPT, SamplingSettings(grammar="root ::= ["))
    assert engine.decoder.committed == []


# --- the caches --------------------------------------------------------------------------------------------------


def check_caches(decoder) -> None:
    """Between rounds: sequence 0 holds the committed tokens and nothing else; the drafter is one step behind."""
    n, target, drafter = len(decoder.committed), decoder.target, decoder.drafter
    assert target.past == n
    assert target.context.last_position(0) == n - 1
    sequences = max(1, decoder.shape.nodes) if target.context.capture is not None else 1
    assert all(target.context.last_position(s) == -1 for s in range(1, sequences))
    if isinstance(drafter, ScriptedDrafter):
        assert drafter.committed == decoder.committed
    elif drafter is not None:
        context = drafter._decoder
        assert context.last_position(0) == drafter._pairs - 1
        assert all(context.last_position(s) == -1 for s in range(1, 2 * decoder.shape.width))
        assert [*drafter._tokens, *drafter._waiting_tokens] == decoder.committed[drafter._pairs :]
        assert len(drafter._g) == len(drafter._tokens)


@pytest.fixture
def checked_rounds(monkeypatch):
    """Checks the caches after every round; returns the number of rounds so far as a list of one."""
    count = [0]
    round_ = loop._Answer.round

    plain_rounds = loop._Answer.plain_rounds

    def checked(self, root):
        result = round_(self, root)
        check_caches(self.decoder)
        count[0] += 1
        return result

    def checked_plain(self, root, started):
        before = self.stats.rounds
        result = plain_rounds(self, root, started)
        check_caches(self.decoder)
        count[0] += self.stats.rounds - before
        return result

    monkeypatch.setattr(loop._Answer, "round", checked)
    monkeypatch.setattr(loop._Answer, "plain_rounds", checked_plain)
    return count


@pytest.mark.parametrize("drafter", ["good", "random", "narrow"])
@pytest.mark.parametrize("shape", SHAPES)
def test_after_every_round_the_caches_hold_the_committed_tokens_only(open_engine, checked_rounds, drafter, shape):
    ask(open_engine(drafter, shape), max_tokens=60)
    assert checked_rounds[0] > 10


@pytest.mark.parametrize("shape", [(3, 1, 3), (5, 5, 12), (8, 10, 60)])
def test_random_accept_lengths_for_many_rounds_change_nothing(open_engine, checked_rounds, shape):
    """llama.cpp 24541: positions stay consistent whatever is accepted, for hundreds of rounds."""
    wanted = ask(open_engine(None), max_tokens=480).tokens
    rounds = 0
    for seed in (1, 2):
        engine = with_drafter(open_engine, random_trees([*PROMPT, *wanted], seed), shape)
        assert ask(engine, max_tokens=480).tokens == wanted
        rounds += engine.statistics.rounds
        lengths = -np.diff([engine.statistics.rounds, *engine.statistics.depth_accepted])
        assert (lengths[: shape[0]] > 0).all()  # rounds that accepted exactly 0, 1, 2, ... nodes
    assert rounds == checked_rounds[0] - 479
    assert rounds > 150


# --- plain rounds in one call --------------------------------------------------------------------------------------

WARM = SamplingSettings(temperature=1.0, top_k=0, seed=3)
PENALISED = SamplingSettings(temperature=0.9, top_k=0, repeat_penalty=1.3, seed=5)


@pytest.fixture
def calls(monkeypatch):
    """Plain rounds of each call that made several, as they happen."""
    found = []
    decode_plain = Target.decode_plain

    def counted(self, *args, **how):
        rounds = decode_plain(self, *args, **how)
        found.append(len(rounds.tokens))
        return rounds

    monkeypatch.setattr(Target, "decode_plain", counted)
    return found


@pytest.mark.parametrize("limits", [{"max_tokens": 150}, {"max_tokens": 3}, {"max_tokens": None, "ignore_eos": True}])
@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_plain_rounds_in_one_call_are_those_one_by_one(open_engine, calls, sampling, limits):
    at_once, watched = open_engine(None), open_engine(None)
    for prompt in PROMPTS:
        answer = ask(at_once, prompt, sampling, **limits)
        seen = []
        watch = Watch(rounds=seen.append)
        pieces = list(watched.stream(prompt, sampling, Limits(**limits), watch))
        assert answer.pieces == pieces
        assert len(seen) == answer.statistics.rounds == answer.statistics.round_tokens
        assert at_once.decoder.committed == watched.decoder.committed
        check_caches(at_once.decoder)
    assert sum(calls) > 0


@pytest.mark.parametrize(
    "looks", [{"stop": ("x",)}, {"watch": Watch(rounds=lambda record: None)}, {"watch": Watch(likeliest=1)}]
)
def test_who_looks_at_every_token_gets_one_at_a_time(open_engine, calls, looks):
    engine, watch = open_engine(None), looks.get("watch", Watch())
    assert len(list(engine.stream(PROMPT, GREEDY, Limits(20, looks.get("stop", ())), watch)))
    assert calls == []


def test_a_grammar_is_asked_for_every_token(open_engine, calls):
    sampling = replace(GREEDY, grammar='root ::= "a"*')
    ask(open_engine(None), PROMPT, sampling)
    assert calls == []


def test_long_passes_come_one_at_a_time(open_engine, calls, monkeypatch):
    monkeypatch.setattr("eagle3_cli.context.AT_A_TIME", 1e-9)
    ask(open_engine(None))
    assert calls == []


# --- several answers -----------------------------------------------------------------------------------------------


def test_a_second_turn_computes_only_what_is_new(open_engine):
    engine = open_engine("good")
    first = ask(engine, max_tokens=12)
    known = len(engine.decoder.committed)
    longer = [*PROMPT, *first.tokens, 5, 6, 7]
    answer = ask(engine, longer)
    assert answer.statistics.prompt_tokens == len(longer)
    assert known - 1 <= answer.statistics.cached_tokens <= len(longer) - 1
    assert answer.shown == ask(open_engine("good"), longer).shown
    check_caches(engine.decoder)


def test_the_same_prompt_again_computes_its_last_tokens_only(open_engine):
    engine = open_engine("good")
    first, again = ask(engine), ask(engine)
    assert again.shown == first.shown
    assert len(PROMPT) - 2 <= again.statistics.cached_tokens < len(PROMPT)
    assert again.statistics.accepted == first.statistics.accepted


@pytest.mark.parametrize("keep", [0, 1, 5, 16, 17, 20, 28])
def test_a_prompt_that_parts_from_the_cache_anywhere_gives_a_fresh_engines_answer(open_engine, keep):
    engine = open_engine("good")
    first = ask(engine, max_tokens=15)
    prompt = [*[*PROMPT, *first.tokens][:keep], 200, 3, 90, 41]
    answer, fresh = ask(engine, prompt), ask(open_engine("good"), prompt)
    assert answer.shown == fresh.shown
    assert answer.statistics.accepted == fresh.statistics.accepted
    assert answer.statistics.cached_tokens <= keep


@pytest.mark.parametrize("keep", [1, 5, 16, 17, 20, 28])
def test_after_a_change_of_prompt_the_drafter_drafts_like_a_fresh_one(open_engine, keep):
    """A random drafter looks at all pairs, so one stale pair would show."""
    shape = TreeShape(3, 3, 9)
    used, fresh = open_engine("narrow", (3, 3, 9)), open_engine("narrow", (3, 3, 9))
    first = ask(used, max_tokens=15)
    prompt = [*[*PROMPT, *first.tokens][:keep], 200, 3, 90, 41]
    trees = []
    for engine in (used, fresh):
        engine.decoder.prefill(prompt)
        trees.append(engine.decoder.drafter.draft(77, FixedShape(shape)))
    assert list(trees[0].tokens) == list(trees[1].tokens)
    np.testing.assert_allclose(trees[0].logps, trees[1].logps, atol=2e-3)


def test_no_state_leaks_between_prompts(open_engine):
    """llama.cpp 26100: A, A, A against A, B, A, C, A, greedy and with penalties."""
    a, b, c = PROMPTS
    for sampling in (GREEDY, SAMPLED["penalties"]):
        alone, mixed = open_engine("good"), open_engine("good")
        same = [ask(alone, a, sampling) for _ in range(3)]
        among = [ask(mixed, prompt, sampling) for prompt in (a, b, a, c, a)][::2]
        counts = {(x.statistics.accepted, x.statistics.rounds, x.statistics.drafted) for x in [*same, *among]}
        assert len(counts) == 1
        assert all(x.shown == same[0].shown for x in [*same, *among])


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 16 * 3 + 7])
def test_prompts_around_the_batch_size_give_the_answer_of_one_big_batch(open_engine, length):
    prompt = (PROMPTS[2] * 2)[:length]
    chunked, whole = open_engine("good", batch=16), open_engine("good", batch=256)
    answer = ask(chunked, prompt)
    assert answer.shown == ask(whole, prompt).shown
    assert answer.statistics.accepted == ask(whole, prompt).statistics.accepted


def test_a_chat_is_rendered_and_answered_turn_by_turn(open_engine):
    engine = open_engine("good")
    messages = [{"role": "user", "content": "the inn"}]
    prompt = engine.render(messages)
    assert prompt[0] == tiny.IM_START
    assert prompt.count(tiny.IM_END) == 1
    first = ask(engine, prompt, max_tokens=8)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "then"}]
    second = engine.render(messages)
    assert ask(engine, second).shown == ask(open_engine(None), second).shown


# --- interruptions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(0, 12))
@pytest.mark.parametrize("drafter", [None, "good"])
def test_closing_the_iterator_early_leaves_the_caches_right(open_engine, drafter, after):
    engine = open_engine(drafter)
    wanted = ask(engine)
    pieces = engine.stream(PROMPT, GREEDY, Limits(max_tokens=N))
    got = [next(pieces).token for _ in range(after)]
    pieces.close()
    assert got == wanted.tokens[:after]
    check_caches(engine.decoder)
    assert ask(engine).shown == wanted.shown


INTERRUPTED = [
    ("eagle3_cli.engine.loop.verify", 3),
    ("eagle3_cli.engine.target.Target.verify", 2),
    ("eagle3_cli.engine.target.Target.commit", 2),
    ("eagle3_cli.engine.loop.Decoder.commit", 3),
    ("eagle3_cli.engine.drafter.Eagle3Drafter.draft", 2),
    ("eagle3_cli.engine.drafter.Eagle3Drafter.extend", 1),
    ("eagle3_cli.engine.drafter.Eagle3Drafter.extend", 3),
    ("eagle3_cli.engine.drafter._Growth._process", 3),
    ("eagle3_cli.engine.drafter._Growth._children", 4),
    ("eagle3_cli.context.Context.process", 1),
    ("eagle3_cli.context.Context.process", 2),
    ("eagle3_cli.context.Context.process", 4),
    ("eagle3_cli.context.Context.process", 9),
    ("eagle3_cli.context.Context.keep", 3),
    ("eagle3_cli.engine.target._native.gather", 2),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("where", "call"), INTERRUPTED)
@pytest.mark.parametrize("error", [KeyboardInterrupt, LlamaError("no room")])
def test_an_interruption_anywhere_leaves_the_next_answer_right(open_engine, monkeypatch, where, call, when, error):
    """The exception comes in the given call of a function, before it does anything or after all of it."""
    wanted = ask(open_engine("good"))
    engine = open_engine("good")
    ask(engine, PROMPT[:9], max_tokens=4)
    with monkeypatch.context() as patch:
        interrupt(patch, where, call, when, error)
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            ask(engine)
    check_caches(engine.decoder)
    again = ask(engine)
    assert again.shown == wanted.shown
    assert again.statistics.accepted == wanted.statistics.accepted
    check_caches(engine.decoder)


class LineInterrupt:
    """A trace function that raises KeyboardInterrupt before the n-th line of engine code; `lines` counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame, event, argument):
        inside = "/eagle3_cli/engine/" in frame.f_code.co_filename
        return self.line if inside else None

    def line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self.line


def traced(trace: LineInterrupt, call) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(("length", "every"), [(17, 41), (300, 97)])
def test_a_keyboard_interrupt_on_any_line_leaves_the_next_answer_right(open_engine, length, every):
    prompt = (PROMPTS[2] * 8)[:length]
    engine = open_engine("good")
    wanted = ask(engine, prompt, max_tokens=9)
    count = LineInterrupt(0)
    ask(engine, prompt[:5], max_tokens=2)
    traced(count, lambda: ask(engine, prompt, max_tokens=9))
    assert count.lines > 1000
    for at in range(1, count.lines, every):
        ask(engine, prompt[:5], max_tokens=2)
        with pytest.raises(KeyboardInterrupt):
            traced(LineInterrupt(at), lambda: ask(engine, prompt, max_tokens=9))
        again = ask(engine, prompt, max_tokens=9)
        assert again.shown == wanted.shown, f"interrupted before line {at}"
        assert again.statistics.accepted == wanted.statistics.accepted
        check_caches(engine.decoder)


def interrupt(patch, where: str, call: int, when: str, error) -> None:
    from _pytest.monkeypatch import derive_importpath

    name, owner = derive_importpath(where, raising=True)
    original, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args, **kwargs):
        now = next(calls) == call
        if now and when == "before":
            raise error
        result = original(*args, **kwargs)
        if now:
            raise error
        return result

    patch.setattr(where, interrupted)


# --- counts ----------------------------------------------------------------------------------------------------------


def test_the_numbers_of_vllm_9565():
    """3, 0, 2 accepted of 4 drafted: length 2.67 with the bonus token, rate 5/12, by depth 2/3, 2/2, 1/2."""
    stats = Statistics()
    chain = DraftTree([1, 2, 3, 4], [-1, 0, 1, 2], [1, 2, 3, 4], [-1, -2, -3, -4])
    for accepted in (3, 0, 2):
        stats.record(chain, Verdict([*range(1, accepted + 1), 99], list(range(accepted))))
    assert stats.acceptance_length == pytest.approx(8 / 3)
    assert (stats.accepted, stats.drafted, stats.rounds) == (5, 12, 3)
    block = stats.speculative()
    assert block["mean_nodes"] == 4
    assert block["accepted_by_depth"] == [
        {"depth": 1, "accepted": 2, "tried": 3},
        {"depth": 2, "accepted": 2, "tried": 2},
        {"depth": 3, "accepted": 1, "tried": 2},
        {"depth": 4, "accepted": 0, "tried": 1},
    ]


def test_a_fully_accepted_tree_has_no_try_below_its_last_level():
    stats = Statistics()
    stats.record(DraftTree([1, 2], [-1, 0], [1, 2], [-1, -2]), Verdict([1, 2, 9], [0, 1]))
    assert stats.speculative()["accepted_by_depth"] == [
        {"depth": 1, "accepted": 1, "tried": 1},
        {"depth": 2, "accepted": 1, "tried": 1},
    ]


def test_a_walk_that_ends_at_an_accepted_end_token_counts_it_once():
    stats = Statistics()
    stats.record(DraftTree([1, 2], [-1, 0], [1, 2], [-1, -2]), Verdict([1], [0]))
    assert (stats.accepted, stats.round_tokens, stats.depth_tried, stats.depth_accepted) == (1, 1, [1], [1])


def test_plain_decoding_counts_rounds_of_one(plain):
    answer = plain()
    block = answer.statistics.speculative()
    assert (block["enabled"], block["reason"]) == (False, "--no-draft")
    assert (block["rounds"], block["drafted"], block["acceptance_length"]) == (N - 1, 0, 1.0)
    assert block["accepted_by_depth"] == []


def test_a_budget_of_zero_nodes_is_plain_decoding(open_engine, plain):
    answer = ask(open_engine("good", (4, 4, 0)))
    assert answer.shown == plain().shown
    assert answer.statistics.speculative()["enabled"] is False
    assert answer.statistics.drafted == 0


def test_counts_of_a_real_answer_add_up(open_engine):
    stats = ask(open_engine("good")).statistics
    assert stats.round_tokens == N - 1
    assert stats.accepted + stats.rounds == stats.round_tokens
    assert sum(stats.depth_accepted) == stats.accepted
    assert stats.completion_tokens == N
    assert stats.depth_tried[0] <= stats.rounds
    assert stats.drafted <= 8 * stats.rounds


def test_times_of_the_parts_make_up_the_decode_time(open_engine):
    timings = ask(open_engine("good"), PROMPT, SAMPLED["top-p"]).statistics.timings()
    parts = ("target_s", "drafter_s", "sampler_s", "other_s")
    assert all(timings[part] > 0 for part in parts)
    assert sum(timings[part] for part in parts) == pytest.approx(timings["decode_s"])


def test_statistics_before_any_answer_are_empty(open_engine):
    engine = open_engine("good")
    assert engine.statistics.speculative()["acceptance_length"] is None
    assert engine.statistics.timings()["decode_tokens_per_second"] is None
    assert engine.statistics.load_s > 0
    assert TreeShape(4, 4, 8) == engine.decoder.shape
