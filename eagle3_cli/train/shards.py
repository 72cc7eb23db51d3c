"""States of the target on disk: a folder with manifest.json and shard-00000.safetensors, shard-00001.safetensors, ...

A shard holds whole samples, T tokens in all, one after the other:
    tokens  int32 [T]         answer  uint8 [T]        best   int32 [T]
    starts  int64 [S+1]       sample s is rows starts[s] .. starts[s+1]-1
    hidden  bfloat16 [T, 3*Ht]   inputs of the aux layers side by side
    final   bfloat16 [T, Ht]     after the target's final norm
Files appear complete or not at all, and a shard counts once the manifest names it, so whatever ends a capture costs at
most the shard in progress.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..convert.json_files import read_json
from ..convert.output import replacing
from ..errors import FileError
from .samples import Sample

VERSION = 1  # of the format described above
MANIFEST = "manifest.json"
SHARD_BYTES = 1 << 27  # a shard is gathered in memory before it is written
_NAME = re.compile(r"shard-\d{5,}\.safetensors")
_AGAIN = "Delete the folder and capture again."
_OTHER = "Capture into another folder, or delete this one."


@dataclass(frozen=True)
class TargetId:
    """What tells one target from another.

    path         as given when it was captured; not compared, for files may move
    size         bytes of its file, or of all weight files of a folder
    first_mib    sha256 of the first MiB of the (first) weight file
    tokenizer    sha256 of the tokenizer's fields or files, without the chat template
    """

    path: str
    size: int
    first_mib: str
    tokenizer: str


@dataclass(frozen=True)
class Header:
    """What all shards of a folder have in common.

    aux_layers   the layers whose inputs `hidden` holds (llama.cpp's convention)
    width        Ht
    vocab        number of the target's token ids
    template     sha256 of the chat template; empty where the target has none
    engine       what computed the states, with its number type ("llama.cpp", "transformers bfloat16")
    """

    target: TargetId
    aux_layers: tuple[int, int, int]
    width: int
    vocab: int
    template: str
    engine: str


def token_bytes(width: int) -> int:
    """Bytes on disk of one token of a target of this width; headers of the files aside."""
    return 4 * width * 2 + 4 + 1 + 4


def shard_tokens(width: int) -> int:
    """Tokens after which a shard is full, at least one."""
    return max(1, SHARD_BYTES // token_bytes(width))


@dataclass(frozen=True)
class ShardEntry:
    """One finished shard: its file's name, size and sha256, and what it holds."""

    file: str
    bytes: int
    sha256: str
    samples: int
    tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Manifest:
    """complete: every sample was captured; False while a capture runs or after one was killed."""

    header: Header
    shards: tuple[ShardEntry, ...] = ()
    complete: bool = False

    @property
    def samples(self) -> int:
        return sum(entry.samples for entry in self.shards)

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.shards)

    @property
    def answer_tokens(self) -> int:
        return sum(entry.answer_tokens for entry in self.shards)


