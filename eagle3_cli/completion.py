"""What a shell offers behind Tab, and the scripts that ask for it.

click's scripts and classes, with one thing added: an item of the type "path" is a file or folder that the shell should
treat as one, so that a folder goes on and a blank is quoted.  bash takes our list of GGUF files, zsh makes its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

VARIABLE = "_EAGLE3_COMPLETE"  # set by the scripts
PATH = "path"


class Bash(BashComplete):
    source_template = BashComplete.source_template.replace(
        "        elif [[ $type == 'plain' ]]; then\n",
        "        elif [[ $type == 'path' ]]; then\n"
        "            compopt -o filenames\n"
        '            COMPREPLY+=("$value")\n'
        "        elif [[ $type == 'plain' ]]; then\n",
    )


class Zsh(ZshComplete):
    source_template = ZshComplete.source_template.replace(
        '        elif [[ "$type" == "dir" ]]; then\n',
        '        elif [[ "$type" == "path" ]]; then\n'
        '            _files -g "*.gguf"\n'
        '        elif [[ "$type" == "dir" ]]; then\n',
    )

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        items = super().get_completions(args, incomplete)
        ours = [item for item in items if item.type != PATH]
        return [*ours, CompletionItem(incomplete, type=PATH)] if len(ours) < len(items) else ours


class Fish(FishComplete):
    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        items = super().get_completions(args, incomplete)
        return [CompletionItem(item.value, help=item.help) if item.type == PATH else item for item in items]


SHELLS: dict[str, type[ShellComplete]] = {"bash": Bash, "zsh": Zsh, "fish": Fish}


def register() -> None:
    """Let click use these classes."""
    for name, shell in SHELLS.items():
        add_completion_class(shell, name)


def of_value(metavar: str, incomplete: str, names: bool = False) -> list[CompletionItem[Any]]:
    """What a value can be, by what the help page calls it; empty where nothing is known.  names: it may be that of a
    registered model."""
    words = set(metavar.replace("|", " ").replace(":", " ").split())
    if "GGUF" in words:
        other = words - {"GGUF", "DIR", "SCALE"}
        return [*(models(incomplete) if names else ()), *_words(other, incomplete), *_ggufs(incomplete)]
    if words & {"FILE", "JSON", "JSONL", "SVG", "PROGRAM"}:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(incomplete, type="dir")] if "DIR" in words else []


def _words(words: set[str], incomplete: str) -> list[CompletionItem[Any]]:
    return [CompletionItem(word) for word in sorted(words) if word.startswith(incomplete)]


def models(incomplete: str) -> list[CompletionItem[Any]]:
    """Registered names; none where their file cannot be read: nobody wants an error behind Tab."""
    from .errors import Eagle3Error
    from .registry import read

    try:
        return [CompletionItem(n, help=m.target) for n, m in sorted(read().items()) if n.startswith(incomplete)]
    except Eagle3Error:
        return []


def _ggufs(incomplete: str) -> list[CompletionItem[Any]]:
    """GGUF files and folders that begin so, the folder in front as it was typed."""
    typed, name = os.path.split(incomplete)
    try:
        entries = sorted(Path(typed or ".").expanduser().iterdir())
        found = [e for e in entries if e.name.startswith(name) and (name.startswith(".") or not e.name.startswith("."))]
        wanted = [(e.name, e.is_dir()) for e in found if e.suffix.lower() == ".gguf" or e.is_dir()]
    except (OSError, RuntimeError):  # RuntimeError: no home
        return []
    return [CompletionItem(os.path.join(typed, n) + ("/" if folder else ""), type=PATH) for n, folder in wanted]
