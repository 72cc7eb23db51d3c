"""Every flag reaches the engine and shows in --json; every flag without effect is refused."""

from __future__ import annotations

import json
import math
import os

import click
import pytest

from eagle3_cli.commands.build import logit_bias
from eagle3_cli.commands.generate import generate
from eagle3_cli.errors import OptionError

ADAPTIVE = ("--samplers", "min_p,temperature,adaptive_p")
PENALTY, DRY = ("--repeat-penalty", "1.1"), ("--dry-multiplier", "0.8")

# flags -> what they change in settings
CHANGES = [
    (["--target", "t.gguf", "--draft", "d.gguf"], {"target": "t.gguf", "draft": "d.gguf"}),
    (["--draft-depth", "5"], {"draft_depth": 5}),
    (["--draft-width", "3"], {"draft_width": 3}),
    (["--draft-tokens", "30"], {"draft_tokens": 30, "lookup": False}),
    (["--draft-tokens", "auto"], {"draft_tokens": "auto", "lookup": True}),
    (["--no-lookup"], {"draft_tokens": "auto", "lookup": False}),
    (["--draft", "lookup"], {"draft": None, "lookup": True}),
    (["--feedback", "post"], {"feedback": "post"}),
    (["--lora", "a.gguf", "--lora", "b.gguf"], {"loras": [["a.gguf", 1.0], ["b.gguf", 1.0]]}),
    (["--lora-scaled", "a.gguf:0.5"], {"loras": [["a.gguf", 0.5]]}),
    (["-n", "9"], {"max_tokens": 9}),
    (["-n9"], {"max_tokens": 9}),
    (["--max-tokens", "-1"], {"max_tokens": None}),
    (["--stop", "User:", "--stop", r"\n"], {"stop": ["User:", "\n"]}),
    (["--ignore-eos"], {"ignore_eos": True}),
    (["--temp", "0"], {"temperature": 0.0}),
    (["--top-k", "7"], {"top_k": 7}),
    (["--top-p", "0.5"], {"top_p": 0.5}),
    (["--min-p", "0.2"], {"min_p": 0.2}),
    (["--typical", "0.9"], {"typical_p": 0.9}),
    (["--top-nsigma", "1.5"], {"top_n_sigma": 1.5}),
    (["--top-n-sigma", "1.5"], {"top_n_sigma": 1.5}),
    (["--xtc-probability", "0.5"], {"xtc_probability": 0.5}),
    (["--xtc-probability", "0.5", "--xtc-threshold", "0.2"], {"xtc_threshold": 0.2}),
    (["--dynatemp-range", "0.3"], {"dynatemp_range": 0.3}),
    (["--dynatemp-range", "0.3", "--dynatemp-exp", "2"], {"dynatemp_exponent": 2.0}),
    (["--mirostat", "2"], {"mirostat": 2}),
    (["--mirostat", "2", "--mirostat-lr", "0.2", "--mirostat-ent", "3"], {"mirostat_lr": 0.2, "mirostat_ent": 3.0}),
    (["--samplers", "top-k;TopP; temp"], {"samplers": ["top_k", "top_p", "temperature"]}),
    ([*ADAPTIVE, "--adaptive-target", "0.4"], {"adaptive_target": 0.4}),
    ([*ADAPTIVE, "--adaptive-target", "0.4", "--adaptive-decay", "0.5"], {"adaptive_decay": 0.5}),
    (["--seed", "42"], {"seed": 42}),
    (["--seed", "-1"], {"seed": 7}),  # the fake engine's draw
    (["--repeat-penalty", "1.3"], {"repeat_penalty": 1.3}),
    ([*PENALTY, "--repeat-last-n", "-1"], {"repeat_last_n": -1}),
    (["--presence-penalty", "0.5"], {"presence_penalty": 0.5}),
    (["--frequency-penalty", "0.25"], {"frequency_penalty": 0.25}),
    (["--dry-multiplier", "0.8"], {"dry_multiplier": 0.8}),
    ([*DRY, "--dry-base", "2"], {"dry_base": 2.0}),
    ([*DRY, "--dry-allowed-length", "4"], {"dry_allowed_length": 4}),
    ([*DRY, "--dry-penalty-last-n", "99"], {"dry_penalty_last_n": 99}),
    ([*DRY, "--dry-sequence-breaker", r"\t"], {"dry_sequence_breakers": ["\t"]}),
    ([*DRY, "--dry-sequence-breaker", "none"], {"dry_sequence_breakers": []}),
    (["--logit-bias", "5-inf", "--logit-bias", "6+1.5"], {"logit_bias": [[5, "-inf"], [6, 1.5]]}),
    (["--grammar", 'root ::= "a"'], {"grammar": 'root ::= "a"'}),
    (["-c", "2048"], {"ctx_size": 2048}),
    (["-b", "64"], {"batch_size": 64}),
    (["-t", "3"], {"threads": 3}),
    (["--draft-threads", "2"], {"draft_threads": 2}),
    (["-ngl", "12"], {"gpu_layers": 12}),
    (["--gpu-layers", "-1"], {"gpu_layers": None}),
    (["--flash-attn", "on"], {"flash_attn": "on"}),
    (["--cache-type-k", "f32"], {"cache_type_k": "f32"}),
    (["--cache-type-v", "q8_0"], {"cache_type_v": "q8_0"}),
    (["--no-mmap"], {"mmap": False}),
    (["--device", "cpu"], {"device": "cpu"}),
    (["-dev", "CUDA0,CUDA2"], {"device": "CUDA0,CUDA2"}),
    (["-sm", "row", "-mg", "1"], {"split_mode": "row", "main_gpu": 1}),
    (["-ts", "3,1"], {"tensor_split": [3.0, 1.0]}),
    (["-ot", "a=CPU,b=CUDA0", "-ot", "c=CPU"], {"override_tensor": ["a=CPU", "b=CUDA0", "c=CPU"]}),
    (["-cmoe"], {"cpu_moe": -1}),
    (["-ncmoe", "20"], {"cpu_moe": 20}),
    (["--raw"], {"raw": True}),
    (["--system", "be brief"], {"system": "be brief"}),
    (["--logprobs", "2"], {"logprobs": 2}),
    (["--chat-template-kwargs", '{"enable_thinking": false}'], {"chat_template_kwargs": {"enable_thinking": False}}),
]
SPECIAL = {  # tested on their own
    "words", "prompt", "files", "as_json", "stats", "quiet", "raw_output", "no_draft", "grammar_file",
    "json_schema", "json_schema_file",
    "messages", "batch", "output", "parallel", "hide_thinking", "trace",
    "extract", "extract_last",
}  # fmt: skip


