"""Drafters that ask for what llama.cpp's graph lacks, against the float64 forward pass of reference.py.

EAGLE 3.1's norms (fc_norm, norm_output), sliding windows, a missing final norm, a missing vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
from drafting import Drafting, agree

from eagle3_cli.engine import load_engine, loop
from eagle3_cli.engine.tree import FixedShape
from eagle3_cli.errors import OptionError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape

GREEDY = SamplingSettings(temperature=0.0)
TEXT = [int(t) for t in np.random.default_rng(21).integers(0, tiny.END_OF_TEXT, 80)]
SHAPE = TreeShape(4, 3, 9)
ALL = TreeShape(4, 3, 30)  # keeps every node proposed, so that each level is compared in full

SWITCHES = {
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "window": {"window": 6},
    "no final norm": {"final_norm": False},
    "3.1": {"fc_norm": True, "norm_output": True},
    "3.1 and window": {"fc_norm": True, "norm_output": True, "window": 6},
    "all but a final norm": {"fc_norm": True, "window": 6, "final_norm": False},
}
NARROW = replace(tiny.DRAFTER, width=48, heads=6, kv_heads=3, ffn=80, norm_before_residual=True)
D2T = [i for i in range(tiny.VOCAB) if i % 3 and i < tiny.END_OF_TEXT]


def random_weights(config, seed, candidates=tiny.VOCAB):
    weights = tiny.drafter_weights(config, seed, candidates)
    if not config.final_norm:
        weights["output.weight"] *= 0.3  # outputs are larger than normed ones
    return weights


@pytest.fixture(scope="session")
def write(model_folder, tiny_target):
    """write(base, **switches) -> a drafter, made once.  random: useless, of the target's width.  narrow: useless, of
    another width and with a draft vocabulary.  good: knows most of the target, though it also looks at the past."""
    made = {}

    def make(base, **switches):
        key = (base, *sorted(switches.items()))
        if key not in made:
            made[key] = write_kind(model_folder / f"kind{len(made)}.gguf", base, switches)
        return made[key]

    def write_kind(path, base, switches):
        if base == "narrow":
            config = replace(NARROW, **switches)
            return tiny.write_drafter(path, config, random_weights(config, 31, len(D2T)), D2T)
        config = replace(tiny.DRAFTER, norm_before_residual=base == "good", **switches)
        good = tiny.good_weights(tiny_target.weights, config, focus=1.5) if base == "good" else None
        return tiny.write_drafter(path, config, good or random_weights(config, 32))

    return make


@pytest.fixture
def open_pair(tiny_target):
    """open_pair(drafter or None, shape, feedback, **RuntimeSettings) -> Engine; closed after the test."""
    opened = []

    def open_one(drafter, shape=SHAPE, feedback="auto", **runtime):
        path, why = (drafter.path, None) if drafter else (None, "--no-draft")
        pair = PairSettings(tiny_target.path, path, why, shape.depth, shape.width, shape.nodes, feedback)
        settings = {**tiny.EXACT, "ctx_size": 256, "batch": 16, "threads": 1, **runtime}
        opened.append(load_engine(pair, RuntimeSettings(**settings)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def drafts(engine, committed, root, shape=SHAPE):
    engine.decoder.prefill(committed)
    return engine.decoder.drafter.draft(root, FixedShape(shape))


# --- every kind against the reference --------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["random", "narrow"])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("shape", [(1, 3, 3), (4, 1, 4), (4, 3, 30)])
def test_the_first_tree_is_what_the_drafters_mathematics_gives(open_pair, write, tiny_target, base, switches, shape):
    drafter, shape = write(base, **switches), TreeShape(*shape)
    tree = drafts(open_pair(drafter, shape), TEXT[:40], 99, shape)
    assert len(tree) == shape.nodes
    assert max(tree.depths) == shape.depth
    agree(tree, Drafting(tiny_target, drafter, TEXT[:40], 99), shape)


@pytest.mark.parametrize("switches", [s for s in SWITCHES.values() if s.get("window")], ids=str)
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_drafts_stay_right_where_the_text_grows_and_is_cut_back(open_pair, write, tiny_target, switches, batch):
    """Across the window's end, by one token and by chunks; back to before it, back behind it, and on."""
    drafter = write("narrow", **switches)
    engine = open_pair(drafter, ALL, batch=batch)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 11, 28, 29, 60, 55, 57, 5, 7, 40, 50):
        agree(drafts(engine, TEXT[:n], TEXT[n], ALL), Drafting(tiny_target, drafter, TEXT[:n], TEXT[n]), ALL)


