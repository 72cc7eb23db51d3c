"""The `eagle3` group: its commands are imported when they run, its help needs none of them."""

from __future__ import annotations

import importlib
from typing import Any

import click

# name -> where the command lives, what the overview says about it
COMMANDS = {
    "generate": ("eagle3_cli.commands.generate:generate", "Answer one prompt."),
    "chat": ("eagle3_cli.commands.chat:chat", "Talk with a model."),
    "convert": ("eagle3_cli.commands.convert:convert", "Make a drafter GGUF from a published EAGLE-3 checkpoint."),
    "train": ("eagle3_cli.commands.train:train", "Train a drafter for the GGUF that you run."),
    "inspect": ("eagle3_cli.commands.inspect:inspect", "Show what a checkpoint or GGUF is, and whether a pair fits."),
    "bench": ("eagle3_cli.commands.bench:bench", "Measure what speculation brings on this machine."),
    "demo": ("eagle3_cli.commands.demo:demo", "Answer with and without the drafter, and compare."),
    "models": ("eagle3_cli.commands.models:models", "Names for pairs, to be given as --target."),
    "doctor": ("eagle3_cli.commands.doctor:doctor", "Check the installation, this machine and a pair."),
    "completion": ("eagle3_cli.commands.completion:completion", "Print the completion script of a shell."),
    "help": ("eagle3_cli.commands.help:show_help", "Explain a topic, or show a command's help page."),
}


class LazyGroup(click.Group):
    """A group whose overview is a table, so that `--help` imports no command and no model code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"{name}: no such command.{_suggestion(name)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """From the table, too: behind Tab nobody waits for every command to be imported."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _suggestion(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    return f" Did you mean {close[0]}?" if close else f" There are {', '.join(COMMANDS)}."


def _print_versions(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from .versions import bug_report

    found = bug_report()
    console = ctx.obj
    console.text(f"eagle3 {found.pop('eagle3')}\n")
    for name, version in found.items():
        console.text(f"{name}: {version}\n")
    ctx.exit()


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.command(cls=LazyGroup, context_settings=SETTINGS, no_args_is_help=True)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_versions,
              help="Show the versions of everything a bug report needs.")  # fmt: skip
def cli() -> None:
    """EAGLE-3 speculative decoding for GGUF models: the same answer, sooner.

    A small drafter proposes tokens, the model checks many of them at once, and every token of the answer is
    still the model's own. Without --target and --draft the small pair that comes with eagle3 answers.

    \b
    Examples:
      eagle3 demo
      eagle3 generate "Why is the sky blue?"
      cat notes.txt | eagle3 generate "Summarise:"
      eagle3 chat --target llama.gguf --draft llama-eagle3.gguf
      eagle3 convert model.safetensors --target llama.gguf -o llama-eagle3.gguf

    eagle3 help lists topics; eagle3 help environment lists the variables, of which EAGLE3_DEBUG=1 shows the traceback
    of an error and NO_COLOR=1 switches colour off. eagle3 doctor checks the installation.
    """
