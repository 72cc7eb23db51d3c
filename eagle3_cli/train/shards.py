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
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import FileError
from .manifest import (
    AGAIN,
    MANIFEST,
    Header,
    Manifest,
    ShardEntry,
    check_header,
    read_manifest,
    write_manifest,
    write_whole,
)
from .samples import Sample

SHARD_BYTES = 1 << 27  # a shard is gathered in memory before it is written


def token_bytes(width: int) -> int:
    """Bytes on disk of one token of a target of this width; headers of the files aside."""
    return 4 * width * 2 + 4 + 1 + 4


def shard_tokens(width: int) -> int:
    """Tokens after which a shard is full, at least one."""
    return max(1, SHARD_BYTES // token_bytes(width))


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
            write_whole(self.folder / name, data)
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
                        AGAIN,
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
            raise FileError(f"{path}: cannot be read: {error}.", AGAIN) from error
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        if found != _layout(entry, header):
            raise FileError(f"{path}: expected tensors {_layout(entry, header)}, got {found}.", AGAIN)
        self.starts = self.tensors["starts"].numpy()
        if self.starts[0] != 0 or self.starts[-1] != entry.tokens or (np.diff(self.starts) < 1).any():
            raise FileError(f"{path}: expected starts to rise from 0 to {entry.tokens}.", AGAIN)

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
        raise FileError(f"{path}: expected a shard of {entry.bytes} bytes, got {found}.", AGAIN)


def file_sha256(path: Path) -> str:
    """Of the whole content, read piece by piece."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
