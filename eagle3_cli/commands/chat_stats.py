"""`/stats` in a chat: the last answer in more words than the line behind it.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .answer import summary

if TYPE_CHECKING:
    from ..engine.types import Statistics


def report(statistics: Statistics, cells: int, turns: int) -> list[str]:
    """The lines.  statistics: of the last answer.  cells: tokens of the context.  turns: of the conversation."""
    s = statistics
    if not s.prompt_tokens:
        return ["no answer yet"]
    lines = [f"last answer: {summary(s)}"]
    if any(s.depth_tried):
        lines.append(f"accepted by depth: {_by_depth(s)}")
        lines.append(f"rounds by draft size: {', '.join(f'{size}: {s.sizes[size]}' for size in sorted(s.sizes))}")
    if s.drafted_from:
        lines.append(f"proposed by: {_by_source(s)}")
    if s.decode_s:
        parts = {"target": s.target_s, "drafter": s.drafter_s, "sampler": s.sampler_s, "other": s.other_s}
        shares = ", ".join(f"{name} {seconds / s.decode_s:.0%}" for name, seconds in parts.items())
        lines.append(f"time: {s.decode_s:.2f} s, {shares}")
    used = s.prompt_tokens + s.completion_tokens
    lines.append(f"context: {used} of {cells} tokens, {turns} turn{'' if turns == 1 else 's'}")
    return lines


def _by_depth(s: Statistics) -> str:
    depths = zip(s.depth_accepted, s.depth_tried, strict=True)
    return ", ".join(f"{d}: {a / t:.0%} of {t}" for d, (a, t) in enumerate(depths, 1) if t)


def _by_source(s: Statistics) -> str:
    from ..engine.types import SOURCES

    counts = ((name, s.drafted_from.get(source, 0), s.accepted_from.get(source, 0)) for source, name in SOURCES.items())
    return ", ".join(f"{name} {drafted} ({accepted} accepted)" for name, drafted, accepted in counts if drafted)
