"""The configuration file: what it sets, what is stronger, and what is wrong with it in one message."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli import config
from eagle3_cli.errors import FileError


@pytest.fixture
def write(monkeypatch, tmp_path):
    """write(text) makes that the configuration file and returns its path."""

    def write_it(text: str | bytes) -> Path:
        path = tmp_path / "config.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setenv("EAGLE3_CONFIG", str(path))
        return path

    return write_it


def settings_of(eagle3, *flags, command="generate"):
    result = eagle3(command, "-p", "hi", "--json", *flags)
    assert result.code == 0, result.err
    return json.loads(result.out)["settings"]


# ---- what it sets ----


def test_top_level_and_table_set_options(eagle3, write):
    write(
        'temp = 0.5\nthreads = 3\nno-mmap = true\nstop = ["a", "b"]\ndevice = "cpu"\ndraft-tokens = 8\n'
        '[generate]\ntop-k = 7\nsystem = "Be brief."\n[chat]\ntop-k = 9\n'
    )
    got = settings_of(eagle3)
    wanted = {"temperature": 0.5, "threads": 3, "mmap": False, "stop": ["a", "b"], "device": "cpu", "draft_tokens": 8,
              "top_k": 7, "system": "Be brief."}  # fmt: skip
    assert {name: got[name] for name in wanted} == wanted


def test_a_table_is_stronger_than_the_top_level_and_concerns_its_command_alone(eagle3, write):
    write("top-k = 5\n[generate]\ntop-k = 6\n")
    assert settings_of(eagle3)["top_k"] == 6
    eagle3("chat", stdin=b"hi\n")
    assert eagle3.engine.sampling.top_k == 5


def test_the_order_is_command_line_variable_file_default(eagle3, write, monkeypatch):
    assert settings_of(eagle3)["top_k"] == 40
    write("[generate]\ntop-k = 6\n")
    assert settings_of(eagle3)["top_k"] == 6
    monkeypatch.setenv("EAGLE3_TOP_K", "7")
    assert settings_of(eagle3)["top_k"] == 7
    assert settings_of(eagle3, "--top-k", "8")["top_k"] == 8


def test_values_are_read_as_on_the_command_line(eagle3, write):
    write('draft-tokens = "auto"\ntemp = 1\nstop = "one"\nseed = 3\nlora-scaled = ["a.gguf:0.5"]\n')
    got = settings_of(eagle3)
    assert (got["draft_tokens"], got["temperature"], got["stop"], got["seed"]) == ("auto", 1.0, ["one"], 3)
    assert got["loras"] == [["a.gguf", 0.5]]


def test_the_default_file_is_used_if_it_is_there(eagle3, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config.config_file() is None
    assert settings_of(eagle3)["top_k"] == 40
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "config.toml").write_text("top-k = 3\n")
    assert config.config_file() == tmp_path / "eagle3" / "config.toml"
    assert settings_of(eagle3)["top_k"] == 3
    monkeypatch.setenv("EAGLE3_CONFIG", os.devnull)
    assert settings_of(eagle3)["top_k"] == 40


def test_without_a_home_there_is_no_file(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert config.config_file() is None


def test_a_required_option_can_be_set(eagle3, write, monkeypatch):
    seen = []
    monkeypatch.setattr("eagle3_cli.commands.train.train_settings", lambda flags: seen.append(flags) or 1 / 0)
    write('[train]\ntarget = "t.gguf"\nepochs = 2\n')
    eagle3("train", "-o", "out")
    assert (seen[0]["target"], seen[0]["epochs"]) == ("t.gguf", 2.0)


def test_what_differs_between_commands_is_not_taken_from_the_top_level(eagle3, write):
    """bench has a --temp of its own, which the answer's temperature must not become."""
    from eagle3_cli.commands.bench import bench
    from eagle3_cli.commands.convert import convert

    write('temp = 0.3\ntarget = "t.gguf"\n')
    shared = {key for key, option in config.settable(bench).items() if option.shared}
    assert "temp" not in shared
    assert "target" in shared
    assert not config.settable(convert)["target"].shared


def test_a_help_page_tells_the_built_in_defaults(eagle3, write):
    before = eagle3("generate", "--help").out
    write("top-k = 5\n")
    assert eagle3("generate", "--help").out == before
    assert settings_of(eagle3, "--system", "--help")["system"] == "--help"
    assert eagle3.engine.sampling.top_k == 5


