"""The product's promise on the real pair: with a drafter the answer is the answer without."""

from __future__ import annotations

import itertools
import platform

import pytest
from f32_copy import write_f32_copy

from eagle3_cli.bench.check import check
from eagle3_cli.bench.prompts import PROMPTS, Prompt, load_prompts
from eagle3_cli.bench.run import BenchSettings, Contenders
from eagle3_cli.demo import demo_drafter, demo_target
from eagle3_cli.engine import load_engine
from eagle3_cli.errors import FileError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape

SHAPES = (TreeShape(1, 1, 1), TreeShape(3, 2, 4), TreeShape(5, 6, 16), TreeShape(8, 10, 60))

# Q4_1 logits move by 0.5 to 0.9 where kernels of different batch widths round differently, so a flip of two tokens
# closer than that proves nothing; a wrong token is several logits away.
QUANTISED_GAP = 1.0
F32_GAP = 1e-3

TASKS = (
    "Explain to a beginner what this is:",
    "Write a short story about",
    "List five questions that a journalist would ask about",
    "Write a Python function that models",
    "Give practical advice about",
)
TOPICS = (
    "a broken kettle",
    "tidal power",
    "moving to a new town",
    "a bakery at dawn",
    "prime numbers",
    "learning the cello",
    "a delayed night train",
    "compost",
    "the rules of a card game",
    "an honest mistake",
)
FIFTY = tuple(Prompt("fifty", f"{task} {topic}.") for task, topic in itertools.product(TASKS, TOPICS))


@pytest.fixture(scope="session")
def target():
    try:
        return demo_target()
    except FileError:
        pytest.skip("the demo extra is not installed")


def contenders(target, runtime, shapes):
    return Contenders(BenchSettings(target, demo_drafter(), runtime, shapes))


def describe(result):
    return [(d.contender, d.prompt, d.position, round(d.gap, 6)) for d in result.differences]


def test_greedy_answers_of_the_quantised_pair_are_near_those_of_plain_decoding(target):
    with contenders(target, RuntimeSettings(ctx_size=512), SHAPES) as pair:
        result = check(pair, load_prompts(None)[:1], SHAPES, max_tokens=32)
    assert result.largest_gap < QUANTISED_GAP, describe(result)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="measured on x86 kernels only")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_flash_attention_the_quantised_pair_answers_exactly_like_plain_decoding(target, temperature):
    """The same tokens from the same seed, to the last one, for every shape of tree (docs/losslessness.md)."""
    runtime, limits = RuntimeSettings(ctx_size=512, flash_attn="on"), Limits(48, ignore_eos=True)
    sampling = SamplingSettings(temperature, top_p=0.9, seed=7)
    with contenders(target, runtime, SHAPES) as pair:
        prompt = pair.engine.render([{"role": "user", "content": PROMPTS[3]}])
        expected = [piece.token for piece in pair.plain.stream(prompt, sampling, limits)]
        for shape in SHAPES:
            pair.engine.decoder.shape = shape
            assert [piece.token for piece in pair.engine.stream(prompt, sampling, limits)] == expected, shape


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(temperature=0.8, top_p=0.9, seed=11),
        SamplingSettings(temperature=0.8, repeat_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, seed=12),
    ],
    ids=["top-p", "penalties"],
)
def test_the_same_seed_gives_the_same_tokens_with_and_without_a_drafter(f32_target, sampling):
    tokens = {}
    for draft in (None, demo_drafter()):
        runtime = RuntimeSettings(ctx_size=256, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
        with load_engine(PairSettings(f32_target, draft, depth=4, width=4, nodes=8), runtime) as engine:
            prompt = engine.render([{"role": "user", "content": PROMPTS[1]}])
            tokens[draft] = [p.token for p in engine.stream(prompt, sampling, Limits(32))]
            rounds = engine.statistics.rounds
    assert tokens[None] == tokens[demo_drafter()]
    assert rounds < 31


@pytest.fixture(scope="session")
def f32_target(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("f32") / "target-f32.gguf"
    write_f32_copy(target, path)
    return path


@pytest.mark.slow
def test_greedy_answers_of_an_f32_target_are_those_of_plain_decoding(f32_target, capsys):
    """50 prompts x 128 tokens at 1, 4, 16 and 60 nodes.  A first difference must be a near-tie."""
    runtime = RuntimeSettings(ctx_size=512, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
    with contenders(f32_target, runtime, SHAPES) as pair:
        result = check(pair, FIFTY, SHAPES, max_tokens=128)
    with capsys.disabled():
        print(f"\n{result.answers} answers, {result.match_rate:.1%} identical, first differences: {describe(result)}")
    assert result.largest_gap < F32_GAP, describe(result)
