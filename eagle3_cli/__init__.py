"""EAGLE-3 speculative decoding for GGUF models: the same answer, sooner.

    from eagle3_cli import load

    with load("llama.gguf", "llama-eagle3.gguf") as engine:
        for piece in engine.stream("Why is the sky blue?"):
            print(piece.text, end="", flush=True)

docs/python.md explains the Python API.  What is named here is imported when it is used, so that `import eagle3_cli` and
`eagle3 --help` load no model code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Answer, Pair, load
    from .engine.types import Piece, Statistics
    from .settings import Lora

__version__ = "0.1.0"
__all__ = ["Answer", "Lora", "Pair", "Piece", "Statistics", "__version__", "load"]

_HOMES = {"Answer": "api", "Lora": "settings", "Pair": "api", "Piece": "engine.types", "Statistics": "engine.types",
          "load": "api"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
