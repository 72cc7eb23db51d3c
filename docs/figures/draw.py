"""The drawings of docs/how_it_works.md: `python docs/figures/draw.py` writes them into its own folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shapes import DRAFTER, GREY, INK, KEPT, LINE, PALE, TARGET, Point, arrow, box, drawing, label, text

from eagle3_cli.engine.tree import ROOT, Candidates, Children, FixedShape, grow
from eagle3_cli.settings import TreeShape

# ---- one round --------------------------------------------------------------------------------------------

WORDS = ("is", "blue", "because", ",", "often", "cloudy")  # the root, then the tree, depth first
PARENTS = (None, 0, 1, 1, 0, 4)
DEPTHS = (0, 1, 2, 2, 1, 2)
ACCEPTED = (0, 1, 2)
BONUS = "of"
_PLACES: Sequence[tuple[float, float, float]] = (  # x, y, width within a column
    (0, 74, 30), (46, 38, 48), (110, 4, 66), (110, 54, 66), (46, 118, 48), (110, 118, 66),
)  # fmt: skip
NODE_HEIGHT = 28


def one_round() -> str:
    columns = [
        ("Draft", "the drafter proposes a tree", "of what may follow the root"),
        ("Verify", "one pass of the target over", "root and tree gives all logits"),
        ("Walk", "draw from the target's logits,", "go on while the tree has it"),
        ("Commit", "accepted cells stay; their", "states go to the drafter"),
    ]
    parts = []
    for i, (name, *lines) in enumerate(columns):
        left = 24 + 238 * i
        parts.append(f'<circle cx="{left + 11}" cy="33" r="11" fill="{INK}"/>')
        parts.append(text((left + 11, 37.5), str(i + 1), colour="#ffffff", bold=True))
        parts.append(text((left + 30, 38), name, 15, anchor="start", bold=True))
        parts += [text((left, 64 + 16 * n), line, 12, GREY, "start") for n, line in enumerate(lines)]
    parts += _little_tree(24, 108, [DRAFTER] * 6)
    parts += _batch(262, 108)
    parts += _little_tree(500, 108, [KEPT, KEPT, KEPT, LINE, LINE, LINE], bonus=True)
    parts += _cells(738, 108)
    last = "Three tokens for one pass of the target: “blue” and “because” were drafted, “of” is its own."
    parts.append(text((24, 328), last, 13, GREY, "start"))
    return drawing((960, 346), "One round: draft, verify, walk, commit", parts)


def _little_tree(left: float, top: float, colours: Sequence[str], bonus: bool = False) -> list[str]:
    """The tree of the example; pale nodes are not on the accepted path."""
    parts = []
    for node, parent in enumerate(PARENTS):
        x, y, _ = _PLACES[node]
        if parent is not None:
            from_x, from_y, width = _PLACES[parent]
            ends = ((left + from_x + width, top + from_y + 14), (left + x - 1, top + y + 14))
            parts.append(arrow(ends, colours[node], dashed=colours[node] == LINE))
    for node, word in enumerate(WORDS):
        x, y, width = _PLACES[node]
        colour = INK if node == 0 and not bonus else colours[node]
        faded = colour == LINE
        parts.append(label((left + x, top + y), (width, NODE_HEIGHT), word, colour, dashed=faded))
    if bonus:
        parts.append(arrow(((left + 176, top + 18), (left + 189, top + 18)), TARGET))
        parts.append(label((left + 190, top + 4), (30, NODE_HEIGHT), BONUS, TARGET, thick=True))
    return parts


def _batch(left: float, top: float) -> list[str]:
    """The rows of the target's pass, indented by depth, each with its logits."""
    parts = [box((left - 8, top - 8), (206, 190), TARGET)]
    for row, (word, depth) in enumerate(zip(WORDS, DEPTHS, strict=True)):
        x, y = left + 14 * depth, top + 30 * row
        parts.append(label((x, y), (72, 24), word, INK))
        parts.append(arrow(((x + 72, y + 12), (left + 126, y + 12)), TARGET))
        for bar in range(8):
            height = 3 + (7 * (row + 2) * (bar + 1) ** 2) % 17
            parts.append(f'<rect x="{left + 132 + 7 * bar:g}" y="{y + 22 - height:g}" width="5" height="{height:g}"'
                         f' fill="{TARGET}"/>')  # fmt: skip
    return parts


def _cells(left: float, top: float) -> list[str]:
    """The KV cells after the round."""
    parts = []
    for row, word in enumerate(("The", "sky", *WORDS)):
        accepted, before = row - 2 in ACCEPTED, row < 2
        colour = GREY if before else KEPT if accepted else LINE
        words = "committed before" if before else "stays" if accepted else "dropped"
        y = top + 24 * row - 6
        parts.append(label((left, y), (76, 20), word, colour, dashed=not (before or accepted)))
        parts.append(text((left + 86, y + 14.5), words, 12, GREY, "start"))
    parts.append(label((left, top + 24 * 8 - 6), (76, 20), BONUS, TARGET, thick=True))
    parts.append(text((left + 86, top + 24 * 8 + 8.5), "the next root", 12, GREY, "start"))
    return parts


