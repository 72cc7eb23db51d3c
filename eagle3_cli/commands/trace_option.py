"""`--trace`: the page that shows where every token of an answer came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import Decorator, option


def _checked(ctx: click.Context, _param: click.Parameter, value: str | None) -> Path | None:
    """The path, once it is known that a page can be written there: better known before a model is loaded."""
    if value is None or ctx.resilient_parsing:
        return None
    from ..trace import check_writable

    path = Path(value).expanduser()
    check_writable(path)
    return path


trace_option: Decorator[Any] = option(
    "Options", "--trace", variable=False, metavar="FILE", callback=_checked,
    help="Write a web page that shows the draft tree of every round, and what was accepted.",
)  # fmt: skip