@dataclass(frozen=True)
class StatedSample:
    """A sample with the target's states, torch tensors on the CPU.

    tokens   int64 [n]       answer   bool [n]       best   int64 [n], argmax of the target's logits after each token
    hidden   bfloat16 [n, 3*Ht]      final   bfloat16 [n, Ht]      parts of the mapped file: do not write to them
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    hidden: torch.Tensor
    final: torch.Tensor
    best: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)


# --- the manifest --------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """FileError where it is missing, damaged, or of a format that only a newer eagle3 reads."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileError(f"{folder}: expected captured states, found no {MANIFEST}.", "Capture the target's states.")
    values = read_json(path)
    version = values.pop("version", None)
    if version != VERSION:
        newer = type(version) is int and version > VERSION
        hint = "Update eagle3." if newer else _AGAIN
        raise FileError(f"{path}: expected format version {VERSION}, got {version!r}.", hint)
    try:
        header = _parse(Header, values["header"])
        shards = tuple(_parse(ShardEntry, entry) for entry in values["shards"])
        if not all(_NAME.fullmatch(entry.file) for entry in shards):
            raise ValueError("a shard has the name of another file")
        return Manifest(header, shards, _typed("bool", values["complete"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: damaged: {type(error).__name__}: {error}.", _AGAIN) from error


def _parse(kind: Any, values: Any) -> Any:
    """A dataclass from its JSON object, with exactly its keys and types."""
    if not isinstance(values, dict) or values.keys() != {f.name for f in fields(kind)}:
        raise ValueError(f"expected the keys of a {kind.__name__}")
    return kind(**{f.name: _typed(str(f.type), values[f.name]) for f in fields(kind)})


def _typed(kind: str, value: Any) -> Any:
    if kind == "TargetId":
        return _parse(TargetId, value)
    if kind.startswith("tuple"):
        if not isinstance(value, list) or len(value) != 3:
            raise ValueError(f"expected three numbers, got {value!r}")
        return tuple(_typed("int", v) for v in value)
    if type(value).__name__ != kind or (kind == "int" and value < 0):
        raise ValueError(f"expected {kind}, got {value!r}")
    return value


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps({"version": VERSION, **asdict(manifest)}, indent=1) + "\n"
    with replacing(folder / MANIFEST) as path:
        _write(path, text.encode())


def _write(path: Path, data: bytes) -> None:
    """So that a name never survives a power cut without its content."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_header(folder: Path, found: Header, wanted: Header) -> None:
    """FileError that says in what the states of a folder differ from those wanted."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in _COMPARED]
    pairs += [(f"target {name}", getattr(found.target, name), getattr(wanted.target, name)) for name in _OF_TARGET]
    differences = [f"{name.replace('_', ' ')} {_short(b)} wanted, {_short(a)} found" for name, a, b in pairs if a != b]
    if differences:
        raise FileError(f"{folder}: holds states of another capture: {'; '.join(differences)}.", _OTHER)


_COMPARED = ("aux_layers", "width", "vocab", "template", "engine")
_OF_TARGET = ("size", "first_mib", "tokenizer")


def _short(value: Any) -> str:
    """Digests by their first digits."""
    return (value[:12] or "none") if isinstance(value, str) and len(value) in (0, 64) else str(value)


# --- writing -------------------------------------------------------------------------------------------


class ShardWriter:
    """Adds samples to a folder, which is made where there is none.

    done   samples that an earlier capture left there; the next `add` is of the sample with this index
    FileError where the folder holds another capture, or a shard is missing or has another size.
    """

    def __init__(self, folder: Path, header: Header, tokens: int | None = None) -> None:
        """tokens: after how many a shard is full; None: `shard_tokens` of the target's width."""
        self.folder = folder
        self.shard_tokens = shard_tokens(header.width) if tokens is None else tokens
        self.manifest = self._open(header)
        self.done = self.manifest.samples
        self._samples: list[StatedSample] = []
        self._tokens = 0

    def _open(self, header: Header) -> Manifest:
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / MANIFEST).exists():
                write_manifest(self.folder, Manifest(header))
            manifest = read_manifest(self.folder)
            check_header(self.folder, manifest.header, header)
            for entry in manifest.shards:
                _check_size(self.folder, entry)
            self._forget_unfinished({entry.file for entry in manifest.shards})
        return manifest

    def _forget_unfinished(self, finished: set[str]) -> None:
        for path in [*self.folder.glob("shard-*.safetensors"), *self.folder.glob(".shard-*.part")]:
            if path.name not in finished:
                path.unlink()

    def stored(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens and answer mask of each sample that is on disk, in order."""
        for entry in self.manifest.shards:
            shard = _Shard(self.folder, entry, self.manifest.header)
            for i in range(entry.samples):
                sample = shard.sample(i)
                yield sample.tokens.numpy(), sample.answer.numpy()

    def add(self, sample: Sample, hidden: torch.Tensor, final: torch.Tensor, best: torch.Tensor) -> None:
        """Take the states of the next sample: bfloat16 [n, 3*Ht] and [n, Ht], integers [n].  They are kept, not copied;
        the shard is written when it is full."""
        n, width = len(sample), self.manifest.header.width
        found = (hidden.shape, hidden.dtype, final.shape, final.dtype, best.shape)
        if found != ((n, 3 * width), torch.bfloat16, (n, width), torch.bfloat16, (n,)):
            raise ValueError(f"states of {n} tokens of width {width}: got {found}")
        if self.manifest.complete:
            self.manifest = replace(self.manifest, complete=False)
            write_manifest(self.folder, self.manifest)
        tokens, answer = torch.from_numpy(sample.tokens), torch.from_numpy(sample.answer)
        self._samples.append(StatedSample(tokens, answer, hidden, final, best))
        self._tokens += n
        if self._tokens >= self.shard_tokens:
            self._finish_shard()

    def _finish_shard(self) -> None:
        parts, self._samples, self._tokens = self._samples, [], 0
        tensors = {
            "tokens": torch.cat([p.tokens for p in parts]).to(torch.int32),
            "answer": torch.cat([p.answer for p in parts]).to(torch.uint8),
            "starts": torch.tensor([0, *np.cumsum([len(p) for p in parts])], dtype=torch.int64),
            "hidden": torch.cat([p.hidden for p in parts]),
            "final": torch.cat([p.final for p in parts]),
            "best": torch.cat([p.best for p in parts]).to(torch.int32),
        }
        counts = len(parts), len(tensors["tokens"]), int(tensors["answer"].sum())
        parts.clear()
        data = save(tensors)
        name = f"shard-{len(self.manifest.shards):05d}.safetensors"
        entry = ShardEntry(name, len(data), hashlib.sha256(data).hexdigest(), *counts)
        with _writing(self.folder):
            with replacing(self.folder / name) as path:
                _write(path, data)
            self.manifest = replace(self.manifest, shards=(*self.manifest.shards, entry))
            write_manifest(self.folder, self.manifest)

    def close(self) -> Manifest:
        """Write what is left; the capture is complete."""
        if self._samples:
            self._finish_shard()
        if not self.manifest.complete:
            self.manifest = replace(self.manifest, complete=True)
            with _writing(self.folder):
                write_manifest(self.folder, self.manifest)
        return self.manifest


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"{folder}: cannot be written: {error.strerror or error}.") from error


# --- reading -------------------------------------------------------------------------------------------


class ShardReader:
    """The samples of a complete capture, memory-mapped.

    lengths   int64 [S] tokens of each sample
    """

    def __init__(self, folder: Path, verify: bool = True) -> None:
        """verify: compare every shard with its checksum, which reads all of them.  FileError names the shard."""
        self.folder, self.manifest = folder, read_manifest(folder)
        if not self.manifest.complete:
            raise FileError(f"{folder}: its capture was not finished.", "Capture again; it goes on where it stopped.")
        for entry in self.manifest.shards:
            _check_size(folder, entry)
        if verify:
            self._verify()
        self._shards = [_Shard(folder, entry, self.manifest.header) for entry in self.manifest.shards]
        self._first = np.cumsum([0, *(entry.samples for entry in self.manifest.shards)])
        lengths = [np.diff(shard.starts) for shard in self._shards]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths])

    def _verify(self) -> None:
        with ThreadPoolExecutor(max(1, min(16, os.cpu_count() or 1))) as pool:
            entries = self.manifest.shards
            for entry, digest in zip(
                entries, pool.map(lambda e: file_sha256(self.folder / e.file), entries), strict=True
            ):
                if digest != entry.sha256:
                    raise FileError(
                        f"{self.folder / entry.file}: damaged: expected sha256 {entry.sha256[:12]}, got {digest[:12]}.",
                        _AGAIN,
                    )

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, i: int) -> StatedSample:
        """Sample i from 0 on.  `hidden` and `final` stay on disk until they are read."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        shard = int(np.searchsorted(self._first, i, side="right")) - 1
        return self._shards[shard].sample(i - int(self._first[shard]))


class _Shard:
    """One shard, mapped.  FileError where it is not laid out as its entry and the format say."""

    def __init__(self, folder: Path, entry: ShardEntry, header: Header) -> None:
        path = folder / entry.file
        try:
            with safe_open(path, "pt") as file:
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise FileError(f"{path}: cannot be read: {error}.", _AGAIN) from error
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        if found != _layout(entry, header):
            raise FileError(f"{path}: expected tensors {_layout(entry, header)}, got {found}.", _AGAIN)
        self.starts = self.tensors["starts"].numpy()
        if self.starts[0] != 0 or self.starts[-1] != entry.tokens or (np.diff(self.starts) < 1).any():
            raise FileError(f"{path}: expected starts to rise from 0 to {entry.tokens}.", _AGAIN)

    def sample(self, i: int) -> StatedSample:
        rows = slice(int(self.starts[i]), int(self.starts[i + 1]))
        return StatedSample(
            self.tensors["tokens"][rows].long(),
            self.tensors["answer"][rows].bool(),
            self.tensors["hidden"][rows],
            self.tensors["final"][rows],
            self.tensors["best"][rows].long(),
        )


def _layout(entry: ShardEntry, header: Header) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    t, width = entry.tokens, header.width
    return {
        "tokens": (torch.int32, (t,)),
        "answer": (torch.uint8, (t,)),
        "starts": (torch.int64, (entry.samples + 1,)),
        "hidden": (torch.bfloat16, (t, 3 * width)),
        "final": (torch.bfloat16, (t, width)),
        "best": (torch.int32, (t,)),
    }


def _check_size(folder: Path, entry: ShardEntry) -> None:
    path = folder / entry.file
    size = path.stat().st_size if path.is_file() else None
    if size != entry.bytes:
        found = "no such file" if size is None else f"{size}"
        raise FileError(f"{path}: expected a shard of {entry.bytes} bytes, got {found}.", _AGAIN)


def file_sha256(path: Path) -> str:
    """Of the whole content, read piece by piece."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
