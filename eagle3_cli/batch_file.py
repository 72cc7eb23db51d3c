"""The file of a batch's answers, which an interrupted run leaves usable and the next one continues.

    {"index": 0, "id": ..., "text": "...", ..., "input": SHA256, "settings": {...}}
    {"index": 1, "id": ..., "error": "...", "input": SHA256, "settings": {...}}

index is the number of the prompt among the lines that are not empty, from 0; input is the digest of that line; settings
is what the answer depends on and differs from the defaults.  A line is appended when its prompt is done, so what a kill
leaves is whole lines and perhaps the beginning of one, which is cut off.  Failed prompts are tried again, and of two
lines for one prompt the later one counts; in the end the file is put in order where it is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .batch import Defaults, Line
from .console import json_ready
from .convert.output import replacing
from .errors import FileError, shown
from .settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, as_dict

Settings = Mapping[str, Any]

_START = b'{"index": '
_LONGEST = 80  # characters of a text that are recorded as they are
_RUNTIME = ("cache_type_k", "cache_type_v", "flash_attn")
_ANOTHER = "Choose another --output, or take that line out of the file."


def settings_of(pair: PairSettings, runtime: RuntimeSettings, defaults: Defaults, more: Settings) -> dict[str, Any]:
    """What the answers depend on, as JSON has it: the target, and everything that is not as it is by default.

    What they do not depend on is left out: the drafter, threads, devices.  A long text stands for itself as a digest.
    more: further settings whose default is None or False.
    """
    usual: dict[str, Any] = {"system": None, "raw": False, **dict.fromkeys(more)}
    own: dict[str, Any] = {"system": defaults.system, "raw": defaults.raw, **more}
    for settings, default in ((defaults.sampling, SamplingSettings()), (defaults.limits, Limits())):
        usual |= as_dict(default)
        own |= as_dict(settings)
    for name in _RUNTIME:
        usual[name], own[name] = getattr(RuntimeSettings(), name), getattr(runtime, name)
    changed = {name: value for name, value in own.items() if value != usual[name] and value is not False}
    loras = {"loras": [[str(lora.path), lora.scale] for lora in pair.loras]} if pair.loras else {}
    template = {"chat_template_kwargs": pair.template_variables()} if pair.chat_template_kwargs else {}
    files = {"target": str(pair.target), **loras, **template}
    return {**files, **{name: _short(value) for name, value in json_ready(changed).items()}}


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"sha256:{hashlib.sha256(value.encode('utf-8', 'replace')).hexdigest()}"
    return value


def differences(before: Settings, now: Settings) -> list[str]:
    """Each setting that is not the same, with both values."""
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name} was {_told(before, name)}, is {_told(now, name)}"
        for name in names
        if (name in before, before.get(name)) != (name in now, now.get(name))
    ]


def _told(settings: Settings, name: str) -> str:
    return shown(settings[name]) if name in settings else "the default"


# ---- the file ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A line of the file: where its bytes are, which input it is for, whether that failed."""

    start: int
    end: int
    digest: str
    failed: bool


@dataclass
class Found:
    """What a file holds.  entries: by index, the later line of two.  end: behind the last whole line."""

    entries: dict[int, Entry]
    end: int = 0
    lines: int = 0

    def add(self, index: int, entry: Entry) -> None:
        self.entries[index] = entry
        self.end = entry.end
        self.lines += 1

    @property
    def in_order(self) -> bool:
        """Whether the file has one line for each index, in their order."""
        starts = [self.entries[index].start for index in sorted(self.entries)]
        return self.lines == len(starts) and starts == sorted(starts)


def scan(file: IO[bytes], path: Path, settings: Settings) -> Found:
    """Read a file of answers.  FileError for a line that is none, or an answer with other settings; nothing of such a
    file may be touched."""
    found = Found({})
    for number, data in enumerate(file, 1):
        where = f"--output {path}:{number}"
        if not data.endswith(b"\n"):
            if not (data.startswith(_START) or _START.startswith(data)):
                raise _foreign(where, data)
            break
        record = _parsed(where, data)
        entry = Entry(found.end, found.end + len(data), record["input"], "error" in record)
        changed = [] if entry.failed else differences(record["settings"], settings)
        if changed:
            raise FileError(
                f"{where}: was answered with other settings: {'; '.join(changed)}.",
                "Give the same ones, or choose another --output.",
            )
        found.add(record["index"], entry)
    return found