# ---- the tree ---------------------------------------------------------------------------------------------

SHAPE = TreeShape(depth=3, width=2, nodes=6)
VOCABULARY = ("blue", "a", "because", ",", "deep", "clear", "of", "the", "but", "and")
# path -> what the drafter thinks comes next
PROPOSED: Mapping[tuple[str, ...], Sequence[tuple[str, float]]] = {
    (): (("blue", 0.55), ("a", 0.25)),
    ("blue",): (("because", 0.6), (",", 0.2)),
    ("a",): (("deep", 0.4), ("clear", 0.28)),
    ("blue", "because"): (("of", 0.7), ("the", 0.2)),
    ("blue", ","): (("but", 0.5), ("and", 0.3)),
}


def grown() -> tuple[Candidates, set[int], set[int]]:
    """(the candidates, which were expanded, which were kept) by the code that decodes."""
    policy, expanded = FixedShape(SHAPE), set[int]()

    def expand(nodes: Sequence[int], pool: Candidates) -> list[Children]:
        expanded.update(nodes)
        found = [PROPOSED[path_of(pool.tokens, pool.parents, node)] for node in nodes]
        return [[(VOCABULARY.index(word), math.log(p)) for word, p in children] for children in found]

    tree = grow(expand, policy)
    pool = policy.pool
    index = {path_of(pool.tokens, pool.parents, node): node for node in range(len(pool))}
    kept = {index[path_of(tree.tokens, tree.parents, node)] for node in range(len(tree))}
    return pool, expanded - {ROOT}, kept


