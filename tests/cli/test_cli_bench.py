"""`eagle3 bench`: which prompts are asked, and how results are grouped."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from eagle3_cli.bench.check import CheckResult, Difference


class Contenders:
    """Plain decoding and a drafter that is twice as fast; remembers what was rendered."""

    rendered: list[str]

    def __init__(self, settings):
        type(self).rendered = []
        self.settings = settings
        self.engine = SimpleNamespace(notes=(), settings={}, render=self._render)
        self.answers = {"plain": self._answer(1.0, 10), "chain 3": self._answer(0.5, 4)}

    def _render(self, messages):
        self.rendered.append(messages[0]["content"])
        return [len(self.rendered)]

    def _answer(self, seconds, rounds):
        return lambda prompt, temperature, seed: {"tokens": (1,) * 11, "rounds": rounds, "seconds": seconds}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def bench(eagle3, monkeypatch):
    monkeypatch.setattr("eagle3_cli.bench.run.Contenders", Contenders)
    return lambda *args: eagle3("bench", "--repeats", "1", "--temp", "0", *args)


def test_the_mixed_prompts_are_the_default_and_make_one_table(bench):
    result = bench()
    assert result.code == 0
    assert len(Contenders.rendered) == 8
    assert result.out.startswith("| temperature |")
    assert "task" not in result.out
    assert "| 0 | chain 3 | 2.50 | 20.0 (20.0-20.0) | 2.00x |  |" in result.out


def test_several_tasks_are_grouped_and_have_a_mean(bench):
    result = bench("--task", "chat", "--task", "code")
    assert len(Contenders.rendered) == 20
    lines = result.out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| chat", "| chat", "| code", "| code"]
    assert lines[-3] == "| 0 | chain 3 | 2.00x |"
    assert lines[-1].startswith("temperature 0: the best fixed setting is chain 3 with 2.00")


def test_all_is_fifty_prompts(bench):
    bench("--task", "all")
    assert len(Contenders.rendered) == 50


def test_json_has_rows_tasks_and_means(bench):
    found = json.loads(bench("--task", "code", "--json").out)
    assert [row["task"] for row in found["rows"]] == [None, None]
    assert [row["task"] for row in found["tasks"]] == ["code", "code"]
    assert found["geometric_mean"] == {"0.0": {"plain": 1.0, "chain 3": 2.0}}


def test_a_file_of_prompts_is_grouped_by_the_tasks_it_names(bench, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "One"}\n{"prompt": "Two", "task": "sums"}\n')
    lines = bench("--prompts", str(path)).out.splitlines()
    assert Contenders.rendered == ["One", "Two"]
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| mine", "| mine", "| sums", "| sums"]


def test_a_difference_is_named_with_its_task(bench, monkeypatch):
    found = CheckResult(2, (Difference("chain 3", "code", 1, 7, 5, 6, 0.25),))
    monkeypatch.setattr("eagle3_cli.bench.check.check", lambda *_: found)
    result = bench("--check", "--task", "code")
    assert result.code == 0
    assert "code, prompt 1, chain 3: token 7 is 6 instead of 5, logit gap 0.25000" in result.out


def test_what_cannot_be_asked_is_refused(bench, tmp_path):
    unknown = bench("--task", "poetry")
    assert unknown.code == 2
    assert "--task: expected one of mixed, chat, code" in unknown.err
    both = bench("--task", "code", "--prompts", str(tmp_path / "own.jsonl"))
    assert both.code == 2
    assert "--task: names built-in prompts, which --prompts replaces." in both.err


@pytest.mark.parametrize("flags", [("--no-draft",), ("--draft", "lookup")])
def test_without_a_drafter_there_is_nothing_to_measure(bench, flags):
    result = bench(*flags)
    assert (result.code, result.out) == (2, "")
    assert f"{' '.join(flags)}: leaves no drafter to measure" in result.err
