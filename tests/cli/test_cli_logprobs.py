"""--logprobs: what the target thought of every token."""

from __future__ import annotations

import json
import math
import sys

import pytest
from fake_engine import Terminal

from eagle3_cli.__main__ import run
from eagle3_cli.logprobs import entries


def test_json_has_an_entry_per_token(eagle3):
    eagle3.script = [["a", "b"]]
    first, second = json.loads(eagle3("generate", "x", "--json", "--logprobs", "3").out)["logprobs"]
    assert first == {
        "token": "e",  # the fake engine's first token is 101
        "logprob": -0.5,
        "bytes": [101],
        "top_logprobs": [
            {"token": "e", "logprob": -0.5, "bytes": [101]},
            {"token": "<300>", "logprob": -1.5, "bytes": None},  # prints nothing
            {"token": "\ufffd", "logprob": -2.5, "bytes": [226]},  # the beginning of a character
        ],
    }
    assert second["token"] == "f"


def test_zero_asks_for_the_tokens_own_alone(eagle3):
    found = json.loads(eagle3("generate", "x", "--json", "--logprobs", "0").out)["logprobs"]
    assert [(entry["logprob"], entry["top_logprobs"]) for entry in found] == [(-0.5, []), (-0.5, [])]


def test_without_it_nothing_is_asked_for(eagle3):
    assert "logprobs" not in json.loads(eagle3("generate", "x", "--json").out)
    assert eagle3.engine.watch is None


def test_a_variable_is_ignored_where_there_is_no_json(eagle3, monkeypatch):
    monkeypatch.setenv("EAGLE3_LOGPROBS", "2")
    assert eagle3("generate", "x").code == 0
    assert eagle3.engine.watch is None
    assert len(json.loads(eagle3("generate", "x", "--json").out)["logprobs"]) == 1


def test_a_batch_has_them_in_each_line(eagle3, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n{"prompt": ""}\n')
    result = eagle3("generate", "--batch", str(tmp_path / "p.jsonl"), "--logprobs", "1")
    answered, failed = map(json.loads, result.out.splitlines())
    assert [len(entry["top_logprobs"]) for entry in answered["logprobs"]] == [1, 1]
    assert "logprobs" not in failed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--logprobs", "3"], "--logprobs: has no effect without --json or --batch"),
        (["--logprobs", "21", "--json"], "--logprobs: expected a value from 0 to 20, got 21"),
        (["--logprobs", "-1", "--json"], "--logprobs: expected a value from 0 to 20, got -1"),
        (["--logprobs", "x", "--json"], "'x' is not a valid integer"),
    ],
)
def test_bad_values_are_refused_before_loading(eagle3, flags, words):
    result = eagle3("generate", "x", *flags)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not eagle3.engines


def test_a_token_without_a_likelihood_is_a_bug():
    with pytest.raises(ValueError, match="shorter"):
        entries(None, [5], [])


def test_a_real_targets_probabilities(tiny_target, tiny_drafters, monkeypatch, capsys):
    """Of a whole vocabulary they add up to 1; the greedy token is the likeliest; drafting changes none of it."""
    monkeypatch.setattr(sys, "stdin", Terminal())

    def ask(*draft):
        shared = ["--target", str(tiny_target.path), "-c", "256", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-n", "6"]
        code = run(["generate", "--raw", "-p", "the hen", "--temp", "0", "--json", "--logprobs", "20", *shared, *draft])
        assert code == 0
        return json.loads(capsys.readouterr().out)

    plain = ask("--no-draft")
    drafted = ask("--draft", str(tiny_drafters["good"].path), "--draft-tokens", "8")
    assert len(plain["logprobs"]) == len(plain["tokens"]) == 6
    for entry in plain["logprobs"]:
        top = entry["top_logprobs"]
        assert len(top) == 20
        assert {key: entry[key] for key in ("token", "logprob", "bytes")} == top[0]
        assert [other["logprob"] for other in top] == sorted((other["logprob"] for other in top), reverse=True)
        assert sum(math.exp(other["logprob"]) for other in top) <= 1.0 + 1e-6
    assert b"".join(bytes(e["bytes"]) for e in plain["logprobs"]).decode("utf-8", "replace") == plain["text"]
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["speculative"]["accepted"] > 0
    for ours, theirs in zip(drafted["logprobs"], plain["logprobs"], strict=True):
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)
