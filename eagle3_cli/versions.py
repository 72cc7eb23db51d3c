"""What a bug report needs to know about this installation."""

from __future__ import annotations

import platform
from importlib import metadata

from . import __version__

PACKAGES = ("llama-cpp-python", "gguf", "numpy", "click")


def versions(system_info: bool = False) -> dict[str, str]:
    """Name -> version.  `system_info` adds llama.cpp's own line, for which the library must be loaded."""
    found = {"eagle3": __version__, "python": platform.python_version(), "platform": platform.platform()}
    found.update({package: _version(package) for package in PACKAGES})
    if system_info:
        found["llama.cpp"] = _system_info()
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _system_info() -> str:
    """A broken installation is just what `--version` is run for, so its reason is the answer."""
    try:
        from .llama import system_info

        return system_info().strip()
    except Exception as error:
        return f"cannot be loaded ({type(error).__name__}: {error})"
