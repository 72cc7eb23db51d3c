"""`eagle3 inspect`: what a checkpoint or a GGUF is, and whether a pair fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..console import Console
from ..registry import target_path
from .convert import about
from .options import Command, option

NOT_USABLE = 1


@click.command(cls=Command)
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@option(
    "Options", "--target", variable=False, metavar="GGUF|DIR", help="Check whether SOURCE is a drafter for this model."
)
@option("Options", "--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def inspect(console: Console, source: Path, **flags: Any) -> None:
    """Show what a drafter's checkpoint, a drafter GGUF or a target GGUF is, without loading it.

    SOURCE is a GGUF, a .safetensors or .bin file, the index of a sharded one, or a folder. The exit code is 0 if it
    can be used, with the target if one is given, and 1 if not; then the reason is shown.

    \b
    Examples:
      eagle3 inspect ./EAGLE3-LLaMA3.1-8B
      eagle3 inspect llama-eagle3.gguf --target llama.gguf
      eagle3 inspect llama.gguf --json | jq .layers
    """
    from ..inspection import inspect as look

    facts = look(source, target_path(flags["target"]) if flags["target"] else None)
    if flags["as_json"]:
        console.document(facts)
    else:
        console.text("".join(f"{line}\n" for line in describe(facts)))
    if not facts["usable"]:
        click.get_current_context().exit(NOT_USABLE)


def describe(facts: dict[str, Any]) -> list[str]:
    """Lines for people."""
    types = ", ".join(f"{count} {kind}" for kind, count in facts["types"].items())
    what = {"checkpoint": _family(facts), "drafter": "EAGLE-3 drafter", "target": f"{facts.get('architecture')} model"}
    lines = [f"{facts['path']}: {what[facts['kind']]}, {facts['tensors']} tensors ({types}), {_size(facts['bytes'])}"]
    if facts.get("name"):
        lines.append(f"name: {facts['name']}")
    lines += _target(facts) if facts["kind"] == "target" else _drafter(facts)
    lines += [f"note: {note}" for note in facts.get("notes", ())]
    return [*lines, _verdict(facts)]


def _family(facts: dict[str, Any]) -> str:
    return f"{facts['family']} checkpoint" if "family" in facts else "checkpoint"


def _target(facts: dict[str, Any]) -> list[str]:
    sizes = ", ".join(f"{facts[key]} {word}" for key, word in (("layers", "layers"), ("vocabulary", "tokens")))
    lines = [f"{sizes}, width {facts['width']}, trained context {facts['context']}"]
    lines.append(f"chat template: {'yes' if facts['chat_template'] else 'none'}")
    return lines + ([f"parts: {facts['parts']}"] if facts["parts"] != 1 else [])


def _drafter(facts: dict[str, Any]) -> list[str]:
    if "aux_layers" not in facts:
        return []
    if facts["kind"] == "checkpoint":
        return [*about(facts), f"rope: {facts['rope']}"]
    made_for = f"; made for: {facts['made_for']}" if facts["made_for"] else ""
    return [*about(facts), f"tokenizer: {facts['vocabulary']}{made_for}"]


def _verdict(facts: dict[str, Any]) -> str:
    action = {"checkpoint": "converts", "drafter": "runs", "target": "runs"}[facts["kind"]]
    if facts.get("target"):
        action = f"fits {facts['target']}"
    if facts["usable"]:
        return f"{action}: yes"
    return f"{action}: no, {facts['reason']}" + (f" {facts['hint']}" if facts["hint"] else "")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
