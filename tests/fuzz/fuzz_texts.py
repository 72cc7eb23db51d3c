"""Small files of the command line, for fuzz_files.py: what reads them, and sound ones.

Batches and their answers, conversations, registered models, the configuration file, the history of chat.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from eagle3_cli import config, registry
from eagle3_cli.batch import Defaults, id_of, read_lines, record_of, task_of
from eagle3_cli.batch_file import opened, scan
from eagle3_cli.cli import cli
from eagle3_cli.history import HistoryFile
from eagle3_cli.messages import read_messages
from eagle3_cli.settings import Limits, SamplingSettings

DEFAULTS = Defaults(SamplingSettings(), Limits(), "be brief")
ROOT = click.Context(cli, info_name="eagle3")


def read_batch(path: Path) -> bool:
    for line in read_lines(str(path)):
        record = record_of(line)
        id_of(record, line.where)
        for message in task_of(record, line.where, DEFAULTS).prompt:
            assert isinstance(message, dict)
            message["content"].encode()
    return True


def read_answers(path: Path) -> bool:
    with path.open("rb") as file:
        scan(file, path, {})
    with opened(path, {}) as answers:  # what `scan` takes can be continued and put in order
        answers.finish()
    return True


def read_conversation(path: Path) -> bool:
    for message in read_messages(str(path), "--messages"):
        message["content"].encode()
    return True


def read_registry(path: Path) -> bool:
    before, registry.registry_file = registry.registry_file, lambda: path
    try:
        for name, model in registry.read().items():
            registry.check_name(name)
            assert isinstance(model.missing, list)
    finally:
        registry.registry_file = before
    return True


def read_config(path: Path) -> bool:
    config.check(path, ROOT)
    return True


def read_history(path: Path) -> bool:
    for entry in HistoryFile(path).read():
        entry.encode()
    return True


# (file, what reads it, whether each of its lines is a document)
READERS = (
    ("batch.jsonl", read_batch, True),
    ("answers.jsonl", read_answers, True),
    ("session.json", read_conversation, False),
    ("models.json", read_registry, False),
    ("history", read_history, True),
)


def write(folder: Path) -> None:
    """A sound file of each kind."""
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "1"},
    ]
    batch = [
        {"prompt": "why?", "id": 3, "temperature": 0, "max_tokens": 5, "stop": ["\n"], "seed": 7},
        {"messages": turns, "id": "b", "logit_bias": {"5": -1.5, "7": None}, "ignore_eos": True},
        {"prompt": "1", "grammar": 'root ::= "a"', "system": None},
    ]
    (folder / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in batch))
    with opened(folder / "answers.jsonl", {}) as answers:
        for line in read_lines(str(folder / "batch.jsonl")):
            answers.add(line, {"text": "yes"} if line.index else {"error": "no room"})
    (folder / "session.json").write_text(json.dumps({"messages": [*turns[:2], {"role": "system", "content": "x"}]}))
    models = {"llama": {"target": "/m/llama.gguf", "draft": "/m/d.gguf"}, "b.1": {"target": "/m/b", "draft": None}}
    (folder / "models.json").write_text(json.dumps({"format": 1, "models": models}))
    (folder / "history").write_text("".join(json.dumps(text) + "\n" for text in ("hi", "a\nb", "\U0001f600")))
    (folder / "config.toml").write_text(
        'temp = 0.5\nstop = ["a", "\\n"]\nno-lookup = true\n[chat]\nsystem = "be brief"\noverflow = "drop"\n'
        '[train]\nlr = 1e-3\n[generate]\nmax-tokens = 20\nlogit-bias = ["5+1"]\n'
    )
