"""`eagle3 completion`: the script that lets a shell complete our commands, options, models and files."""

from __future__ import annotations

import click

from ..completion import SHELLS, VARIABLE
from ..console import Console
from .options import Command


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(tuple(SHELLS)))
@click.pass_obj
def completion(console: Console, shell: str) -> None:
    """Print the script that completes commands, options, registered models and .gguf files in a shell.

    It calls eagle3 when Tab is pressed, so it stays right when eagle3 is updated; print it once.

    \b
    Examples:
      eagle3 completion bash >> ~/.bashrc
      eagle3 completion zsh > ~/.zsh/completions/_eagle3
      eagle3 completion fish > ~/.config/fish/completions/eagle3.fish
      source <(eagle3 completion bash)
    """
    root = click.get_current_context().find_root().command
    console.text(SHELLS[shell](root, {}, "eagle3", VARIABLE).source())
