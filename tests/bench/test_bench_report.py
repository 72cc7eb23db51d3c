"""From samples to tables: all prompts together, by task, and the mean over tasks."""

from __future__ import annotations

import pytest

from eagle3_cli.bench.report import as_dicts, as_markdown, by_task, geometric_mean, in_words, means_as_markdown, rows
from eagle3_cli.bench.run import Sample


def sample(contender, task, seconds, tokens=11, rounds=10, temperature=0.0, repeat=0, prompt=0, other_s=None):
    return Sample(contender, temperature, repeat, task, prompt, (5,) * tokens, rounds, seconds, other_s)


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
    assert {line.count("|") for line in plain} == {7}
    assert {line.count("|") for line in tasks} == {8}


@pytest.mark.parametrize(("ratios", "said"), [
    ({"plain": 1.0, "auto": 1.0, "chain 3": 0.6, "tree 8": 0.7},
     "temperature 0: auto decodes 1.00 times as fast as plain decoding; the best fixed setting is tree 8 with 0.70, so"
     " speculation loses at every fixed setting."),
    ({"plain": 1.0, "auto": 1.5, "chain 3": 1.4},
     "temperature 0: auto decodes 1.50 times as fast as plain decoding; the best fixed setting is chain 3 with 1.40."),
    ({"plain": 1.0, "auto": 1.5}, "temperature 0: auto decodes 1.50 times as fast as plain decoding."),
])  # fmt: skip
def test_it_says_in_words_when_speculation_loses(ratios, said):
    assert in_words({0.0: ratios}) == said
