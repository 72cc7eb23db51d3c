"""From samples to tables: all prompts together, by task, and the mean over tasks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_cli.bench.breakdown import Costs, costs, in_tables
from eagle3_cli.bench.output import as_dict, as_text, results
from eagle3_cli.bench.prompts import Prompt, digest
from eagle3_cli.bench.report import as_dicts, as_markdown, by_task, geometric_mean, in_words, means_as_markdown, rows
from eagle3_cli.bench.run import BenchSettings, Sample, pinned, seed_of
from eagle3_cli.console import json_ready
from eagle3_cli.settings import RuntimeSettings, TreeShape


def sample(contender, task, seconds, tokens=11, rounds=10, temperature=0.0, repeat=0, prompt=0, other_s=None, **counts):
    return Sample(contender, temperature, repeat, task, prompt, (5,) * tokens, rounds, seconds, other_s, **counts)


# tokens per second: plain 10 and 10; chain 40 for code, 10 for chat
SAMPLES = [
    sample("plain", "code", 1.0),
    sample("chain 3", "code", 0.25, rounds=5),
    sample("plain", "chat", 1.0, prompt=1),
    sample("chain 3", "chat", 1.0, rounds=10, prompt=1),
]


def test_one_row_per_task_and_contender_with_the_tasks_own_ratio():
    found = {(row.task, row.contender): row for row in by_task(SAMPLES)}
    assert list(found) == [("code", "plain"), ("code", "chain 3"), ("chat", "plain"), ("chat", "chain 3")]
    assert found["code", "chain 3"].speed_up == pytest.approx(4.0)
    assert found["code", "chain 3"].acceptance_length == pytest.approx(2.0)
    assert found["chat", "chain 3"].speed_up == pytest.approx(1.0)
    assert found["code", "plain"].tokens_per_second == pytest.approx(10.0)


def test_rows_are_over_all_tasks_together():
    plain, chain = rows(SAMPLES)
    assert (plain.task, chain.task) == (None, None)
    assert chain.speed_up == pytest.approx(20 / 1.25 / 10)


def test_with_one_task_its_rows_are_those_of_the_run():
    one = [s for s in SAMPLES if s.task == "code"]
    assert [{**row, "task": None} for row in as_dicts(by_task(one))] == as_dicts(rows(one))


def test_temperatures_are_kept_apart():
    warm = [sample("plain", "code", 1.0, temperature=1.0), sample("chain 3", "code", 0.5, temperature=1.0)]
    found = by_task([*SAMPLES, *warm])
    assert [(row.temperature, row.task) for row in found[::2]] == [(0.0, "code"), (0.0, "chat"), (1.0, "code")]
    assert geometric_mean(found)[1.0]["chain 3"] == pytest.approx(2.0)


def test_the_mean_over_tasks_is_geometric():
    means = geometric_mean(by_task(SAMPLES))
    assert means == {0.0: {"plain": pytest.approx(1.0), "chain 3": pytest.approx(2.0)}}
    assert means_as_markdown(means).splitlines()[-1] == "| 0 | chain 3 | 2.00x |"


@pytest.mark.parametrize("short", ["plain", "chain 3"])
def test_a_task_without_a_rate_is_left_out(short):
    """One contender's answers end after their first token: there is no rate, so no ratio."""
    more = [sample(name, "sums", 1.0, tokens=1 if name == short else 11) for name in ("plain", "chain 3")]
    assert by_task([*SAMPLES, *more]) == by_task(SAMPLES)
    assert geometric_mean(by_task(more)) == {}


def test_a_table_names_tasks_only_where_rows_have_them():
    plain = as_markdown(rows(SAMPLES)).splitlines()
    tasks = as_markdown(by_task(SAMPLES)).splitlines()
    assert plain[0].startswith("| temperature |")
    assert tasks[0].startswith("| task | temperature |")
    assert tasks[3].startswith("| code | 0 | chain 3 | 2.00 | 40.0 (40.0-40.0) | 4.00x |")
    assert {line.count("|") for line in plain} == {8}
    assert {line.count("|") for line in tasks} == {9}