@pytest.mark.parametrize("window", [1, 2, 3, 16, 17, 39, 40, 41, 42, 43, 44, 100])
def test_windows_of_every_size_end_where_they_should(open_pair, write, tiny_target, window):
    """The root's position is 40; the tree goes to 43."""
    drafter = write("random", window=window)
    tree = drafts(open_pair(drafter, ALL), TEXT[:41], 99, ALL)
    assert max(tree.depths) == ALL.depth
    agree(tree, Drafting(tiny_target, drafter, TEXT[:41], 99), ALL)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_every_later_round_drafts_from_the_right_memory(open_pair, write, tiny_target, switches):
    """The tree of each round equals the reference's from scratch, after rejections and acceptances of all lengths."""
    drafter = write("good", **switches)
    engine = open_pair(drafter)
    decoder, rounds = engine.decoder, []
    draft = decoder.drafter.draft

    def noting(root, policy):
        tree = draft(root, policy)
        if policy.limit == SHAPE:
            rounds.append((list(decoder.committed), root, tree))
        return tree

    decoder.drafter.draft = noting
    list(engine.stream(TEXT[:9], GREEDY, Limits(max_tokens=45)))
    accepted = {b - a for a, b in zip(*[[len(r[0]) for r in rounds[i:]] for i in (0, 1)], strict=False)}
    assert len(rounds) >= 8
    assert len(accepted) >= 3
    for committed, root, tree in rounds:
        agree(tree, Drafting(tiny_target, drafter, committed, root), SHAPE)


# --- the switches have an effect -----------------------------------------------------------------------------------


def differs(a, b) -> bool:
    return list(a.tokens) != list(b.tokens) or not np.allclose(a.logps, b.logps, atol=0.05)


@pytest.mark.parametrize("switch", ["fc_norm", "norm_output", "window", "no final norm"])
def test_each_switch_changes_the_draft(open_pair, write, switch):
    """The same weights; a switch that nobody reads would go unnoticed."""
    with_it = write("random", **SWITCHES[switch])
    path = with_it.path.with_name(f"without {switch}.gguf")
    weights = {"output_norm.weight": np.ones(tiny.DRAFTER.width, np.float32), **with_it.weights}
    weights.pop("fc_norm", None)
    without = tiny.write_drafter(path, tiny.DRAFTER, weights)
    trees = [drafts(open_pair(drafter), TEXT[:40], 99) for drafter in (with_it, without)]
    assert differs(*trees)


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("feedback", ["auto", "pre", "post"])
def test_feedback_goes_before_what_the_file_says(open_pair, write, tiny_target, says, feedback):
    drafter = write("random", norm_output=says)
    taken = {"auto": says, "pre": False, "post": True}[feedback]
    engine = open_pair(drafter, feedback=feedback)
    assert engine.settings["feedback"] == ("post" if taken else "pre")
    tree = drafts(engine, TEXT[:40], 99)
    for norm_output in (False, True):
        other = replace(drafter, config=replace(drafter.config, norm_output=norm_output))
        drafting = Drafting(tiny_target, other, TEXT[:40], 99)
        if norm_output == taken:
            agree(tree, drafting, SHAPE)
        else:
            with pytest.raises(AssertionError):
                agree(tree, drafting, SHAPE)


def test_without_a_drafter_there_is_no_feedback(open_pair):
    assert open_pair(None).settings["feedback"] is None


def test_a_missing_final_norm_cannot_be_fed_back(open_pair, write):
    with pytest.raises(OptionError, match=r"--feedback post: .*kind.*gguf has no final norm"):
        open_pair(write("random", final_norm=False), feedback="post")
    assert open_pair(write("random", final_norm=False), feedback="pre").settings["feedback"] == "pre"


def test_feedback_of_another_name_is_refused(tiny_target):
    with pytest.raises(OptionError, match="--feedback: expected one of auto, pre, post, got both"):
        PairSettings(tiny_target.path, None, feedback="both")


# --- answers and caches ------------------------------------------------------------------------------------------


def answer(engine, sampling=GREEDY, prompt=TEXT[:40]):
    return [piece.token for piece in engine.stream(prompt, sampling, Limits(max_tokens=40))]


