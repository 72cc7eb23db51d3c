"""Extreme values of the options: refused in one message or obeyed; the process never dies of them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_cli.__main__ import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-c", "1"], "--ctx-size: expected 0 or at least 2"),
        (["-c", "16777217"], "--ctx-size: expected a value from 0 to"),
        (["-c", "99999999999999999999"], "--ctx-size: expected"),
        (["-b", "0"], "--batch-size: expected a value from 1 to"),
        (["-b", "65537"], "--batch-size: expected a value from 1 to"),
        (["-b", "-1"], "--batch-size: expected"),
        (["-t", "-1"], "--threads: expected a value from 0 to 512"),
        (["-t", "513"], "--threads: expected a value from 0 to 512"),
        (["--draft-threads", "513"], "--draft-threads: expected a value from 0 to 512"),
        (["-ngl", "-2"], "--gpu-layers: expected"),
        (["-ngl", "100001"], "--gpu-layers: expected"),
        (["-ctv", "q8_0", "-fa", "off"], "--cache-type-v q8_0: needs flash attention"),
        (["-ctk", "q2_K"], "'q2_K' is not one of"),
        (["--top-k", "2147483648"], "--top-k: expected a value from 0 to"),
        (["--repeat-penalty", "2", "--repeat-last-n", "4294967296"], "--repeat-last-n: expected"),
        (["--dry-multiplier", "1", "--dry-penalty-last-n", "2147483648"], "--dry-penalty-last-n: expected"),
        (["--dry-multiplier", "1", "--dry-allowed-length", "2147483648"], "--dry-allowed-length: expected"),
        (["--temp", "1e-9"], "--temp (if not 0): expected a value from 1e-06 to 100"),
        (["--temp", "inf"], "--temp: expected"),
        (["--draft-depth", "65"], "--draft-depth: expected a value from 1 to 64"),
        (["--draft-width", "65"], "--draft-width: expected a value from 1 to 64"),
        (["--draft-tokens", "256"], "--draft-tokens: expected a value from 0 to 255"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_values_out_of_range_are_refused_before_loading(eagle3, command, flags, words):
    result = eagle3(command, *flags, stdin=b"hi")
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not eagle3.engines


@pytest.fixture
def tiny_cli(tiny_target, tiny_drafters, monkeypatch, capfd):
    """tiny_cli(command, *flags, stdin="") -> (exit code, stdout, stderr), with the real tiny pair."""

    def call(command, *flags, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        pair = ("--target", str(tiny_target.path), "--draft", str(tiny_drafters["good"].path), "--draft-tokens", "8")
        code = run([command, *pair, "-t", "1", "-b", "32", *flags])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("flags", [(), ("--json",), ("--raw",)])
@pytest.mark.parametrize("length", [256, 5000])
def test_a_prompt_that_does_not_fit_is_refused_before_any_output(tiny_cli, flags, length):
    code, out, err = tiny_cli("generate", "-c", "256", "-p", "x" * length, *flags)
    assert (code, out) == (2, "")
    assert "error: prompt: expected 1 to 255 tokens (the context holds 256), got" in err
    assert "hint: Shorten it, or raise --ctx-size." in err


def test_a_prompt_that_just_fits_is_answered_with_one_token(tiny_cli):
    code, out, _ = tiny_cli("generate", "-c", "256", "--raw", "-p", "x" * 255, "--json", "--ignore-eos")
    document = json.loads(out)
    assert (code, document["finish_reason"], len(document["tokens"])) == (0, "length", 1)
    assert document["usage"] == {"prompt_tokens": 255, "completion_tokens": 1}


@pytest.mark.parametrize("overflow", ["stop", "drop"])
def test_a_message_that_does_not_fit_is_refused_before_any_output(tiny_cli, overflow):
    code, out, err = tiny_cli("chat", "-c", "256", "--overflow", overflow, stdin="x" * 300 + "\n")
    assert (code, out) == (2, "")
    assert "error: your message: expected at most 255 tokens (the context holds 256), got" in err


def test_packed_keys_that_do_not_fit_into_the_heads_are_refused(tiny_cli):
    code, out, err = tiny_cli("generate", "-p", "hi", "-c", "256", "-ctk", "q8_0")
    assert (code, out) == (2, "")
    assert "--cache-type-k q8_0: packs 32 values at a time, but target.gguf has attention heads of 16" in err


def test_a_grammar_with_no_way_on_is_an_error(tiny_cli):
    flags = ("--grammar", 'root ::= "a"', "--logit-bias", "97-inf")
    code, out, err = tiny_cli("generate", "-p", "hi", "-c", "256", *flags, "--json")
    assert (code, out) == (2, "")
    assert "--grammar: nothing that it allows here is left" in err


# Each of these ended the process, or could have: GGML_ASSERT and exceptions thrown through C do not return.
ALLOWED = [
    ["-b", "1", "--draft-tokens", "0"],
    ["-b", "1"],
    ["-b", "65536"],
    ["-c", "33"],
    ["-t", "64"],
    ["--draft-tokens", "255", "--draft-width", "64", "--draft-depth", "64"],
    ["--draft-tokens", "255", "--draft-width", "64", "--draft-depth", "64", "-c", "33", "-b", "1"],
    ["--draft-depth", "64", "--draft-width", "1"],
    ["-fa", "on"],
    ["-fa", "on", "-ctk", "f32", "-ctv", "bf16"],
    ["--gpu-layers", "0"],
]
SAMPLED = [
    ["--top-k", "2147483647", "--typical", "0", "--min-p", "1", "--top-p", "0"],
    ["--repeat-penalty", "1.5", "--repeat-last-n", "2147483647"],
    ["--dry-multiplier", "1", "--dry-penalty-last-n", "2147483647", "--dry-allowed-length", "2147483647"],
    ["--temp", "1e-6"],
    ["--top-nsigma", "0"],
    ["--top-nsigma", "1e6", "--xtc-probability", "1", "--xtc-threshold", "0"],
    ["--top-nsigma", "1e-30"],
    ["--dynatemp-range", "100", "--dynatemp-exp", "0", "--temp", "1e-6"],
    ["--dynatemp-range", "100", "--dynatemp-exp", "100", "--temp", "100"],
    ["--mirostat", "1", "--mirostat-lr", "100", "--mirostat-ent", "100", "--temp", "100"],
    ["--mirostat", "1", "--mirostat-ent", "0", "--temp", "1e-6"],
    ["--mirostat", "2", "--mirostat-lr", "100", "--mirostat-ent", "100", "--temp", "1e-6"],
    ["--mirostat", "2", "--mirostat-lr", "0", "--mirostat-ent", "0"],
    ["--samplers", "adaptive_p", "--adaptive-target", "0", "--adaptive-decay", "0"],
    ["--samplers", "top_k;adaptive_p", "--top-k", "1", "--adaptive-target", "1", "--adaptive-decay", "0.99"],
    ["--samplers", ""],
    ["--temp", "100", "--seed", "4294967294"],
    ["--logit-bias", "5+3e38", "--logit-bias", "6-3e38"],
]
PROGRAM = """if True:
    import json, resource, sys
    from eagle3_cli.__main__ import run
    pair, calls, limit = json.loads(sys.argv[1])
    for flags in calls:
        print(run(["generate", *pair, "--raw", "-p", "x" * 20, "-n", "4", "--json", *flags]), flush=True)
    if limit:
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, -1))
        print(run(["generate", *pair, "-p", "x", "-c", "2097152"]), flush=True)
"""


def test_extreme_values_that_are_allowed_do_not_end_the_process(tiny_target, tiny_drafters):
    """Nor does a context for which there is no memory."""
    pair = ["--target", str(tiny_target.path), "--draft", str(tiny_drafters["good"].path), "-t", "1"]
    calls = [["--temp", "0", *flags] for flags in ALLOWED] + SAMPLED
    limit = 200 * 2**20 if sys.platform == "linux" else 0
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([pair, calls, limit])],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    codes, documents = lines[1 : 2 * len(calls) : 2], lines[: 2 * len(calls) : 2]
    assert codes == ["0"] * len(calls), done.stderr
    tokens = [json.loads(document)["tokens"] for document in documents]
    assert tokens[: len(ALLOWED)] == [tokens[0]] * len(ALLOWED)
    if limit:
        assert lines[2 * len(calls) :] == ["1"]
        assert "error: target: llama.cpp could not make a context of 2097152 cells" in done.stderr
        assert "hint: Try a smaller --ctx-size or --batch-size." in done.stderr