def path_of(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[str, ...]:
    words: tuple[str, ...] = ()
    while node != ROOT:
        words, node = (VOCABULARY[tokens[node]], *words), parents[node]
    return words


def draft_tree() -> str:
    pool, expanded, kept = grown()
    columns, size = (24, 190, 436, 682), (178, 40)
    places = {ROOT: (columns[0], 190.0)}
    for depth in (1, 2, 3):
        level = [node for node in range(len(pool)) if pool.depths[node] == depth]
        for i, node in enumerate(level):
            places[node] = (columns[depth], 66 + (i + 0.5) * 288 / len(level) - 20)
    parts = [text((columns[d] + 89, 40), f"level {d}", 13, GREY) for d in (1, 2, 3)]
    for node in range(len(pool)):
        x, y = places[pool.parents[node]]
        width = 76 if pool.parents[node] == ROOT else size[0]
        ends = ((x + width, y + 20), (places[node][0] - 1, places[node][1] + 20))
        parts.append(arrow(ends, KEPT if node in kept else LINE, dashed=node not in kept))
    parts.append(label(places[ROOT], (76, 40), "root: is", INK))
    for node in range(len(pool)):
        colour = KEPT if node in kept else LINE
        words = f"{VOCABULARY[pool.tokens[node]]}\n{_product(pool, node)}"
        parts.append(label(places[node], size, words, colour, node not in kept, thick=node in expanded))
    parts += _tree_legend()
    return drawing((884, 420), "A draft tree grows by path probability and is cut to its best nodes", parts)


def _product(pool: Candidates, node: int) -> str:
    """The path probability, as it comes about."""
    path, own = math.exp(pool.logps[node]), math.exp(pool.drafted[node] or 0.0)
    if pool.parents[node] == ROOT:
        return f"{path:.2f}"
    return f"{math.exp(pool.logps[pool.parents[node]]):.2f} x {own:.2f} = {path:.2f}"


def _tree_legend() -> list[str]:
    entries = (
        (KEPT, True, f"expanded: the best {SHAPE.width} of a level"),
        (KEPT, False, f"kept: the best {SHAPE.nodes} of all"),
        (LINE, False, "proposed, not kept"),
    )
    parts = []
    for i, (colour, thick, words) in enumerate(entries):
        x = (100, 370, 600)[i]
        parts.append(box((x, 381), (26, 18), colour, colour == LINE, thick))
        parts.append(text((x + 34, 394.5), words, 13, GREY, "start"))
    return parts


# ---- features ---------------------------------------------------------------------------------------------


def feature_fusion() -> str:
    parts = [text((135, 36), "target", 15, TARGET, bold=True), text((708, 34), "drafter", 15, DRAFTER, bold=True)]
    layers = ("layers n-3 to n-1", "layers n/2 to n-4", "layers 2 to n/2-1", "layers 0 and 1")
    for i, words in enumerate(("norm and head", *layers, "embedding of a token")):
        top = 56 + 62 * i
        parts.append(label((40, top), (190, 40), words, TARGET))
        if i:
            parts.append(arrow(((135, top), (135, top - 21)), TARGET))
    for y, words in ((173, "input of layer n-3"), (235, "input of layer n/2"), (297, "input of layer 2")):
        parts.append(f'<circle cx="135" cy="{y}" r="3.5" fill="{TARGET}"/>')
        parts.append(arrow(((135, y), (262, y)), TARGET))
        parts.append(label((264, y - 13), (52, 26), "norm", LINE, dashed=True))
        parts.append(arrow(((316, y), (366, 235 + (y - 235) * 0.45)), TARGET))
        parts.append(text((238, y - 19), words, 12, GREY, "start"))
    parts.append(label((368, 190), (64, 82), "fc\n3 Ht\nto H", DRAFTER))
    parts.append(arrow(((432, 231), (489, 231)), DRAFTER))
    parts.append(text((460, 222), "g", 15, DRAFTER, bold=True))
    parts.append(label((490, 196), (86, 70), "hidden\nnorm", DRAFTER))
    parts.append(label((490, 330), (86, 44), "embedding\nnorm", DRAFTER))
    parts.append(label((380, 330), (76, 44), "the next\ntoken", INK))
    parts.append(arrow(((456, 352), (489, 352)), DRAFTER))
    parts.append(arrow(((576, 231), (629, 231)), DRAFTER))
    parts.append(arrow(((576, 352), (604, 352), (604, 262), (629, 262)), DRAFTER))
    parts.append(label((630, 190), (156, 100), "one decoder layer:\nattention over both,\nthen feed-forward", DRAFTER))
    parts.append(arrow(((708, 190), (708, 137)), DRAFTER))
    parts.append(text((722, 168), "s", 15, DRAFTER, bold=True))
    parts.append(label((638, 96), (140, 40), "norm and head", DRAFTER))
    parts.append(arrow(((708, 96), (708, 66)), DRAFTER))
    parts.append(text((708, 60), "what may come next", 12, GREY))
    parts.append(arrow(((786, 240), (822, 240), (822, 312), (460, 312), (460, 240)), DRAFTER, dashed=True))
    parts.append(text((640, 327), "from level 2 on s takes the place of g", 12, GREY, "start"))
    words = "dashed boxes and EAGLE 3.1: a norm for each feature, and s is taken behind the final norm"
    parts.append(text((262, 408), words, 12, GREY, "start"))
    return drawing(
        (884, 430), "Three hidden states of the target are fused into the feature that the drafter reads", parts
    )


# ---- training-time test -----------------------------------------------------------------------------------

ROWS, CELL = 5, 20


def sees(step: int, row: int, key_step: int, key: int) -> bool:
    """Whether a row sees a key in training: the causal ones of step 0, of the later steps its own."""
    return key <= row if key_step == 0 else key_step <= step and key == row


def training_mask() -> str:
    reads = ("reads the target's features", "reads its own output of step 0", "reads its own output of step 1")
    parts, left = [], 62
    for step, words in enumerate(reads):
        width = CELL * ROWS * (step + 1)
        parts.append(text((left, 40), f"step {step}", 15, anchor="start", bold=True))
        parts.append(text((left, 60), words, 12, GREY, "start"))
        for key_step in range(step + 1):
            parts.append(text((left + CELL * ROWS * (key_step + 0.5), 90), f"keys of step {key_step}", 12, GREY))
            parts += _grid(left + CELL * ROWS * key_step, 100, step, key_step)
        left += max(width, 180) + 50
    parts += [text((50, 100 + CELL * (row + 0.72)), f"row {row}", 12, GREY, "end") for row in range(ROWS)]
    legend = ((TARGET, "made from the target's features"), (DRAFTER, "made from the drafter's own output"),
              (LINE, "not seen"))  # fmt: skip
    for i, (colour, words) in enumerate(legend):
        x = (62, 312, 600)[i]
        parts.append(_cell((x, 226), colour))
        parts.append(text((x + 28, 240.5), words, 13, GREY, "start"))
    return drawing((900, 266), "What each row attends to in three steps of training-time test", parts)


def _grid(left: float, top: float, step: int, key_step: int) -> list[str]:
    seen = DRAFTER if key_step else TARGET
    return [
        _cell((left + CELL * key, top + CELL * row), seen if sees(step, row, key_step, key) else LINE)
        for row in range(ROWS)
        for key in range(ROWS)
    ]


def _cell(at: Point, colour: str) -> str:
    """Filled with its colour where it is seen; a mark tells the two kinds apart without it."""
    x, y = at
    fill = PALE[LINE] if colour == LINE else colour
    mark = f'<circle cx="{x + 10:g}" cy="{y + 10:g}" r="3" fill="#ffffff"/>' if colour == DRAFTER else ""
    return f'<rect x="{x + 1:g}" y="{y + 1:g}" width="18" height="18" rx="2" fill="{fill}" stroke="{LINE}"/>{mark}'


FIGURES: Mapping[str, Callable[[], str]] = {
    "round.svg": one_round,
    "tree.svg": draft_tree,
    "fusion.svg": feature_fusion,
    "training_mask.svg": training_mask,
}


def main() -> None:
    for name, draw in FIGURES.items():
        Path(__file__).with_name(name).write_text(draw(), "utf-8", newline="\n")


if __name__ == "__main__":
    main()
