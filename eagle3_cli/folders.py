"""Where this user's files are: configuration and cache, as the system has places for them.

For a user without a home, as in some containers, both are below the null device, where nothing can be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "eagle3"


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
