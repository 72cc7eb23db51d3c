"""Converting published EAGLE-3 checkpoints to GGUF files of llama.cpp's eagle3 architecture.

    from eagle3_cli.convert import ConvertSettings, convert
    report = convert(ConvertSettings(source=Path("drafter/"), target=Path("target.gguf"), output=Path("drafter.gguf")))

    checkpoint.py    files, shards, directories      config.py        facts of a drafter, from here:
    safetensors.py   reading .safetensors              sizes.py         sizes and heads, by the tensors
    torch_bin.py     reading .bin                      switches.py      norms, feedback, window
    families.py      tensor names, as tables           layers.py        aux layers
    layout.py        one flat config, whichever        rope.py          RoPE scaling
                     family wrote it                   vocab.py         draft vocabulary: offsets to absolute ids
    target.py        what is needed of the target      config_keys.py   which keys stop a conversion
    target_hf.py     the same from a HF directory    plan.py          what the GGUF will hold
    tokenizer.py     is it the drafter's, too?       tensors.py       permutation, reading in blocks
    gguf_header.py   quick GGUF metadata reader      ggml_types.py    number types, which one a tensor gets
    output.py        complete or not at all          ggml.py          ggml's own quantisers, by ctypes
    writer.py        header and tensors              encode.py        into a type, and what does not fit
    check.py         reopening and comparing         parallel.py      blocks of rows on all cores
    load.py          loading once in llama.cpp       pipeline.py      all of it in order

Importing this module is cheap: numpy and gguf are loaded by `convert`, torch only for a .bin file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

AUX_CONVENTIONS = ("auto", "input", "output")
Progress = Callable[[str, int, int], None]  # tensor name, bytes done, bytes in total


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert.

    source     a .safetensors or .bin file, the index of a sharded one, or the directory of a checkpoint
    target     the model that the drafter was trained for, whose tokenizer is copied: a GGUF or a Hugging Face
               directory; None where the checkpoint says enough
    output     GGUF to write
    outtype    type of the matrices, see `eagle3 convert --help`; norms are always F32
    config     the drafter's config.json where it is not beside the checkpoint
    aux_convention   how the config counts aux layers: auto, input or output
    feedback   which row the drafter feeds back: auto (what the config says), pre or post (the final norm)
    force      replace an existing output
    dry_run    do everything but write
    """

    source: Path
    target: Path | None
    output: Path
    outtype: str = "f16"
    config: Path | None = None
    aux_convention: str = "auto"
    feedback: str = "auto"
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class TensorRow:
    """What became of one tensor; shapes rows first.  The gguf fields are None for a tensor that is not stored."""

    source: str
    source_shape: tuple[int, ...]
    source_dtype: str
    gguf: str | None
    gguf_shape: tuple[int, ...] | None
    gguf_dtype: str | None
    transform: str


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    size         bytes of the file (of the tensors alone in a dry run)
    target       where the facts of the target came from; None where none was given
    aux_layers   the *inputs* of these target layers; aux_layers_how: one sentence on how the config was read
    embeddings, head   "own" or "target"
    d2t          "own (d2t)", "own (d2t, absolute ids)", "own (t2d)" or "identity"
    vocabulary   "target" or "none": of the file itself
    norm_* to sliding_window   see switches.py
    """

    family: str
    output: Path
    size: int
    outtype: str
    target: Path | None
    aux_layers: tuple[int, int, int]
    aux_layers_how: str
    embeddings: str
    head: str
    d2t: str
    vocabulary: str
    rope: str
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    final_norm: bool
    sliding_window: int | None
    tensors: tuple[TensorRow, ...]
    notes: tuple[str, ...]
    dry_run: bool

    def as_dict(self) -> dict[str, Any]:
        """The report for --json: plain lists, numbers and text."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        rows = [{f.name: getattr(row, f.name) for f in fields(row)} for row in self.tensors]
        return {**values, "output": str(self.output), "target": self.target and str(self.target), "tensors": rows}


def convert(settings: ConvertSettings, progress: Progress | None = None) -> Report:
    """Convert a checkpoint and report what was done.

    progress is called with (tensor name, bytes done, bytes in total) after each block of rows.
    Raises an `InputError` with a hint for anything that cannot be converted.  The output appears complete and
    compared with its source, or not at all; an existing one is kept until then.
    """
    from .pipeline import run

    return run(settings, progress)
