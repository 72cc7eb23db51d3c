"""The output folder of a run: who may write into it, which stages are done, and the state of the training loop.

    run.json            the settings of the run; every resume is compared with them
    samples/            conversations as tokens, in parts
    shards/, unseen/    the target's states, see shards.py
    vocabulary.safetensors   draft vocabulary and scale of the features
    states/             the training loop's states, the newest two
    metrics.jsonl       one line per log step and per evaluation
    checkpoint/         the drafter in SpecForge's layout
    drafter.gguf        the same for llama.cpp
    report.html, result.json   written last

Every file appears complete or not at all.  Nothing is read with pickle.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..convert.json_files import read_json
from ..convert.output import replacing
from ..errors import FileError, OptionError
from .samples import Sample
from .settings import TrainSettings, flag

if TYPE_CHECKING:
    import torch

FORMAT = 1
RUN, RESULT, METRICS = "run.json", "result.json", "metrics.jsonl"
VOCABULARY = "vocabulary.safetensors"  # of a run: d2t, absolute ids, and the features' scale
_OURS = (RUN, RESULT, METRICS, "samples", "shards", "unseen", "unseen_samples", VOCABULARY, "states",
         "checkpoint", "drafter.gguf", "report.html")  # fmt: skip
_KEPT = 2  # states
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a file in the folder that is a link is not written through


def write_json(path: Path, value: Any) -> None:
    """value as the whole content of a file, complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


# ---- the folder -----------------------------------------------------------------------------------------


def check_folder(settings: TrainSettings, inputs: Mapping[str, Any]) -> bool:
    """Whether the output folder holds a run that these settings continue; nothing is changed.

    inputs  what else the run depends on: digests of the target and the data
    FileError for a folder that holds something else, OptionError for a run with other settings.
    """
    folder = settings.output
    if not folder.exists() or (folder.is_dir() and not any(p.name != ".lock" for p in folder.iterdir())):
        return False
    if not folder.is_dir():
        raise FileError(f"{folder}: expected a folder, got a file.", "Give --output another name.")
    if not (folder / RUN).is_file():
        raise FileError(
            f"{folder}: expected an empty folder or a run of eagle3 train, got other files.",
            "Give --output a new name.",
        )
    if settings.force:
        return False
    for name in _OURS:
        if (folder / name).is_symlink():
            raise FileError(
                f"{folder / name}: expected a part of the run itself, got a symbolic link: eagle3 train writes there.",
                "Put in its place what it points to, or give --force to start over.",
            )
    stored = read_json(folder / RUN)
    if stored.get("format") != FORMAT:
        raise FileError(
            f"{folder / RUN}: expected format {FORMAT}, got {stored.get('format')}.",
            "Continue with the eagle3 that started this run, or give --force to start over.",
        )
    _compare(folder, stored, {**settings.fixed(), **inputs})
    return True


def _compare(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    before = stored.get("settings", {})
    names = [name for name in wanted if before.get(name) != json.loads(json.dumps(wanted[name]))]
    if not names:
        return
    told = "; ".join(_difference(name, before.get(name), wanted[name]) for name in names[:4])
    more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
    raise OptionError(
        f"{folder}: holds a run with other settings: {told}{more}.",
        "Continue it with its own settings, choose another --output, or give --force to start over.",
    )


def _difference(name: str, before: Any, now: Any) -> str:
    """Of a setting both values; of a digest whose it is."""
    if name in _DIGESTS:
        return f"{_DIGESTS[name]} has changed"
    return f"{flag(name)} was {before}, is {now}"


_DIGESTS = {
    "data_sha256": "the data",
    "target_file": "the target",
    "start_sha256": "the checkpoint to start from",
    "training_data": "the data",
}


@contextlib.contextmanager
def opened(settings: TrainSettings, inputs: Mapping[str, Any]) -> Iterator[Path]:
    """The output folder, made if need be and held against other runs until the end; a dead run holds nothing.

    FileError while another run has it; otherwise as `check_folder`.
    """
    check_folder(settings, inputs)
    folder = settings.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | _NO_LINK, 0o666)
    except OSError as error:
        raise FileError(f"{folder}: cannot be written: {error.strerror or error}.") from error
    try:
        _lock(handle, folder)
        if not check_folder(settings, inputs):  # again: another run may have started and ended in between
            for name in _OURS:
                _remove(folder / name)
            write_json(folder / RUN, {"format": FORMAT, "settings": {**settings.fixed(), **inputs}})
        yield folder
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    """The system drops the lock with the process, however it ends."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        hint = "Wait for it, or choose another --output."
        raise FileError(f"{folder}: another run is writing into it.", hint) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- conversations as tokens ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Samples, and what they come from.

    conversations  how many, those without a sample included
    seen           user turns that the target wrote itself
    left_out       reason -> how many
    """

    samples: Sequence[Sample]
    conversations: int
    seen: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


