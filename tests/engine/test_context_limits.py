"""The edges of batch and context: prompts around the batch size, long contexts, the last cells; and what happens when
llama.cpp says no."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from scripted import ScriptedDrafter, constant
from seconds import tell_seconds

from eagle3_cli import context as contexts
from eagle3_cli.context import lib
from eagle3_cli.engine import load_engine
from eagle3_cli.engine.sampler import check_sampling
from eagle3_cli.engine.target import Target
from eagle3_cli.errors import FileError, LlamaError, OptionError, PromptError
from eagle3_cli.settings import CACHE_TYPES, Limits, PairSettings, RuntimeSettings, SamplingSettings

GREEDY = SamplingSettings(temperature=0.0, seed=0)
LOOP = SamplingSettings(temperature=0.0, seed=0, grammar='root ::= ("abcdefg")*')  # text that can be looked up
RANDOM = [int(t) for t in np.random.default_rng(8).integers(0, tiny.END_OF_TEXT, 8000)]
LOOPING = [*b"abcdefg"] * 40
CELLS = 200  # llama.cpp makes 256 of them; ours are counted exactly
BATCH = 32

Open = Callable[..., Any]


@pytest.fixture
def open_pair(tiny_target: Any, tiny_drafters: Any, monkeypatch: Any, tmp_path: Any) -> Iterator[Open]:
    """open_pair(drafter or None, PairSettings values, **RuntimeSettings) -> Engine; closed after the test."""
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))
    opened = []

    def open_one(draft: str | None, pair: dict[str, Any] | None = None, **runtime: Any) -> Any:
        path = tiny_drafters[draft].path if draft else None
        values = {**tiny.EXACT, "ctx_size": CELLS, "batch": BATCH, "threads": 1, **runtime}
        opened.append(load_engine(PairSettings(tiny_target.path, path, **(pair or {})), RuntimeSettings(**values)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def shape(depth: int, width: int, nodes: int) -> dict[str, int]:
    return {"depth": depth, "width": width, "nodes": nodes}


def answer(engine: Any, prompt: list[int], sampling: SamplingSettings = GREEDY, **limits: Any) -> tuple[list[int], Any]:
    """(tokens, finish reason)"""
    pieces = list(engine.stream(prompt, sampling, Limits(**limits)))
    return [piece.token for piece in pieces if piece.token is not None], pieces[-1].finish_reason


# --- prompts around the batch size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, "good", "narrow"])
def test_prompts_around_the_batch_size_are_answered_like_in_one_batch(open_pair, draft):
    engine = open_pair(draft, shape(4, 4, 8), ctx_size=512)
    whole = open_pair(None, ctx_size=512, batch=512)
    assert engine.decoder.target.context.rows == BATCH  # of a batch and of a ubatch
    for length in (1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH, 3 * BATCH + 7):
        prompt = RANDOM[length : 2 * length]  # no two have a beginning in common
        wanted = answer(whole, prompt, max_tokens=30)
        assert answer(engine, prompt, max_tokens=30) == wanted, length
        assert answer(engine, prompt, max_tokens=30) == wanted, f"{length}, from the cache"


def test_a_batch_larger_than_the_context_takes_no_more_memory(open_pair):
    engine, usual = open_pair("good", shape(4, 4, 8), batch=65536), open_pair("good", shape(4, 4, 8))
    assert engine.decoder.target.context.rows == CELLS
    assert lib.llama_n_ctx(engine.decoder.target.context.handle) == 256
    assert answer(engine, RANDOM[:150], max_tokens=20) == answer(usual, RANDOM[:150], max_tokens=20)


def test_a_batch_of_one_row_has_room_for_the_logits_of_every_sequence(open_pair):
    """llama.cpp asserts it: with --draft-tokens 0 --batch-size 1 the process ended."""
    engine = open_pair("good", shape(4, 4, 0), batch=1)
    assert answer(engine, RANDOM[:9], max_tokens=9) == answer(open_pair(None), RANDOM[:9], max_tokens=9)


@pytest.mark.parametrize("cells", [256, 1000, 8192])
def test_each_model_has_one_cache_whatever_the_number_of_sequences(open_pair, cells):
    """llama.cpp 28433: not one for each of the 61 sequences of a tree."""
    engine = open_pair("good", shape(8, 10, 60), ctx_size=cells)
    caches = engine.decoder.target.context, engine.decoder.drafter._decoder
    assert [context.cells for context in caches] == [cells, cells + 80]
    assert [lib.llama_n_ctx(context.handle) for context in caches] == [-(-c.cells // 256) * 256 for c in caches]


# --- long contexts -------------------------------------------------------------------------------------------------


def test_two_thousand_tokens_of_context(open_pair):
    prompt = RANDOM[:2000]
    runtime = {"ctx_size": 2048, "batch": 512}
    wanted = answer(open_pair(None, **runtime), prompt)
    assert len(wanted[0]) == 48
    engine = open_pair("good", shape(4, 4, 8), **runtime)
    assert answer(engine, prompt) == wanted
    assert engine.statistics.accepted > 5


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["good", "narrow", "borrowing"])
def test_eight_thousand_tokens_of_context(open_pair, draft):
    prompt = RANDOM[:7900]
    wanted = answer(open_pair(None, ctx_size=8000, batch=512), prompt)
    assert len(wanted[0]) == 100
    assert answer(open_pair(draft, shape(8, 10, 60), ctx_size=8000, batch=512), prompt) == wanted


def test_a_drafter_of_short_contexts_is_as_good_beyond_them(open_pair, tiny_target, tiny_drafters, tmp_path):
    """sglang 6783, vllm 48894: its file says 64 positions.  Every row of the context is drafted from, up to its end."""
    good = tiny_drafters["good"]
    short = tiny.write_drafter(tmp_path / "short.gguf", good.config, good.weights, eagle3__context_length=64)
    runtime = RuntimeSettings(**tiny.EXACT, ctx_size=CELLS, batch=BATCH, threads=1)
    usual = open_pair("good", shape(4, 4, 8))
    with load_engine(PairSettings(tiny_target.path, short.path, **shape(4, 4, 8)), runtime) as engine:
        for length in (60, 64, 65, 190):
            assert answer(engine, RANDOM[:length]) == answer(usual, RANDOM[:length])
            assert engine.statistics.accepted == usual.statistics.accepted > 0, length


# --- the last cells ------------------------------------------------------------------------------------------------

# what drafts, the shape of its tree, its size at most, other settings, what it samples
ENDS = {
    "one": ("good", shape(1, 1, 1), 1, {}, GREEDY),
    "chain": ("good", shape(3, 1, 3), 3, {}, GREEDY),
    "tree": ("good", shape(4, 4, 8), 8, {}, GREEDY),
    "useless": ("narrow", shape(3, 3, 7), 7, {}, GREEDY),
    "flash attention": ("good", shape(4, 4, 8), 8, {"flash_attn": "on", "ctx_size": 256}, GREEDY),
    "auto": ("good", {}, 32, {}, GREEDY),
    "auto with lookup": ("good", {"lookup": True}, 32, {"ctx_size": 256}, LOOP),
    "lookup": (None, {"lookup": True, "nodes": 6}, 6, {}, LOOP),
    "auto lookup": (None, {"lookup": True}, 32, {}, LOOP),
}


@pytest.fixture
def trees(monkeypatch) -> list[tuple[int, int]]:
    """(tokens in the cache, nodes) of every verification."""
    seen: list[tuple[int, int]] = []
    verify = Target.verify

    def watched(self, root, tree):
        seen.append((self.past, len(tree)))
        verify(self, root, tree)

    monkeypatch.setattr(Target, "verify", watched)
    return seen


@pytest.mark.parametrize("name", ENDS)
def test_the_tree_shrinks_and_the_answer_ends_at_the_last_cell(open_pair, monkeypatch, trees, name):
    """Whatever room there is: prompt and answer together are exactly as many tokens as the context has cells."""
    draft, pair, nodes, runtime, sampling = ENDS[name]
    engine, plain = open_pair(draft, pair, **runtime), open_pair(None, **runtime)
    if engine.decoder.budget is not None:
        tell_seconds(engine.decoder.budget, monkeypatch)
    cells = engine.decoder.cells
    text = LOOPING if sampling is LOOP else RANDOM
    rooms = range(1, nodes + 3) if nodes < 32 else (1, 2, 3, 4, 5, 8, 13, 21, 31, 32, 33, 34, 60)
    drafted = 0
    for room in rooms:
        prompt = text[: cells - room]
        trees.clear()
        tokens, reason = answer(engine, prompt, sampling, ignore_eos=True)
        assert (len(prompt) + len(tokens), reason) == (cells, "length")
        assert all(past + 1 + n <= cells for past, n in trees)
        assert trees == [] or (trees[-1][0] < cells - 1 and max(n for _, n in trees) <= nodes)
        drafted += sum(n for _, n in trees)
        assert engine.decoder.committed == [*prompt, *tokens][: len(engine.decoder.committed)]
        assert len(engine.decoder.committed) == cells - 1  # the last token is emitted, not read
        assert answer(plain, prompt, sampling, ignore_eos=True) == (tokens, reason)
    assert drafted > 0
    with pytest.raises(PromptError, match=f"expected 1 to {cells - 1} tokens .the context holds {cells}., got {cells}"):
        answer(engine, text[:cells])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["large", "wide", "most"])
def test_large_trees_shrink_and_the_answer_ends_at_the_last_cell(open_pair, trees, name):
    """llama.cpp 10547, for many rooms up to a tree and two more."""
    pair = {"large": shape(8, 10, 60), "wide": shape(3, 64, 100), "most": shape(64, 8, 255)}[name]
    engine, plain = open_pair("good", pair, ctx_size=512), open_pair(None, ctx_size=512)
    nodes = pair["nodes"]
    for room in (*range(1, 20), *range(20, nodes, 7), nodes, nodes + 1, nodes + 2):
        trees.clear()
        tokens, reason = answer(engine, RANDOM[: 512 - room], ignore_eos=True)
        assert (len(tokens), reason) == (room, "length")
        assert all(past + 1 + n <= 512 for past, n in trees)
        assert answer(plain, RANDOM[: 512 - room], ignore_eos=True) == (tokens, reason)


def test_the_tree_is_as_large_as_the_room_allows_until_nothing_is_left(open_pair, trees):
    """A drafter whose every proposal is rejected: one token per round, so every size is seen."""
    engine = open_pair("end", shape(4, 2, 8))
    assert len(answer(engine, RANDOM[: CELLS - 14], ignore_eos=True)[0]) == 14
    left = range(13, 0, -1)  # tokens to come, after the one that the prompt gave
    assert trees == [(CELLS - 1 - k, min(8, k) if k > 1 else 0) for k in left]


def test_a_chain_is_never_longer_than_the_answer(open_pair, trees):
    engine = open_pair("random", shape(6, 1, 6))
    engine.decoder.drafter = ScriptedDrafter(constant(tiny.IM_END))
    answer(engine, RANDOM[: CELLS - 10], ignore_eos=True)
    assert [n for _, n in trees] == [6, 6, 6, 5, 4, 3, 2, 1, 0]


def test_after_a_full_context_a_shorter_prompt_is_answered_as_ever(open_pair):
    engine, fresh = open_pair("good", shape(4, 4, 8)), open_pair("good", shape(4, 4, 8))
    answer(engine, RANDOM[: CELLS - 5])
    for prompt in (RANDOM[: CELLS - 60], RANDOM[100:140]):
        assert answer(engine, prompt, max_tokens=30) == answer(fresh, prompt, max_tokens=30)
        assert engine.statistics.accepted == fresh.statistics.accepted


@pytest.mark.parametrize("cells", [2, 3, 9])
def test_tiny_contexts_are_filled_exactly(open_pair, cells):
    engine, plain = open_pair("good", shape(8, 10, 60), ctx_size=cells), open_pair(None, ctx_size=cells)
    for length in range(1, cells):
        tokens, reason = answer(engine, RANDOM[:length])
        assert (length + len(tokens), reason) == (cells, "length")
        assert answer(plain, RANDOM[:length]) == (tokens, reason)


@pytest.mark.parametrize("prompt", [[-1], [5, tiny.VOCAB], [2**40]])
def test_a_token_that_the_model_lacks_is_refused(open_pair, prompt):
    engine = open_pair("good", shape(2, 2, 4))
    with pytest.raises(PromptError, match=f"expected token ids from 0 to {tiny.VOCAB - 1}"):
        answer(engine, prompt, SamplingSettings(temperature=1.0, repeat_penalty=1.2))
    assert engine.decoder.committed == []


# --- cache types -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory) -> tiny.TinyModel:
    """A target whose heads hold two whole blocks of every packed cache type."""
    config = replace(tiny.TARGET, heads=2, kv_heads=1, head_dim=64)
    return tiny.write_target(tmp_path_factory.mktemp("wide") / "wide.gguf", config)


def load_with(target: Any, **runtime: Any) -> Any:
    pair = PairSettings(target.path, None, "--no-draft")
    return load_engine(pair, RuntimeSettings(**{"ctx_size": 64, "batch": 16, "threads": 1, **runtime}))


@pytest.mark.parametrize("packed", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
@pytest.mark.parametrize("flash", ["auto", "on", "off"])
def test_a_packed_cache_needs_heads_of_whole_blocks(tiny_target, packed, flash):
    """Heads of 16 values, blocks of 32: without flash attention llama.cpp computes with keys of no block at all."""
    with pytest.raises(OptionError, match=rf"--cache-type-k {packed}: packs 32 values .* heads of 16") as caught:
        load_with(tiny_target, cache_type_k=packed, flash_attn=flash)
    assert caught.value.exit_code == 2
    if flash != "off":
        with pytest.raises(OptionError, match=rf"--cache-type-v {packed}: packs 32 values"):
            load_with(tiny_target, cache_type_v=packed, flash_attn=flash)


@pytest.mark.parametrize("k", CACHE_TYPES)
def test_every_pair_of_cache_types_answers_or_is_refused_before_loading(wide_heads, k):
    exact = load_with(wide_heads, **tiny.EXACT)
    wanted = answer(exact, RANDOM[:30], max_tokens=3)
    exact.close()
    for v in CACHE_TYPES:
        for flash in ("on", "off"):
            if flash == "off" and v.startswith("q"):
                with pytest.raises(OptionError, match="needs flash attention"):
                    RuntimeSettings(cache_type_v=v, flash_attn="off")
                continue
            with load_with(wide_heads, cache_type_k=k, cache_type_v=v, flash_attn=flash) as engine:
                tokens = answer(engine, RANDOM[:30], max_tokens=3)
            assert len(tokens[0]) == 3
            assert tokens == wanted or {k, v} & {"q4_0", "q4_1", "q5_0", "q5_1"}, (v, flash)


# --- llama.cpp says no -----------------------------------------------------------------------------------------------

WORDS = {1: "found no room", 2: "was aborted", -1: "refused", -2: "could not allocate", -3: "failed", 99: "failed"}


@pytest.mark.parametrize(("code", "call"), list(zip(WORDS, (1, 2, 3, 4, 7, 9), strict=True)))
def test_every_code_of_a_pass_is_an_error_and_the_next_answer_is_right(open_pair, monkeypatch, code, call):
    engine = open_pair("good", shape(4, 4, 8))
    wanted = answer(open_pair("good", shape(4, 4, 8)), RANDOM[:50], max_tokens=20)
    process, left = contexts._process, [call]

    def refusing(*arguments):
        left[0] -= 1
        return process(*arguments) if left[0] else code

    with monkeypatch.context() as patch:
        patch.setattr(contexts, "_process", refusing)
        with pytest.raises(LlamaError, match=rf"{WORDS[code]}.*code {code}"):
            answer(engine, RANDOM[:50], max_tokens=20)
    assert answer(engine, RANDOM[:50], max_tokens=20) == wanted


def refuse(monkeypatch: Any, name: str, result: Any) -> None:
    monkeypatch.setattr(f"eagle3_cli.{name}", lambda *_: result)


@pytest.mark.parametrize(
    ("name", "words", "sampling"),
    [
        ("context._logits", "no logits", GREEDY),
        ("engine.sampler._logits_row", "no logits", SamplingSettings(temperature=1.0, seed=1)),
        ("context._seq_rm", "cannot drop positions", GREEDY),
        ("context.lib.llama_sampler_chain_init", "could not make", GREEDY),
        ("context.lib.llama_sampler_init_top_k", "could not make", SamplingSettings(temperature=1.0, seed=1)),
        ("context.lib.llama_sampler_init_dist", "could not make", SamplingSettings(temperature=1.0, seed=1)),
        ("context.lib.llama_sampler_init_dry", "could not make", SamplingSettings(dry_multiplier=0.5, seed=1)),
        ("context.lib.llama_sampler_init_penalties", "could not make", SamplingSettings(repeat_penalty=1.1, seed=1)),
        ("context.lib.llama_sampler_init_logit_bias", "could not make", SamplingSettings(logit_bias=((1, 1.0),))),
    ],
)
def test_a_missing_result_is_an_error(open_pair, monkeypatch, name, words, sampling):
    engine = open_pair("narrow", shape(4, 4, 8))
    with monkeypatch.context() as patch:
        refuse(patch, name, None)
        with pytest.raises(LlamaError, match=words):
            answer(engine, RANDOM[:20], sampling, max_tokens=20)
    engine.decoder.truncate(0)
    assert len(answer(engine, RANDOM[:20], max_tokens=20)[0]) == 20


@pytest.mark.parametrize("name", ["_state_get", "_state_set", "_seq_rm"])
def test_cells_that_cannot_be_moved_are_an_error(open_pair, monkeypatch, name):
    engine = open_pair("good", shape(4, 4, 8), flash_attn="on")
    context = engine.decoder.target.context
    engine.decoder.prefill(RANDOM[:20])
    context.make_contiguous(0, 10, 20, scratch=3)
    assert context.last_position(0) == 19
    refuse(monkeypatch, f"context.{name}", 0)
    with pytest.raises(LlamaError, match="could not move 10 KV cells"):
        context.make_contiguous(0, 10, 20, scratch=3)


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ("failed to allocate buffer for kv cache", "Try a smaller --ctx-size or --batch-size."),
        ("model does not support different K (q8_0) and V (f16) cache types", None),
    ],
)
def test_a_context_that_cannot_be_made_is_an_error_with_llamas_reason(open_pair, monkeypatch, log, hint):
    monkeypatch.setattr("eagle3_cli.context.lib.llama_init_from_model", lambda *_: None)
    monkeypatch.setattr("eagle3_cli.context.recent_log", lambda: log)
    with pytest.raises(LlamaError, match=r"target: llama.cpp could not make a context of 200 cells: .*cache") as info:
        open_pair(None)
    assert info.value.hint == hint


def test_a_model_without_a_cache_is_refused(open_pair, monkeypatch):
    """Diffusion and embedding models of llama.cpp have none."""
    monkeypatch.setattr("eagle3_cli.context.lib.llama_get_memory", lambda *_: None)
    with pytest.raises(FileError, match="keeps no KV cache"):
        open_pair(None)


def test_a_batch_that_cannot_be_made_is_an_error(open_pair, monkeypatch):
    monkeypatch.setattr("eagle3_cli.context.lib.llama_batch_ext_init", lambda *_: None)
    with pytest.raises(LlamaError, match="could not make a batch"):
        open_pair(None)


# --- draws that would end the process or mean nothing ----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", [None, "good"])
def test_a_grammar_that_allows_nothing_that_is_left_is_an_error(open_pair, temperature, draft):
    """llama.cpp throws through C when a token is taken that its grammar does not allow."""
    engine = open_pair(draft, shape(4, 4, 8))
    banned = tuple((token, -np.inf) for token in (ord("c"), tiny.IM_END, tiny.END_OF_TEXT))
    sampling = SamplingSettings(temperature=temperature, grammar='root ::= "abc"', logit_bias=banned, seed=3)
    with pytest.raises(OptionError, match="nothing that it allows here is left"):
        answer(engine, RANDOM[:20], sampling, max_tokens=20)
    assert len(answer(engine, RANDOM[:20], max_tokens=20)[0]) == 20


@pytest.mark.parametrize(
    ("tensor", "rows", "sampling"),
    [
        ("output_norm.weight", slice(None), GREEDY),
        ("output_norm.weight", slice(None), SamplingSettings(seed=1)),
        ("output.weight", slice(40, 60), SamplingSettings(seed=1)),
        ("output.weight", slice(40, 60), SamplingSettings(seed=1, typical_p=0.5)),
        ("output.weight", slice(40, 60), SamplingSettings(seed=1, grammar="root ::= [a-z]+")),
    ],
)
def test_logits_that_are_no_numbers_are_an_error(tmp_path, tiny_target, tensor, rows, sampling):
    weights = {name: value.copy() for name, value in tiny_target.weights.items()}
    weights[tensor][rows] = np.nan
    target = tiny.write_target(tmp_path / "nan.gguf", weights=weights)
    with load_with(target) as engine, pytest.raises(LlamaError, match="logits are not numbers"):
        answer(engine, RANDOM[:20], sampling, max_tokens=5)


def test_biases_that_leave_nothing_or_no_number_are_refused(open_pair):
    model = open_pair(None).decoder.model
    with pytest.raises(OptionError, match="bans every token"):
        check_sampling(SamplingSettings(logit_bias=tuple((t, -np.inf) for t in range(tiny.VOCAB))), model)
    with pytest.raises(OptionError, match="expected a bias up to"):
        check_sampling(SamplingSettings(logit_bias=((5, 1e39),)), model)
    check_sampling(SamplingSettings(logit_bias=((5, 1e38), (6, -1e300))), model)


@pytest.mark.parametrize("most", [2**31 - 1, 10**6])
def test_looking_back_further_than_the_context_is_looking_at_all_of_it(open_pair, most):
    """llama.cpp reserves memory for as many tokens as are asked for."""
    engine = open_pair(None)
    both = [
        SamplingSettings(seed=2, repeat_penalty=1.3, repeat_last_n=n, dry_multiplier=0.5, dry_penalty_last_n=n)
        for n in (-1, most)
    ]
    assert answer(engine, RANDOM[:30], both[0], max_tokens=20) == answer(engine, RANDOM[:30], both[1], max_tokens=20)
