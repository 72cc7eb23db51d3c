"""What a file is: a drafter's checkpoint, a drafter GGUF or a target GGUF, and whether a pair fits.

Nothing is loaded: configs, headers and tensor tables tell everything.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from .convert import ConvertSettings, convert
from .convert.gguf_header import GgufFile, read_gguf
from .errors import InputError, OptionError

Facts = dict[str, Any]
"""Plain values for JSON.  Always: path, kind ("checkpoint", "drafter" or "target"), usable, and reason where it is
not.  `target` is the path that the pair was checked with, None without one."""


def inspect(source: Path, target: Path | None) -> Facts:
    """Describe a file or folder.  InputError when it cannot be read at all; what can be read and not be used is
    described, with usable False and the reason."""
    if _is_gguf(source):
        file = read_gguf(source)
        if file.value("general.architecture") == "eagle3":
            return _drafter(file, target)
        if target is not None:
            raise OptionError(f"--target: has no effect, {source} is no drafter.", "Leave it out.")
        return _target(file)
    return _checkpoint(source, target)


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:  # a folder, or nothing that can be read: the checkpoint's reader says what it is
        return False


# --- checkpoints ---------------------------------------------------------------------------------------


def _checkpoint(source: Path, target: Path | None) -> Facts:
    """Everything that a dry conversion finds out, or why there is none."""
    from .convert.checkpoint import open_checkpoint

    found = open_checkpoint(source)
    tensors = found.tensors.values()
    facts: Facts = {
        "path": str(source),
        "kind": "checkpoint",
        "tensors": len(tensors),
        "bytes": sum(t.data.nbytes for t in tensors),
        "types": dict(Counter(t.dtype for t in tensors)),
        "target": target and str(target),
    }
    try:
        report = convert(ConvertSettings(source, target, Path("drafter.gguf"), dry_run=True)).as_dict()
    except InputError as error:
        return {**facts, **_verdict(error)}
    about_the_file = ("output", "size", "outtype", "dry_run", "tensors")
    return {**facts, **{k: v for k, v in report.items() if k not in about_the_file}, **_verdict(None)}


# --- GGUF files ----------------------------------------------------------------------------------------


def _common(file: GgufFile, kind: str) -> Facts:
    from gguf import GGMLQuantizationType

    known = {t.value: t.name for t in GGMLQuantizationType}
    types = Counter(known.get(t.type, str(t.type)) for t in file.tensors.values())
    return {
        "path": str(file.path),
        "kind": kind,
        "name": file.value("general.name"),
        "architecture": file.value("general.architecture"),
        "tensors": len(file.tensors),
        "bytes": file.size,
        "types": dict(types.most_common()),
    }


def _drafter(file: GgufFile, target: Path | None) -> Facts:
    """A drafter's own statements, and whether its header, alone or with the target's, is what the engine runs."""
    own = {name: field.value for name, field in file.fields.items() if name.startswith("eagle3.")}
    reduced = file.tensors.get("d2t")
    facts = {
        **_common(file, "drafter"),
        "made_for": file.value("eagle3_cli.target_name"),
        "aux_layers": own.get("eagle3.target_layers"),
        "embeddings": "own" if "token_embd.weight" in file.tensors else "target",
        "head": "own" if "output.weight" in file.tensors else "target",
        "d2t": f"own ({reduced.shape[0]} tokens)" if reduced else "identity",
        "vocabulary": "own" if "tokenizer.ggml.tokens" in file.fields else "none",
        "norm_before_residual": own.get("eagle3.norm_before_residual", False),
        "norm_before_fc": own.get("eagle3.norm_before_fc", False),
        "fc_norm": "eagle3_cli.fc_norm" in file.fields,
        "norm_output": file.value("eagle3_cli.norm_output", False),
        "final_norm": file.value("eagle3_cli.final_norm", True),
        "sliding_window": file.value("eagle3_cli.sliding_window"),
        "keys": own,
        "target": target and str(target),
    }
    return {**facts, **_verdict(_fault(file.path, target))}


def _fault(drafter: Path, target: Path | None) -> InputError | None:
    from .model_files import check_drafter, check_target, read_drafter

    try:
        if target is None:
            check_drafter(drafter)
        else:
            check_target(target)
            read_drafter(drafter, target)
    except InputError as error:
        return error
    return None


def _target(file: GgufFile) -> Facts:
    from .model_files import check_target

    arch = str(file.value("general.architecture"))
    tokens = file.fields.get("tokenizer.ggml.tokens")
    facts = {
        **_common(file, "target"),
        "layers": file.value(f"{arch}.block_count"),
        "width": file.value(f"{arch}.embedding_length"),
        "context": file.value(f"{arch}.context_length"),
        "vocabulary": tokens.count if tokens else 0,
        "chat_template": "tokenizer.chat_template" in file.fields,
        "parts": file.value("split.count", 1),
    }
    try:
        check_target(file.path)
    except InputError as error:
        return {**facts, **_verdict(error)}
    return {**facts, **_verdict(None)}


def _verdict(error: InputError | None) -> Facts:
    if error is None:
        return {"usable": True, "reason": None, "hint": None}
    return {"usable": False, "reason": error.message, "hint": error.hint}
