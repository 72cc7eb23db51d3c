"""docs/help.md: every help page and every topic, as the commands themselves have them.

    python -m eagle3_cli.commands.help_pages docs/help.md

The same text everywhere: the width is fixed, and neither variables nor a configuration file change what a page says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..cli import COMMANDS, SETTINGS, cli
from ..convert.output import replacing
from .help import TOPICS, topic

WIDTH = 98  # of a help page where the terminal is wide enough
HEAD = """# Help pages

What `eagle3 COMMAND --help` and `eagle3 help TOPIC` print, made from the commands by `make help-pages`.
[cli.md](cli.md) compares them with other programs.
"""


def document() -> str:
    """The whole of docs/help.md."""
    with click.Context(cli, info_name="eagle3", **{**SETTINGS, "terminal_width": WIDTH, "color": False}) as root:
        pages = [_block("eagle3", cli.get_help(root))]
        for name in COMMANDS:
            pages += [_block(title, text) for title, text in _pages(root, name)]
        pages += [_block(f"eagle3 help {name}", topic(root, name).rstrip("\n")) for name in TOPICS]
    return "\n".join([HEAD, *pages])


def _pages(parent: click.Context, name: str) -> Iterator[tuple[str, str]]:
    """Title and page of a command, then of those under it."""
    assert isinstance(parent.command, click.Group)
    command = parent.command.get_command(parent, name)
    assert command is not None
    ctx = click.Context(command, info_name=name, parent=parent)
    yield ctx.command_path, command.get_help(ctx)
    if isinstance(command, click.Group):
        for below in command.list_commands(ctx):
            yield from _pages(ctx, below)


def _block(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    with replacing(Path(sys.argv[1])) as temporary:
        temporary.write_text(document(), "utf-8")
