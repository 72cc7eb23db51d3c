"""generate --batch with several prompts at a time: the same answers, in the same places."""

from __future__ import annotations

import json
import os
import sys

import pytest
from fake_engine import Terminal

from eagle3_cli.__main__ import run
from eagle3_cli.batch import Line
from eagle3_cli.commands import batch_answers
from eagle3_cli.commands.batch_answers import in_order
from eagle3_cli.engine import parallel

RECORDS = [
    {"prompt": "the hen", "id": "a"},
    {"prompt": "the other hen and the first hen", "max_tokens": 25, "temperature": 1.2, "seed": 4},
    {"prompt": ""},
    {"messages": [{"role": "user", "content": "in the end"}], "max_tokens": 3},
    {"prompt": "x" * 60, "max_tokens": 40, "stop": "th"},
    {"prompt": "the hen", "logit_bias": {"99999999": 1}},
    {"prompt": "y" * 600},
    {"prompt": "then", "max_tokens": 90},
    {"prompt": "an", "grammar": 'root ::= [a-z ]+', "seed": 1},
]  # fmt: skip
FAILED = (2, 5, 6)


@pytest.fixture
def ask(tiny_target, tiny_drafters, tmp_path, monkeypatch, capsys):
    """ask(*flags) -> (exit code, records on stdout, stderr), with the real tiny pair."""
    monkeypatch.setattr(sys, "stdin", Terminal())
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "-c", "256", "-t", "1", "-b", "32", "--seed", "3", "-n", "12"]

    def call(*flags, draft=()):
        draft = draft or ("--no-draft",)
        code = run(["generate", "--batch", str(path), "--target", str(tiny_target.path), *draft, *exact, *flags])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    call.drafter = ("--draft", str(tiny_drafters["good"].path))
    return call


@pytest.fixture
def made(monkeypatch):
    """What contexts were made: (sequences, longest)."""
    seen = []
    make = parallel.Parallel.__init__

    def watched(self, model, runtime, on_gpu, sequences, longest):
        seen.append((sequences, longest))
        make(self, model, runtime, on_gpu, sequences, longest)

    monkeypatch.setattr(parallel.Parallel, "__init__", watched)
    return seen


@pytest.mark.parametrize("number", ["2", "4", "40"])
def test_several_at_a_time_say_what_one_at_a_time_says(ask, made, number):
    code, one, _ = ask("--parallel", "1")
    assert (code, made) == (1, [])
    assert [i for i, record in enumerate(one) if "error" in record] == list(FAILED)
    assert ask("--parallel", number)[:2] == (1, one)
    assert [sequences for sequences, _ in made] == [min(int(number), len(RECORDS) - 2)]


def test_what_needs_more_room_than_those_before_is_answered_beside_them(ask, made, monkeypatch):
    monkeypatch.setattr(batch_answers, "AHEAD", 2)
    assert ask("--parallel", "2")[:2] == ask("--parallel", "1")[:2]
    longest = made[0][1]
    assert longest < 90


def test_a_file_gets_them_in_order_too(ask, tmp_path):
    out = tmp_path / "out.jsonl"
    code, nothing, _ = ask("--parallel", "3", "-o", str(out))
    assert (code, nothing) == (1, [])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(len(RECORDS)))
    expected = ask("--parallel", "1")[1]
    assert [record.get("text") for record in records] == [record.get("text") for record in expected]
    assert ask("-o", str(out))[0] == 1  # another number of prompts at a time is no other setting


def test_logprobs_are_there_too(ask):
    one, several = (ask("--parallel", number, "--logprobs", "2", "--temp", "0")[1] for number in ("1", "3"))
    for ours, theirs in zip(several, one, strict=True):
        for a, b in zip(ours.get("logprobs", []), theirs.get("logprobs", []), strict=True):
            assert a["token"] == b["token"]
            assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_disk_ends_all_of_them(ask):
    """The context goes before the model."""
    code, _, err = ask("--parallel", "3", "-o", "/dev/full")
    assert code == 2
    assert err.startswith("error: /dev/full: cannot be written: No space left on device.")


