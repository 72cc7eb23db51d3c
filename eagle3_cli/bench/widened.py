"""Variants of a llama target: in another number type, or widened, which is a larger model that computes the same.

What a small target costs are mostly its many small steps, what a large one costs is reading its weights.  A widened
copy has as many weights as wanted and answers as before, so a small target's drafter can be measured on it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..convert.encode import decode, encode
from ..convert.ggml_types import KINDS
from ..convert.gguf_header import Field, GgufFile, TensorInfo, pack, read_gguf
from ..convert.output import check_space, replacing
from ..convert.plan import FILE_TYPES
from ..convert.tensors import Planned, release, row_bytes
from ..convert.writer import Step, write_gguf
from ..errors import CheckpointError, FileError, OptionError
from ..settings import check_name

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
LENGTH = "llama.feed_forward_length"
KIND_NAMES = {kind.number: name for name, kind in KINDS.items() if name != "I64"}
AGAIN = "Download or convert the file again."


def write_variant(source: Path, output: Path, outtype: str, ffn: int | None = None) -> None:
    """Write a llama target with all of its matrices in one of `TYPES`; vectors become F32.

    ffn   the new feed-forward length; None: as it is.  Added rows of ffn_gate and ffn_up are random, always the same,
          and as large as the source's; added columns of ffn_down are 0, so that nothing of them reaches the output

    Tensors that have the type already are copied.  The metadata are the source's apart from the file type and, where it
    is widened, feed-forward length and name.  OptionError for a type or a length that does not fit, FileError for a
    source that is damaged or of another architecture; memory is a few blocks of rows.
    """
    check_name("--type", outtype, TYPES)
    _check_output(source, output)
    file = read_gguf(source)
    length = _length(file)
    _check_ffn(outtype, length, ffn)
    _check_tensors(file, length, ffn)
    data = np.memmap(source, np.uint8, "r")
    tensors = tuple(_plan(file, info, outtype, data, ffn) for info in file.tensors.values())
    check_space(output, sum(tensor.nbytes for tensor in tensors))
    try:
        with replacing(output) as temporary:
            write_gguf(temporary, _keys(file, outtype, ffn), tensors, lambda *_: None, "llama", _encode)
    except CheckpointError as error:  # a value is not finite, or the type cannot hold it
        raise FileError(f"{source}: {error.message}", "Use f32 or bf16 where the source is not damaged.") from error
    except OSError as error:
        raise FileError(f"{output}: cannot be written: {error.strerror or error}.") from error


# ---- what is refused ----


def _check_output(source: Path, output: Path) -> None:
    if not output.parent.is_dir():
        raise FileError(f"{output.parent}: no such directory.", "Create it first.")
    if output.is_dir():
        raise FileError(f"{output}: is a directory, expected a file name.", "Give a name that ends in .gguf.")
    if output.exists() and source.exists() and output.samefile(source):
        raise OptionError(f"--output: {output} is also the source.", "Choose another name.")


def _length(file: GgufFile) -> int:
    """The feed-forward length of a llama target."""
    architecture, length, parts = (file.value(key) for key in ("general.architecture", LENGTH, "split.count"))
    if architecture != "llama":
        raise FileError(f"{file.path}: expected the architecture llama, got {architecture}.")
    if parts is not None and parts != 1:
        raise FileError(f"{file.path}: expected a model in one file, got a part of {parts}.", "Merge the parts first.")
    if type(length) is not int or length < 1:
        raise FileError(f"{file.path}: expected {LENGTH} as a number, got {length!r}.", AGAIN)
    return length


def _check_ffn(outtype: str, length: int, ffn: int | None) -> None:
    block = KINDS[outtype.upper()].block
    if ffn is not None and ffn <= length:
        raise OptionError(f"--ffn: expected more than the {length} of the source, got {ffn}.")
    if ffn is not None and ffn % block:
        raise OptionError(f"--ffn: expected a multiple of {block} for {outtype}, got {ffn}.")


def _check_tensors(file: GgufFile, length: int, ffn: int | None) -> None:
    """FileError unless every block has ffn_gate, ffn_up and ffn_down, and nothing else of that length."""
    blocks, width = file.value("llama.block_count"), file.value("llama.embedding_length")
    if type(blocks) is not int or blocks < 1:
        raise FileError(f"{file.path}: expected llama.block_count as a number, got {blocks!r}.", AGAIN)
    for name in (f"blk.{block}.ffn_{part}" for block in range(blocks) for part in ("gate", "up", "down")):
        expected = (width, length) if name.endswith("down") else (length, width)
        info = file.tensors.get(f"{name}.weight")
        found = list(info.shape) if info else "no such tensor"
        if info is None or info.shape != expected:
            raise FileError(f"{file.path}: {name}.weight: expected shape {list(expected)}, got {found}.")
        if ffn is not None and not name.endswith("down") and f"{name}.bias" in file.tensors:
            raise FileError(f"{file.path}: {name}.bias: expected no bias where --ffn widens the block, got one.")


# ---- keys ----


def _keys(file: GgufFile, outtype: str, ffn: int | None) -> tuple[Field, ...]:
    """The source's keys as they are stored, without those that the writer sets; changed ones in their places."""
    changed = {"general.file_type": pack("general.file_type", "UINT32", FILE_TYPES[outtype])}
    if ffn is not None:
        name = f"{file.value('general.name', file.path.stem)} (widened: feed-forward length {ffn})"
        changed["general.name"] = pack("general.name", "STRING", name)
        changed[LENGTH] = pack(LENGTH, "UINT32", ffn)
    set_by_writer = ("general.architecture", "general.alignment")
    kept = {name: field for name, field in file.fields.items() if name not in set_by_writer}
    return tuple({**kept, **changed}.values())


