"""Shards: what is written is read, whatever kills the writer, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states_tools import HEADER, WIDTH, contents, random_samples, random_states

from eagle3_cli.errors import FileError
from eagle3_cli.train import manifest
from eagle3_cli.train.manifest import read_manifest
from eagle3_cli.train.shards import ShardReader, ShardWriter, token_bytes

LENGTHS = [3, 5, 1, 4, 9, 2, 2]  # with 8 tokens to a shard: samples 0..1, 2..4, 5..6
SAMPLES = random_samples(LENGTHS)


def write(folder: Path, samples: list[Any] = SAMPLES) -> ShardWriter:
    writer = ShardWriter(folder, HEADER, 8)
    for i in range(writer.done, len(samples)):
        writer.add(samples[i], *random_states(len(samples[i]), i))
    writer.close()
    return writer


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path)
    reader = ShardReader(tmp_path)
    assert len(reader) == len(LENGTHS)
    assert reader.lengths.tolist() == LENGTHS
    for i, sample in enumerate(SAMPLES):
        read, (hidden, final, best) = reader.sample(i), random_states(len(sample), i)
        assert np.array_equal(read.tokens, sample.tokens)
        assert np.array_equal(read.answer, sample.answer)
        assert read.answer.dtype == torch.bool
        assert torch.equal(read.hidden, hidden)
        assert torch.equal(read.final, final)
        assert torch.equal(read.best, best)
    with pytest.raises(IndexError):
        reader.sample(len(LENGTHS))


def test_manifest_counts_what_the_shards_hold(tmp_path: Path) -> None:
    manifest = write(tmp_path).manifest
    assert [(entry.samples, entry.tokens) for entry in manifest.shards] == [(2, 8), (3, 14), (2, 4)]
    assert manifest.answer_tokens == sum(int(s.answer.sum()) for s in SAMPLES)
    assert manifest == read_manifest(tmp_path)
    assert manifest.header == HEADER


def test_disk_needed_is_what_the_shards_take(tmp_path: Path) -> None:
    write(tmp_path)
    stored = sum(len(data) for name, data in contents(tmp_path).items() if name.startswith("shard"))
    expected = sum(LENGTHS) * token_bytes(WIDTH)
    assert expected < stored < expected + 3 * 800  # three headers and starts


def test_states_are_mapped_not_copied(tmp_path: Path) -> None:
    write(tmp_path)
    reader = ShardReader(tmp_path)
    first, again = reader.sample(1), reader.sample(1)
    assert first.hidden.data_ptr() == again.hidden.data_ptr()
    assert first.hidden.data_ptr() == reader.sample(0).hidden.data_ptr() + LENGTHS[0] * 3 * WIDTH * 2


@pytest.mark.parametrize("moment", ["before", "written", "named"])
def test_writer_killed_anywhere_resumes_to_the_same_bytes(tmp_path: Path, moment: str) -> None:
    write(tmp_path / "whole")
    files = 5  # first manifest, a shard and a manifest, ...: the last ones are for what close() writes
    for count in range(1, files + 1):
        folder = tmp_path / f"{count}"
        assert _killed_while_writing(folder, moment, count) == signal.SIGKILL
        write(folder)
        assert contents(folder) == contents(tmp_path / "whole")


def _killed_while_writing(folder: Path, moment: str, count: int) -> int:
    """The signal that ended a child which writes the shards and kills itself at the count-th file."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            manifest.replacing = _deadly(manifest.replacing, moment, count)
            write(folder)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def _deadly(replacing: Any, moment: str, count: int) -> Any:
    seen = 0

    def die(now: str) -> None:
        if now == moment and seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def deadly(path: Path) -> Any:
        nonlocal seen
        seen += 1
        die("before")
        with replacing(path) as temporary:
            yield temporary
            die("written")
        die("named")

    return deadly


def test_more_samples_can_be_added_to_a_finished_capture(tmp_path: Path) -> None:
    write(tmp_path, SAMPLES[:3])
    assert ShardWriter(tmp_path, HEADER, 8).done == 3
    write(tmp_path)
    assert ShardReader(tmp_path).lengths.tolist() == LENGTHS


def test_unfinished_capture_is_not_read(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, HEADER, 8)
    for i in range(3):
        writer.add(SAMPLES[i], *random_states(LENGTHS[i], i))
    with pytest.raises(FileError, match="not finished"):
        ShardReader(tmp_path)


def test_flipped_bit_names_the_shard(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"shard-00001.*sha256"):
        ShardReader(tmp_path)
    assert len(ShardReader(tmp_path, verify=False)) == len(LENGTHS)


@pytest.mark.parametrize("found", ["no such file", "3"])
def test_lost_or_cut_shard_names_it(tmp_path: Path, found: str) -> None:
    write(tmp_path)
    path = tmp_path / "shard-00002.safetensors"
    path.unlink() if found == "no such file" else path.write_bytes(b"123")
    for use in (lambda: ShardReader(tmp_path, verify=False), lambda: ShardWriter(tmp_path, HEADER)):
        with pytest.raises(FileError, match=rf"shard-00002.*got {found}"):
            use()


def test_shard_of_another_layout_is_refused_without_verifying(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"best"', b'"rest"'))
    with pytest.raises(FileError, match="expected tensors"):
        ShardReader(tmp_path, verify=False)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(HEADER, aux_layers=(1, 2, 3)), r"aux layers \(1, 2, 3\) wanted, \(1, 2, 4\) found"),
        (replace(HEADER, template=""), "template none wanted, cccccccccccc found"),
        (replace(HEADER, engine="transformers f32"), "engine transformers f32 wanted, llama.cpp found"),
        (replace(HEADER, target=replace(HEADER.target, size=11)), "target size 11 wanted, 10 found"),
        (replace(HEADER, target=replace(HEADER.target, tokenizer="d" * 64)), "target tokenizer d{12} wanted"),
    ],
)
def test_folder_of_another_capture_says_what_differs(tmp_path: Path, other: Any, what: str) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(FileError, match=what):
        ShardWriter(tmp_path, other)
    assert contents(tmp_path) == before


def test_target_may_have_moved(tmp_path: Path) -> None:
    write(tmp_path)
    moved = replace(HEADER, target=replace(HEADER.target, path="elsewhere.gguf"))
    assert ShardWriter(tmp_path, moved).done == len(LENGTHS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 1, got 2"),
        ({"version": None}, "format version 1, got None"),
        ({"complete": 1}, "damaged.*expected bool"),
        ({"shards": [{"file": "shard-00000.safetensors"}]}, "damaged.*keys of a ShardEntry"),
        ({"header": {}}, "damaged.*keys of a Header"),
    ],
)
def test_manifest_of_another_format_or_damaged_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FileError, match=message) as error:
        ShardReader(tmp_path)
    if change.get("version") == 2:
        assert error.value.hint == "Update eagle3."


def test_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("shard-00001", "../shard-00001"))
    with pytest.raises(FileError, match="another file"):
        ShardReader(tmp_path)


def test_folder_without_manifest_or_that_is_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no manifest\.json"):
        ShardReader(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        ShardWriter(tmp_path / "file", HEADER)


def test_files_that_no_manifest_names_are_removed(tmp_path: Path) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    for name in ("shard-00009.safetensors", ".shard-00003.safetensors.77.part"):
        (tmp_path / name).write_bytes(b"left behind")
    write(tmp_path)
    assert contents(tmp_path) == before
