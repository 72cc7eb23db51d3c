"""The configuration file: what options are where neither the command line nor a variable sets them.

    temp = 0                      # for every command that has --temp
    [chat]                        # for this command alone
    system = "Answer briefly."

TOML.  A key is the long name of an option without its dashes.  The command line is stronger than EAGLE3_ variables,
these are stronger than a command's table, and that is stronger than the top level.  Options that name the input or the
output of one call cannot be set, and the top level cannot set what means something else in every command.

A fault is a FileError that names file and key.  Tables of other commands than the one that runs are checked when those
run, and by `eagle3 doctor`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from .errors import FileError, InputError, brief, shown
from .folders import config_folder, file_bytes

VARIABLE = "EAGLE3_CONFIG"
REPAIR = f"Correct the file, or name another one with {VARIABLE}."


# ---- which file -------------------------------------------------------------------------------------------


def default_file() -> Path:
    return config_folder() / "config.toml"


def config_file() -> Path | None:
    """The file in use: the one that EAGLE3_CONFIG names, there or not, or the default one if it is there."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    found = default_file()
    return found if os.path.lexists(found) else None


# ---- what it says ------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The file as TOML has it: dictionaries, lists, texts, numbers.  FileError where it cannot be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(file_bytes(path).decode("utf-8-sig"))
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}.", REPAIR) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, too long
        raise FileError(f"{path}: expected TOML: {brief(str(error))}.", REPAIR) from error


def defaults(path: Path, ctx: click.Context) -> dict[str, Any]:
    """What the file sets for the command of a context: parameter name -> value, for click's default_map."""
    document = read(path)
    names = _command_names(ctx)
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    for name in tables:
        if name not in names:
            raise _fault(path, f"[{name}]", f"expected the name of a command ({', '.join(names)}).", _near(name, names))
    options, found = settable(ctx.command), {}
    for key in [key for key in document if key not in tables]:
        option = options.get(key)
        if option is None or not option.shared:
            _check_other_commands(path, key, ctx)
        else:
            found[str(option.name)] = _value(path, key, option, document[key], ctx)
    for key, value in tables.get(str(ctx.info_name), {}).items():
        where = f"[{ctx.info_name}] {key}"
        if key not in options:
            raise _unknown(path, where, key, ctx.command, options)
        found[str(options[key].name)] = _value(path, where, options[key], value, ctx)
    return found


def check(path: Path, root: click.Context) -> None:
    """FileError for the first fault, whichever command it concerns."""
    for name, command in _commands(root).items():
        defaults(path, click.Context(command, parent=root, info_name=name))


def settable(command: click.Command) -> dict[str, Any]:
    """Key -> option, for the options of a command that the file can set: those that a variable can."""
    options = [p for p in command.params if isinstance(p, click.Option) and p.envvar]
    return {key_of(option): option for option in options}


def key_of(option: click.Option) -> str:
    return next((name for name in option.opts if name.startswith("--")), option.opts[0]).lstrip("-")


def _command_names(ctx: click.Context) -> list[str]:
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    return root.command.list_commands(root)


def _commands(ctx: click.Context) -> dict[str, click.Command]:
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    found = {name: root.command.get_command(root, name) for name in _command_names(ctx)}
    return {name: command for name, command in found.items() if command is not None}


# ---- faults ------------------------------------------------------------------------------------------------


def _fault(path: Path, where: str, message: str, hint: str | None = None) -> FileError:
    return FileError(f"{path}: {brief(where)}: {brief(message, 400)}", hint or REPAIR)


def _near(name: str, names: Iterable[str]) -> str | None:
    import difflib

    close = difflib.get_close_matches(name.replace("_", "-"), list(names), n=1)
    return f"Did you mean {close[0]}?" if close else None


def _unknown(path: Path, where: str, key: str, command: click.Command, options: Mapping[str, Any]) -> FileError:
    ours = [p for p in command.params if isinstance(p, click.Option) and key_of(p) == key]
    if ours:
        return _fault(path, where, f"--{key} belongs to one call; expected an option that a file can set.")
    return _fault(path, where, f"eagle3 {command.name} has no option --{key}.", _near(key, options))


def _check_other_commands(path: Path, key: str, ctx: click.Context) -> None:
    """FileError unless the top level may have this key for another command's sake."""
    homes, known = [], set[str]()
    for name, command in _commands(ctx).items():
        options = settable(command)
        if key in options and options[key].shared:
            return
        homes += [name] if key in options else []
        known |= {other for other, option in options.items() if option.shared}
    if homes:
        raise _fault(path, key, f"expected it in a table, as --{key} differs from command to command.",
                     f"Put it under [{homes[0]}].")  # fmt: skip
    raise _fault(path, key, f"no command has an option --{key} that a file can set.", _near(key, known))


def _value(path: Path, where: str, option: Any, value: Any, ctx: click.Context) -> Any:
    """The value, once it is known that the option takes it.  What the command line can repeat may be a list."""
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        return [_single(path, where, option, each, ctx) for each in values]
    return _single(path, where, option, value, ctx)


def _single(path: Path, where: str, option: Any, value: Any, ctx: click.Context) -> Any:
    types, words = _expected(option)
    if type(value) not in types:
        raise _fault(path, where, f"expected {words}, got {shown(value)}.")
    try:
        option.type.convert(value, option, ctx)
    except click.BadParameter as error:
        raise _fault(path, where, f"expected {words}, got {shown(value)}.") from error
    except InputError as error:
        raise _fault(path, where, error.message) from error
    return value


def _expected(option: Any) -> tuple[tuple[type, ...], str]:
    """Types of a value in TOML, and the words for them.  An option's type may say so itself."""
    kind = option.type
    if option.is_flag:
        return (bool,), "true or false"
    if hasattr(kind, "in_file"):
        types, words = kind.in_file
        return types, words
    if isinstance(kind, click.types.IntParamType):
        return (int,), "a whole number"
    if isinstance(kind, click.types.FloatParamType):
        return (int, float), "a number"
    if isinstance(kind, click.Choice):
        return (str,), f"one of {', '.join(map(str, kind.choices))}"
    return (str,), "text in quotation marks"