# ---- habits give way, and what is typed together with them ----


def test_a_useless_value_in_the_file_gives_way(eagle3, write):
    write("top-k = 5\ndraft-width = 3\nquiet = true\n")
    assert eagle3("generate", "hi", "--temp", "0", "--no-draft", "--stats").code == 0


def test_a_typed_flag_that_the_file_makes_useless_is_refused_with_the_place_to_look(eagle3, write):
    path = write("temp = 0\n")
    result = eagle3("generate", "hi", "--top-k", "5")
    assert (result.code, result.out) == (2, "")
    assert "--top-k: has no effect with --temp 0" in result.err
    assert f"{path} sets --temp: change it there, or leave --top-k out." in result.err
    assert settings_of(eagle3, "--top-k", "5", "--temp", "1")["top_k"] == 5


def test_a_value_out_of_range_is_blamed_on_who_set_it(eagle3, write, monkeypatch):
    path = write("temp = 200\n")
    result = eagle3("generate", "hi")
    assert (result.code, result.out) == (2, "")
    assert "--temp: expected a value from 0 to 100, got 200." in result.err
    assert f"{path} sets it." in result.err
    monkeypatch.setenv("EAGLE3_TEMP", "300")
    assert "EAGLE3_TEMP sets it." in eagle3("generate", "hi").err
    assert "sets it" not in eagle3("generate", "hi", "--temp", "400").err


def test_the_stronger_of_draft_and_no_draft_counts(eagle3, write, monkeypatch):
    write('target = "t.gguf"\ndraft = "d.gguf"\n')
    assert settings_of(eagle3)["draft"] == "d.gguf"
    assert settings_of(eagle3, "--no-draft")["draft"] is None
    monkeypatch.setenv("EAGLE3_NO_DRAFT", "1")
    assert settings_of(eagle3)["draft"] is None
    assert settings_of(eagle3, "--draft", "e.gguf")["draft"] == "e.gguf"


def test_another_target_leaves_the_files_drafter_and_adapters_behind(eagle3, write, monkeypatch):
    write('target = "t.gguf"\ndraft = "d.gguf"\nlora = ["a.gguf"]\nlora-scaled = ["b.gguf:2"]\n')
    assert len(settings_of(eagle3)["loras"]) == 2
    other = settings_of(eagle3, "--target", "o.gguf", "--draft", "e.gguf")
    assert (other["target"], other["draft"], other["loras"]) == ("o.gguf", "e.gguf", [])
    refused = eagle3("generate", "hi", "--target", "o.gguf")
    assert "--target: no drafter for this model." in refused.err
    assert settings_of(eagle3, "--target", "o.gguf", "--draft", "lookup")["lookup"] is True
    monkeypatch.setenv("EAGLE3_TARGET", "o.gguf")
    monkeypatch.setenv("EAGLE3_DRAFT", "e.gguf")
    assert settings_of(eagle3)["draft"] == "e.gguf"
    assert settings_of(eagle3, "--draft", "x.gguf")["target"] == "o.gguf"


def test_a_drafter_without_a_target_of_its_own_stays(eagle3, write, monkeypatch):
    write('draft = "lookup"\n')
    assert settings_of(eagle3, "--target", "o.gguf")["lookup"] is True
    write("")
    monkeypatch.setenv("EAGLE3_DRAFT", "d.gguf")
    assert settings_of(eagle3, "--target", "o.gguf")["draft"] == "d.gguf"


def test_one_form_from_the_command_line_is_stronger_than_another_from_the_file(eagle3, write):
    write("grammar = 'root ::= \"a\"'\n")
    assert settings_of(eagle3)["grammar"] == 'root ::= "a"'
    assert settings_of(eagle3, "--grammar", 'root ::= "b"')["grammar"] == 'root ::= "b"'
    write("grammar = 'x'\ngrammar-file = 'y'\n")
    assert "--grammar-file: cannot be used with --grammar" in eagle3("generate", "hi").err


# ---- what is wrong with it ----

