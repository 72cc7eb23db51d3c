"""The built-in prompts, written for this purpose, by task; none shares its wording with any training set of ours."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import FileError, InputError, shown
from ..prompt import clean, read_text
from ..settings import check_name

PROMPTS: tuple[str, ...] = (
    "Explain to a ten-year-old why the sea is salty but rivers are not.",
    "My bicycle squeaks whenever I pedal uphill. What could be wrong, and how do I find out?",
    "Write a Python function that returns the second largest number in a list, and explain how it works.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show each step.",
    "Rewrite this politely: 'Your report is late again and the numbers are wrong.'",
    "List seven things to pack for a weekend in the mountains in October, with a reason for each.",
    "Summarise in two sentences: Lighthouses once relied on keepers who lit oil lamps every evening, wound the"
    " clockwork that turned the lens, and logged passing ships. Electric light and automation ended the profession"
    " within a few decades, and most towers now stand empty or serve as museums.",
    "Write a short dialogue between a baker and a customer who wants bread without salt.",
)
MIXED, ALL = "mixed", "all"
NAMES = ("chat", "code", "mathematics", "summarising", "rewriting")  # what ALL stands for
FOLDER = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class Prompt:
    """One user turn.  task: what results are grouped by."""

    task: str
    text: str


def load_prompts(path: Path | None, tasks: Sequence[str] = (MIXED,)) -> tuple[Prompt, ...]:
    """The built-in prompts of these tasks, or those of a JSONL file with {"prompt": ..., "task": ...} lines.

    The task of a line that names none is the file's stem.  A task that is asked for twice comes once.

    OptionError for an unknown task; FileError names a bad line.
    """
    if path is not None:
        return _read(path)
    for task in tasks:
        check_name("--task", task, (*TASKS, ALL))
    names = dict.fromkeys(name for task in tasks for name in (NAMES if task == ALL else (task,)))
    return tuple(Prompt(name, text) for name in names for text in TASKS[name])


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 in hex of json.dumps of the list of [task, text] of all prompts, in order."""
    return hashlib.sha256(json.dumps([[prompt.task, prompt.text] for prompt in prompts]).encode()).hexdigest()


def _read(path: Path) -> tuple[Prompt, ...]:
    lines = read_text(str(path), "--prompts").split("\n")
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise FileError(f"{path}: expected at least one prompt, got none.")
    return tuple(prompts)


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}:{number}: expected a JSON object, got {shown(line)}.") from error
    fields = record if isinstance(record, dict) else {}
    if "messages" in fields:
        raise FileError(
            f'{path}:{number}: expected {{"prompt": "..."}}, got a conversation ("messages").',
            "Every prompt is one user turn: give its text alone.",
        )
    prompt, task = fields.get("prompt"), fields.get("task", path.stem)
    if not isinstance(prompt, str) or not prompt:
        raise FileError(f'{path}:{number}: expected {{"prompt": "..."}}, got {shown(line)}.')
    if not isinstance(task, str) or not task:
        raise FileError(f"{path}:{number}: task: expected a name, got {task!r}.")
    try:
        return Prompt(task, clean(prompt, f"{path}:{number}"))
    except InputError as error:
        raise FileError(error.message, error.hint) from error


TASKS: Mapping[str, tuple[str, ...]] = {
    MIXED: PROMPTS,
    **{name: tuple(prompt.text for prompt in _read(FOLDER / f"{name}.jsonl")) for name in NAMES},
}
