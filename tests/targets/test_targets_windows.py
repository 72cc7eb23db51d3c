"""Targets whose layers see a sliding window of 8 tokens: trees larger than the window, texts of many windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, WINDOWED, Model
from engines import PROMPT, answer, close, drafter_for, guess, running, samplings, script
from reference import path_to, tokens_to
from scripted import perfect, tree_of

from eagle3_cli.engine.tree import ROOT
from eagle3_cli.engine.types import DraftTree

WINDOW = 8
SHAPE = (12, 4, 24)
MOST = 48
pytestmark = pytest.mark.usefixtures("one_thread")


def chain(length: int) -> DraftTree:
    """One long path, and a sibling beside each of its nodes."""
    nodes = []
    parent = ROOT
    for depth in range(1, length + 1):
        nodes += [(100 + depth, parent, depth), (20 + 3 * depth, parent, depth)]
        parent = len(nodes) - 1
    return tree_of(nodes)


@pytest.mark.parametrize("name", WINDOWED)
def test_every_node_of_a_tree_sees_its_own_window(models, name):
    """The root has left the window of the deepest nodes; what is kept is one path of 12, longer than a window."""
    model, tree = models(name), chain(12)
    assert model.reference.config.sliding_window == WINDOW < max(tree.depths)
    with running(model.path, drafter_for(model), SHAPE) as engine:
        target = engine.decoder.target
        engine.decoder.prefill(PROMPT)
        target.verify(99, tree)
        texts = [[*PROMPT, 99, *tokens_to(tree, node)] for node in range(ROOT, len(tree))]
        for node, logits in enumerate(model.logits(texts), ROOT):
            close(target.logits(node), logits[-1], model)
        leaf = max(node for node in range(len(tree)) if tree.depths[node] == 12)
        features = target.commit(path_to(tree, leaf))
        wanted = model.read(texts[leaf + 1])[1][len(PROMPT) :, model.aux].reshape(13, -1)
        close(features, wanted, model)
        target.verify(7, DraftTree())
        close(target.logits(ROOT), model.logits([[*texts[leaf + 1], 7]])[0][-1], model)


@pytest.mark.parametrize("name", WINDOWED)
def test_answers_of_several_windows_are_those_of_plain_decoding(models, name):
    """With a random drafter, with one that is always right for more than a window, and with random right parts."""
    model = models(name)
    with running(model.path, None) as plain, running(model.path, drafter_for(model), SHAPE) as engine:
        wanted = [answer(plain, sampling, most=MOST) for sampling in samplings(model)]
        assert len(wanted[0]) == MOST > 3 * WINDOW
        assert answer(engine, most=MOST) == wanted[0]
        for sampling, tokens in zip(samplings(model), wanted, strict=True):
            for seed in (1, 2):
                guess(engine, [*PROMPT, *tokens], seed)
                assert answer(engine, sampling, most=MOST) == tokens
        script(engine, perfect([*PROMPT, *wanted[0]]))
        assert answer(engine, most=MOST) == wanted[0]
        assert engine.statistics.acceptance_length > WINDOW


@pytest.mark.parametrize("name", WINDOWED)
def test_a_prompt_that_parts_from_the_cache_gives_a_fresh_engines_answer(models, name):
    """The cache still has what lies sixty windows behind: more than llama.cpp keeps where it keeps windows alone."""
    model, runtime = models(name), {"ctx_size": 1024, "batch": 64}
    with running(model.path, drafter_for(model), SHAPE, **runtime) as engine:
        text = [*PROMPT * 16, *answer(engine, prompt=PROMPT * 16)]
        for keep in (500, 20):
            prompt = [*text[:keep], 200, 3, 90, 41]
            with running(model.path, None, **runtime) as fresh:
                assert answer(engine, prompt=prompt) == answer(fresh, prompt=prompt)
            text = prompt


@pytest.mark.parametrize("name", ["phi3", "mistral"])
def test_llama_sees_no_window_in_these_files(tmp_path: Path, name: str):
    """The file states one; llama.cpp attends to everything, and so do trees."""
    architecture = replace(ARCHITECTURES[name], keys=lambda config: {"attention.sliding_window": WINDOW})
    model = Model(architecture, tmp_path)
    logits = model.logits([PROMPT])[0][-1]
    with running(model.path, None) as plain, running(model.path, drafter_for(model), SHAPE) as engine:
        wanted = answer(plain, most=MOST)
        assert answer(engine, most=MOST) == wanted
        guess(engine, [*PROMPT, *wanted], 1)
        assert answer(engine, most=MOST) == wanted
        engine.decoder.truncate(0)
        engine.decoder.drafter = None
        close(engine.decoder.logits_after(PROMPT), logits, model)
