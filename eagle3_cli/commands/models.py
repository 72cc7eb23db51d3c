"""`eagle3 models`: names for pairs, to be given as --target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from .. import registry
from ..console import Console
from ..errors import InputError, OptionError
from ..registry import LOOKUP, Registered
from .convert import table
from .options import Command, option


@click.group(no_args_is_help=True)
def models() -> None:
    """Names for pairs of models: a name given as --target takes its drafter along.

    A registered name wins over a file of that name in the current folder; ./NAME is always the file. The list is
    models.json beside the configuration file.

    \b
    Examples:
      eagle3 models add llama --target llama.gguf --draft llama-eagle3.gguf
      eagle3 models list
      eagle3 chat --target llama
      eagle3 generate "Hello" --target llama --no-draft
      eagle3 models remove llama
    """


@models.command(cls=Command)
@click.argument("name")
@option("Options", "--target", variable=False, required=True, metavar="GGUF", help="The model that answers.")
@option("Options", "--draft", variable=False, metavar="GGUF|lookup",
        help="Its EAGLE-3 drafter; lookup: n-gram matches in the text alone.")  # fmt: skip
@option("Options", "--no-draft", variable=False, is_flag=True, help="It has no drafter and answers without.")
@option("Options", "--force", variable=False, is_flag=True, help="Replace a model that has this name.")
@click.pass_obj
def add(console: Console, name: str, **flags: Any) -> None:
    """Register a pair under a name, once it is known that the two fit.

    The name may have lower-case letters, digits, dots, dashes and underscores. Where the files are is remembered, not
    what is in them.

    \b
    Examples:
      eagle3 models add llama --target llama.gguf --draft llama-eagle3.gguf
      eagle3 models add qwen --target qwen.gguf --draft lookup
      eagle3 models add plain --target some.gguf --no-draft
    """
    registry.check_name(name)
    model = _model(flags)
    _check_pair(model)
    with registry.changed() as known:
        if name in known and not flags["force"]:
            raise InputError(f"{name}: there is a model of this name, {known[name].target}.", "--force replaces it.")
        known[name] = model
    console.text(f"{name}: {described(model)}\n")


def _model(flags: dict[str, Any]) -> Registered:
    draft = flags["draft"] or None
    if draft and flags["no_draft"]:
        raise OptionError("--no-draft: cannot be used with --draft.", "Leave one of them out.")
    if not draft and not flags["no_draft"]:
        raise OptionError("--target: no drafter for this model.", "Give --draft GGUF, --draft lookup, or --no-draft.")
    return Registered(_absolute(flags["target"]), LOOKUP if draft == LOOKUP else draft and _absolute(draft))


def _absolute(path: str) -> str:
    """Links stay links: the parts of a split model are found by their names."""
    return os.path.abspath(Path(path).expanduser())


def _check_pair(model: Registered) -> None:
    """InputError for a target that cannot run, and for a drafter that is not for it."""
    from ..model_files import check_target, read_drafter

    check_target(Path(model.target))
    if model.draft and model.draft != LOOKUP:
        read_drafter(Path(model.draft), Path(model.target))


def _registered(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    from ..completion import models as names

    return names(incomplete)


@models.command("list", cls=Command)
@option("Options", "--json", "as_json", help="Print one JSON document.", is_flag=True)
@click.pass_obj
def list_models(console: Console, as_json: bool) -> None:
    """Show the registered models, and which of their files are no longer there.

    \b
    Examples:
      eagle3 models list
      eagle3 models list --json | jq -r '.models[].name'
    """
    known = sorted(registry.read().items())
    if as_json:
        rows = [{"name": n, "target": m.target, "draft": m.draft, "missing": m.missing} for n, m in known]
        console.document({"file": str(registry.registry_file()), "models": rows})
    elif known:
        cells = [(n, m.target, m.draft or "no drafter", "missing" if m.missing else "") for n, m in known]
        console.text("".join(f"{line}\n" for line in table(cells, ("name", "target", "draft", ""))))
    else:
        console.note("no model is registered; eagle3 models add NAME --target GGUF --draft GGUF does it")


@models.command(cls=Command)
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=_registered)
def remove(names: tuple[str, ...]) -> None:
    """Forget names. The files stay.

    \b
    Examples:
      eagle3 models remove llama
    """
    with registry.changed() as known:
        there = f"There are {', '.join(sorted(known))}." if known else "There are none."
        for name in names:
            if known.pop(name, None) is None:
                raise InputError(f"{name}: no model is registered under this name.", there)


def described(model: Registered) -> str:
    return f"{model.target}, " + (f"drafter {model.draft}" if model.draft else "no drafter")
