"""What fixed trees would bring with the costs of a file: the arithmetic, and every file that is refused."""

from __future__ import annotations

import json

import pytest

from eagle3_cli.bench.output import as_dict, as_text, results
from eagle3_cli.bench.projection import load, project
from eagle3_cli.bench.run import SHAPES, Sample
from eagle3_cli.errors import FileError, InputError
from eagle3_cli.settings import TreeShape

CHAIN, TREE = TreeShape(3, 1, 3), TreeShape(3, 4, 8)
COSTS = {"plain_ms": 20, "verify": {"1": 1.0, "4": 1.3, "10": 1.9}, "draft": {"1": 0.1, "5": 0.3}}


def sample(contender, rounds, tokens=11, temperature=0.0, **counts):
    """tau is (tokens - 1) / rounds."""
    return Sample(contender, temperature, 0, "code", 0, (5,) * tokens, rounds, 1.0, **counts)


SAMPLES = [
    sample("plain", 10, sizes={0: 10}),
    sample("auto", 5, sizes={4: 5}),
    sample("chain 3", 5, shape=CHAIN, draft_rounds=4, sizes={3: 4, 0: 1}),
    sample("tree 8", 4, shape=TREE, draft_rounds=4, sizes={8: 2, 6: 2}),
    sample("llama-server none", 10),
]


def write(folder, found):
    path = folder / "costs.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return path


def projected(folder, samples=SAMPLES):
    return {p.contender: p for p in project(results(samples).table, load(write(folder, COSTS), (CHAIN, TREE)))}


# ---- the arithmetic ----


def test_only_plain_decoding_and_fixed_trees_are_projected(tmp_path):
    assert list(projected(tmp_path)) == ["plain", "chain 3", "tree 8"]


def test_plain_decoding_is_the_unit(tmp_path):
    plain = projected(tmp_path)["plain"]
    assert (plain.cost, plain.draft_cost, plain.verify_rows, plain.speed_up) == (1.0, 0.0, 1.0, 1.0)
    assert plain.tokens_per_second == pytest.approx(50.0)


def test_a_chain_drafts_one_row_a_level_after_what_the_round_before_emitted(tmp_path):
    """tau 2: passes of the drafter over 2, 1 and 1 rows, in 4 of 5 rounds."""
    chain = projected(tmp_path)["chain 3"]
    assert chain.acceptance_length == 2.0
    assert chain.verify_rows == pytest.approx(1 + 12 / 5)
    assert chain.draft_cost == pytest.approx(0.8 * (0.15 + 0.1 + 0.1))
    assert chain.cost == pytest.approx((4 * 1.3 + 1.0) / 5 + chain.draft_cost)
    assert chain.speed_up == pytest.approx(2.0 / chain.cost)
    assert chain.tokens_per_second == pytest.approx(50.0 * chain.speed_up)


def test_a_tree_drafts_width_rows_a_level_and_costs_are_linear_between_points(tmp_path):
    """tau 2.5: 2.5, 4 and 4 rows; 9 and 7 rows are verified."""
    tree = projected(tmp_path)["tree 8"]
    assert tree.draft_cost == pytest.approx(0.175 + 0.25 + 0.25)
    assert tree.cost == pytest.approx((1.8 + 1.6) / 2 + tree.draft_cost)
    assert tree.verify_rows == pytest.approx(8.0)


def test_a_level_has_no_more_rows_than_nodes_that_can_have_children(tmp_path):
    """Of 3 nodes one level deep another 2 can be expanded, and then 1, whatever the width."""
    wide = sample("tree 3", 10, shape=TreeShape(8, 6, 3), draft_rounds=10, sizes={3: 10})
    found = projected(tmp_path, [SAMPLES[0], wide])["tree 3"]
    assert found.draft_cost == pytest.approx(0.1 + 0.15 + 0.1)


def test_a_shape_without_nodes_is_plain(tmp_path):
    none = sample("chain 0", 10, shape=TreeShape(1, 1, 0), sizes={0: 10})
    assert projected(tmp_path, [SAMPLES[0], none])["chain 0"].speed_up == 1.0


def test_speed_ups_are_over_plain_decoding_at_the_same_temperature(tmp_path):
    """The end token has a round but is no part of the answer: plain decoding's tau is then below 1."""
    warm = [sample("plain", 11, temperature=1.0), sample("chain 3", 11, shape=CHAIN, sizes={0: 11}, temperature=1.0)]
    table = results([*SAMPLES, *warm]).table
    found = project(table, load(write(tmp_path, COSTS), (CHAIN,)))
    assert [(p.contender, p.speed_up) for p in found if p.temperature == 1.0] == [("plain", 1.0), ("chain 3", 1.0)]


