"""Chat templates: programs from a model's file, rendered where they can do no harm.

What a template may use is what llama-cpp-python's formatter offers: Jinja's immutable sandbox, which has no way to
Python's internals, with loop controls, `{% generation %}`, `raise_exception`, `strftime_now` and a `tojson` that
escapes nothing.  Time and memory are limited by `confined`, the text by `fill`.  Whatever kind of target it is, its
conversations go through `render`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import confined
from .errors import PromptError

OWN = 1 << 20  # characters that a template may write of its own
TIMES = 4  # how often it may write what was said

_HINT = "The template is part of the model's file. Get the model from a source that you trust, or use --raw."


def render(name: str, template: str, variables: Mapping[str, Any]) -> str:
    """The text of a conversation by a chat template.

    name        the model, for messages
    variables   what the template sees, "messages" among it
    PromptError where the template refuses the conversation, is no template, or is over a limit.
    """
    try:
        return str(confined.run("eagle3_cli.templates:fill", {"template": template, "variables": dict(variables)}))
    except confined.Refused as error:
        raise PromptError(f"{name}: its chat template refuses this conversation: {error}.") from error
    except confined.Stopped as error:
        message = f"{name}: its chat template was stopped: it takes more than {confined.LIMITS}."
        raise PromptError(message, _HINT) from error


# ---- in the confined process ------------------------------------------------------------------------------


def fill(task: Mapping[str, Any]) -> str:
    """See `render`."""
    variables = task["variables"]
    most = OWN + TIMES * sum(len(str(value)) for message in variables["messages"] for value in message.values())
    parts, size = [], 0
    for part in _compiled(task["template"]).generate(variables, raise_exception=_raise, strftime_now=_now):
        size += len(part)
        if size > most:
            raise ValueError(f"it writes more than {most} characters")
        parts.append(part)
    return "".join(parts)


@lru_cache(maxsize=2)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


class _Generation(Extension):
    """{% generation %} marks answers for training elsewhere; here it is as if it were not there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
