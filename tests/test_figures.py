"""docs/figures: the committed drawings are what the code draws, and they show what decoding and training do."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def draw():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("draw")


def test_the_committed_drawings_are_what_the_code_draws(draw):
    stale = [name for name, make in draw.FIGURES.items() if (FOLDER / name).read_text("utf-8") != make()]
    assert stale == [], "run: python docs/figures/draw.py"


def test_every_committed_drawing_has_its_code(draw):
    assert {path.name for path in FOLDER.glob("*.svg")} == set(draw.FIGURES)


def test_a_drawing_has_a_title_and_nothing_outside_its_frame(draw):
    for make in draw.FIGURES.values():
        root = ElementTree.fromstring(make())
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        assert root.findtext(f"{SVG}title")
        for shape in root.iter(f"{SVG}rect"):
            x, y = float(shape.get("x", 0)), float(shape.get("y", 0))
            assert x >= 0
            assert y >= 0
            assert x + float(shape.attrib["width"]) <= width
            assert y + float(shape.attrib["height"]) <= height
        for words in root.iter(f"{SVG}text"):
            assert 0 < float(words.attrib["x"]) < width
            assert 0 < float(words.attrib["y"]) < height


def test_words_of_a_drawing_are_escaped(draw):
    shapes = importlib.import_module("shapes")
    root = ElementTree.fromstring(shapes.drawing((9, 9), "a < b & c", [shapes.text((1, 1), "</text>")]))
    assert (root.findtext(f"{SVG}title"), root.findtext(f"{SVG}text")) == ("a < b & c", "</text>")


def test_the_tree_keeps_the_likeliest_of_all_paths(draw):
    """Against every path multiplied out, without a frontier."""
    values = {(): 1.0}
    for path in sorted(draw.PROPOSED, key=len):
        values |= {(*path, word): values[path] * p for word, p in draw.PROPOSED[path]}
    del values[()]
    pool, expanded, kept = draw.grown()
    paths = {draw.path_of(pool.tokens, pool.parents, node): node for node in range(len(pool))}
    assert {path: math.exp(pool.logps[node]) for path, node in paths.items()} == pytest.approx(
        {path: value for path, value in values.items() if path in paths}
    )
    best = sorted(values, key=values.__getitem__, reverse=True)[: draw.SHAPE.nodes]
    assert kept == {paths[path] for path in best}
    assert expanded == {paths[path] for path in draw.PROPOSED if path}


def test_the_training_mask_is_what_attention_sees(draw):
    """With equal scores and values that name their key, an output tells which keys were seen."""
    torch = pytest.importorskip("torch")
    from eagle3_cli.train.attention import attend

    rows, steps = draw.ROWS, 3
    size = rows * steps
    keys = [torch.zeros(1, 1, rows, size) for _ in range(steps)]
    values = [torch.zeros(1, 1, rows, size) for _ in range(steps)]
    for step, key in itertools.product(range(steps), range(rows)):
        values[step][0, 0, key, rows * step + key] = 1.0
    for step in range(steps):
        out = attend(torch.zeros(1, 1, rows, size), keys[: step + 1], values[: step + 1])[0, 0]
        for row, key_step, key in itertools.product(range(rows), range(steps), range(rows)):
            assert (out[row, rows * key_step + key] > 0) == draw.sees(step, row, key_step, key)
