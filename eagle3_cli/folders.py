"""Where this user's files are, configuration and cache, as the system has places for them; and how they are read.

For a user without a home, as in some containers, both are below the null device, where nothing can be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "eagle3"
LARGEST = 1 << 20  # bytes of a file of these that is read at all


def config_folder() -> Path:
    """Of config.toml and models.json."""
    try:
        return _system_config() / NAME
    except RuntimeError:
        return Path(os.devnull) / NAME


def cache_folder() -> Path:
    """Of what can be made again: $EAGLE3_CACHE, or the place that the system has for caches."""
    chosen = os.environ.get("EAGLE3_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return _system_cache() / NAME
    except RuntimeError:
        return Path(os.devnull)


def file_bytes(path: Path, most: int = LARGEST) -> bytes:
    """A small file's content.  OSError as `open` has it, ValueError where there is more.  Does not wait for the other
    end of a pipe."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        data = file.read(most + 1) or b""
    if len(data) > most:
        raise ValueError(f"expected at most {most >> 20} MiB, got more")
    return data


def _system_config() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _system_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
