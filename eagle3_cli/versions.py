"""What a bug report needs to know about this installation."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from . import __version__

PACKAGES = ("llama-cpp-python", "gguf", "numpy", "click")


def versions() -> dict[str, str]:
    """Name -> version, without loading llama.cpp."""
    found = {"eagle3": __version__, "python": platform.python_version(), "platform": platform.platform()}
    return {**found, **{package: _version(package) for package in PACKAGES}}


def bug_report() -> dict[str, str]:
    """The same, with the system, the machine, llama.cpp's build and the files in use."""
    from . import config, machine
    from .folders import cache_folder

    in_use = config.config_file()
    return {
        **versions(),
        "system": machine.system(),
        "processor": machine.processor(),
        "cores": f"{machine.allowed_cores()} of {os.cpu_count() or 1} logical",
        "memory": machine.in_words(machine.memory()),
        **_llama(),
        "config": str(in_use) if in_use else f"none ({config.default_file()} is not there)",
        "cache": str(cache_folder()),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _llama() -> dict[str, str]:
    """A broken installation is just what `--version` is run for, so its reason is the answer."""
    try:
        from .devices import backends, build
        from .llama import system_info

        return {"llama.cpp": system_info().strip(), "build": build(), "backends": ", ".join(backends())}
    except Exception as error:
        return {"llama.cpp": f"cannot be loaded ({type(error).__name__}: {error})"}
