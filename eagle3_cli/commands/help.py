"""`eagle3 help`: topics that concern several commands, and every command's help page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..console import Console
from ..errors import InputError
from .options import Command

FOLDER = Path(__file__).with_name("topics")
TOPICS = {
    "sampling": "How a token is chosen, and what form an answer takes.",
    "speculation": "How a drafter makes it faster, and what to set.",
    "files": "Models and their names, the configuration file, the cache.",
    "environment": "Every variable that sets something.",
}
OTHER_VARIABLES = {
    "EAGLE3_CONFIG": "The configuration file, instead of config.toml in the configuration folder; /dev/null: none.",
    "EAGLE3_CACHE": "The folder for what was learned about the speed of a pair, and for chat's history.",
    "EAGLE3_DEBUG": "1 shows the traceback of an error.",
    "XDG_CONFIG_HOME": "Where the configuration folder eagle3 is, instead of ~/.config.",
    "XDG_CACHE_HOME": "Where the cache folder eagle3 is, instead of ~/.cache (not on macOS and Windows).",
    "NO_COLOR": "Anything but empty switches colour off.",
    "TERM": "dumb switches colour and progress bars off.",
}


def _names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    names = {**TOPICS, **dict.fromkeys(_group(ctx).list_commands(ctx), None)}
    return [CompletionItem(name, help=text) for name, text in names.items() if name.startswith(incomplete)]


@click.command("help", cls=Command)
@click.argument("words", nargs=-1, metavar="[TOPIC | COMMAND]", shell_complete=_names)
@click.pass_obj
def show_help(console: Console, words: tuple[str, ...]) -> None:
    """Explain a topic, or show the help page of a command.

    \b
    Examples:
      eagle3 help
      eagle3 help sampling
      eagle3 help environment
      eagle3 help models add
    """
    root = click.get_current_context().find_root()
    console.text(overview(root) if not words else page(root, words))


def overview(root: click.Context) -> str:
    formatter = root.make_formatter()
    with formatter.section("Topics (eagle3 help TOPIC)"):
        formatter.write_dl(list(TOPICS.items()))
    with formatter.section("Commands (eagle3 COMMAND --help)"):
        formatter.write_dl(_short_helps(root))
    return formatter.getvalue().lstrip("\n")


def page(root: click.Context, words: tuple[str, ...]) -> str:
    """A topic's text or a command's help page; `words` are a topic, or a command and those under it."""
    if len(words) == 1 and words[0] in TOPICS:
        return topic(root, words[0])
    ctx, command = root, root.command
    for word in words:
        below = command.get_command(ctx, word) if isinstance(command, click.Group) else None
        if below is None:
            raise InputError(f"eagle3 help {' '.join(words)}: no such topic or command.", _suggestion(root, words[0]))
        command = below
        ctx = click.Context(command, info_name=word, parent=ctx)
    return command.get_help(ctx) + "\n"


def topic(root: click.Context, name: str) -> str:
    if name == "environment":
        return environment(root)
    return (FOLDER / f"{name}.txt").read_text("utf-8")


def environment(root: click.Context) -> str:
    """Every variable, from the commands themselves."""
    formatter = root.make_formatter()
    formatter.write_text(
        "A variable sets an option for every call. The command line is stronger, the configuration file weaker. 1 or 0"
        " sets an option that takes no value; one that can be repeated has a value per line, or numbers and names"
        " between blanks. An empty variable counts as none."
    )
    with formatter.section("Other variables"):
        formatter.write_dl(list(OTHER_VARIABLES.items()))
    shared, own = variables(root)
    with formatter.section("Options that mean the same in every command"):
        formatter.write_dl([(name, f"{flag}: {', '.join(commands)}") for name, (flag, commands) in shared.items()])
    with formatter.section("Options that differ from command to command"):
        formatter.write_dl([(name, f"{flag}: {', '.join(commands)}") for name, (flag, commands) in own.items()])
    return formatter.getvalue()


Variables = dict[str, tuple[str, list[str]]]
"""Variable -> the option, the commands that have it."""


def variables(root: click.Context) -> tuple[Variables, Variables]:
    """Those that commands share and those of one command, by name."""
    shared: Variables = {}
    own: Variables = {}
    for name, command in commands(root):
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar:
                where = shared if getattr(option, "shared", False) else own
                flag = next(text for text in option.opts if text.startswith("--"))
                where.setdefault(str(option.envvar), (flag, []))[1].append(name)
    return dict(sorted(shared.items())), dict(sorted(own.items()))


def commands(ctx: click.Context, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that takes options, by its whole name: "generate", "models add"."""
    group = ctx.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(click.Context(command, info_name=name, parent=ctx), f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _group(ctx: click.Context) -> click.Group:
    root = ctx.find_root().command
    assert isinstance(root, click.Group)
    return root


def _short_helps(root: click.Context) -> list[tuple[str, str]]:
    from ..cli import COMMANDS

    return [(name, text) for name, (_, text) in COMMANDS.items()]


def _suggestion(root: click.Context, word: str) -> str:
    import difflib

    known = [*TOPICS, *_group(root).list_commands(root)]
    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}."
