"""The built-in prompts, written for this purpose; none shares its wording with any training set of ours."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import FileError

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


def load_prompts(path: Path | None) -> tuple[str, ...]:
    """The built-in prompts, or those of a JSONL file with {"prompt": ...} lines.  FileError names a bad line."""
    if path is None:
        return PROMPTS
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read as UTF-8 text: {error}.") from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise FileError(f"{path}: expected at least one prompt, got none.")
    return tuple(prompts)


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FileError(f"{path}:{number}: expected a JSON object, got {line[:40]!r}.") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise FileError(f'{path}:{number}: expected {{"prompt": "..."}}, got {line[:40]!r}.')
    return prompt
