"""Grammars, schemas and texts that are meant to do harm, or are only very large: one message, or they simply work."""

from __future__ import annotations

import json

import pytest
import tiny

from eagle3_cli import confined
from eagle3_cli.errors import OptionError, PromptError
from eagle3_cli.llama import Model, check_grammar, schema_to_gbnf

MIB5 = 5 << 20

REFUSED = {
    "root ::= [": "unexpected end of input",
    "root ::= other": "Undefined rule identifier 'other'",
    'start ::= "a"': "does not contain a 'root' symbol",
    'root ::= root "a" | "b"': "left recursion",
    'root ::= "\\q"': "unknown escape",
    'root ::= "a"{5000}': "number of repetitions",
    'root ::= ("a"{0,1000}){1000}': "number of rules",
    'root ::= "a"{99999999999999999999999}': "llama.cpp cannot parse it",
    "root ::= <[5]>": "token elements",
    'root ::= "a" !<[5]>': "token elements",
    "root ::= <think> [a-z]*": "token elements",
    "": "is empty",
    "# root": "is empty",
}


@pytest.mark.parametrize("grammar", REFUSED)
def test_a_bad_grammar_says_why_in_one_line(capfd, grammar):
    with pytest.raises(OptionError, match=f"^--grammar: .*{REFUSED[grammar]}") as caught:
        check_grammar(grammar)
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", ""), "llama.cpp itself prints the grammar to stderr"


HARMFUL = {
    "brackets": "root ::= " + "(" * MIB5,
    "groups": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "rules": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(100_000)) + 'a100000 ::= "a"',
    "growing at once": 'root ::= b root "y" | "z"\nb ::= c\nc ::= ""',
    "growing later": 'root ::= "x" a\na ::= b a "y" | "z"\nb ::= c\nc ::= ""',
    "many ways": "".join(f"a{i} ::= a{i + 1} | a{i + 1}\n" for i in range(60)) + 'a60 ::= "a"\nroot ::= a0',
    "no end": 'root ::= "' + "a" * MIB5,
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_grammar_that_would_end_the_process_is_one_message(monkeypatch, capfd, name):
    check_grammar('root ::= "a"')  # so that the process is there
    monkeypatch.setattr(confined, "SECONDS", 2.0)
    with pytest.raises(OptionError, match=r"^--grammar: ") as caught:
        check_grammar(HARMFUL[name])
    assert caught.value.exit_code == 2
    assert len(caught.value.message) < 400
    assert capfd.readouterr() == ("", "")
    check_grammar('root ::= "b"')


GOOD = [
    'root ::= "a" [<!>] "<[5]>!" # <[5]>\n',
    'root ::= "\\"<" [^"\\]<]* ">"',
    'root ::= ("a" | "b" x)* "::="\nx ::= # comment\n  [^#"]+',
    'root ::= (a b)* c?\na ::= [a-z]+\nb ::= ""\nc ::= "" | "c"',
]


@pytest.mark.parametrize("grammar", GOOD)
def test_a_good_grammar_is_not_taken_for_a_bad_one(grammar):
    check_grammar(grammar)


def nested(depth):
    return '{"type": "array", "items": ' * depth + '{"type": "null"}' + "}" * depth


SCHEMAS = {
    "5 MB of brackets": "[" * MIB5,
    "nested": nested(50_000),
    "long strings": '{"type": "string", "minLength": 10000000000}',
    "long arrays": '{"type": "array", "items": {"type": "null"}, "maxItems": 10000000000}',
    "long patterns": '{"type": "string", "pattern": "^([ab]{10000000000})$"}',
    "of itself": '{"$ref": "#/a", "a": {"$ref": "#/a"}}',
    "elsewhere": '{"$ref": "https://example.com/schema.json"}',
    "no schema": '{"type": ["a", 5]}',
    "no object": "[1, 2]",
    "no JSON": "{" + " " * MIB5,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_harmful_schema_is_one_message(eagle3, monkeypatch, name):
    assert schema_to_gbnf('{"type": "null"}')
    monkeypatch.setattr(confined, "SECONDS", 2.0)
    result = eagle3("generate", "-p", "x", "--json-schema", SCHEMAS[name])
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: --json-schema: ")
    assert len(result.err) < 1000
    assert not eagle3.engines
    assert schema_to_gbnf('{"type": "null"}')


def test_a_large_schema_that_means_no_harm_is_taken():
    words = [f"word {i}" for i in range(20_000)]
    grammar = schema_to_gbnf(json.dumps({"enum": words}))
    assert all(f'"\\"{word}\\""' in grammar for word in words[::1000])
    check_grammar(grammar)


@pytest.mark.parametrize("flag", ["--stop", "--grammar", "--json-schema", "--dry-sequence-breaker", "--system", "-p"])
@pytest.mark.parametrize(("text", "words"), [("a\0b", "NUL"), ("a\udce9", "expected UTF-8")])
def test_no_text_has_other_bytes(eagle3, flag, text, words):
    result = eagle3("generate", *([] if flag == "-p" else ["-p", "x"]), flag, text)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not eagle3.engines


@pytest.mark.parametrize("how", ["-p", "-f", "stdin", "--stop", "--system"])
def test_five_megabytes_of_text_arrive(eagle3, tmp_path, how):
    text = "na\u00efve \U0001f600 \x1b[2J" * (MIB5 // 20)
    (tmp_path / "text").write_text(text, "utf-8")
    args = {"-p": ["-p", text], "-f": ["-f", str(tmp_path / "text")], "stdin": []}.get(how, ["-p", "x", how, text])
    result = eagle3("generate", *args, stdin=text.encode() if how == "stdin" else None)
    assert result.code == 0, result.err[:500]
    if how == "--stop":
        assert eagle3.engine.limits.stop == (text,)
    else:
        assert text in eagle3.engine.prompts[-1]


@pytest.mark.parametrize(("pre", "char"), [("gpt-4o", "a"), ("tekken", " "), ("deepseek-llm", "!"), ("gpt-2", "a")])
def test_a_long_run_does_not_overflow_the_tokenizers_stack(tmp_path, pre, char):
    model = Model(tiny.write_target(tmp_path / "t.gguf", tokenizer__ggml__pre=pre).path, [], 0)
    try:
        assert len(model.tokenize(char * 200_000, False)) == 200_000
        with pytest.raises(PromptError, match="at most 8 MiB of text"):
            model.tokenize(char * ((8 << 20) + 1), False)
    finally:
        model.close()
