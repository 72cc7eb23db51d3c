"""`eagle3 help`: topics, commands, and the list of variables, which the commands themselves make."""

from __future__ import annotations

import contextlib
import re
import shlex

import click
import pytest

from eagle3_cli.cli import COMMANDS, SETTINGS, cli
from eagle3_cli.commands.help import FOLDER, TOPICS, commands

# What names the input or the output of one call, and so has no variable and no place in the configuration file.
OWN = {
    "generate": {"--prompt", "--file", "--batch", "--output", "--messages", "--trace"},
    "chat": {"--trace"},
    "convert": {"--output", "--config", "--force", "--dry-run"},
    "train": {"--output", "--data", "--force", "--dry-run"},
    "inspect": {"--target"},
    "bench": {"--prompts", "--check", "--plot", "--cost-curve"},
    "models add": {"--target", "--draft", "--no-draft", "--force"},
}


@pytest.fixture
def root():
    return click.Context(cli, info_name="eagle3", **SETTINGS)


def options_of(command):
    """Long name -> option, without --help."""
    options = [p for p in command.params if isinstance(p, click.Option)]
    return {next(name for name in option.opts if name.startswith("--")): option for option in options}


def test_without_words_topics_and_commands_are_listed(eagle3):
    result = eagle3("help")
    assert (result.code, result.err) == (0, "")
    assert all(f"  {name} " in result.out for name in (*TOPICS, *COMMANDS))


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_is_printed_on_stdout(eagle3, name):
    result = eagle3("help", name)
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("\n")
    assert max(map(len, result.out.splitlines())) <= 98


def test_every_text_has_a_topic_and_every_topic_a_text():
    assert {path.stem for path in FOLDER.glob("*.txt")} | {"environment"} == set(TOPICS)


@pytest.mark.parametrize("words", ["generate", "convert", "models", "models add"])
def test_a_command_shows_its_own_help_page(eagle3, words):
    page = eagle3(*words.split(), "--help").out
    assert page.startswith(f"Usage: eagle3 {words} ")
    assert eagle3("help", *words.split()).out == page


def test_an_unknown_topic_is_bad_input_with_a_suggestion(eagle3):
    result = eagle3("help", "smapling")
    assert (result.code, result.out) == (2, "")
    assert "eagle3 help smapling: no such topic or command." in result.err
    assert "Did you mean sampling?" in result.err
    assert eagle3("help", "generate", "more").code == 2


def test_help_needs_no_model_and_no_valid_configuration(eagle3, monkeypatch, tmp_path):
    (tmp_path / "broken.toml").write_text("=")
    monkeypatch.setenv("EAGLE3_CONFIG", str(tmp_path / "broken.toml"))
    assert eagle3("help", "files").code == eagle3("generate", "--help").code == eagle3("-h").code == 0
    assert not eagle3.engines


@pytest.mark.parametrize(
    "args", [["help"], ["help", "environment"], ["doctor", "--help"], ["models", "add", "-h"], ["completion", "fish"]]
)
def test_help_and_scripts_import_no_model_code(light, args):
    light(*args)


# ---- variables ----


def test_every_option_has_a_variable_unless_it_belongs_to_one_call(root):
    without = {}
    for name, command in commands(root):
        names = {flag for flag, option in options_of(command).items() if not option.envvar}
        without |= {name: names} if names else {}
    assert without == OWN


def test_every_variable_is_listed_with_its_option_and_commands(eagle3, root):
    said = " ".join(eagle3("help", "environment").out.split())
    for name, command in commands(root):
        for flag, option in options_of(command).items():
            if option.envvar:
                _, found, rest = said.partition(f"{option.envvar} {flag}: ")
                assert found, option.envvar
                assert name in re.split(" EAGLE3_| Options ", rest)[0].split(", ")
    assert all(variable in said for variable in ("EAGLE3_CONFIG", "EAGLE3_CACHE", "EAGLE3_DEBUG", "NO_COLOR"))


def test_a_shared_variable_means_the_same_option_everywhere(root):
    flags: dict[str, set[str]] = {}
    for _, command in commands(root):
        for flag, option in options_of(command).items():
            if option.envvar:
                flags.setdefault(option.envvar, set()).add(flag)
    assert {variable for variable, names in flags.items() if len(names) > 1} == set()


# ---- examples ----


def examples(text):
    """Command lines of eagle3 in a help text, pipes and redirections cut off."""
    for line in text.splitlines():
        for part in re.split(r" \| (?=eagle3|jq)", line.strip()):
            if part.startswith("eagle3 ") and line.startswith(" "):
                yield part


def parsed(root, line):
    """click reads the line without running it."""
    words = shlex.split(line.partition(" > ")[0].partition(" >> ")[0])[1:]
    ctx, command = root, cli
    while isinstance(command, click.Group):
        name, words = words[0], words[1:]
        below = command.get_command(ctx, name)
        assert below is not None, line
        ctx, command = click.Context(below, info_name=name, parent=ctx), below
    with contextlib.suppress(click.exceptions.Exit):  # of --help
        command.make_context(ctx.info_name, words, parent=ctx.parent, default_map={})


def test_every_command_has_examples_that_it_understands(root, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, command in commands(root):
        lines = list(examples(command.help or ""))
        assert lines, name
        for line in lines:
            parsed(root, line)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_every_topic_has_examples_that_the_commands_understand(root, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = list(examples((FOLDER / f"{name}.txt").read_text()))
    assert lines
    for line in lines:
        parsed(root, line)
