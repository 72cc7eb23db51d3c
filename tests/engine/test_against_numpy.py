"""Both models against an independent float64 forward pass: hidden states, tree attention, EAGLE-3's drafting.

The target runs with a float32 KV cache and is equal to five digits.  The drafter's cache is float16, and flash
attention adds up in float16 too: equal to about three digits.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from drafting import Drafting, agree
from reference import TargetReference, path_to, tokens_to

from eagle3_cli import context as llama_context
from eagle3_cli.engine import load_engine
from eagle3_cli.engine.tree import ROOT, FixedShape
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape

GREEDY = SamplingSettings(temperature=0.0)
TARGET = 1e-4  # tolerance, of values of size 1 to 10
AUX = list(tiny.DRAFTER.aux_layers)
PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, tiny.END_OF_TEXT, 41)]

# Branches at every level, to three depths; most nodes are not on the path of first children.
TREE = DraftTree(
    tokens=[10, 12, 15, 16, 13, 10, 11, 14],
    parents=[-1, 0, 1, 1, 0, 4, -1, 6],
    depths=[1, 2, 3, 3, 2, 3, 1, 2],
    logps=[-1.0, -1.2, -1.5, -1.6, -1.3, -1.7, -1.1, -1.4],
)


def close(got: Any, wanted: Any, tolerance: float = TARGET) -> None:
    np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def reading(tiny_target):
    """The reference's logits and layer inputs of the prompt."""
    return TargetReference(tiny_target.weights, tiny_target.config).read(PROMPT)


# --- the target -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 16, 41, 64])
def test_captured_features_are_the_inputs_of_the_aux_layers(open_engine, reading, batch):
    target = open_engine("random", batch=batch).decoder.target
    chunks = []
    target.prefill(PROMPT, lambda tokens, features: chunks.append((list(tokens), features.copy())))
    assert [token for tokens, _ in chunks for token in tokens] == PROMPT
    _, inputs = reading
    close(np.concatenate([features for _, features in chunks]), inputs[:, AUX].reshape(len(PROMPT), -1))


def test_prefill_leaves_the_logits_of_the_last_token(open_engine, reading):
    engine = open_engine("random", batch=16)
    engine.decoder.prefill(PROMPT)
    close(engine.decoder.target.logits(ROOT), reading[0][-1])
    assert engine.decoder.target.argmax(ROOT) == reading[0][-1].argmax()


@pytest.fixture
def engine_reading_the_last_layer(tiny_target, tmp_path):
    """With a drafter that reads the output of the target's last layer."""
    config = replace(tiny.DRAFTER, aux_layers=(1, 2, tiny.TARGET.layers))
    draft = tiny.write_drafter(tmp_path / "last.gguf", config).path
    pair, runtime = (
        PairSettings(tiny_target.path, draft, None, 3, 3, 6),
        RuntimeSettings(**tiny.EXACT, batch=16, threads=1),
    )
    with load_engine(pair, runtime) as engine:
        yield engine


def test_the_output_of_the_last_layer_is_captured_for_every_row(engine_reading_the_last_layer, reading):
    """llama.cpp computes it only for rows that ask for logits."""
    target, chunks = engine_reading_the_last_layer.decoder.target, []
    target.prefill(PROMPT, lambda tokens, features: chunks.append(features.copy()))
    logits, inputs = reading
    close(np.concatenate(chunks), inputs[:, [1, 2, tiny.TARGET.layers]].reshape(len(PROMPT), -1))
    close(target.logits(ROOT), logits[-1])
    assert target.argmax(ROOT) == logits[-1].argmax()


def test_answers_are_the_same_where_every_row_asks_for_logits(engine_reading_the_last_layer, open_engine):
    answers = []
    for engine in (engine_reading_the_last_layer, open_engine(None)):
        for sampling in (GREEDY, SamplingSettings(temperature=0.8, seed=4)):
            answers.append([piece.token for piece in engine.stream(PROMPT, sampling, Limits(max_tokens=30))])
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize("draft", [None, "random"])
def test_logits_after_any_tokens(open_engine, reading, draft):
    """Forwards, with what is in the cache, and back again."""
    decoder = open_engine(draft, batch=16).decoder
    for n in (1, 5, 16, 17, 41, 40, 2):
        close(decoder.logits_after(PROMPT[:n]), reading[0][n - 1])
        assert decoder.committed == PROMPT[:n]


