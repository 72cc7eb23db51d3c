"""Draws through llama.cpp's real chain at a real model's logits, against numpy's idea of the law.

Seeds are fixed, so these tests do not flicker: a statistic of 20,000 draws either fits or does not.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tiny
from reference import adaptive_p, chi_square_excess, mirostat_1_keeps, mirostat_2, sampling_law

from eagle3_cli.engine.sampler import Sampler, check_sampling, with_seed
from eagle3_cli.engine.tree import ROOT
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.engine.verify import verify
from eagle3_cli.errors import OptionError
from eagle3_cli.llama import schema_to_gbnf
from eagle3_cli.settings import SamplingSettings

DRAWS = 20_000
# A prompt after which many tokens are likely.
PROMPT = [int(t) for t in np.random.default_rng(55).integers(0, tiny.END_OF_TEXT, 12)]
OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = {
    "temperature": SamplingSettings(temperature=0.8, **OPEN),
    "hot": SamplingSettings(temperature=2.5, **OPEN),
    "top-k": SamplingSettings(temperature=1.5, top_k=5, top_p=1.0, min_p=0.0),
    "top-p": SamplingSettings(temperature=1.3, top_k=0, top_p=0.8, min_p=0.0),
    "min-p": SamplingSettings(temperature=1.3, top_k=0, top_p=1.0, min_p=0.1),
    "top-p and min-p": SamplingSettings(temperature=1.0, top_k=0, top_p=0.8, min_p=0.1),
    "top-n-sigma": SamplingSettings(temperature=1.5, top_n_sigma=1.5, **OPEN),
    "xtc": SamplingSettings(temperature=1.2, xtc_probability=1.0, xtc_threshold=0.05, **OPEN),
    "dynamic temperature": SamplingSettings(temperature=1.5, dynatemp_range=1.0, dynatemp_exponent=1.3, **OPEN),
    "temperature first": SamplingSettings(temperature=2.0, top_p=0.5, samplers=("temperature", "top_p")),
    "temperature last": SamplingSettings(temperature=2.0, top_p=0.5, samplers=("top_p", "temperature")),
    "no sampler": SamplingSettings(temperature=2.0, samplers=()),
    "defaults": SamplingSettings(temperature=1.0),
}


@pytest.fixture(scope="module")
def engine(tiny_target, tiny_drafters):
    """With the logits after PROMPT in place; tests here only read them."""
    from eagle3_cli.engine import load_engine
    from eagle3_cli.settings import PairSettings, RuntimeSettings

    pair = PairSettings(tiny_target.path, tiny_drafters["random"].path, None, 2, 2, 8)
    with load_engine(pair, RuntimeSettings(ctx_size=256, threads=1)) as engine:
        engine.decoder.prefill(PROMPT)
        yield engine


@pytest.fixture
def sampler(engine):
    """sampler(settings, prompt=()) -> Sampler, seeded with 1 unless the settings say otherwise."""
    made = []

    def make(settings, prompt=(), **changes):
        from dataclasses import replace

        changes.setdefault("seed", settings.seed if settings.seed is not None else 1)
        made.append(Sampler(engine.decoder.model, replace(settings, **changes), prompt, engine.decoder.cells))
        return made[-1]

    yield make
    for each in made:
        each.close()


def row_of(engine, node: int = ROOT) -> int:
    return engine.decoder.target.logits_row(node)


def logits_of(engine, node: int = ROOT) -> np.ndarray:
    return engine.decoder.target.logits(node)


def draws(engine, sampler, n: int, node: int = ROOT) -> list[int]:
    context, row = engine.decoder.target.context, row_of(engine, node)
    return [sampler.draw(context, row) for _ in range(n)]


def counts_of(tokens) -> np.ndarray:
    return np.bincount(tokens, minlength=tiny.VOCAB)


# --- the law ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_law_of_the_settings(engine, sampler, name):
    law = sampling_law(logits_of(engine), SETTINGS[name])
    assert np.count_nonzero(law) >= 3
    assert chi_square_excess(counts_of(draws(engine, sampler(SETTINGS[name]), DRAWS)), law) < 4


def test_the_chi_square_test_notices_a_slightly_wrong_temperature(engine, sampler):
    law = sampling_law(logits_of(engine), SamplingSettings(temperature=0.85, **OPEN))
    assert chi_square_excess(counts_of(draws(engine, sampler(SETTINGS["temperature"]), DRAWS)), law) > 6


def fits_both_draws(engine, sampler, settings, law) -> set[int]:
    """Draws two tokens at the same logits, with many seeds; law(tokens before) -> [V].  Sizes of the second laws."""
    pairs = [tuple(draws(engine, sampler(settings, seed=seed), 2)) for seed in range(6000)]
    assert chi_square_excess(counts_of([first for first, _ in pairs]), law([])) < 4
    supports = set()
    for token, _ in Counter(first for first, _ in pairs).most_common(3):
        seconds = counts_of([second for first, second in pairs if first == token])
        assert chi_square_excess(seconds, law([token])) < 4
        supports.add(int(np.count_nonzero(law([token]))))
    return supports


def test_mirostat_2_cuts_by_surprise_and_moves_its_bound_with_every_token(engine, sampler):
    settings = SamplingSettings(temperature=0.8, mirostat=2, mirostat_ent=2.0, mirostat_lr=1.0)
    p = sampling_law(logits_of(engine), SETTINGS["temperature"])
    supports = fits_both_draws(engine, sampler, settings, lambda tokens: mirostat_2(p, settings, tokens))
    assert len(supports) > 1


def test_mirostat_1_keeps_as_many_of_the_likeliest_as_its_estimate_says(engine, sampler):
    settings = SamplingSettings(temperature=0.8, mirostat=1, mirostat_ent=3.0)
    keeps = mirostat_1_keeps(sampling_law(logits_of(engine), SETTINGS["temperature"]), settings)
    law = sampling_law(logits_of(engine), SamplingSettings(temperature=0.8, top_k=keeps, top_p=1.0, min_p=0.0))
    first = [draws(engine, sampler(settings, seed=seed), 1)[0] for seed in range(6000)]
    assert 3 < keeps < 100
    assert chi_square_excess(counts_of(first), law) < 4


@pytest.mark.parametrize("target", [0.05, 0.4])
def test_adaptive_p_prefers_tokens_near_a_target_that_moves(engine, sampler, target):
    usual = {"temperature": 0.8, "top_p": 0.8, "samplers": ("top_p", "temperature", "adaptive_p")}
    settings = SamplingSettings(adaptive_target=target, adaptive_decay=0.5, **usual)
    p = sampling_law(logits_of(engine), settings)
    fits_both_draws(engine, sampler, settings, lambda tokens: adaptive_p(p, settings, tokens))
    assert chi_square_excess(counts_of(draws(engine, sampler(SamplingSettings(**usual)), DRAWS)), p) < 4


WALKS = {
    "all tokens": SamplingSettings(temperature=1.0, **OPEN),
    "top-p .8": SamplingSettings(temperature=1.0, top_k=0, top_p=0.8, min_p=0.0),
    "min-p .1": SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.1),
}


@pytest.mark.parametrize("name", WALKS)
def test_walking_a_tree_draws_both_levels_from_the_target(engine, sampler, name):
    """Two likely children (neither is token 0), two levels; the logits of the real tree batch."""
    settings, target = WALKS[name], engine.decoder.target
    first, second = (int(t) for t in np.argsort(-logits_of(engine))[[0, 2]])
    root = PROMPT[-1]
    target.truncate(len(PROMPT) - 1)
    tree = DraftTree([first, second, second, first], [-1, 0, -1, 2], [1, 2, 1, 2], [-1, -3, -2, -4])
    target.verify(root, tree)
    try:
        chain, context = sampler(settings), target.context
        pairs: Counter[tuple[int, ...]] = Counter()
        for _ in range(DRAWS):
            verdict = verify(tree, lambda node: chain.draw(context, target.logits_row(node)), lambda token: False)
            pairs[tuple(verdict.tokens[:2])] += 1
        laws = {node: sampling_law(logits_of(engine, node), settings) for node in (ROOT, 0, 2)}
    finally:
        target.commit([])
    head = counts_of([tokens[0] for tokens in pairs.elements()])
    assert chi_square_excess(head, laws[ROOT]) < 4
    for node in (0, 2):
        after = [tokens[1] for tokens in pairs.elements() if tokens[0] == tree.tokens[node]]
        assert all(len(tokens) == 1 for tokens in pairs if tokens[0] not in (first, second))
        assert len(after) > 500
        assert chi_square_excess(counts_of(after), laws[node]) < 4


# --- seeds -----------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_draws_and_another_one_changes_them(engine, sampler):
    settings = SETTINGS["hot"]
    first, again = (draws(engine, sampler(settings, seed=7), 50) for _ in range(2))
    assert first == again
    assert first != draws(engine, sampler(settings, seed=8), 50)


def test_a_missing_seed_is_drawn_and_reported():
    seeds = {with_seed(SamplingSettings()).seed for _ in range(20)}
    assert len(seeds) > 15
    assert all(0 <= seed <= 2**32 - 2 for seed in seeds)


def test_a_given_seed_is_kept():
    assert with_seed(SamplingSettings(seed=0)).seed == 0
    assert with_seed(SamplingSettings(seed=2**32 - 2)).seed == 2**32 - 2


def test_the_engine_reports_the_seed_it_uses(open_engine):
    engine = open_engine()
    settings = engine.effective(SamplingSettings(temperature=2.0))
    first, again = ([p.token for p in engine.stream(PROMPT, settings)] for _ in range(2))
    assert first == again


# --- greedy ----------------------------------------------------------------------------------------------------

GREEDY = SamplingSettings(temperature=0.0)


def test_the_greedy_fast_path_equals_the_chain(engine, sampler):
    chain = sampler(GREEDY)
    assert chain.is_argmax
    assert draws(engine, chain, 3) == [engine.decoder.target.argmax(ROOT)] * 3
    assert engine.decoder.target.argmax(ROOT) == logits_of(engine).argmax()


@pytest.mark.parametrize(
    "changes",
    [
        {"repeat_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"dry_multiplier": 0.8},
        {"logit_bias": ((3, 1.0),)},
        {"grammar": 'root ::= "a"'},
        {"temperature": 0.5},
    ],
)
def test_what_changes_the_choice_turns_the_fast_path_off(sampler, changes):
    assert not sampler(GREEDY, **changes).is_argmax


@pytest.mark.parametrize("changes", [{"repeat_penalty": 1.3, "repeat_last_n": 0}, {"top_k": 5}, {"dry_base": 2.0}])
def test_what_changes_nothing_keeps_the_fast_path(sampler, changes):
    assert sampler(GREEDY, **changes).is_argmax


# --- biases and penalties ----------------------------------------------------------------------------------------


def test_a_bias_of_minus_infinity_bans_a_token(engine, sampler):
    favourite = int(logits_of(engine).argmax())
    banned = sampler(SETTINGS["temperature"], logit_bias=((favourite, -np.inf),))
    assert favourite not in draws(engine, banned, 2000)
    assert draws(engine, sampler(GREEDY, logit_bias=((favourite, -np.inf),)), 1) != [favourite]


def test_a_bias_shifts_the_law(engine, sampler):
    favourite = int(logits_of(engine).argmax())
    settings = SETTINGS["temperature"]
    shifted = logits_of(engine)
    shifted[favourite] -= 1.5
    got = counts_of(draws(engine, sampler(settings, logit_bias=((favourite, -1.5),)), DRAWS))
    assert chi_square_excess(got, sampling_law(shifted, settings)) < 4


def test_the_repeat_penalty_sees_the_prompt(engine, sampler):
    """Positive logits of tokens in the prompt are divided, negative ones multiplied."""
    logits = logits_of(engine)
    prompt = [int(t) for t in np.argsort(-logits)[:3]]
    settings = SETTINGS["temperature"]
    penalised = logits.copy()
    penalised[prompt] /= np.where(logits[prompt] > 0, 1.3, 1 / 1.3)
    law = sampling_law(penalised, settings)
    got = [sampler(settings, prompt, repeat_penalty=1.3, seed=seed) for seed in range(3000)]
    tokens = [draws(engine, chain, 1)[0] for chain in got]
    assert chi_square_excess(counts_of(tokens), law) < 4


def test_the_repeat_penalty_forgets_what_lies_behind_its_window(engine, sampler):
    favourite = int(logits_of(engine).argmax())
    settings = {"repeat_penalty": 50.0, "repeat_last_n": 4}
    assert draws(engine, sampler(GREEDY, [favourite, 1, 2, 3], **settings), 1) != [favourite]
    assert draws(engine, sampler(GREEDY, [favourite, 1, 2, 3, 4], **settings), 1) == [favourite]


def test_penalties_advance_with_every_emitted_token(engine, sampler):
    """Drawing at the same logits again and again, each token loses to the next one."""
    order = [int(t) for t in np.argsort(-logits_of(engine))[:4]]
    assert draws(engine, sampler(GREEDY, presence_penalty=100.0), 4) == order


def test_minus_one_looks_back_over_the_whole_context(engine, sampler):
    favourite = int(logits_of(engine).argmax())
    prompt = [favourite, *[1] * 200]
    assert draws(engine, sampler(GREEDY, prompt, presence_penalty=100.0, repeat_last_n=-1), 1) != [favourite]
    assert draws(engine, sampler(GREEDY, prompt, presence_penalty=100.0, repeat_last_n=64), 1) == [favourite]


def test_dry_punishes_a_repeated_sequence(engine, sampler):
    favourite = int(logits_of(engine).argmax())
    prompt = [10, 20, 30, 40, favourite, 10, 20, 30, 40]
    assert draws(engine, sampler(GREEDY, prompt, dry_multiplier=50.0), 1) != [favourite]
    assert draws(engine, sampler(GREEDY, prompt[1:5], dry_multiplier=50.0), 1) == [favourite]


# --- grammar ---------------------------------------------------------------------------------------------------


def test_a_grammar_draws_the_renormalised_law(engine, sampler):
    """Rejection, then one draw from what the grammar allows: exactly P(x)/P(G)."""
    settings = SETTINGS["hot"]
    allowed = [int(t) for t in np.argsort(-logits_of(engine)) if 97 <= t < 123][:4]
    grammar = "root ::= [" + "".join(map(chr, sorted(allowed))) + "]"
    law = sampling_law(logits_of(engine), settings)
    assert 0.001 < law[allowed].sum() < 0.9
    wanted = np.zeros(tiny.VOCAB)
    wanted[allowed] = law[allowed] / law[allowed].sum()
    got = [draws(engine, sampler(settings, grammar=grammar, seed=seed), 1)[0] for seed in range(4000)]
    assert chi_square_excess(counts_of(got), wanted) < 4


def test_a_grammar_is_obeyed_to_its_end(engine, sampler):
    chain = sampler(SETTINGS["hot"], grammar='root ::= "ab" [cd] "e"')
    got = draws(engine, chain, 5)
    assert got[:2] == [ord("a"), ord("b")]
    assert got[2] in (ord("c"), ord("d"))
    assert got[3] == ord("e")
    assert engine.decoder.model.is_end(got[4])


def test_a_json_schema_becomes_a_grammar(engine, sampler):
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    chain = sampler(SETTINGS["hot"], grammar=schema_to_gbnf(schema))
    text = b""
    for token in draws_until_end(engine, chain, 200):
        text += engine.decoder.model.piece(token)
    assert text.lstrip().startswith(b"{")
    assert b'"n"' in text


def draws_until_end(engine, chain, most: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < most:
        tokens += draws(engine, chain, 1)
        if engine.decoder.model.is_end(tokens[-1]):
            return tokens[:-1]
    return tokens


def test_greedy_with_a_grammar_takes_the_best_allowed_token(engine, sampler):
    logits = logits_of(engine)
    letters = np.arange(97, 123)
    best = int(letters[logits[letters].argmax()])
    assert draws(engine, sampler(GREEDY, grammar="root ::= [a-z]"), 1) == [best]


@pytest.mark.parametrize("grammar", ["", "  \n", "root ::= [", "start ::= 'x'", "root ::= other"])
def test_a_broken_grammar_is_an_option_error(engine, grammar):
    with pytest.raises(OptionError, match="--grammar"):
        check_sampling(SamplingSettings(grammar=grammar), engine.decoder.model)


@pytest.mark.parametrize("token", [-1, tiny.VOCAB, 10**9])
def test_a_bias_for_a_token_that_does_not_exist_is_an_option_error(engine, token):
    with pytest.raises(OptionError, match="--logit-bias"):
        check_sampling(SamplingSettings(logit_bias=((token, 1.0),)), engine.decoder.model)


@pytest.mark.parametrize("schema", ["", "{", "[]", "nonsense", '{"type": "no-such-type"}'])
def test_a_broken_schema_is_an_option_error(schema):
    with pytest.raises(OptionError, match="--json-schema"):
        schema_to_gbnf(schema)
