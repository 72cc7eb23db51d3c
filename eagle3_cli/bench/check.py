"""Is the answer with a drafter the answer without?  Token by token, with the logit gap where they part.

With the same logits both are equal.  llama.cpp's kernels for one row and for several rows round differently, so two
tokens whose logits nearly tie can change places; then both answers are legitimate, and the gap is tiny.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import Engine
from ..settings import Limits, SamplingSettings, TreeShape
from .prompts import Prompt
from .run import Contenders


@dataclass(frozen=True)
class Difference:
    """Where a greedy answer first differs from the plain one.

    contender  "auto" or a fixed tree
    task       of the prompt
    prompt     its number in the run, from 0
    position   index of the token in the answer
    gap        logit of plain's token minus logit of the other, as plain decoding computes them
    """

    contender: str
    task: str
    prompt: int
    position: int
    plain: int
    drafted: int
    gap: float


@dataclass(frozen=True)
class CheckResult:
    answers: int
    differences: tuple[Difference, ...]

    @property
    def match_rate(self) -> float:
        return 1.0 - len(self.differences) / self.answers

    @property
    def largest_gap(self) -> float:
        return max((d.gap for d in self.differences), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "match_rate": self.match_rate, "largest_gap": self.largest_gap}


def check(
    contenders: Contenders, prompts: Sequence[Prompt], shapes: Sequence[TreeShape], max_tokens: int
) -> CheckResult:
    """Greedy answers of every shape, and of trees that a budget chooses, against plain decoding, prompt by prompt."""
    engine, plain = contenders.engine, contenders.plain
    differences = []
    for number, asked in enumerate(prompts):
        prompt = engine.render([{"role": "user", "content": asked.text}])
        expected = _greedy(plain, prompt, max_tokens)
        for shape in (None, *shapes):
            if shape:
                engine.decoder.shape = shape
            got = _greedy(engine if shape else contenders.auto, prompt, max_tokens)
            if got != expected:
                at = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
                gap = plain.logit_gap([*prompt, *expected[:at]], expected[at], got[at])
                where = (shape.name if shape else "auto", asked.task, number, at)
                differences.append(Difference(*where, expected[at], got[at], gap))
    return CheckResult(len(prompts) * (1 + len(shapes)), tuple(differences))


def _greedy(engine: Engine, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Exactly max_tokens greedy tokens from empty caches, so that all compute the prompt in the same batches; the end
    token counts as any other."""
    engine.decoder.truncate(0)
    limits = Limits(max_tokens, ignore_eos=True)
    pieces = engine.stream(prompt, SamplingSettings(temperature=0.0, seed=0), limits)
    return [piece.token for piece in pieces if piece.token is not None]