def test_no_features_while_the_capture_is_paused(open_engine, reading):
    """The logits are the same, and the next pass is captured again."""
    target = open_engine("random", batch=16).decoder.target
    chunks = []
    for wanted, tokens in ((False, PROMPT[:20]), (True, PROMPT[20:])):
        target.captures = wanted
        target.prefill(tokens, lambda tokens, features: chunks.append(None if features is None else features.copy()))
    assert chunks[:2] == [None, None]
    logits, inputs = reading
    close(np.concatenate(chunks[2:]), inputs[20:, AUX].reshape(len(PROMPT) - 20, -1))
    close(target.logits(ROOT), logits[-1])
    target.captures = False
    target.verify(99, TREE)
    assert target.commit([]) is None


def tree_reading(tiny_target, root: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """node -> (logits, aux features) after the prompt, the root and the node's own path, nothing else."""
    readings = {}
    for node in range(ROOT, len(TREE)):
        logits, inputs = TargetReference(tiny_target.weights, tiny_target.config).read(
            [*PROMPT, root, *tokens_to(TREE, node)]
        )
        readings[node] = logits[-1], inputs[-1, AUX].reshape(-1)
    return readings


def test_every_tree_row_computes_what_its_own_path_alone_would(open_engine, tiny_target):
    engine = open_engine("random")
    wanted = tree_reading(tiny_target, root=99)
    engine.decoder.prefill(PROMPT)
    engine.decoder.target.verify(99, TREE)
    for node in range(ROOT, len(TREE)):
        close(engine.decoder.target.logits(node), wanted[node][0])
        assert engine.decoder.target.argmax(node) == wanted[node][0].argmax()


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("leaf", range(ROOT, len(TREE)))
def test_commit_keeps_the_features_and_the_cells_of_the_path(open_engine, tiny_target, leaf, in_order):
    """Every node as the last accepted one; then one more token must see exactly that path."""
    engine = open_engine("random")
    engine.decoder.target._in_order = in_order
    target, path = engine.decoder.target, path_to(TREE, leaf)
    engine.decoder.prefill(PROMPT)
    target.verify(99, TREE)
    features = target.commit(path)
    reference = TargetReference(tiny_target.weights, tiny_target.config)
    logits, inputs = reference.read([*PROMPT, 99, *tokens_to(TREE, leaf), 7])
    close(features, inputs[len(PROMPT) : -1, AUX].reshape(len(path) + 1, -1))
    assert target.past == len(PROMPT) + 1 + len(path) == target.context.last_position(0) + 1
    target.verify(7, DraftTree())
    close(engine.decoder.target.logits(ROOT), logits[-1])


def cells_in_order(context, n: int) -> bool:
    """Do the cells of sequence 0 hold the positions 0..n-1 in this order?  As llama.cpp saves them, cell by cell:
    int32 position, number of sequences, sequence id."""
    size = llama_context._state_size(context.handle, 0, 0)
    state = ctypes.create_string_buffer(size)
    assert llama_context._state_get(context.handle, state, size, 0, 0) == size
    return np.array([[i, 1, 0] for i in range(n)], np.int32).tobytes() in state.raw


def move_nothing(context, source: int, start: int, end: int, scratch: int) -> None:
    context.remove(0, start)
    context.copy(source, 0, start, end)
    context.keep(0)


def test_cells_lie_in_the_order_of_their_positions_like_those_of_plain_decoding(open_engine, monkeypatch):
    """Attention adds up in the order of the cells."""
    in_order = {}
    for move in ("as it is", "not at all"):
        if move == "not at all":
            monkeypatch.setattr("eagle3_cli.context.Context.make_contiguous", move_nothing)
        for leaf in range(ROOT, len(TREE)):
            target = (engine := open_engine("random", flash_attn="on")).decoder.target
            engine.decoder.prefill(PROMPT)
            target.verify(99, TREE)
            target.commit(path_to(TREE, leaf))
            target.verify(7, DraftTree())  # takes the first free cell
            target.commit([])
            in_order[move, leaf] = cells_in_order(target.context, target.past)
            engine.close()
    assert all(in_order["as it is", leaf] for leaf in range(ROOT, len(TREE)))
    assert not all(in_order["not at all", leaf] for leaf in range(ROOT, len(TREE)))


# --- the drafter ----------------------------------------------------------------------------------------------


DRAFTERS = ["good", "random", "borrowing", "narrow"]
SHAPES = [(1, 1, 1), (1, 6, 4), (4, 1, 4), (3, 3, 9), (5, 4, 16)]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_tree_is_what_eagle3_proposes(open_engine, tiny_target, tiny_drafters, name, shape):
    engine = open_engine(name, shape)
    engine.decoder.prefill(PROMPT)
    tree = engine.decoder.drafter.draft(99, FixedShape(TreeShape(*shape)))
    assert len(tree) == shape[2]
    assert max(tree.depths) > 1 or shape[0] == 1
    agree(tree, Drafting(tiny_target, tiny_drafters[name], PROMPT, 99), TreeShape(*shape))


@pytest.mark.parametrize("gap", [1, 17, 40])
def test_a_drafter_drafts_from_what_it_saw_behind_a_gap(open_engine, tiny_target, tiny_drafters, gap):
    """It saw some tokens, then the capture paused until `gap`, and a draft in between leaves no trace."""
    engine = open_engine("random", (3, 3, 9), batch=16)
    decoder = engine.decoder
    for end, wanted in ((gap // 2, True), (gap, False), (len(PROMPT), True)):
        decoder.target.captures = wanted
        decoder.target.prefill(PROMPT[len(decoder.committed) : end], decoder.commit)
        assert decoder.drafter.ready == (wanted and end > 0)
        if decoder.drafter.ready:
            tree = decoder.drafter.draft(99, FixedShape(TreeShape(3, 3, 9)))
    agree(tree, Drafting(tiny_target, tiny_drafters["random"], PROMPT, 99, since=gap), TreeShape(3, 3, 9))


def test_one_more_level_needs_the_output_before_the_norm_as_feature(open_engine, tiny_target, tiny_drafters):
    """Depth 2 of a tree, node by node: the children of every level-1 node."""
    engine = open_engine("random", (2, 3, 12))
    engine.decoder.prefill(PROMPT)
    tree = engine.decoder.drafter.draft(99, FixedShape(TreeShape(2, 3, 12)))
    drafting = Drafting(tiny_target, tiny_drafters["random"], PROMPT, 99)
    level_one = [i for i in range(12) if tree.parents[i] == ROOT]
    assert len(level_one) == 3
    for parent in level_one:
        children = [tree.tokens[i] for i in range(12) if tree.parents[i] == parent]
        wanted = drafting.model.best(drafting.node((tree.tokens[parent],))[2], 3)
        assert children == [token for token, _ in wanted]


def test_a_prompt_longer_than_the_drafters_batch_is_paired_without_a_gap(open_engine, tiny_target, tiny_drafters):
    from eagle3_cli.settings import DRAFTER_ROWS

    prompt = [int(t) for t in np.random.default_rng(4).integers(0, tiny.END_OF_TEXT, 2 * DRAFTER_ROWS + 5)]
    engine = open_engine("narrow", (2, 3, 6), batch=DRAFTER_ROWS + 3)
    engine.decoder.prefill(prompt)
    tree = engine.decoder.drafter.draft(5, FixedShape(TreeShape(2, 3, 6)))
    agree(tree, Drafting(tiny_target, tiny_drafters["narrow"], prompt, 5), TreeShape(2, 3, 6))


@pytest.mark.parametrize("name", ["good", "narrow"])
def test_every_later_round_drafts_from_the_right_memory(open_engine, tiny_target, tiny_drafters, name):
    """The tree of each round equals the reference's from scratch: nothing of rejected drafts stays behind."""
    shape = TreeShape(4, 3, 8)
    engine = open_engine(name, (4, 3, 8))
    decoder, drafter = engine.decoder, engine.decoder.drafter
    rounds = []

    def draft(root, policy):
        tree = type(drafter).draft(drafter, root, policy)
        if policy.limit == shape:
            rounds.append((list(decoder.committed), root, tree))
        return tree

    drafter.draft = draft
    for _ in engine.stream(PROMPT[:9], GREEDY, Limits(max_tokens=40)):
        pass
    assert len(rounds) >= 8
    assert name != "good" or engine.statistics.accepted > 10
    for committed, root, tree in rounds:
        agree(tree, Drafting(tiny_target, tiny_drafters[name], committed, root), shape)