@pytest.mark.parametrize(("ratios", "said"), [
    ({"plain": 1.0, "auto": 1.0, "chain 3": 0.6, "tree 8": 0.7},
     "temperature 0: auto decodes 1.00 times as fast as plain decoding; the best fixed setting is tree 8 with 0.70, so"
     " speculation loses at every fixed setting; auto / best fixed: 1.43."),
    ({"plain": 1.0, "auto": 1.5, "chain 3": 1.4},
     "temperature 0: auto decodes 1.50 times as fast as plain decoding; the best fixed setting is chain 3 with 1.40;"
     " auto / best fixed: 1.07."),
    ({"plain": 1.0, "auto": 1.2, "chain 3": 1.6, "llama-server none": 2.0},
     "temperature 0: auto decodes 1.20 times as fast as plain decoding; the best fixed setting is chain 3 with 1.60;"
     " auto / best fixed: 0.75."),
    ({"plain": 1.0, "chain 3": 1.4}, "temperature 0: the best fixed setting is chain 3 with 1.40."),
    ({"plain": 1.0}, ""),
    ({"plain": 1.0, "auto": 1.5}, "temperature 0: auto decodes 1.50 times as fast as plain decoding."),
])  # fmt: skip
def test_it_says_in_words_when_speculation_loses(ratios, said):
    words = in_words({0.0: ratios}, fixed={"chain 3", "tree 8"})
    assert words.replace("\n  ", " ") == said
    assert max(map(len, words.split("\n"))) <= 120


# ---- counts ----

CHAIN, TREE = TreeShape(3, 1, 3), TreeShape(4, 4, 8)
BUDGET = {
    "plain_ms": 5.0,
    "verify_cost": {"1": 1.0, "4": 2.5},
    "draft_cost": {"1": 0.1, "2": 0.15},
}
COUNTED = [
    sample("plain", "code", 4.0, drafter_s=0.0, sizes={0: 10}),
    sample("auto", "code", 2.0, drafter_s=0.5, depth_tried=[40, 20], depth_accepted=[30, 5], sizes={0: 2, 3: 8},
           drafted_from={1: 20, 2: 7, 3: 4}, accepted_from={1: 10, 3: 4}, budget={**BUDGET, "plain_ms": 4.0}),
    sample("auto", "code", 2.0, prompt=1, drafter_s=0.3, depth_tried=[10], depth_accepted=[5], sizes={3: 1},
           drafted_from={1: 5}, accepted_from={1: 5}, budget=BUDGET),
    sample("chain 3", "code", 2.0, rounds=5, shape=CHAIN, drafter_s=0.5, draft_rounds=4, depth_tried=[40, 20, 10, 0],
           depth_accepted=[30, 10, 1, 0], sizes={3: 4, 0: 1}, drafted_from={1: 12}, accepted_from={1: 6}),
    sample("tree 8", "code", 2.0, rounds=5, shape=TREE, drafter_s=1.0, draft_rounds=5, depth_tried=[5, 4],
           depth_accepted=[4, 1], sizes={8: 5}, drafted_from={1: 40}, accepted_from={1: 5}),
    sample("llama-server none", "code", 4.0),
]  # fmt: skip


def counted():
    return {row.contender: row for row in rows(COUNTED)}


def test_depths_are_summed_over_answers_and_end_where_nothing_was_tried():
    found = counted()
    assert [(c.depth, c.accepted, c.tried) for c in found["auto"].accepted_by_depth] == [(1, 35, 50), (2, 5, 20)]
    assert [c.rate for c in found["chain 3"].accepted_by_depth] == [0.75, 0.5, 0.1]
    assert found["plain"].accepted_by_depth == found["llama-server none"].accepted_by_depth == ()


def test_n_alpha_is_for_chains_with_counts_alone():
    found = counted()
    assert found["chain 3"].n_alpha == (0.75, 0.5, 0.1)
    assert [found[name].n_alpha for name in ("plain", "auto", "tree 8", "llama-server none")] == [None] * 4
    assert rows([sample("plain", "code", 1.0), sample("chain 3", "code", 1.0, shape=CHAIN)])[1].n_alpha is None


def test_the_drafters_share_is_of_all_decode_time():
    found = counted()
    assert found["auto"].drafter_share == pytest.approx(0.8 / 4.0)
    assert found["plain"].drafter_share == 0.0
    assert found["llama-server none"].drafter_share is None
    lines = as_markdown(rows(COUNTED)).splitlines()
    assert lines[3].endswith("| 2.00x | 20.0% |  |")
    assert lines[-1].endswith("| 1.00x |  |  |")


def test_sources_are_what_was_drafted_and_accepted_by_each():
    found = counted()
    assert found["auto"].sources == {
        "drafter": {"drafted": 25, "accepted": 15},
        "lookup": {"drafted": 7, "accepted": 0},
        "both": {"drafted": 4, "accepted": 4},
    }
    assert found["plain"].sources == {}


def test_rows_by_task_have_their_own_counts():
    other = [replace(s, task="chat", depth_tried=[1], depth_accepted=[1]) for s in COUNTED]
    found = {(row.task, row.contender): row for row in by_task([*COUNTED, *other])}
    assert found["chat", "chain 3"].n_alpha == (1.0,)
    assert found["code", "chain 3"].n_alpha == (0.75, 0.5, 0.1)


