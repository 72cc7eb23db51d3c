"""`eagle3 convert`: a published EAGLE-3 checkpoint becomes a drafter GGUF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import Console
from ..convert import AUX_CONVENTIONS
from ..convert.ggml_types import OUTTYPES
from ..errors import OptionError
from ..registry import target_path
from ..settings import FEEDBACK
from .options import Command, option, quiet_option

if TYPE_CHECKING:
    from ..convert import Report

HEADINGS = ("source", "shape", "type", "gguf", "shape", "type", "transform")


@click.command(cls=Command)
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@option(
    "Options",
    "--target",
    variable="CONVERT",
    metavar="GGUF|DIR",
    help="The model that the drafter was trained for: its GGUF, or a folder with its config.json and tokenizer.",
)
@option("Options", "-o", "--output", variable=False, metavar="GGUF", help="The file to write. Default: NAME-TYPE.gguf.")
@option(
    "Options",
    "--outtype",
    variable="CONVERT",
    type=click.Choice(OUTTYPES),
    metavar="TYPE",
    default="f16",
    show_default=True,
    help=f"Type of most matrices; the others follow from it as in llama-quantize. One of {', '.join(OUTTYPES)}.",
)
@option("Options", "--config", variable=False, metavar="JSON", help="config.json, if it is not beside the weights.")
@option(
    "Options",
    "--aux-convention",
    variable="CONVERT",
    type=click.Choice(AUX_CONVENTIONS),
    default="auto",
    show_default=True,
    help="Whether the config's layer ids mean a layer's input or its output.",
)
@option(
    "Options",
    "--feedback",
    variable="CONVERT",
    type=click.Choice(FEEDBACK),
    default="auto",
    show_default=True,
    help="Whether the row fed back is taken before or after the final norm; auto: as the config says.",
)
@option("Options", "--force", variable=False, is_flag=True, help="Replace the output file if it is there.")
@option("Options", "--dry-run", variable=False, is_flag=True, help="Check everything, list the tensors, write nothing.")
@option("Options", "--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
@quiet_option
@click.pass_obj
def convert(console: Console, source: Path, **flags: Any) -> None:
    """Make a drafter GGUF from a published EAGLE-3 checkpoint.

    SOURCE is a .safetensors or .bin file, the index of a sharded one, or the folder they are in. The tokenizer and
    the vocabulary come from the target. Without --target the file has no vocabulary of its own; it runs all the same.

    \b
    Examples:
      eagle3 convert model.safetensors --target llama.gguf -o llama-eagle3.gguf
      eagle3 convert ./EAGLE3-LLaMA3.1-8B --target llama.gguf --outtype q8_0
      eagle3 convert ./checkpoint --target llama.gguf --dry-run
      eagle3 convert ./checkpoint --json | jq .aux_layers
    """
    console.quiet = flags["quiet"]
    if flags["force"] and flags["dry_run"]:
        raise OptionError("--force: has no effect with --dry-run.", "Leave one of them out.")
    from ..convert import ConvertSettings
    from ..convert import convert as run

    settings = ConvertSettings(
        source=source,
        target=target_path(flags["target"]) if flags["target"] else None,
        output=Path(flags["output"] or default_output(source, flags["outtype"])),
        outtype=flags["outtype"],
        config=Path(flags["config"]) if flags["config"] else None,
        aux_convention=flags["aux_convention"],
        feedback=flags["feedback"],
        force=flags["force"],
        dry_run=flags["dry_run"],
    )
    report = run(settings, progress=lambda name, done, total: console.progress(name, done / total if total else 1.0))
    console.clear_progress()
    if flags["as_json"]:
        console.document(report.as_dict())
    else:
        console.text(describe(report))


def describe(report: Report) -> str:
    """The report for people: the tensor table on a dry run, then what was made of what."""
    facts = report.as_dict()
    lines = table(facts["tensors"], HEADINGS) if report.dry_run else []
    what = f"{report.family} checkpoint, {report.outtype}, {report.size / 1e6:.1f} MB"
    lines.append(f"would write {report.output}: {what}" if report.dry_run else f"{report.output}: {what}")
    lines += about(facts)
    lines.append(f"tokenizer: {'of the target' if report.vocabulary == 'target' else 'none'}; rope: {report.rope}")
    lines += [f"note: {note}" for note in report.notes]
    return "".join(f"{line}\n" for line in lines)


def about(facts: Mapping[str, Any]) -> list[str]:
    """Lines about a drafter, from its report or from what its GGUF says."""
    how = f" ({facts['aux_layers_how']})" if "aux_layers_how" in facts else ""
    switches = [n for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if facts[n]]
    switches += [] if facts["final_norm"] else ["no final norm"]
    switches += [f"sliding window {facts['sliding_window']}"] if facts["sliding_window"] else []
    return [
        f"aux layers: inputs of {', '.join(map(str, facts['aux_layers'] or ()))}{how}",
        f"embeddings: {facts['embeddings']}; head: {facts['head']}; draft vocabulary: {facts['d2t']}",
        f"switches: {', '.join(switches) or 'none, plain EAGLE-3'}",
    ]


def default_output(source: Path, outtype: str) -> str:
    """NAME-TYPE.gguf in the current folder; NAME is the file's, or the folder's where the file's says nothing."""
    path = source.resolve()
    name = path.name.split(".")[0]
    if path.is_dir() or name in ("model", "pytorch_model"):
        name = path.name if path.is_dir() else path.parent.name
    return f"{name or 'drafter'}-{outtype}.gguf"


def table(rows: Sequence[Any], headings: Sequence[str] = ()) -> list[str]:
    """Rows as aligned columns; a row is a dict or a sequence, a shape is shown as 3x4."""
    cells = [list(headings)] if headings else []
    cells += [[_cell(v) for v in (row.values() if isinstance(row, dict) else row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)
