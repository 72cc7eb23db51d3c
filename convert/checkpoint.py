"""A checkpoint on disk: one file, a directory, or an index of shards, as safetensors or PyTorch's .bin.

Nothing is loaded: a `StoredTensor` is a view into a memory map.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import FileError
from .json_files import read_json

ENDINGS = (".safetensors", ".bin")
INDEX = ".index.json"
# Inside a directory the first name that is there counts, as in transformers.
USUAL = ("model.safetensors", "model.safetensors" + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the checkpoint stores it.

    dtype   safetensors' name of the type
    data    in the storage type of `safetensors.DTYPES[dtype]` and in `shape`; BF16 is uint16 bit patterns.
            Read-only, mapped.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    data: NDArray[Any]


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint by name, and where they came from (`folder` is where config.json belongs)."""

    path: Path
    folder: Path
    tensors: dict[str, StoredTensor]


def open_checkpoint(source: Path) -> Checkpoint:
    """Open a .safetensors or .bin file, the index of a sharded one, or a directory that holds one of them.

    Raises FileError that names the file when something is missing, truncated, or not what it should be.
    """
    if not os.path.exists(source):  # Path.exists raises for a name that is too long
        raise FileError(f"{source}: no such file or directory.", "Give the folder of a downloaded EAGLE-3 checkpoint.")
    path = _pick(source) if source.is_dir() else source
    if not path.is_file():  # a pipe would never end
        raise FileError(f"{path}: expected an ordinary file.", "Give the folder of a downloaded EAGLE-3 checkpoint.")
    tensors = _open_index(path) if path.name.endswith(".json") else _reader(path)(path)
    if not tensors:
        raise FileError(f"{path}: the checkpoint holds no tensors.", "Download it again.")
    return Checkpoint(path, path.parent, tensors)


def _reader(path: Path) -> Callable[[Path], dict[str, StoredTensor]]:
    if path.suffix == ".safetensors":
        from .safetensors import open_file

        return open_file
    if path.suffix == ".bin":
        from .torch_bin import open_bin

        return open_bin
    raise FileError(f"{path}: expected a .safetensors or .bin file, the {INDEX} of its shards, or a directory.")


def _pick(folder: Path) -> Path:
    """The checkpoint inside a directory."""
    for name in USUAL:
        if (folder / name).exists():
            return folder / name
    for ending in ENDINGS:
        found = sorted(folder.glob("*" + ending + INDEX)) or sorted(folder.glob("*" + ending))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(p.name for p in found)
            raise FileError(f"{folder}: several checkpoints and no model{ending}{INDEX}: {names}.", "Name one file.")
    raise FileError(
        f"{folder}: expected one of {', '.join(USUAL)} in this directory.",
        "Give the folder of a downloaded EAGLE-3 checkpoint.",
    )


def _open_index(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a sharded checkpoint.  Index and shards must name exactly the same tensors."""
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FileError(f"{path}: expected a 'weight_map' of tensor names to file names.", "Download the index again.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        _check_shard(path, shard)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        file = path.parent / shard
        stored = _reader(file)(file)
        listed = {name for name, file_name in weight_map.items() if file_name == shard}
        if missing := sorted(listed - stored.keys()):
            raise FileError(f"{file}: {path.name} places {missing[0]!r} here, but it is not there.")
        if extra := sorted(stored.keys() - listed):
            raise FileError(f"{file}: holds {extra[0]!r}, which {path.name} does not place here.")
        tensors.update(stored)
    return tensors


def _check_shard(index: Path, shard: str) -> None:
    """A shard is a file beside its index; nothing an index says leads elsewhere, nor does a link of that name."""
    known = Path(shard).suffix in ENDINGS
    if not known or Path(shard).name != shard or not shard.isprintable() or "\\" in shard:
        raise FileError(f"{index}: expected the name of a .safetensors or .bin file beside the index, got {shard!r}.")
    file = index.parent / shard
    if not os.path.isfile(file):  # Path.is_file raises for a name that is too long
        raise FileError(f"{file}: this shard is named by {index.name} but missing.", "Download it.")
    if not any(file.resolve().is_relative_to(folder) for folder in _homes(index.parent.resolve())):
        raise FileError(
            f"{file}: expected a file in this directory, got a link to {file.resolve()}.",
            "Put the file itself there if you trust it.",
        )


def _homes(folder: Path) -> list[Path]:
    """Where the files of a checkpoint's directory may be.  Hugging Face's cache keeps them beside the snapshots, as
    blobs, and links to them."""
    return [folder, folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [folder]