def test_json_rows_carry_the_counts():
    document = json.loads(json.dumps(json_ready(as_dicts(rows(COUNTED)))))
    chain = next(row for row in document if row["contender"] == "chain 3")
    assert chain["accepted_by_depth"][1] == {"depth": 2, "accepted": 10, "tried": 20}
    assert chain["n_alpha"] == [0.75, 0.5, 0.1]
    assert chain["shape"] == {"depth": 3, "width": 1, "nodes": 3}
    assert chain["rounds_by_nodes"] == {"0": 1, "3": 4}
    assert (chain["rounds"], chain["draft_rounds"]) == (5, 4)
    assert document[0]["shape"] is document[0]["n_alpha"] is None


def test_costs_are_those_that_the_last_answer_knew():
    assert costs(COUNTED) == Costs(5.0, {1: 1.0, 4: 2.5}, {1: 0.1, 2: 0.15})
    assert costs(SAMPLES) is None
    unknown = {**BUDGET, "plain_ms": None, "verify_cost": {}, "draft_cost": {}}
    assert costs([sample("auto", "code", 1.0, budget=unknown)]) is None


def test_the_tables_beside_the_rows():
    assert in_tables(rows(COUNTED), costs(COUNTED)).split("\n\n") == [
        "Acceptance by depth: rounds that matched a child there, of those whose walk stood right above it. In brackets:"
        " fewer\nthan 20 tries.",
        "| temperature | contender | 1 | 2 | 3 |\n|---|---|---|---|---|\n"
        "| 0 | auto | 0.70 | 0.25 |  |\n"
        "| 0 | chain 3 | 0.75 | 0.50 | (0.10) |\n"
        "| 0 | tree 8 | (0.80) | (0.25) |  |",
        "n-alpha: acceptance in a chain after n features that the drafter estimated itself. In brackets: fewer than 20"
        " tries.",
        "| temperature | contender | 0-alpha | 1-alpha | 2-alpha |\n|---|---|---|---|---|\n"
        "| 0 | chain 3 | 0.75 | 0.50 | (0.10) |",
        "Nodes of auto's trees by what proposed them: the drafter, an n-gram match (lookup), or both.",
        "| temperature | source | drafted | accepted |\n|---|---|---|---|\n"
        "| 0 | drafter | 25 | 15 |\n| 0 | lookup | 7 | 0 |\n| 0 | both | 4 | 4 |",
        "Cost of a pass by rows, in passes of the target over one row (5.00 ms), as auto's budget knows it after the"
        " run:",
        "- target, rows: cost: 1: 1.00, 4: 2.50\n- drafter, rows: cost: 1: 0.10, 2: 0.15",
    ]
    assert in_tables(rows(SAMPLES), None) == ""


def test_deep_trees_and_wide_curves_stay_within_120_columns():
    deep = [replace(s, depth_tried=[30] * 64, depth_accepted=[3] * 64) for s in COUNTED]
    wide = Costs(5.0, dict.fromkeys(range(1, 257), 12.0), {})
    found = in_tables(rows(deep), wide)
    assert max(map(len, found.splitlines())) <= 120
    assert "| 9 |\n" in found
    assert "| 8-alpha |\n" in found
    assert " ".join(found.split()).count("55 deeper columns are in --json.") == 2
    assert "256: 12.00" in found


def test_the_text_has_the_parts_in_order_and_the_document_all_of_them():
    found = results(COUNTED)
    text = as_text(found, several_tasks=False)
    places = [text.index(part) for part in ("| tau |", "Acceptance by", "n-alpha:", "Cost of a pass", "temperature 0:")]
    assert places == sorted(places)
    assert text.endswith("the best fixed setting is chain 3 with 2.00; auto /\n  best fixed: 1.00.\n")
    document = as_dict(found)
    assert document["costs"] == {"plain_ms": 5.0, "verify": {1: 1.0, 4: 2.5}, "draft": {1: 0.1, 2: 0.15}}
    assert document["projection"] is None
    assert as_dict(results(SAMPLES))["costs"] is None


# ---- a second run ----


def test_what_a_second_run_needs_is_pinned():
    settings = BenchSettings(Path("t"), Path("d"), RuntimeSettings(), (CHAIN,), (0.5,), repeats=2, max_tokens=9)
    prompts = [Prompt("code", "One"), Prompt("chat", "Zwei \u00e4")]
    found = pinned(settings, prompts)
    assert found == {
        "prompts": {"count": 2, "sha256": hashlib.sha256(b'[["code", "One"], ["chat", "Zwei \\u00e4"]]').hexdigest()},
        "max_tokens": 9,
        "repeats": 2,
        "temperatures": [0.5],
        "shapes": {"chain 3": {"depth": 3, "width": 1, "nodes": 3}},
        "seed": "1000 * repeat + prompt, both counted from 0",
    }
    assert seed_of(2, 7) == 2007
    assert digest(prompts[::-1]) != digest(prompts)
    assert digest([Prompt("codeO", "ne"), prompts[1]]) != digest(prompts)
