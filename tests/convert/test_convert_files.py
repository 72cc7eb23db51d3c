"""Input and output files: what is refused, and that the output appears complete or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable

import checkpoints
import pytest

from eagle3_cli.errors import Eagle3Error


@pytest.fixture(autouse=True, params=["nameless", "hidden"])
def way(request, monkeypatch):
    """Both ways of writing: Linux's files without a name, and what other systems do."""
    if request.param == "hidden":
        monkeypatch.setattr("eagle3_cli.convert.output._nameless", lambda *_: None)
    return request.param


@pytest.fixture
def checkpoint(tmp_path):
    return checkpoints.write(tmp_path / "checkpoint", checkpoints.tensors())


@pytest.fixture
def fails(tmp_path, checkpoint, target) -> Callable[..., str]:
    def run(source=checkpoint, target=target, output=tmp_path / "new.gguf", **settings) -> str:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(Eagle3Error) as caught:
            checkpoints.run(source, target, output, **settings)
        assert caught.value.exit_code == 2
        assert sorted(tmp_path.iterdir()) == before
        return caught.value.message

    return run


def test_missing_files(fails, tmp_path, checkpoint):
    assert "no such file or directory" in fails(source=tmp_path / "nothing")
    assert "no such file or directory" in fails(source=tmp_path / ("x" * 300))
    assert "no such file" in fails(target=tmp_path / "nothing.gguf")
    assert "no such file" in fails(config=tmp_path / "nothing.json")
    assert "no such directory" in fails(output=tmp_path / "no" / "o.gguf")
    assert "is a directory" in fails(output=tmp_path)
    (checkpoint / "config.json").unlink()
    assert "config.json: no such file" in fails()


def test_bad_targets(fails, tmp_path, target, convert):
    convert()
    assert "this is a drafter (eagle3)" in fails(target=tmp_path / "out.gguf")
    bad = tmp_path / "bad.gguf"
    for content, words in [
        (b"", "not a GGUF"), (b"GGUF", "truncated"), (b"\x89PNG....", "not a GGUF"),
        (target.read_bytes()[:3000], "truncated"), (b"GGUF" + b"\0\0\0\3" * 9, "GGUF version"),
    ]:  # fmt: skip
        bad.write_bytes(content)
        assert words in fails(target=bad)


def test_a_target_of_another_width(fails, tmp_path):
    other = checkpoints.write_target(tmp_path / "wide.gguf", width=96)
    assert "is made for a target of width 64, but" in fails(target=other)


def test_an_existing_output_is_kept_without_force(fails, tmp_path, checkpoint, target):
    output = tmp_path / "o.gguf"
    output.write_text("precious")
    assert "exists already" in fails(output=output)
    assert output.read_text() == "precious"
    checkpoints.run(checkpoint, target, output, force=True)
    assert output.read_bytes()[:4] == b"GGUF"


def test_force_never_replaces_an_input(fails, checkpoint, target):
    for path in (target, checkpoint / "model.safetensors", checkpoint / "config.json"):
        before = path.read_bytes()
        assert "is also an input" in fails(output=path, force=True)
        assert path.read_bytes() == before


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path, checkpoint, target):
    precious, link = tmp_path / "precious", tmp_path / "o.gguf"
    precious.write_text("precious")
    link.symlink_to(precious)
    checkpoints.run(checkpoint, target, link, force=True)
    assert precious.read_text() == "precious"
    assert not link.is_symlink()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_a_crash_in_the_middle_leaves_the_old_file(tmp_path, checkpoint, target, error):
    from eagle3_cli.convert import ConvertSettings, convert

    output = tmp_path / "o.gguf"
    output.write_text("old")
    before = sorted(tmp_path.iterdir())

    def stop(name: str, done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert(ConvertSettings(checkpoint, target, output, force=True), progress=stop)
    assert sorted(tmp_path.iterdir()) == before
    assert output.read_text() == "old"


def test_a_full_disk_is_an_error_not_a_traceback(fails, monkeypatch):
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert "cannot be written: No space left on device" in fails()


def test_too_little_space_is_seen_before_writing(fails, monkeypatch):
    monkeypatch.setattr("eagle3_cli.convert.output.shutil.disk_usage", lambda path: type("U", (), {"free": 10}))
    assert "0 MB are free" in fails()


@pytest.mark.parametrize("place", ["tensor", "key"])
def test_a_file_that_reads_back_differently_is_not_kept(fails, monkeypatch, place):
    from eagle3_cli.convert import writer

    real = writer.write_gguf

    def damaged(path, keys, tensors, progress):
        real(path, keys, tensors, progress)
        data = bytearray(path.read_bytes())
        at = len(data) - 3000 if place == "tensor" else data.index(b"eagle3.embedding_length") + 27
        data[at] ^= 4
        path.write_bytes(data)

    monkeypatch.setattr(writer, "write_gguf", damaged)
    message = fails()
    assert "does not match its source" in message
    assert ("tensor" if place == "tensor" else "key eagle3.embedding_length") in message


def test_the_file_has_ordinary_permissions(tmp_path, checkpoint, target):
    old = os.umask(0o022)
    try:
        checkpoints.run(checkpoint, target, tmp_path / "o.gguf")
    finally:
        os.umask(old)
    assert (tmp_path / "o.gguf").stat().st_mode & 0o777 == 0o644


HALF_WAY = """
import sys, time
from pathlib import Path
from eagle3_cli.convert import ConvertSettings, convert

def stop(name, done, total):
    if done > total // 2:
        print("half way", flush=True)
        time.sleep(60)

source, target, output = map(Path, sys.argv[1:])
convert(ConvertSettings(source, target, output, force=True), progress=stop)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name")
@pytest.mark.parametrize("existing", [True, False])
def test_kill_9_in_the_middle_leaves_nothing_behind(tmp_path, checkpoint, target, existing, way):
    if way == "hidden":
        pytest.skip("only a file without a name vanishes with its process")
    output = tmp_path / "out" / "o.gguf"
    output.parent.mkdir()
    if existing:
        output.write_text("old")
    before = sorted(output.parent.iterdir())
    command = [sys.executable, "-c", HALF_WAY, str(checkpoint), str(target), str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half way\n"
        child.kill()
    assert sorted(output.parent.iterdir()) == before
    assert not existing or output.read_text() == "old"
