"""Completion: the scripts, and what they are answered."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete

from eagle3_cli import completion, registry
from eagle3_cli.cli import COMMANDS, SETTINGS, cli
from eagle3_cli.commands.help import TOPICS
from eagle3_cli.registry import Registered


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The current folder: two GGUF files, one with a blank, others, a folder with one; and a registered model."""
    for name in ("llama.gguf", "my model.GGUF", "notes.txt", ".hidden.gguf", "sub/deep.gguf", "sub/deep.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    with registry.changed() as models:
        models["llama-8b"] = Registered("/m/llama.gguf", "lookup")
    return tmp_path


def offered(*words):
    """Values behind Tab after these words, of which the last is not complete."""
    shell = ShellComplete(cli, dict(SETTINGS), "eagle3", completion.VARIABLE)
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_commands_options_and_choices(files):
    assert offered("") == list(COMMANDS)
    assert offered("ge") == ["generate"]
    assert offered("models", "") == ["add", "list", "remove"]
    assert "--draft-tokens" in offered("generate", "--draft")
    assert offered("generate", "--device", "c") == ["cpu", "cuda"]
    assert offered("help", "sam") == ["sampling"]
    assert set(TOPICS) <= set(offered("help", ""))
    assert offered("completion", "") == ["bash", "zsh", "fish"]
    assert offered("nonsense", "") == list(COMMANDS)


def test_a_target_is_a_registered_name_or_a_gguf(files):
    assert offered("generate", "--target", "") == ["llama-8b", "llama.gguf", "my model.GGUF", "sub/"]
    assert offered("generate", "--target", "lla") == ["llama-8b", "llama.gguf"]
    assert offered("generate", "--target", "sub/") == ["sub/deep.gguf"]
    assert offered("generate", "--target", "./l") == ["./llama.gguf"]
    assert offered("generate", "--target", ".h") == [".hidden.gguf"]
    assert offered("train", "--target", "llama-") == ["llama-8b"]
    assert offered("generate", "--target", "no/such/") == []


def test_a_drafter_is_lookup_or_a_gguf_and_an_adapter_a_gguf(files):
    assert offered("generate", "--draft", "l") == ["lookup", "llama.gguf"]
    assert offered("chat", "--lora", "l") == offered("chat", "--lora-scaled", "l") == ["llama.gguf"]


def test_a_home_folder_stays_as_it_was_typed(files, monkeypatch):
    monkeypatch.setenv("HOME", str(files))
    assert offered("generate", "--target", "~/ll") == ["~/llama.gguf"]


def test_names_are_offered_to_be_removed(files):
    assert offered("models", "remove", "") == ["llama-8b"]


def test_other_files_are_left_to_the_shell(files):
    shell = ShellComplete(cli, dict(SETTINGS), "eagle3", completion.VARIABLE)
    for words, kind in (
        (["generate", "--grammar-file"], "file"),
        (["bench", "--plot"], "file"),
        (["train", "-o"], "dir"),
        (["convert"], "file"),
    ):
        assert [item.type for item in shell.get_completions(words, "")] == [kind]


def test_nothing_that_is_wrong_is_said_behind_tab(files, monkeypatch):
    (files / "broken.toml").write_text("=")
    monkeypatch.setenv("EAGLE3_CONFIG", str(files / "broken.toml"))
    (files / ".config" / "eagle3" / "models.json").write_text("{")
    assert offered("generate", "--target", "lla") == ["llama.gguf"]


# ---- the scripts ----


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_is_printed(eagle3, shell):
    result = eagle3("completion", shell)
    assert (result.code, result.err) == (0, "")
    assert f"_EAGLE3_COMPLETE={shell}_complete" in result.out
    assert ("_files -g" if shell == "zsh" else "compopt -o filenames" if shell == "bash" else "fish") in result.out


def test_an_unknown_shell_is_bad_usage(eagle3):
    result = eagle3("completion", "csh")
    assert (result.code, result.out) == (2, "")


@pytest.fixture
def program(files, environment):
    """`eagle3` on the PATH, and the environment with it."""
    script = files / "bin" / "eagle3"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m eagle3_cli "$@"\n')
    script.chmod(0o755)
    return {**environment, "PATH": f"{script.parent}{os.pathsep}{environment['PATH']}"}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes(program):
    """With the shell's own function, as Tab calls it; compopt works only behind Tab."""
    script = (
        'eval "$(eagle3 completion bash)"; compopt() { echo option $2; }; '
        "COMP_WORDS=(eagle3 generate --target my); COMP_CWORD=3; _eagle3_completion eagle3; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", script], env=program, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("option filenames\nmy model.GGUF\n", "")


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes(program):
    script = "eagle3 completion fish | source; complete -C 'eagle3 generate --target ll'"
    done = subprocess.run(["fish", "-N", "-c", script], env=program, capture_output=True, text=True, timeout=60)
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == {"llama-8b", "llama.gguf"}


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_accepts_the_script(program):
    script = "autoload -Uz compinit; compinit -u -D; source <(eagle3 completion zsh); print ${_comps[eagle3]}"
    done = subprocess.run(["zsh", "-f", "-c", script], env=program, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("_eagle3_completion\n", "")


def test_zsh_looks_for_files_itself(files):
    shell = completion.Zsh(cli, dict(SETTINGS), "eagle3", completion.VARIABLE)
    items = shell.get_completions(["generate", "--target"], "lla")
    assert [(item.value, item.type) for item in items] == [("llama-8b", "plain"), ("lla", "path")]
    assert [item.type for item in shell.get_completions(["generate", "--device"], "c")] == ["plain", "plain"]


def test_every_metavar_of_a_file_is_known():
    """An option whose value is called FILE or so must not be left without completion."""
    from eagle3_cli.commands.help import commands

    root = click.Context(cli, info_name="eagle3", **SETTINGS)
    for name, command in commands(root):
        for option in command.params:
            if isinstance(option, click.Option) and any(
                w in str(option.metavar) for w in ("FILE", "GGUF", "JSON", "DIR")
            ):
                assert completion.of_value(option.metavar, ""), (name, option.opts)
