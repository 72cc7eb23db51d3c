"""generate --batch: every line is answered once, whatever happens in between."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Terminal
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_cli.batch import _READERS, KEYS, Defaults, Line, read_lines, record_of, task_of
from eagle3_cli.batch_file import differences, opened, settings_of
from eagle3_cli.errors import FileError, InputError, LlamaError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings

THREE = [{"prompt": "one", "id": "a"}, {"prompt": "two", "id": 2}, {"prompt": "three"}]
ANSWERS = [["1"], ["2"], ["3"]]


@pytest.fixture
def batch(eagle3, tmp_path):
    """batch(records, *flags) -> result; the answers are in `batch.out`, as text in `batch.text()`."""

    def call(records, *flags, output=True, **options):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        call.source.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        more = ["-o", str(call.out)] if output else []
        return eagle3("generate", "--batch", str(call.source), *more, *flags, **options)

    call.program, call.source, call.out = eagle3, tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    call.text = lambda: call.out.read_text("utf-8")
    call.records = lambda: [json.loads(line) for line in call.text().splitlines()]
    eagle3.script = [list(answer) for answer in ANSWERS]
    return call


def answered(batch):
    return [(record["index"], record.get("text", "error")) for record in batch.records()]


# ---- one run ----------------------------------------------------------------------------------------------


def test_every_line_is_answered_in_order(batch):
    result = batch(THREE)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert batch.program.engine.prompts == ["<user>one", "<user>two", "<user>three"]
    assert answered(batch) == [(0, "1"), (1, "2"), (2, "3")]
    assert [record["id"] for record in batch.records()] == ["a", 2, None]
    assert len(batch.program.engines) == 1
    assert batch.program.engine.closed


def test_an_answers_line_has_the_documented_keys(batch):
    batch(THREE[:1], "--seed", "5", "-n", "9")
    record = batch.records()[0]
    assert list(record) == ["index", "id", "text", "finish_reason", "usage", "seed", "input", "settings"]
    assert record["finish_reason"] == "stop"
    assert record["usage"] == {"prompt_tokens": len("<user>one"), "completion_tokens": 1}
    assert record["seed"] == 5
    assert record["settings"] == {"target": "demo-target.gguf", "max_tokens": 9, "seed": 5}


def test_without_output_the_answers_go_to_stdout(batch):
    result = batch(THREE, output=False)
    assert (result.code, result.err) == (0, "")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [record["text"] for record in records] == ["1", "2", "3"]
    assert list(records[0]) == ["index", "id", "text", "finish_reason", "usage", "seed"]
    assert not batch.out.exists()


@pytest.mark.parametrize("output", ["-", None])
def test_stdin_is_answered_line_by_line(eagle3, output):
    eagle3.script = [list(answer) for answer in ANSWERS]
    more = ["-o", output] if output else []
    result = eagle3("generate", "--batch", "-", *more, stdin=b'{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
    assert [json.loads(line)["text"] for line in result.out.splitlines()] == ["1", "2"]
    assert eagle3.engine.prompts == ["<user>a", "<user>b"]


def test_on_a_terminal_an_answer_is_still_one_line(batch, monkeypatch):
    screen = Terminal()
    batch.program.script = [["a\x1b[2J"]]
    monkeypatch.setattr(sys, "stdout", screen)
    batch(THREE[:1], output=False)
    assert screen.getvalue().count("\n") == 1
    assert json.loads(screen.getvalue())["text"] == "a\x1b[2J"


def test_a_line_may_be_a_conversation(batch):
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "why"},
    ]
    batch([{"messages": talk}, {"messages": [{"role": "system", "content": "s"}, *talk]}], "--system", "usual")
    assert batch.program.engine.prompts == [
        "<system>usual<user>hi<assistant>yes?<user>why",
        "<system>s<user>hi<assistant>yes?<user>why",
    ]


def test_a_lines_own_settings_hold_for_it_alone(batch):
    own = {"prompt": "x", "system": "brief", "temperature": 0, "max_tokens": 3, "seed": 9, "stop": "END", "top_k": None}
    batch([own, {"prompt": "y"}, {"prompt": "z", "max_tokens": -1, "seed": -1}], "-n", "50", "--seed", "1")
    first, second, third = batch.program.engine.calls
    assert first == (SamplingSettings(temperature=0.0, seed=9), Limits(max_tokens=3, stop=("END",)))
    assert second == (SamplingSettings(seed=1), Limits(max_tokens=50))
    assert third == (SamplingSettings(seed=7), Limits())  # 7 is what the fake engine draws
    assert batch.program.engine.prompts == ["<system>brief<user>x", "<user>y", "<user>z"]


def test_an_empty_system_message_takes_the_usual_one_away(batch):
    batch([{"prompt": "x", "system": ""}, {"prompt": "y", "system": None}], "--system", "usual")
    assert batch.program.engine.prompts == ["<user>x", "<system>usual<user>y"]


def test_a_lines_schema_becomes_its_grammar(batch, monkeypatch):
    monkeypatch.setattr("eagle3_cli.llama.schema_to_gbnf", lambda text: f"grammar of {text}")
    batch([{"prompt": "x", "json_schema": {"type": "null"}}, {"prompt": "y", "json_schema": "{}"}, {"prompt": "z"}])
    assert [sampling.grammar for sampling, _ in batch.program.engine.calls] == [
        'grammar of {"type": "null"}', "grammar of {}", None,
    ]  # fmt: skip


def test_raw_prompts_go_without_the_template(batch):
    batch([{"prompt": "x"}, {"messages": []}, {"prompt": "y", "system": "s"}], "--raw")
    assert batch.program.engine.prompts == ["x"]
    errors = [record["error"] for record in batch.records()[1:]]
    assert "messages needs the chat template, which --raw leaves out" in errors[0]
    assert "system needs the chat template, which --raw leaves out" in errors[1]


def test_stats_are_of_the_whole_batch(batch):
    result = batch([*THREE, "nonsense"], "--stats")
    assert (
        "3 prompts answered, 1 failed, 3 tokens, 4.0 tokens/s, acceptance length 1.00, prompts 29 tokens" in result.err
    )


def test_progress_is_shown_on_a_terminal_only(batch, monkeypatch):
    assert batch(THREE).err == ""
    batch.out.unlink()
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    batch(THREE)
    assert "0% 0 of 3 prompts" in screen.getvalue()
    assert "67% 2 of 3 prompts" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


# ---- lines that fail --------------------------------------------------------------------------------------


def test_a_line_that_fails_does_not_stop_the_others(batch):
    batch.program.script = [["1"], [LlamaError("decode failed.", "Try less.")], ["3"]]
    result = batch(THREE)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: 1 of 3 prompts could not be answered.\nhint: Their lines in ")
    assert answered(batch) == [(0, "1"), (1, "error"), (2, "3")]
    failed = batch.records()[1]
    assert list(failed) == ["index", "id", "error", "input", "settings"]
    assert failed["id"] == 2
    assert failed["error"] == f"{batch.source}:2: decode failed. Try less."


def test_a_bug_stops_the_batch_and_keeps_what_is_done(batch):
    batch.program.script = [["1"], [RuntimeError("a bug")]]
    result = batch(THREE)
    assert (result.code, result.out) == (1, "")
    assert "internal error" in result.err
    assert answered(batch) == [(0, "1")]


BAD = [
    ("nonsense", "expected one line of JSON, got 'nonsense'"),
    ("[" * 100_000, "expected one line of JSON, got '[["),
    ("5", 'expected an object with "prompt" or "messages", got 5'),
    ({}, 'expected either "prompt" or "messages", got none'),
    ({"prompt": "x", "messages": []}, 'expected either "prompt" or "messages", got prompt and messages'),
    ({"prompt": None}, 'expected either "prompt" or "messages", got none'),
    ({"prompt": " "}, "the prompt is empty"),
    ({"prompt": 5}, "prompt: expected text, got 5"),
    ({"prompt": "a\0b"}, "prompt: expected text, got a NUL"),
    ('{"prompt": "\\ud800"}', "prompt: expected UTF-8 text"),
    ({"prompt": "x", "temp": 0}, "unknown key 'temp'. Did you mean temperature?"),
    ({"prompt": "x", "zzz": 0}, "unknown key 'zzz'. There are prompt, messages, id"),
    ({"prompt": "x", "id": [1]}, "id: expected text, got [1]"),
    ({"prompt": "x", "id": True}, "id: expected text, got true"),
    ({"prompt": "x", "system": 5}, "system: expected text, got 5"),
    ({"messages": []}, "expected a list of messages, got []"),
    ({"messages": [{"role": "user"}]}, "message 1: expected content as text"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "expected the last message to be a user's"),
    ({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "system": "z"},
     "system is given twice"),
    ({"prompt": "x", "temperature": "warm"}, "temperature: expected a number, got 'warm'"),
    ({"prompt": "x", "temperature": True}, "temperature: expected a number, got true"),
    ({"prompt": "x", "temperature": -1}, "--temp: expected a value from 0"),
    ('{"prompt": "x", "temperature": NaN}', "--temp: expected a value from 0"),
    ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "temperature: expected a number, got 1000"),
    ({"prompt": "x", "top_k": 1.5}, "top_k: expected a whole number, got 1.5"),
    ({"prompt": "x", "top_k": 10**30}, "top_k: expected a whole number, got 1000"),
    ({"prompt": "x", "max_tokens": 0}, "--max-tokens: expected a value at least 1"),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos: expected true or false, got 1"),
    ({"prompt": "x", "stop": [1]}, "stop: expected text or a list of texts, got [1]"),
    ({"prompt": "x", "stop": ""}, "--stop: expected a non-empty string"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias: expected an object of token ids and biases, got [1]"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias: expected an object of token ids"),
    ({"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias: expected a number, got 'a'"),
    ({"prompt": "x", "grammar": 5}, "grammar: expected text, got 5"),
    ({"prompt": "x", "json_schema": 5}, "json_schema: expected an object or its text, got 5"),
    ({"prompt": "x", "json_schema": {}, "grammar": "x"}, "json_schema cannot be used with grammar"),
]  # fmt: skip


def test_each_bad_line_says_why_in_its_place(batch):
    batch.program.script = []
    result = batch([line for line, _ in BAD])
    assert result.code == 1
    assert f"error: {len(BAD)} of {len(BAD)} prompts could not be answered" in result.err
    for number, (record, (_, words)) in enumerate(zip(batch.records(), BAD, strict=True), 1):
        assert record["error"].startswith(f"{batch.source}:{number}: "), record
        assert words in record["error"]
        assert len(record["error"]) < 1000
    assert batch.program.engine.prompts == []


def test_other_bytes_than_utf8_fail_alone(batch):
    batch.source.write_bytes(b'{"prompt": "caf\xe9"}\n{"prompt": "x"}\n')
    result = batch.program("generate", "--batch", str(batch.source), "-o", str(batch.out))
    assert result.code == 1
    assert "expected UTF-8 text, got byte 0xe9" in batch.records()[0]["error"]
    assert batch.records()[1]["text"] == "1"


# ---- an interrupted run -----------------------------------------------------------------------------------


def test_a_finished_file_is_left_alone_and_no_model_is_loaded(batch):
    batch(THREE)
    before, engines = batch.text(), len(batch.program.engines)
    result = batch(THREE)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert (batch.text(), len(batch.program.engines)) == (before, engines)


@pytest.mark.parametrize("torn", ["", '{"index": 1, "id": 2, "te', "{"])
def test_what_is_missing_is_answered_and_a_torn_line_is_cut(batch, torn):
    batch(THREE)
    whole = batch.text()
    first = whole.splitlines(keepends=True)[0]
    batch.out.write_text(first + torn)
    batch.program.script = [["2"], ["3"]]
    assert batch(THREE).code == 0
    assert batch.text() == whole
    assert batch.program.engine.prompts == ["<user>two", "<user>three"]


@settings(max_examples=30)
@given(st.data())
def test_cut_anywhere_the_same_command_ends_with_the_same_file(batch, data):
    batch.out.unlink(missing_ok=True)
    batch.program.script = [list(answer) for answer in ANSWERS]
    batch(THREE)
    whole = batch.out.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    batch.out.write_bytes(whole[:cut])
    batch.program.script = ANSWERS[whole[:cut].count(b"\n") :]
    assert batch(THREE).code == 0
    assert batch.out.read_bytes() == whole


def test_ctrl_c_leaves_a_file_that_the_same_command_continues(batch):
    batch.program.script = [["1"], ["2", KeyboardInterrupt()]]
    result = batch(THREE)
    assert (result.code, result.out) == (130, "")
    assert result.err == "Interrupted. The same command goes on from what is done.\n"
    assert answered(batch) == [(0, "1")]
    batch.program.script = [["2"], ["3"]]
    assert batch(THREE).code == 0
    assert answered(batch) == [(0, "1"), (1, "2"), (2, "3")]


def test_sigterm_of_a_real_process_leaves_whole_lines(command, environment, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    out = tmp_path / "out.jsonl"
    call = command('[["1"], ["<forever>"]]', "generate", "--batch", str(tmp_path / "p.jsonl"), "-o", str(out))
    child = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=environment)  # fmt: skip
    while not (out.exists() and out.read_bytes().endswith(b"\n")):
        assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=30) == (b"", b"")
    assert child.returncode == 143
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["1"]


def test_failed_lines_are_tried_again_and_come_into_their_places(batch):
    batch.program.script = [["1"], [LlamaError("no memory.")], ["3"]]
    assert batch(THREE).code == 1
    batch.program.script = [["2"]]
    assert batch(THREE).code == 0
    assert batch.program.engine.prompts == ["<user>two"]
    assert answered(batch) == [(0, "1"), (1, "2"), (2, "3")]


def test_a_mended_line_is_answered(batch):
    assert batch([THREE[0], "nonsense", THREE[2]]).code == 1
    assert answered(batch) == [(0, "1"), (1, "error"), (2, "2")]
    batch.program.script = [["mended"]]
    assert batch(THREE).code == 0
    assert answered(batch) == [(0, "1"), (1, "mended"), (2, "2")]


def test_lines_may_be_added(batch):
    batch(THREE[:2])
    assert batch(THREE).code == 0
    assert answered(batch) == [(0, "1"), (1, "2"), (2, "3")]


def test_a_failed_line_that_is_gone_goes(batch):
    assert batch([THREE[0], "nonsense"]).code == 1
    assert batch(THREE[:1]).code == 0
    assert answered(batch) == [(0, "1")]


def test_the_order_is_made_in_a_whole_new_file_with_the_old_rights(batch):
    batch.program.script = [[LlamaError("no memory.")], ["2"]]
    batch(THREE[:2])
    batch.out.chmod(0o600)
    batch.program.script = [["1"]]
    batch(THREE[:2])
    assert answered(batch) == [(0, "1"), (1, "2")]
    assert stat.S_IMODE(batch.out.stat().st_mode) == 0o600
    assert sorted(path.name for path in batch.out.parent.iterdir()) == ["out.jsonl", "p.jsonl"]


def test_a_link_is_followed(batch):
    real = batch.out.with_name("real.jsonl")
    real.write_text("")
    batch.out.symlink_to(real)
    batch.program.script = [[LlamaError("no memory.")], ["2"]]
    batch(THREE[:2])
    batch.program.script = [["1"]]
    batch(THREE[:2])
    assert batch.out.is_symlink()
    assert [json.loads(line)["text"] for line in real.read_text().splitlines()] == ["1", "2"]


def test_stdin_is_continued_too(eagle3, tmp_path):
    out = tmp_path / "out.jsonl"
    eagle3.script = [["1"], ["2"]]
    assert eagle3("generate", "--batch", "-", "-o", str(out), stdin=b'{"prompt": "a"}\n').code == 0
    assert eagle3("generate", "--batch", "-", "-o", str(out), stdin=b'{"prompt": "a"}\n{"prompt": "b"}\n').code == 0
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["1", "2"]
    again = eagle3("generate", "--batch", "-", "-o", str(out), stdin=b'{"prompt": "c"}\n')
    assert again.code == 2
    assert "belongs to another line" in again.err


# ---- files that cannot be continued -----------------------------------------------------------------------


def refused(batch, records, *flags):
    """The message; nothing was loaded or changed."""
    before, engines = batch.out.read_bytes(), len(batch.program.engines)
    result = batch(records, *flags)
    assert (result.code, result.out) == (2, "")
    assert (batch.out.read_bytes(), len(batch.program.engines)) == (before, engines)
    return result.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temp", "0"], "temperature was the default, is 0.0"),
        (["-n", "5"], "max_tokens was the default, is 5"),
        (["--system", "s"], "system was the default, is 's'"),
        (["--raw"], "raw was the default, is true"),
        (["--logprobs", "0"], "logprobs was the default, is 0"),
        (["--target", "t.gguf", "--no-draft"], "target was 'demo-target.gguf', is 't.gguf'"),
        (["--lora", "a.gguf"], 'loras was the default, is [["a.gguf", 1.0]]'),
        (["--cache-type-k", "f32"], "cache_type_k was the default, is 'f32'"),
        (["--seed", "1", "--top-k", "3"], "top_k was the default, is 3; seed was the default, is 1"),
    ],
)
def test_answers_with_other_settings_are_not_mixed(batch, flags, words):
    batch(THREE[:2])
    err = refused(batch, THREE, *flags)
    assert f"out.jsonl:1: was answered with other settings: {words}." in err


@pytest.mark.parametrize("flags", [["--no-draft"], ["-t", "1"], ["--draft-tokens", "4"], ["-b", "64"], ["--stats"]])
def test_settings_that_no_answer_depends_on_may_change(batch, flags):
    batch(THREE[:2])
    batch.program.script = [["3"]]
    assert batch(THREE, *flags).code == 0
    assert answered(batch) == [(0, "1"), (1, "2"), (2, "3")]


def test_failures_with_other_settings_are_tried_again(batch):
    batch.program.script = [[LlamaError("too long.")]]
    batch(THREE[:1])
    batch.program.script = [["1"]]
    assert batch(THREE[:1], "-n", "5").code == 0
    assert answered(batch) == [(0, "1")]


def test_answers_to_other_lines_are_not_lost(batch):
    batch(THREE)
    assert "its answer 1 belongs to another line" in refused(batch, [{"prompt": "other"}, *THREE[1:]])
    assert "has an answer for line 2, but --batch has 1 lines" in refused(batch, THREE[:1])


@pytest.mark.parametrize(
    "content", ["hello", "hello\n", '{"text": "x"}\n', "[1]\n", '{"index": "0", "input": "", "settings": {}}\n', "\n",
                '{"index": 0, "input": "", "settings": 5}\n', "[" * 100_000 + "\n", "\ufffd\n"],
    ids=lambda v: v[:20],
)  # fmt: skip
def test_a_file_of_something_else_is_not_touched(batch, content):
    batch.out.write_text(content, "utf-8")
    assert "out.jsonl:1: expected a line that generate --batch wrote, got" in refused(batch, THREE)


def test_the_input_is_not_its_own_output(batch):
    batch(THREE)
    result = batch.program("generate", "--batch", str(batch.source), "-o", str(batch.source))
    assert result.code == 2
    assert "expected a line that generate --batch wrote" in result.err
    assert len(batch.source.read_text().splitlines()) == 3


def test_two_runs_cannot_write_one_file(batch, tmp_path):
    settings = {"target": "t"}
    with opened(batch.out, settings), pytest.raises(FileError, match="another run is writing into it"), \
            opened(batch.out, settings):  # fmt: skip
        pass
    assert not batch.out.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch", "/no/such"], "--batch /no/such: No such file"),
        (["--batch", "/"], "--batch /: Is a directory"),
        (["--batch", "{source}", "-o", "/no/such/out"], "--output /no/such/out: No such file"),
        (["--batch", "{source}", "-o", "/"], "--output /: Is a directory"),
        (["--batch", "{empty}"], "expected at least one line, got none"),
        (["--batch", "{source}", "word"], "--batch: the prompts are the lines of its file"),
        (["--batch", "{source}", "-p", "word"], "--batch: the prompts are the lines of its file"),
        (["--batch", "{source}", "-f", "{source}"], "--batch: the prompts are the lines of its file"),
        (["--batch", "{source}", "--messages", "{source}"], "--batch: the prompts are the lines of its file"),
        (["--batch", "{source}", "--json"], "--json: has no effect with --batch"),
        (["--batch", "{source}", "--trace", "{trace}"], "--trace: has no effect with --batch"),
        (["word", "-o", "out"], "--output: has no effect without --batch"),
        (["--batch", "{source}", "--temp", "-1"], "--temp: expected a value from 0"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_calls_are_refused_before_loading(batch, tmp_path, flags, words):
    (tmp_path / "empty").write_text("\n \r\n")
    batch.source.write_text('{"prompt": "x"}\n')
    names = {"source": batch.source, "empty": tmp_path / "empty", "trace": tmp_path / "t.html"}
    result = batch.program("generate", *(flag.format(**names) for flag in flags))
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not batch.program.engines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "p.jsonl"]


def test_an_empty_stdin_is_refused_before_loading(eagle3, tmp_path):
    result = eagle3("generate", "--batch", "-", "-o", str(tmp_path / "out"), stdin=b"\n")
    assert (result.code, result.out) == (2, "")
    assert "stdin: expected at least one line, got none" in result.err
    assert not eagle3.engines
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_load_leaves_no_file(batch):
    batch.program.load_error = FileError("x.gguf: truncated.")
    assert batch(THREE).code == 2
    assert not batch.out.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_disk_is_one_message(batch):
    batch.source.write_text('{"prompt": "x"}\n')
    result = batch.program("generate", "--batch", str(batch.source), "-o", "/dev/full")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: /dev/full: cannot be written: No space left on device.")


def test_a_pipe_can_be_read_and_written(command, environment, tmp_path):
    program = command('[["1"], ["2"]]', "generate", "--batch", "/dev/stdin", "-o", "/dev/stdout")
    done = subprocess.run(program, input=b'{"prompt": "a"}\n{"prompt": "b"}\n', capture_output=True, env=environment,
                          timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["1", "2"]


def test_a_reader_that_takes_one_line_ends_it(command, environment, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' * 3)
    script = json.dumps([["1"], ["x" * 100_000], ["3"]])
    words = '{ "$@"; echo $? >&2; } | head -n 1'
    call = command(script, "generate", "--batch", str(tmp_path / "p.jsonl"))
    done = subprocess.run(["sh", "-c", words, "sh", *call], capture_output=True, env=environment, timeout=60)
    assert json.loads(done.stdout)["text"] == "1"
    assert done.stderr == b"0\n"


def test_a_lines_answer_is_written_before_the_next_one_begins(batch):
    seen = []
    batch.program.script = [["1"], [lambda: seen.append(answered(batch)), "2"]]
    batch(THREE[:2])
    assert seen == [[(0, "1")]]


# ---- the parts --------------------------------------------------------------------------------------------

DEFAULTS = Defaults(SamplingSettings(), Limits())


def task(**record):
    return task_of({"prompt": "x", **record}, "here", DEFAULTS)


def test_every_key_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text("utf-8")
    assert [key for key in KEYS if f"`{key}`" not in page] == []


def test_every_setting_can_be_given_in_a_line():
    values = {
        "float": 0.5, "int": 2, "int | None": 3, "bool": True, "str | None": "text", "tuple[str, ...]": ["a", "b"],
        "tuple[tuple[int, float], ...]": {"5": -1.5, "6": None},
    }  # fmt: skip
    assert set(values) == set(_READERS)
    for kind in (SamplingSettings, Limits):
        for field in fields(kind):
            assert field.name in KEYS
            expected = ["min_p", "temperature"] if field.name == "samplers" else values[field.type]
            made = task(**{field.name: expected})
            got = getattr(made.sampling if kind is SamplingSettings else made.limits, field.name)
            if field.type == "tuple[tuple[int, float], ...]":
                expected = ((5, -1.5), (6, float("-inf")))
            assert got == (tuple(expected) if isinstance(expected, (list, tuple)) else expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@given(JSON)
def test_whatever_a_line_holds_is_taken_or_refused_in_one_message(value):
    line = Line(0, "here", json.dumps(value).encode())
    message = ""
    try:
        record = record_of(line)
        record.pop("json_schema", None)  # takes a process of its own
        assert task_of(record, "here", DEFAULTS).prompt
    except InputError as error:
        message = error.message
    assert "\n" not in message
    assert len(message) < 300


def test_lines_are_numbered_as_in_the_file_and_counted_without_the_empty_ones(tmp_path):
    (tmp_path / "p").write_bytes(b"a\r\n\n \nb\n\nc")
    found = list(read_lines(str(tmp_path / "p")))
    assert [(line.index, line.where[-2:], line.data) for line in found] == [
        (0, ":1", b"a"),
        (1, ":4", b"b"),
        (2, ":6", b"c"),
    ]


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_cli.batch.LARGEST", 1 << 20)
    (tmp_path / "p").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(FileError, match="expected at most 1 MiB in a line"):
        list(read_lines(str(tmp_path / "p")))


def test_settings_are_recorded_as_far_as_they_are_not_usual(tmp_path):
    pair = PairSettings(target=tmp_path, draft=None)
    usual = settings_of(pair, RuntimeSettings(), DEFAULTS, {"logprobs": None, "hide_thinking": False})
    assert usual == {"target": str(tmp_path)}
    other = Defaults(
        SamplingSettings(logit_bias=((1, float("-inf")),), grammar="x" * 100), Limits(stop=("a",)), "s", True
    )
    found = settings_of(
        pair, RuntimeSettings(flash_attn="on", threads=3), other, {"logprobs": 0, "hide_thinking": True}
    )
    assert found.pop("grammar").startswith("sha256:")
    assert found == json.loads(json.dumps(found)) == {
        "target": str(tmp_path), "system": "s", "raw": True, "logprobs": 0, "hide_thinking": True,
        "logit_bias": [[1, "-inf"]], "stop": ["a"], "flash_attn": "on",
    }  # fmt: skip


def test_differences_name_both_values():
    assert differences({"a": 1, "b": None}, {"a": 1, "b": None}) == []
    assert differences({"a": 1}, {"b": "x"}) == ["a was 1, is the default", "b was the default, is 'x'"]


def test_prompts_with_one_beginning_are_computed_once(tiny_target, monkeypatch, tmp_path, capsys):
    """By the real engine: what a line has in common with the one before it is in the cache."""
    from eagle3_cli.__main__ import run

    monkeypatch.setattr(sys, "stdin", Terminal())
    prompts = ["the hen and the other hen", "the hen and the first hen", "the hen and the other hen"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    shared = ["--target", str(tiny_target.path), "--no-draft", "-c", "256", "-t", "1", "--temp", "0", "-n", "8"]
    assert run(["generate", "--batch", str(tmp_path / "p.jsonl"), *shared, "--stats"]) == 0
    out, err = capsys.readouterr()
    first, _, third = [json.loads(line)["text"] for line in out.splitlines()]
    assert first == third
    words = err.split("prompts ")[-1].split()  # "144 tokens, 80 of them cached"
    assert int(words[2]) > 20
    assert run(["generate", prompts[0], *shared, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == first


def test_the_fake_engine_takes_what_the_real_one_takes():
    import inspect

    from eagle3_cli.engine.load import Engine

    real = list(inspect.signature(Engine.stream).parameters)
    assert list(inspect.signature(FakeEngine.stream).parameters) == real