def _parsed(where: str, data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _foreign(where, data) from error
    ours = (
        isinstance(record, dict)
        and type(record.get("index")) is int
        and isinstance(record.get("input"), str)
        and isinstance(record.get("settings"), dict)
    )
    if not ours:
        raise _foreign(where, data)
    return dict(record)


def _foreign(where: str, data: bytes) -> FileError:
    got = shown(data.decode("utf-8", "replace"))
    return FileError(f"{where}: expected a line that generate --batch wrote, got {got}.", "Choose another --output.")


class AnswerFile:
    """The open file.  `add` appends a line at once; `finish` puts the lines in order."""

    def __init__(self, path: Path, handle: int, found: Found, settings: Settings) -> None:
        self.path, self._handle, self._found, self._settings = path, handle, found, settings
        self.ordinary = stat.S_ISREG(os.fstat(handle).st_mode)

    def check(self, digests: Sequence[str]) -> None:
        """FileError where an answer belongs to none of these lines, so that it is not lost.  Failures of
        lines that are gone are forgotten."""
        for index, entry in list(self._found.entries.items()):
            if entry.failed:
                if index >= len(digests):
                    del self._found.entries[index]
                continue
            if not 0 <= index < len(digests):
                raise FileError(
                    f"--output {self.path}: has an answer for line {index + 1}, but --batch has {len(digests)} lines.",
                    _ANOTHER,
                )
            self._check(index, digests[index])

    def _check(self, index: int, digest: str) -> None:
        if self._found.entries[index].digest != digest:
            raise FileError(
                f"--output {self.path}: its answer {index + 1} belongs to another line than the one in --batch.",
                _ANOTHER,
            )

    def has(self, line: Line) -> bool:
        """Whether the line is answered already."""
        entry = self._found.entries.get(line.index)
        if entry is None or entry.failed:
            return False
        self._check(line.index, line.digest)
        return True

    def add(self, line: Line, record: Mapping[str, Any]) -> None:
        """Append a prompt's outcome.  OSError names the file."""
        whole = {"index": line.index, **record, "input": line.digest, "settings": self._settings}
        text = json.dumps(json_ready(whole), ensure_ascii=False, allow_nan=False) + "\n"
        data = text.encode("utf-8", "replace")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise
        start = self._found.end
        self._found.add(line.index, Entry(start, start + len(data), line.digest, "error" in record))

    def finish(self) -> None:
        """Put the lines in the order of their prompts, one for each.  The file is replaced by a whole one."""
        if not self.ordinary or self._found.in_order:
            return
        with (
            open(self._handle, "rb", closefd=False) as file,
            replacing(self.path) as temporary,
            temporary.open("wb") as ordered,
        ):
            os.chmod(temporary, stat.S_IMODE(os.fstat(self._handle).st_mode))
            for _, entry in sorted(self._found.entries.items()):
                file.seek(entry.start)
                ordered.write(file.read(entry.end - entry.start))


@contextlib.contextmanager
def opened(path: Path, settings: Settings) -> Iterator[AnswerFile]:
    """The file of answers, held against other runs until the end.  FileError where it cannot be written, is another
    run's, or holds anything else.  A file that is new and stays empty vanishes."""
    path = Path(os.path.realpath(path)) if path.is_file() else path  # what a link points to is what is replaced
    handle, created = _open(path)
    try:
        _hold(handle, path)
        yield _continued(path, handle, settings)
    finally:
        try:
            if created and os.fstat(handle).st_size == 0:
                path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _open(path: Path) -> tuple[int, bool]:
    """A handle that appends, and whether the file is new."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        try:
            return os.open(path, flags | os.O_EXCL, 0o666), True
        except FileExistsError:
            return os.open(path, flags, 0o666), False
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FileError(f"--output {path}: {getattr(error, 'strerror', None) or error}.") from error


def _hold(handle: int, path: Path) -> None:
    """The system drops the lock with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows: a lock there would also stop this process from reading
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"--output {path}: another run is writing into it."
        raise FileError(message, "Wait for it, or choose another --output.") from error
    except OSError:  # a file system without locks
        return


def _continued(path: Path, handle: int, settings: Settings) -> AnswerFile:
    """With what the file holds; a line that a kill left unfinished is cut off."""
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        return AnswerFile(path, handle, Found({}), settings)
    with open(handle, "rb", closefd=False) as file:
        file.seek(0)
        found = scan(file, path, settings)
    if found.end < os.fstat(handle).st_size:
        os.ftruncate(handle, found.end)
    return AnswerFile(path, handle, found, settings)