@pytest.mark.parametrize("base", ["good", "narrow"])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_answers_are_the_same_with_and_without_the_drafter(open_pair, write, base, switches):
    drafted, plain = open_pair(write(base, **switches)), open_pair(None)
    for sampling in (GREEDY, SamplingSettings(temperature=0.9, seed=5)):
        assert answer(drafted, sampling) == answer(plain, sampling)
        assert drafted.statistics.accepted > 10 or base == "narrow"


def alone_in_sequence_0(decoder) -> bool:
    context = decoder.drafter._decoder
    others = [context.last_position(s) for s in range(1, 2 * decoder.shape.width)]
    return context.last_position(0) == decoder.drafter._pairs - 1 and set(others) <= {-1}


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 4), (4, 3, 9)])
@pytest.mark.parametrize("base", ["good", "narrow"])
def test_after_every_round_only_sequence_0_is_in_use(open_pair, write, monkeypatch, base, shape):
    engine, clean = open_pair(write(base, window=6), TreeShape(*shape)), []
    round_ = loop._Answer.round

    def checked(self, root):
        done = round_(self, root)
        clean.append(alone_in_sequence_0(self.decoder))
        return done

    monkeypatch.setattr(loop._Answer, "round", checked)
    answer(engine)
    assert len(clean) > 5
    assert all(clean)


@pytest.mark.parametrize("where", ["process", "copy", "remove", "keep"])
@pytest.mark.parametrize("call", range(1, 8))
def test_an_interrupted_draft_leaves_nothing_behind(open_pair, write, monkeypatch, tiny_target, where, call):
    from eagle3_cli.context import Context

    drafter = write("narrow", window=6)
    engine, wanted = open_pair(drafter), answer(open_pair(None))
    engine.decoder.prefill(TEXT[:40])
    original, calls = getattr(Context, where), [0]

    def interrupted(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Context, where, interrupted)
        try:
            for n in (40, 43, 47):
                drafts(engine, TEXT[:n], TEXT[n])
        except KeyboardInterrupt:
            engine.decoder.truncate(len(engine.decoder.committed))
    assert alone_in_sequence_0(engine.decoder)
    agree(drafts(engine, TEXT[:50], 99), Drafting(tiny_target, drafter, TEXT[:50], 99), SHAPE)
    assert answer(engine) == wanted


# --- without a vocabulary ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no_vocab", "none"])
@pytest.mark.parametrize("missing", [(), ("token_embd.weight",), ("token_embd.weight", "output.weight")], ids=str)
def test_a_drafter_without_a_vocabulary_drafts_like_one_with_it(open_pair, tiny_target, tmp_path, name, missing):
    weights = {key: value for key, value in tiny.drafter_weights(tiny.DRAFTER, 33).items() if key not in missing}
    drafter = tiny.write_drafter(tmp_path / "nameless.gguf", weights=weights, tokens=[], tokenizer__ggml__model=name)
    engine = open_pair(drafter)
    agree(drafts(engine, TEXT[:40], 99), Drafting(tiny_target, drafter, TEXT[:40], 99), SHAPE)
    assert answer(engine) == answer(open_pair(None))


def test_a_drafter_without_a_vocabulary_may_have_a_draft_vocabulary(open_pair, tiny_target, tmp_path):
    drafter = tiny.write_drafter(
        tmp_path / "nameless.gguf", NARROW, tiny.drafter_weights(NARROW, 34, len(D2T)), D2T, tokens=[]
    )
    engine = open_pair(drafter)
    agree(drafts(engine, TEXT[:40], 99), Drafting(tiny_target, drafter, TEXT[:40], 99), SHAPE)
    assert answer(engine) == answer(open_pair(None))


def test_a_drafter_without_a_vocabulary_answers_through_the_front_door(open_pair, tiny_target, tmp_path):
    """Text in, text out: nothing asks the drafter for a token's text."""
    drafter = tiny.write_drafter(tmp_path / "nameless.gguf", tokens=[])
    texts = []
    for engine in (open_pair(drafter), open_pair(None)):
        prompt = engine.render([{"role": "user", "content": "the inn"}])
        texts.append("".join(p.text for p in engine.stream(prompt, GREEDY, Limits(max_tokens=20))))
    assert texts[0] == texts[1]
