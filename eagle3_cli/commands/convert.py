"""`eagle3 convert`: a published EAGLE-3 checkpoint becomes a drafter GGUF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..errors import OptionError
from .options import Command, option, quiet_option

if TYPE_CHECKING:
    from ..convert import Report

OUTTYPES = ("f32", "f16", "bf16", "q8_0")
CONVENTIONS = ("auto", "input", "output")


@click.command(cls=Command)
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@option("Options", "--target", required=True, metavar="GGUF", help="The model that the drafter was trained for.")
@option("Options", "-o", "--output", variable=False, metavar="GGUF", help="The file to write.")
@option(
    "Options", "--outtype", type=click.Choice(OUTTYPES), default="f16", show_default=True, help="Type of the matrices."
)
@option("Options", "--config", variable=False, metavar="JSON", help="config.json, if it is not beside the weights.")
@option(
    "Options",
    "--aux-convention",
    type=click.Choice(CONVENTIONS),
    default="auto",
    show_default=True,
    help="Whether the config's layer ids mean a layer's input or its output.",
)
@option("Options", "--force", variable=False, is_flag=True, help="Replace the output file if it is there.")
@option("Options", "--dry-run", variable=False, is_flag=True, help="Check everything, list the tensors, write nothing.")
@option("Options", "--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
@quiet_option
@click.pass_obj
def convert(console: Console, source: Path, **flags: Any) -> None:
    """Make a drafter GGUF from a published EAGLE-3 checkpoint.

    SOURCE is a .safetensors file, the index of a sharded one, or the folder they are in. The tokenizer and the
    vocabulary come from the target.

    \b
    Examples:
      eagle3 convert model.safetensors --target llama.gguf -o llama-eagle3.gguf
      eagle3 convert ./EAGLE3-LLaMA3.1-8B --target llama.gguf -o llama-eagle3.gguf --outtype f16
      eagle3 convert ./checkpoint --target llama.gguf --dry-run
    """
    console.quiet = flags["quiet"]
    output, dry_run = flags["output"], flags["dry_run"]
    if output is None and not dry_run:
        raise OptionError("-o: no output file.", "Give -o drafter.gguf, or --dry-run to write nothing.")
    if flags["force"] and dry_run:
        raise OptionError("--force: has no effect with --dry-run.", "Leave one of them out.")
    from ..convert import ConvertSettings
    from ..convert import convert as run

    settings = ConvertSettings(
        source=source,
        target=Path(flags["target"]).expanduser(),
        output=Path(output) if output else source.with_suffix(".gguf"),
        outtype=flags["outtype"],
        config=Path(flags["config"]) if flags["config"] else None,
        aux_convention=flags["aux_convention"],
        force=flags["force"],
        dry_run=dry_run,
    )
    report = run(settings, progress=lambda name, done, total: console.progress(name, done / total if total else 1.0))
    console.clear_progress()
    if flags["as_json"]:
        console.document(report.as_dict())
    else:
        console.text(describe(report, dry_run))


def describe(report: Report, dry_run: bool) -> str:
    """The report for people: the tensor table on a dry run, then what was made of what."""
    lines = table(report.as_dict()["tensors"]) if dry_run else []
    what = f"{report.family} checkpoint, {report.outtype}, {report.size / 1e6:.1f} MB"
    lines.append(f"would write: {what}" if dry_run else f"{report.output}: {what}")
    lines.append(f"aux layers: inputs of {', '.join(map(str, report.aux_layers))} ({report.aux_layers_how})")
    lines.append(f"embeddings: {report.embeddings}; head: {report.head}; draft vocabulary: {report.d2t}")
    lines.append(f"rope: {report.rope}")
    lines += [f"note: {note}" for note in report.notes]
    return "".join(f"{line}\n" for line in lines)


def table(rows: Sequence[Any]) -> list[str]:
    """Rows as aligned columns; a row is a dict or a sequence, a shape is shown as 3x4."""
    cells = [[_cell(v) for v in (row.values() if isinstance(row, dict) else row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)