class SampleStore:
    """Samples on disk, in parts, so that a resumed run has those that were written.

    samples, conversations, seen, left_out   as of `Part`, of all parts together
    complete                                 nothing more comes
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.samples: list[Sample] = []
        self.conversations, self.seen = 0, list[str]()
        self.left_out: Counter[str] = Counter()
        self._parts = len(list(folder.glob("part-*.safetensors")))
        for part in range(self._parts):
            self._take(_read_part(self._path(part)))
        self.complete = (folder / "complete.json").is_file()

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.safetensors"

    def _take(self, part: Part) -> None:
        self.samples += part.samples
        self.conversations += part.conversations
        self.seen += part.seen
        self.left_out.update(part.left_out)

    def add(self, part: Part) -> None:
        """One more part, on disk when this returns."""
        from safetensors.numpy import save

        facts = {"conversations": part.conversations, "seen": list(part.seen), "left_out": dict(part.left_out)}
        arrays: dict[str, Any] = {
            "tokens": np.concatenate([np.zeros(0), *(s.tokens for s in part.samples)]).astype(np.int32),
            "answer": np.concatenate([np.zeros(0), *(s.answer for s in part.samples)]).astype(np.uint8),
            "starts": np.cumsum([0, *map(len, part.samples)]).astype(np.int64),
        }
        with replacing(self._path(self._parts)) as temporary:
            temporary.write_bytes(save(arrays, {"facts": json.dumps(facts)}))
        self._parts += 1
        self._take(part)

    def finish(self) -> None:
        """Nothing more comes."""
        write_json(self.folder / "complete.json", {"samples": len(self.samples)})
        self.complete = True


def _read_part(path: Path) -> Part:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            starts, tokens, answer = (file.get_tensor(name) for name in ("starts", "tokens", "answer"))
            facts = json.loads(file.metadata()["facts"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: expected conversations as tokens: {error}.", "Give --force to start over.") from error
    samples = [Sample(tokens[a:b], answer[a:b].astype(bool)) for a, b in itertools.pairwise(starts)]
    return Part(samples, **facts)


# ---- the training loop's state --------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopState:
    """Everything that the next optimiser step depends on.

    tensors   "model.<name>", "optimiser.<name>.<field>", "rng": the CPU generator's state
    step      optimiser steps done; the next batch follows from it, the seed and the lengths
    seconds   of training so far
    tokens    seen so far
    """

    tensors: dict[str, torch.Tensor]
    step: int
    seconds: float
    tokens: int


def state_path(folder: Path, step: int) -> Path:
    return folder / f"state-{step:09d}.safetensors"


def save_state(folder: Path, state: LoopState) -> Path:
    """Write a state beside the older ones, then remove all but the newest two.  A kill leaves the older ones usable."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    _sweep(folder)
    path = state_path(folder, state.step)
    unfinished = folder / f".{path.name}"
    facts = {"format": FORMAT, "step": state.step, "seconds": state.seconds, "tokens": state.tokens}
    try:
        save_file(state.tensors, unfinished, metadata={"state": json.dumps(facts)})
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:  # the latter for a disk that is full, too
        raise FileError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
    for old in _states(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def load_state(folder: Path) -> LoopState | None:
    """The newest state, on the CPU; None where there is none.  FileError for one that cannot be read."""
    from safetensors import SafetensorError, safe_open

    found = _states(folder)
    if not found:
        return None
    path = found[-1]
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return LoopState(tensors, int(facts["step"]), float(facts["seconds"]), int(facts["tokens"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{path}: expected a whole state of eagle3 train: {error}.", "Delete this file: the one before it is used."
        ) from error


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("state-*.safetensors")) if folder.is_dir() else []


def _sweep(folder: Path) -> None:
    """What a killed save left."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            path.unlink(missing_ok=True)


# ---- metrics.jsonl --------------------------------------------------------------------------------------


def append_metrics(path: Path, line: Mapping[str, Any]) -> None:
    try:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | _NO_LINK, 0o666)
        with open(handle, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}.") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines in order; a last line that a kill cut short is left out."""
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps that a resume from `step` does again."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