# ---- tensors ----


@dataclass(frozen=True)
class _Tensor(Planned):
    """data   bytes of the source's rows in the ggml type dtype, [rows, bytes of a row]; a vector is one row
    size   shape of the output; rows and columns beyond the source's are added
    columns   of the source
    """

    size: tuple[int, ...] = ()
    columns: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def forget(self, rows: slice) -> None:
        if len(self.data[rows]):
            release(self.data[rows])


def _plan(file: GgufFile, info: TensorInfo, outtype: str, data: NDArray[np.uint8], ffn: int | None) -> _Tensor:
    kind = _source_kind(file, info)
    *rows, columns = info.shape
    wanted = outtype.upper() if rows else "F32"
    if columns % KINDS[wanted].block:
        raise FileError(
            f"{file.path}: {info.name}: expected rows of a multiple of {KINDS[wanted].block} for {outtype},"
            f" got {columns}.",
            "Use bf16.",
        )
    stored, count = row_bytes(kind, columns), (rows or [1])[0]
    if info.offset + count * stored > file.size:
        raise FileError(f"{file.path}: truncated: {info.name} ends behind the end of the file.", AGAIN)
    raw = data[info.offset : info.offset + count * stored].reshape(count, stored)
    size = list(info.shape)
    if ffn is not None and info.name.endswith(("ffn_gate.weight", "ffn_up.weight")):
        size[0] = ffn
    elif ffn is not None and info.name.endswith("ffn_down.weight"):
        size[1] = ffn
    return _Tensor(info.name, wanted, info.name, kind, raw, size=tuple(size), columns=columns)


def _source_kind(file: GgufFile, info: TensorInfo) -> str:
    if len(info.shape) not in (1, 2) or 0 in info.shape:
        raise FileError(f"{file.path}: {info.name}: expected a matrix or a vector, got shape {list(info.shape)}.")
    kind = KIND_NAMES.get(info.type)
    if kind is None or info.shape[-1] % KINDS[kind].block:
        known = ", ".join(KIND_NAMES.values())
        raise FileError(
            f"{file.path}: {info.name}: expected one of {known} in whole blocks, got the ggml type {info.type}"
            f" and rows of {info.shape[-1]}."
        )
    return kind


def _encode(step: Step) -> NDArray[np.uint8]:
    """Bytes of some rows of the output."""
    tensor, rows = step
    assert isinstance(tensor, _Tensor)
    if len(tensor.size) == 1:
        return _converted(tensor, tensor.data)
    parts = []
    present = len(tensor.data)
    if rows.start < present:
        kept = tensor.data[rows]
        zeros = np.zeros((len(kept), tensor.size[1] - tensor.columns), np.float32)
        pieces = (_converted(tensor, kept), encode(zeros, "F32", tensor.kind, tensor.name))
        parts.append(np.hstack([piece.reshape(len(kept), -1) for piece in pieces]).reshape(-1))
    if rows.stop > present:
        parts.append(encode(_random(tensor, max(rows.start, present), rows.stop), "F32", tensor.kind, tensor.name))
    return np.concatenate(parts)


def _converted(tensor: _Tensor, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows of the source in the wanted type."""
    if tensor.dtype == tensor.kind:
        return np.ascontiguousarray(data).reshape(-1)
    values = decode(np.ascontiguousarray(data), tensor.dtype).reshape(len(data), -1)
    return encode(values, "F32", tensor.kind, tensor.name)


def _random(tensor: _Tensor, start: int, stop: int) -> NDArray[np.float32]:
    """Added rows, normally distributed; each has the root mean square of a row of the source."""
    models = decode(tensor.data[np.arange(start, stop) % len(tensor.data)], tensor.dtype).reshape(stop - start, -1)
    values = np.random.default_rng([zlib.crc32(tensor.name.encode()), start]).standard_normal(models.shape, np.float32)
    values *= np.sqrt(np.square(models).mean(axis=1, keepdims=True))
    return values
