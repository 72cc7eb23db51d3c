"""The conversion from beginning to end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, FileError, OptionError, PairError
from ..settings import FEEDBACK
from . import AUX_CONVENTIONS, ConvertSettings, Progress, Report, TensorRow
from .checkpoint import Checkpoint, open_checkpoint
from .config import Choices, Facts, read_facts
from .families import Named, canonical, detect, sort_tensors
from .ggml_types import OUTTYPES
from .json_files import read_json
from .layout import flatten
from .plan import origins, plan_keys, plan_tensors
from .target import read_target, without_target
from .tensors import Planned
from .tokenizer import check_tokenizer


def run(settings: ConvertSettings, progress: Progress | None) -> Report:
    """See `convert`: read and check everything, plan, write, compare, load, rename."""
    _check_options(settings)
    checkpoint = open_checkpoint(settings.source)
    config, config_path = _read_config(settings, checkpoint)
    _check_output(settings, checkpoint, config_path)
    with _located(settings.source, config_path):
        family = detect(config, checkpoint.tensors)
        named = sort_tensors(checkpoint)
        flat = flatten(config)
        target = read_target(settings.target) if settings.target else without_target(flat, named.tensors)
        facts = read_facts(flat, named.tensors, family, target, Choices(settings.aux_convention, settings.feedback))
        check_tokenizer(checkpoint.folder, target)
        tensors = plan_tensors(named, facts, settings.outtype)
        keys = plan_keys(named, facts, target, settings.outtype)
        size = sum(t.nbytes for t in tensors)
        if not settings.dry_run:
            size = _write(settings, keys, tensors, progress or (lambda name, done, total: None))
    return _report(settings, facts, named, tensors, size)


def _check_options(settings: ConvertSettings) -> None:
    """Everything that can be refused before a tensor is looked at."""
    output = settings.output
    if settings.outtype not in OUTTYPES:
        raise OptionError(f"--outtype: expected one of {', '.join(OUTTYPES)}, got {settings.outtype}.")
    if settings.aux_convention not in AUX_CONVENTIONS:
        known = ", ".join(AUX_CONVENTIONS)
        raise OptionError(f"--aux-convention: expected one of {known}, got {settings.aux_convention}.")
    if settings.feedback not in FEEDBACK:
        raise OptionError(f"--feedback: expected one of {', '.join(FEEDBACK)}, got {settings.feedback}.")
    if settings.dry_run:
        return
    if os.path.isdir(output):
        raise FileError(f"{output}: is a directory, expected a file name.", "Give --output a name that ends in .gguf.")
    if not os.path.isdir(output.parent):
        raise FileError(f"{output.parent}: no such directory.", "Create it first.")
    if os.path.lexists(output) and not settings.force:
        raise FileError(f"{output}: exists already.", "Give --force to replace it.")


def _read_config(settings: ConvertSettings, checkpoint: Checkpoint) -> tuple[dict[str, Any], Path]:
    path = settings.config or checkpoint.folder / "config.json"
    if not os.path.isfile(path):
        raise FileError(f"{path}: no such file.", "Give the drafter's config.json with --config.")
    return read_json(path), path


def _check_output(settings: ConvertSettings, checkpoint: Checkpoint, config: Path) -> None:
    """--force replaces an old output, never an input."""
    output, target = settings.output, settings.target
    inputs = [checkpoint.path, *{t.path for t in checkpoint.tensors.values()}, config, *([target] if target else [])]
    if os.path.exists(output) and any(os.path.exists(path) and os.path.samefile(output, path) for path in inputs):
        raise OptionError(f"--output: {output} is also an input of this conversion.", "Choose another name.")


@contextlib.contextmanager
def _located(source: Path, config: Path) -> Iterator[None]:
    """Put the file's name in front of messages about the config or about a tensor."""
    try:
        yield
    except (CheckpointError, PairError) as error:
        if error.message.startswith(str(source)):
            raise
        about_config = error.message.startswith("config:")
        message = error.message.removeprefix("config:").lstrip()
        raise type(error)(f"{config if about_config else source}: {message}", error.hint) from error


def _write(settings: ConvertSettings, keys: Any, tensors: tuple[Planned, ...], progress: Progress) -> int:
    """Write, compare, load once and rename; returns the size in bytes.  gguf is only imported now, to refuse sooner."""
    from .check import check_gguf
    from .load import check_loads
    from .output import check_space, replacing
    from .writer import write_gguf

    check_space(settings.output, sum(t.nbytes for t in tensors))
    try:
        with replacing(settings.output) as temporary:
            write_gguf(temporary, keys, tensors, progress)
            check_gguf(temporary, keys, tensors)
            check_loads(temporary)
        return settings.output.stat().st_size
    except OSError as error:
        raise FileError(f"{settings.output}: cannot be written: {error.strerror or error}.") from error


def _report(settings: ConvertSettings, facts: Facts, named: Named, tensors: tuple[Planned, ...], size: int) -> Report:
    switches = facts.switches
    return Report(
        family=facts.family.name,
        output=settings.output,
        size=size,
        outtype=settings.outtype,
        target=settings.target,
        aux_layers=facts.aux.inputs,
        aux_layers_how=facts.aux.how,
        **origins(named.tensors, facts),
        vocabulary="target" if settings.target else "none",
        rope=facts.rope.description,
        norm_before_residual=switches.norm_before_residual,
        norm_before_fc=switches.norm_before_fc,
        fc_norm=switches.fc_norm,
        norm_output=switches.norm_output,
        final_norm=switches.final_norm,
        sliding_window=switches.window,
        tensors=_rows(named, tensors),
        notes=facts.notes,
        dry_run=settings.dry_run,
    )


def _rows(named: Named, tensors: tuple[Planned, ...]) -> tuple[TensorRow, ...]:
    """One row per stored tensor, then one per checkpoint tensor that was read or left out but not stored."""
    stored = {t.name: t for t in named.tensors.values()}
    rows = []
    for t in tensors:
        source = stored.pop(t.source, None)
        shape, dtype = (source.shape, source.dtype) if source else (t.shape, t.dtype)
        rows.append(TensorRow(t.source, shape, dtype, t.name, t.shape, t.kind, t.transform))
    for left in stored.values():
        rows.append(TensorRow(left.name, left.shape, left.dtype, None, None, None, _fate(canonical(left.name))))
    for left in named.ignored:
        rows.append(TensorRow(left.name, left.shape, left.dtype, None, None, None, "not a weight, left out"))
    return tuple(rows)


def _fate(name: str) -> str:
    """What became of a tensor that is not stored as one."""
    if name.startswith("fc_norm."):
        return "stored as the key eagle3_cli.fc_norm"
    return "checked against d2t, not stored" if name == "t2d" else "identity, not stored"
