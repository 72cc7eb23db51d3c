"""The decoding engine.  `load_engine` is its front door; `loop.py` is where to start reading."""

from __future__ import annotations

from .load import Engine, load_engine

__all__ = ["Engine", "load_engine"]