def settings_of(eagle3, *flags):
    result = eagle3("generate", "-p", "hi", "--json", *flags)
    assert result.code == 0, result.err
    return json.loads(result.out)["settings"]


@pytest.mark.parametrize(("flags", "expected"), CHANGES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_flag_shows_in_json_settings(eagle3, flags, expected):
    got = settings_of(eagle3, *flags)
    assert {key: got[key] for key in expected} == expected


def test_no_flag_is_forgotten_by_this_table():
    spelt = {word for flags, _ in CHANGES for word in flags if word.startswith("-")}
    missing = [p.name for p in generate.params if p.name not in SPECIAL and not spelt & set(p.opts)]
    assert missing == []


def test_defaults_are_those_of_the_settings(eagle3):
    from eagle3_cli.settings import Limits, SamplingSettings

    eagle3("generate", "hi", "--seed", "1")
    assert eagle3.engine.sampling == SamplingSettings(seed=1)
    assert eagle3.engine.limits == Limits()


def test_json_document_has_the_documented_keys(eagle3):
    document = json.loads(eagle3("generate", "hi", "--json").out)
    assert list(document) == [
        "text", "tokens", "finish_reason", "usage", "timings", "speculative", "settings", "versions",
    ]  # fmt: skip
    assert document["text"] == "Hello world"
    assert document["tokens"] == [101, 102]
    assert document["finish_reason"] == "stop"
    assert document["usage"] == {"prompt_tokens": len("<user>hi"), "completion_tokens": 2}
    assert {"load_s", "prefill_s", "decode_s", "decode_tokens_per_second", "target_s", "drafter_s", "other_s"} <= set(
        document["timings"]
    )
    assert {
        "enabled", "reason", "rounds", "drafted", "accepted", "acceptance_length", "accepted_by_depth", "mean_nodes",
        "rounds_by_nodes", "draft_rounds", "sources", "speed_up", "budget",
    } == set(document["speculative"])  # fmt: skip
    assert {"eagle3", "python", "llama-cpp-python"} <= set(document["versions"])


def test_json_prints_one_line_and_nothing_else(eagle3):
    result = eagle3("generate", "hi", "--json")
    assert result.out.count("\n") == 1
    assert result.err == ""


def test_every_setting_has_a_variable_shown_in_help(eagle3):
    text = " ".join(eagle3("generate", "--help").out.split())
    input_flags = {"words", "prompt", "files", "help", "messages", "batch", "output", "trace"}
    for param in generate.params:
        if param.name not in input_flags:
            assert isinstance(param, click.Option)
            assert param.show_envvar
            assert str(param.envvar) in text


def test_variable_is_used_and_flag_wins(eagle3, monkeypatch):
    monkeypatch.setenv("EAGLE3_TOP_K", "9")
    monkeypatch.setenv("EAGLE3_STOP", "one two\nthree")
    assert settings_of(eagle3)["top_k"] == 9
    assert settings_of(eagle3)["stop"] == ["one two", "three"]
    assert settings_of(eagle3, "--top-k", "5")["top_k"] == 5


def test_no_pair_is_the_demo_pair(eagle3):
    got = settings_of(eagle3)
    assert (got["target"], got["draft"]) == ("demo-target.gguf", "demo-drafter.gguf")


def test_no_draft_alone_is_the_demo_target(eagle3):
    eagle3("generate", "hi", "--no-draft")
    pair = eagle3.engine.pair
    assert (str(pair.target), pair.draft, pair.no_draft) == ("demo-target.gguf", None, "--no-draft")


def test_pair_from_variables_can_be_answered_plainly(eagle3, monkeypatch):
    monkeypatch.setenv("EAGLE3_TARGET", "t.gguf")
    monkeypatch.setenv("EAGLE3_DRAFT", "d.gguf")
    monkeypatch.setenv("EAGLE3_DRAFT_WIDTH", "2")
    monkeypatch.setenv("EAGLE3_FEEDBACK", "post")
    eagle3("generate", "hi", "--no-draft")
    assert (str(eagle3.engine.pair.target), eagle3.engine.pair.draft) == ("t.gguf", None)
    monkeypatch.setenv("EAGLE3_NO_DRAFT", "1")
    eagle3("generate", "hi", "--draft", "e.gguf")
    assert str(eagle3.engine.pair.draft) == "e.gguf"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--target", "t.gguf"], "--no-draft to answer without a drafter"),
        (["--draft", "d.gguf"], "--draft: needs --target"),
        (["--target", "t.gguf", "--draft", "d.gguf", "--no-draft"], "--no-draft: cannot be used with --draft"),
        (["--no-draft", "--draft-depth", "3"], "--draft-depth: has no effect with --no-draft"),
        (["--no-draft", "--draft-width", "3"], "--draft-width: has no effect with --no-draft"),
        (["--no-draft", "--draft-tokens", "3"], "--draft-tokens: has no effect with --no-draft"),
        (["--no-draft", "--draft-threads", "3"], "--draft-threads: has no effect with --no-draft"),
        (["--no-draft", "--feedback", "pre"], "--feedback: has no effect with --no-draft"),
        (["--feedback", "both"], "'both' is not one of"),
        (["--grammar", "x", "--json-schema", "{}"], "--json-schema: cannot be used with --grammar"),
        (["--grammar", "x", "--grammar-file", "x"], "--grammar-file: cannot be used with --grammar"),
        (["--grammar", " "], "--grammar: is empty"),
        (["--grammar-file", "/no/such"], "--grammar-file /no/such: No such file"),
        (["--json-schema", "@/no/such"], "--json-schema /no/such: No such file"),
        (["--json-schema", __file__], f"hint: Give @{__file__} to read it"),
        (["--temp", "0", "--top-k", "5"], "--top-k: has no effect with --temp 0"),
        (["--temp", "0", "--top-p", "0.5"], "--top-p: has no effect with --temp 0"),
        (["--repeat-last-n", "5"], "--repeat-last-n: has no effect without --repeat-penalty"),
        (["--dry-base", "2"], "--dry-base: has no effect without --dry-multiplier"),
        (["--xtc-threshold", "0.2"], "--xtc-threshold: has no effect without --xtc-probability"),
        (["--dynatemp-exp", "2"], "--dynatemp-exp: has no effect without --dynatemp-range"),
        (["--mirostat-ent", "2"], "--mirostat-ent: has no effect without --mirostat"),
        (["--mirostat", "1", "--top-k", "5"], "--top-k: has no effect with --mirostat"),
        (["--mirostat", "1", "--repeat-penalty", "1.1"], "--repeat-penalty: has no effect with --mirostat"),
        (["--mirostat", "1", "--temp", "0"], "--mirostat: has no effect with --temp 0"),
        (["--mirostat", "3"], "--mirostat: expected a value from 0 to 2"),
        (["--adaptive-target", "0.5"], "--adaptive-target: has no effect without adaptive_p in --samplers"),
        ([*ADAPTIVE, "--adaptive-decay", "0.5"], "--adaptive-decay: has no effect without --adaptive-target"),
        (["--samplers", "top_k", "--temp", "0.5"], "--temp: has no effect without temperature in --samplers"),
        (["--samplers", "top_k", "--min-p", "0.5"], "--min-p: has no effect without min_p in --samplers"),
        (["--samplers", "topk;best"], "--samplers: expected one of penalties, dry,"),
        (["--samplers", "topk;top_k"], "--samplers: expected each sampler once, got top_k twice"),
        (["--device", "cpu", "-ngl", "3"], "--gpu-layers: has no effect with --device cpu"),
        (["--raw", "--system", "x"], "--system: has no effect with --raw"),
        (["--raw", "--chat-template-kwargs", "{}"], "--chat-template-kwargs: has no effect with --raw"),
        (["--chat-template-kwargs", "think"], "--chat-template-kwargs: expected a JSON object, got think"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs: expected a JSON object, got [1]"),
        (["--chat-template-kwargs", "[" * 100_000], "--chat-template-kwargs: expected a JSON object"),
        (["--chat-template-kwargs", '{"messages": []}'], "--chat-template-kwargs: messages is set by the conversation"),
        (["--stats", "--quiet"], "--quiet: has no effect with --stats"),
        (["--temp", "-1"], "--temp: expected a value from 0"),
        (["--temp", "nan"], "--temp: expected a value from 0"),
        (["--top-p", "1.5"], "--top-p: expected a value from 0 to 1"),
        (["-n", "0"], "--max-tokens: expected a value at least 1"),
        (["-n", "-2"], "--max-tokens: expected a value at least 1"),
        (["--seed", "-2"], "--seed: expected"),
        (["--seed", "4294967295"], "--seed: expected"),
        (["--draft-depth", "0"], "--draft-depth: expected"),
        (["--draft-tokens", "999"], "--draft-tokens: expected"),
        (["-c", "-5"], "--ctx-size: expected"),
        (["--device", "tpu"], "'tpu' is not one of"),
        (["--stop", ""], "--stop: expected a non-empty string"),
        ([*DRY, "--dry-sequence-breaker", ""], "--dry-sequence-breaker: expected a non-empty string"),
        ([*DRY, "--dry-sequence-breaker", "none", "--dry-sequence-breaker", "x"], "none cannot be used with others"),
        (["--logit-bias", "hello"], "--logit-bias: expected ID+BIAS"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_bad_flags_are_refused_before_loading(eagle3, flags, words, command):
    if command == "chat" and {"--raw", "--stats"} & set(flags):
        pytest.skip("generate only")
    result = eagle3(command, *flags, stdin=b"hi")
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not eagle3.engines


def test_a_grammar_is_read_once_for_it_may_come_from_a_pipe(eagle3):
    ends = os.pipe()
    os.write(ends[1], b'root ::= "a"')
    os.close(ends[1])
    assert settings_of(eagle3, "--grammar-file", f"/dev/fd/{ends[0]}")["grammar"] == 'root ::= "a"'
    os.close(ends[0])


def test_useless_value_in_a_variable_gives_way(eagle3, monkeypatch):
    monkeypatch.setenv("EAGLE3_TOP_K", "5")
    assert eagle3("generate", "hi", "--temp", "0").code == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15043+1", (15043, 1.0)),
        ("15043-1", (15043, -1.0)),
        ("15043=1", (15043, 1.0)),
        ("15043=-1.5", (15043, -1.5)),
        ("0+.5", (0, 0.5)),
        ("7-inf", (7, -math.inf)),
        ("7=-inf", (7, -math.inf)),
        ("7-1e-3", (7, -0.001)),
    ],
)
def test_logit_bias_reads_llama_cpp_notation(text, expected):
    assert logit_bias(text) == expected


@pytest.mark.parametrize("text", ["", "5", "5+", "+1", "-5+1", "5+-1", "5=", "x+1", "5+x", "5+nan", "5+inf", "5 1"])
def test_logit_bias_refuses_anything_else(text):
    with pytest.raises(OptionError, match="--logit-bias"):
        logit_bias(text)


def test_grammar_file_is_read(eagle3, tmp_path):
    (tmp_path / "g.gbnf").write_text('root ::= "a"\r\n')
    assert settings_of(eagle3, "--grammar-file", str(tmp_path / "g.gbnf"))["grammar"] == 'root ::= "a"'


@pytest.mark.parametrize("how", ["--json-schema", "--json-schema @", "--json-schema-file"])
def test_schema_becomes_a_grammar(eagle3, monkeypatch, tmp_path, how):
    monkeypatch.setattr("eagle3_cli.llama.schema_to_gbnf", lambda text: f"grammar of {text}")
    schema = '{"type": "object"}'
    path = tmp_path / "s.json"
    path.write_text(schema)
    value = {"--json-schema": schema, "--json-schema @": f"@{path}", "--json-schema-file": str(path)}[how]
    assert settings_of(eagle3, how.split()[0], value)["grammar"] == f"grammar of {schema}"


def test_invalid_schema_is_bad_input(eagle3):
    result = eagle3("generate", "hi", "--json-schema", "not json")
    assert (result.code, result.out) == (2, "")
    assert "--json-schema" in result.err


def test_files_are_kept_as_they_are_written(eagle3, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    eagle3("generate", "hi", "--target", "~/t.gguf", "--no-draft")
    assert str(eagle3.engine.pair.target) == "/home/somebody/t.gguf"
