"""`/set` in a chat: the settings of the answers, one by one.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from ..errors import InputError, OptionError
from ..settings import FLAGS, Limits, SamplingSettings
from .build import samplers

SHORT = {flag: name for name, flag in FLAGS.items()}
UNSET = -1  # stands for None, as on the command line

# name -> what a value is
KINDS: dict[str, Callable[[str], Any]] = {
    **{f.name: type(f.default) for f in fields(SamplingSettings) if isinstance(f.default, (int, float))},
    "samplers": samplers,
    "seed": int,
    "max_tokens": int,
}


def listing(sampling: SamplingSettings, limits: Limits) -> list[str]:
    """A line for each setting and its value."""
    width = max(map(len, KINDS))
    return [f"{name:{width}}  {_value(name, sampling, limits)}" for name in KINDS]


def changed(name: str, value: str, sampling: SamplingSettings, limits: Limits) -> tuple[SamplingSettings, Limits, str]:
    """Both with one setting changed, and a line that says so.

    name: with "_" or "-", perhaps as the flag is called.  InputError names what is wrong with it or its value.
    """
    name = name.lower().replace("-", "_")
    name = SHORT.get(name, name)
    if name not in KINDS:
        raise InputError(f"/set {name}: no such setting. There are {', '.join(KINDS)}.")
    found = _read(name, value)
    changes: dict[str, Any] = {name: None if name in ("seed", "max_tokens") and found == UNSET else found}
    try:
        if name == "max_tokens":
            limits = replace(limits, **changes)
        else:
            sampling = replace(sampling, **changes)
    except OptionError as error:  # it names the flag
        raise InputError(f"/set {name}: {error.message.partition(': ')[2]}", error.hint) from error
    idle = without_effect(name, sampling)
    return sampling, limits, f"{name}: {_value(name, sampling, limits)}{f' (no effect {idle})' if idle else ''}"


def without_effect(name: str, sampling: SamplingSettings) -> str | None:
    """While what the setting does nothing, in words; None where it does something."""
    if name == "seed" and sampling.greedy:
        return "with --temp 0"
    words, _ = sampling.idle().get(name, (None, ""))
    return words


def _read(name: str, value: str) -> Any:
    kind = KINDS[name]
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InputError(f"/set {name}: expected {what}, got {value}.") from None


def _value(name: str, sampling: SamplingSettings, limits: Limits) -> str:
    value = getattr(limits if name == "max_tokens" else sampling, name)
    if value is None:
        return f"{UNSET} ({'a new one for every answer' if name == 'seed' else 'the context'})"
    if isinstance(value, tuple):
        return ";".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