WRONG = [
    ("temp = ", "expected TOML: Invalid value (at end of document)."),
    (b"system = '\xff'", "expected TOML: 'utf-8' codec can't decode"),
    ("[chta]\n", "[chta]: expected the name of a command (generate, chat, convert,"),
    ("temperature = 1", "temperature: no command has an option --temperature that a file can set."),
    ("draft_tokens = 1", "draft_tokens: no command has an option --draft_tokens that a file can set."),
    ("repeats = 3", "repeats: expected it in a table, as --repeats differs from command to command."),
    ("[generate]\nrepeats = 3", "[generate] repeats: eagle3 generate has no option --repeats."),
    ("[generate]\nprompt = 'x'", "[generate] prompt: --prompt belongs to one call;"),
    ("[chat]\nfile = 'x'", None),  # a table of another command
    ("temp = 'warm'", "temp: expected a number, got 'warm'."),
    ("temp = true", "temp: expected a number, got true."),
    ("top-k = 1.5", "top-k: expected a whole number, got 1.5."),
    ("draft-tokens = 'many'", "draft-tokens: expected a whole number or \"auto\", got 'many'."),
    ("no-mmap = 1", "no-mmap: expected true or false, got 1."),
    ("device = 'tpu'", "device: expected one of auto, cpu, cuda, metal, or names of GPUs, got 'tpu'."),
    ("system = 5", "system: expected text in quotation marks, got 5."),
    ("stop = ['a', 5]", "stop: expected text in quotation marks, got 5."),
    ("system = ['a']", 'system: expected text in quotation marks, got ["a"].'),
    ("system = 1979-05-27", 'system: expected text in quotation marks, got "1979-05-27".'),
    ('system = "\\u0000"', "system: --system: expected text, got a NUL character at offset 0."),
    ("temp = {a = 1}", "[temp]: expected the name of a command"),
    (f"system = '{'x' * (1 << 20)}'", "expected TOML: expected at most 1 MiB, got more."),
    ("a = " + "[" * 100_000, "expected TOML: "),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[str(text)[:30] for text, _ in WRONG])
def test_what_is_wrong_is_one_message_that_names_file_and_key(eagle3, write, text, words):
    path = write(text)
    result = eagle3("generate", "-p", "hi")
    if words is None:
        assert (result.code, result.err) == (0, "")
        return
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {path}: {words}")
    assert result.err.count("error:") == result.err.count("hint:") == 1
    assert not eagle3.engines


def test_hints_name_what_was_meant(eagle3, write):
    write("draft_token = 1\n")
    assert "Did you mean draft-tokens?" in eagle3("generate", "hi").err
    write("[genrate]\n")
    assert "Did you mean generate?" in eagle3("generate", "hi").err
    write("repeats = 1\n")
    assert "Put it under [bench]." in eagle3("generate", "hi").err


@pytest.mark.parametrize("where", ["none.toml", "."])
def test_a_file_that_is_named_must_be_there(eagle3, monkeypatch, tmp_path, where):
    path = tmp_path / where
    monkeypatch.setenv("EAGLE3_CONFIG", str(path))
    result = eagle3("generate", "hi")
    assert (result.code, result.out) == (2, "")
    assert f"{path}: cannot be read: " in result.err


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert config.read(tmp_path / "pipe") == {}


def test_every_table_is_checked_by_check(write, tmp_path):
    import click

    from eagle3_cli.cli import SETTINGS, cli

    root = click.Context(cli, info_name="eagle3", **SETTINGS)
    config.check(write("temp = 1\n[bench]\nrepeats = 2\n[train]\nepochs = 1.5\n"), root)
    with pytest.raises(FileError, match=r"\[train\] epochs: expected a number"):
        config.check(write("[train]\nepochs = 'two'\n"), root)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(["temp", "top-k", "stop", "device", "no-mmap", "generate", "chat", "draft-tokens", "nonsense"])


@given(st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=3), max_size=4))
def test_no_document_does_anything_but_set_options_or_fail_with_a_message(document):
    import click

    from eagle3_cli.cli import SETTINGS, cli
    from eagle3_cli.commands.generate import generate

    root = click.Context(cli, info_name="eagle3", **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "read", lambda path: document)
        try:
            found = config.defaults(Path("c.toml"), click.Context(generate, parent=root, info_name="generate"))
        except FileError:
            return
    names = {str(param.name) for param in generate.params}
    assert found.keys() <= names
    for name, value in found.items():
        next(param for param in generate.params if param.name == name).type_cast_value(root, value)