def test_text_and_document_say_that_it_is_no_measurement(tmp_path):
    curve = load(write(tmp_path, COSTS), (CHAIN, TREE))
    found = results(SAMPLES, curve)
    text = as_text(found, several_tasks=False)
    assert "\n\nProjection, not a measurement: " in text
    assert text.splitlines()[-1] == "| 0 | tree 8 | 2.50 | 8.0 | 2.38 | 28.4% | 52.6 | 1.05x |"
    assert [line for line in text.splitlines() if len(line) > 120] == []
    document = as_dict(found)["projection"]
    assert document["is"] == "a projection, not a measurement"
    assert document["costs"]["verify"] == {1: 1.0, 4: 1.3, 10: 1.9}
    assert document["rows"][2]["speed_up"] == pytest.approx(2.5 / 2.375)
    assert "Projection" not in as_text(results(SAMPLES), several_tasks=False)


# ---- the file ----


def test_points_may_come_in_any_order(tmp_path):
    found = load(write(tmp_path, {**COSTS, "verify": {"10": 1.9, "1": 1, "4": 1.3}}), (CHAIN,))
    assert list(found.verify.items()) == [(1, 1.0), (4, 1.3), (10, 1.9)]


@pytest.mark.parametrize(("found", "message"), [
    ("{", r"costs\.json: the file: expected JSON, got "),
    ("[" * 100_000, r"the file: expected JSON, got "),
    ([1], r"the file: expected a JSON object, got \[1\]\."),
    ({}, r"plain_ms: expected a value, got none\."),
    ({"plain_ms": 20, "verify": {"1": 1}}, r"draft: expected a value, got none\."),
    ({**COSTS, "Draft": {}}, r"Draft: expected only the fields plain_ms, verify, draft, got this one\."),
    ({**COSTS, "plain_ms": "20"}, r"plain_ms: expected a number above 0, got 20\."),
    ({**COSTS, "plain_ms": True}, r"plain_ms: expected a number above 0, got true\."),
    ({**COSTS, "plain_ms": 0}, r"plain_ms: expected a finite number above 0, got 0\."),
    ({**COSTS, "plain_ms": float("nan")}, r"plain_ms: expected a finite number above 0, got NaN\."),
    ({**COSTS, "plain_ms": 10**400}, r"plain_ms: expected a finite number above 0, got 1000"),
    ({**COSTS, "verify": [1.0]}, r"verify: expected an object of rows and costs, .* got \[1\.0\]\."),
    ({**COSTS, "verify": {}}, r"verify: expected a cost of 1 row, got none\."),
    ({**COSTS, "draft": {"2": 0.1}}, r"draft: expected a cost of 1 row, got rows 2\."),
    ({**COSTS, "verify": {"1": 1.0, "04": 1.3}}, r"verify: expected rows as whole numbers from 1 to 9999, got 04\."),
    ({**COSTS, "verify": {"1": 1.0, "0": 1.3}}, r"verify: expected rows as whole numbers from 1 to 9999, got 0\."),
    ({**COSTS, "verify": {"1": 1.0, "9" * 5000: 1.3}}, r"verify: expected rows as whole numbers from 1 to 9999, got 9"),
    ({**COSTS, "verify": {"1": 1.0, "10": -2}}, r'verify\."10": expected a finite number above 0, got -2\.'),
    ({**COSTS, "draft": {"1": None}}, r'draft\."1": expected a number above 0, got null\.'),
    ({**COSTS, "verify": {"1": 1.5, "10": 2}}, r'verify\."1": expected 1, got 1\.5\.'),
    ('{"plain_ms": 1, "verify": {"1": 1, "4": 1, "4": 2}, "draft": {"1": 1}}', r"4: expected one value, got several\."),
    ({**COSTS, "verify": {"1": 1, "3": 1.1}}, r"verify: expected costs up to 4 rows for --shape 3,1,3, got up to 3\."),
    ({**COSTS, "draft": {"1": 1, "3": 1.1}}, r"draft: expected costs up to 4 rows for --shape 3,1,3, got up to 3\."),
])  # fmt: skip
def test_a_file_that_is_no_cost_curve(tmp_path, found, message):
    with pytest.raises(FileError, match=message) as error:
        load(write(tmp_path, found), (CHAIN,))
    assert error.value.message.startswith(f"--cost-curve: {tmp_path / 'costs.json'}: ")
    assert error.value.hint
    assert len(error.value.message) < 300 + len(str(tmp_path))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match=r"--cost-curve .*absent\.json: No such file"):
        load(tmp_path / "absent.json", (CHAIN,))
    (tmp_path / "costs.json").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"--cost-curve .*costs\.json: expected UTF-8 text, got byte 0xff"):
        load(tmp_path / "costs.json", (CHAIN,))


def test_the_widest_shape_decides_how_far_curves_have_to_reach(tmp_path):
    path = write(tmp_path, {**COSTS, "verify": {"1": 1, "61": 1.5}, "draft": {"1": 0.1, "10": 0.2}})
    load(path, SHAPES)
    with pytest.raises(FileError, match=r"draft: expected costs up to 12 rows for --shape 8,12,60, got up to 10\."):
        load(path, (*SHAPES, TreeShape(8, 12, 60)))
    with pytest.raises(FileError, match=r"verify: expected costs up to 62 rows for --shape 8,10,61, got up to 61\."):
        load(path, (TreeShape(8, 10, 61),))
