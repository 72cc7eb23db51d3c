"""The output file: it appears complete or not at all, and whatever ends the conversion leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import FileError


def check_folder(output: Path, flag: str) -> None:
    """FileError, which names the flag, unless a file can be made beside the output; better known before than after an
    hour."""
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise FileError(
            f"{flag}: {output.parent}: expected a folder that can be written, got: {error.strerror or error}.",
            "Create it, or name another.",
        ) from error


def check_space(output: Path, size: int) -> None:
    """FileError when the disk cannot hold size bytes more; better known before than after an hour."""
    free = shutil.disk_usage(output.parent).free
    if free < size:
        raise FileError(f"{output.parent}: {size / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free.")


@contextlib.contextmanager
def replacing(output: Path, mode: int = 0o666) -> Iterator[Path]:
    """A path to write to; on a clean exit its content becomes the output, otherwise it vanishes.

    mode    of a file that is new, as for `os.open`; 0o600 keeps it private

    Linux writes to a file without a name, which not even SIGKILL can leave behind.  Elsewhere it is a hidden file
    beside the output.  A symbolic link at the output is replaced, not followed.
    """
    try:
        with _nameless(output, mode) or _hidden(output, mode) as path:
            yield path
    except OSError as error:
        if error.filename is None or str(error.filename).startswith("/proc/") or str(error.filename).endswith(".part"):
            error.filename = os.fspath(output)  # the name that the user knows
        raise
    _sync(output.parent)


def _nameless(output: Path, mode: int) -> contextlib.AbstractContextManager[Path] | None:
    """None where the system or the file system has no such files."""
    try:
        handle = os.open(output.parent, os.O_TMPFILE | os.O_RDWR, mode)
    except (AttributeError, OSError):
        return None
    path = Path(f"/proc/{os.getpid()}/fd/{handle}")
    if not path.exists():
        os.close(handle)
        return None
    return _linked(handle, path, output)


@contextlib.contextmanager
def _linked(handle: int, path: Path, output: Path) -> Iterator[Path]:
    """Give the file of an open handle its name in the end: at once if that is free, through a rename if not."""
    try:
        yield path
        if not os.path.lexists(output):
            _link(path, output)
            return
        beside = output.with_name(f".{output.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            _link(path, beside)
            os.replace(beside, output)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    finally:
        os.close(handle)


def _link(path: Path, name: Path) -> None:
    """A handle of the folder makes Python use linkat, which follows /proc's link to the file."""
    folder = os.open(name.parent, os.O_RDONLY)
    try:
        os.link(path, name.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _hidden(output: Path, mode: int) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".part", dir=output.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(mode & ~mask)
        os.replace(temporary, output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """Make the new name durable where the system can (a folder cannot be opened on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