def test_ctrl_c_leaves_what_is_done_and_the_same_command_goes_on(ask, monkeypatch, tmp_path):
    out = tmp_path / "out.jsonl"
    process, passes = parallel.Parallel._process, []

    def interrupted(self, parts):
        passes.append(1)
        if len(passes) == 20:
            raise KeyboardInterrupt
        process(self, parts)

    monkeypatch.setattr(parallel.Parallel, "_process", interrupted)
    code, _, err = ask("--parallel", "3", "-o", str(out))
    assert (code, err) == (130, "Interrupted. The same command goes on from what is done.\n")
    done = out.read_text().splitlines()
    assert 0 < len(done) < len(RECORDS)
    assert ask("--parallel", "3", "-o", str(out))[0] == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(len(RECORDS)))
    assert [record.get("text") for record in records] == [r.get("text") for r in ask("--parallel", "1")[1]]
    assert {line for line in done if "error" not in json.loads(line)} <= set(out.read_text().splitlines())


@pytest.fixture
def eager(monkeypatch):
    """Several at a time are thought to be faster as soon as one answer is there."""
    monkeypatch.setattr(batch_answers, "ENOUGH", 1)
    monkeypatch.setattr(parallel, "at_once", lambda costs, seconds, rate, most: 3 if seconds > 0 and rate > 0 else 1)


def test_auto_goes_on_with_several_where_that_is_faster(ask, made, eager, monkeypatch):
    monkeypatch.setattr(parallel, "TRIAL", 10**9)
    code, records, err = ask("--stats", draft=ask.drafter)
    assert (code, records) == (1, ask("--parallel", "1", draft=ask.drafter)[1])
    assert [sequences for sequences, _ in made] == [256 // 102]  # 102 cells are needed, and the engine has 256
    assert "6 prompts answered, 3 failed" in err


def test_auto_turns_back_where_it_is_not(ask, made, eager, monkeypatch):
    monkeypatch.setattr(parallel, "TRIAL", 0)
    monkeypatch.setattr(parallel.Parallel, "rate", 0.0)
    assert ask(draft=ask.drafter)[:2] == ask("--parallel", "1", draft=ask.drafter)[:2]
    assert len(made) == 1


def test_auto_leaves_it_where_there_is_no_memory(ask, eager, monkeypatch):
    from eagle3_cli.errors import LlamaError

    def full(*_):
        raise LlamaError("target: llama.cpp could not make a context.")

    monkeypatch.setattr(parallel.Parallel, "__init__", full)
    assert ask(draft=ask.drafter)[:2] == ask("--parallel", "1", draft=ask.drafter)[:2]
    code, records, err = ask("--parallel", "2")
    assert (code, records) == (1, [])
    assert "could not make a context" in err


def test_auto_without_a_limit_of_tokens_has_no_room_for_two(ask, made, eager):
    assert ask("-n", "-1", "--ignore-eos", "--stop", "the", draft=ask.drafter)[0] == 1
    assert made == []


def test_auto_is_one_at_a_time_where_costs_are_not_learned(ask, made):
    assert ask("--draft-tokens", "4", draft=ask.drafter)[0] == 1
    assert made == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["x", "--parallel", "2"], "--parallel: has no effect without --batch"),
        (["--batch", "-", "--parallel", "2"], "--parallel: has no effect where --batch is no file"),
        (["--batch", __file__, "--parallel", "2", "--lora", "a.gguf"], "--parallel: has no effect with --lora"),
        (["--batch", __file__, "--parallel", "0"], "--parallel: expected a value from 1 to 256, got 0"),
        (["--batch", __file__, "--parallel", "257"], "--parallel: expected a value from 1 to 256, got 257"),
        (["--batch", __file__, "--parallel", "many"], "'many' is not a valid integer"),
    ],
)
def test_what_has_no_effect_is_refused(eagle3, flags, words):
    result = eagle3("generate", *flags, stdin=b'{"prompt": "x"}\n')
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not eagle3.engines


def test_a_variable_gives_way_where_it_has_no_effect(eagle3, monkeypatch):
    monkeypatch.setenv("EAGLE3_PARALLEL", "4")
    assert eagle3("generate", "x").code == 0
    assert eagle3("generate", "--batch", "-", stdin=b'{"prompt": "x"}\n').code == 0


def test_in_order_holds_back_no_longer_than_needed():
    done = [(Line(i, "", b""), {}, None) for i in range(4)]
    given = iter([done[1], done[0], done[3], done[2]])
    ordered = in_order(given)
    assert [next(ordered), next(ordered)] == done[:2]
    assert next(given) == done[3]
    assert list(in_order([done[2], done[1], done[0], done[3]])) == done
