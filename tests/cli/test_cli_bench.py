"""`eagle3 bench`: which prompts are asked, and how results are grouped."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from eagle3_cli.bench.check import CheckResult, Difference
from eagle3_cli.settings import TreeShape

COUNTS = {
    "shape": TreeShape(3, 1, 3),
    "drafter_s": 0.1,
    "draft_rounds": 4,
    "depth_tried": [4, 3],
    "depth_accepted": [3, 3],
    "sizes": {3: 4},
    "drafted_from": {1: 12},
    "accepted_from": {1: 6},
}
CURVE = {"plain_ms": 20, "verify": {"1": 1.0, "4": 1.2}, "draft": {"1": 0.1, "4": 0.1}}


class Contenders:
    """Plain decoding and a drafter that is twice as fast; remembers what was rendered."""

    rendered: list[str]
    against = None

    def __init__(self, settings):
        type(self).rendered = []
        self.settings = settings
        self.engine = SimpleNamespace(notes=(), settings={}, render=self._render)
        self.answers = {"plain": self._answer(1.0, 10), "chain 3": self._answer(0.5, 4, **COUNTS)}

    def _render(self, messages):
        self.rendered.append(messages[0]["content"])
        return [len(self.rendered)]

    def _answer(self, seconds, rounds, **counts):
        answer = {"tokens": (1,) * 11, "rounds": rounds, "seconds": seconds}
        return lambda prompt, temperature, seed: {**answer, **counts}

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
    assert "| 0 | chain 3 | 2.50 | 20.0 (20.0-20.0) | 2.00x | 20.0% |  |" in result.out
    assert "| 0 | chain 3 | 0.75 | 1.00 |" in result.out


def test_several_tasks_are_grouped_and_have_a_mean(bench):
    result = bench("--task", "chat", "--task", "code")
    assert len(Contenders.rendered) == 20
    lines = result.out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| chat", "| chat", "| code", "| code"]
    assert "| 0 | chain 3 | 2.00x |" in lines
    assert lines[-1].startswith("temperature 0: the best fixed setting is chain 3 with 2.00")


def test_all_is_fifty_prompts(bench):
    bench("--task", "all")
    assert len(Contenders.rendered) == 50


def test_json_has_rows_tasks_and_means(bench):
    found = json.loads(bench("--task", "code", "--json").out)
    assert [row["task"] for row in found["rows"]] == [None, None]
    assert [row["task"] for row in found["tasks"]] == ["code", "code"]
    assert found["geometric_mean"] == {"0.0": {"plain": 1.0, "chain 3": 2.0}}
    assert found["rows"][1]["n_alpha"] == [0.75, 1.0]
    assert found["run"]["prompts"]["count"] == 10
    assert found["costs"] is found["projection"] is None


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
    for shapes, message in (
        (("4,4",), "--shape: expected DEPTH,WIDTH,NODES, got 4,4"),
        (("4,2,8", "4,4,8"), "one tree 8"),
    ):
        refused = bench(*(part for shape in shapes for part in ("--shape", shape)))
        assert (refused.code, refused.out) == (2, "")
        assert message in refused.err
    both = bench("--task", "code", "--prompts", str(tmp_path / "own.jsonl"))
    assert both.code == 2
    assert "--task: names built-in prompts, which --prompts replaces." in both.err


@pytest.mark.parametrize("flags", [("--no-draft",), ("--draft", "lookup")])
def test_without_a_drafter_there_is_nothing_to_measure(bench, flags):
    result = bench(*flags)
    assert (result.code, result.out) == (2, "")
    assert f"{' '.join(flags)}: leaves no drafter to measure" in result.err


# ---- a figure and a projection ----


@pytest.fixture
def curve(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(CURVE))
    return path


def test_a_figure_is_drawn_of_what_is_printed(bench, tmp_path):
    path = tmp_path / "bench.svg"
    printed = bench().out
    assert bench("--plot", str(path)).out == printed
    assert "mixed, temperature 0: chain 3 2.00." in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["bench.svg"]


def test_a_projection_comes_last_and_into_the_document(bench, curve):
    """tau 2.5, 4 rows verified, 3 passes of the drafter: 2.5 / (1.2 + 0.3)."""
    shape = ("--shape", "3,1,3", "--cost-curve", str(curve))
    assert bench(*shape).out.endswith("| 0 | chain 3 | 2.50 | 4.0 | 1.50 | 20.0% | 83.3 | 1.67x |\n")
    found = json.loads(bench(*shape, "--json").out)["projection"]
    assert [row["contender"] for row in found["rows"]] == ["plain", "chain 3"]
    assert found["rows"][1]["speed_up"] == pytest.approx(2.5 / 1.5)


@pytest.fixture
def refused(bench, monkeypatch):
    """stderr of a call that ends with code 2 before any model is loaded."""

    def call(*args):
        monkeypatch.setattr("eagle3_cli.bench.run.Contenders", None)
        result = bench(*args)
        assert (result.code, result.out) == (2, "")
        return result.err

    return call


def test_files_that_cannot_be_used_are_refused_before_anything_is_measured(refused, curve, tmp_path):
    assert "--plot: expected a file name that ends in .svg, got x.png." in refused("--plot", "x.png")
    absent = tmp_path / "absent" / "x.svg"
    assert f"--plot: {absent.parent}: expected a folder that can be written" in refused("--plot", str(absent))
    wide = refused("--cost-curve", str(curve))
    assert "costs.json: verify: expected costs up to 9 rows for --shape 4,4,8, got up to 4." in wide
    assert "none.json: No such file" in refused("--cost-curve", str(tmp_path / "none.json"))


def test_without_matplotlib_the_extra_is_named(refused, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eagle3_cli.bench.plot", raising=False)
    said = refused("--plot", str(tmp_path / "x.svg"))
    assert "--plot: needs matplotlib, which is not installed." in said
    assert "pip install 'eagle3[figures]'" in said


@pytest.mark.parametrize("option", ["--plot", "--cost-curve"])
def test_with_check_there_is_nothing_to_draw_or_to_project(refused, option):
    assert f"{option}: has no effect with --check." in refused("--check", option, "x.svg")
