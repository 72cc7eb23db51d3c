"""Running a model with and without a drafter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from architectures import Model
from scripted import Propose, ScriptedDrafter, random_trees

from eagle3_cli.engine import Engine, load_engine
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings

GREEDY = SamplingSettings(temperature=0.0)
SAMPLED = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, tiny.END_OF_TEXT, 41)]
SHAPE = (4, 4, 12)


def drafter_for(model: Model, aux: tuple[int, ...] | None = None) -> Path:
    """A random drafter for the model's width that reads these layers, or those of the model."""
    aux = aux or model.aux
    path = model.path.with_name(f"draft-{'-'.join(map(str, aux))}.gguf")
    if not path.exists():
        config = replace(tiny.DRAFTER, width=32, heads=2, kv_heads=1, ffn=48, target_width=model.width, aux_layers=aux)
        tiny.write_drafter(path, config)
    return path


def samplings(model: Model) -> list[SamplingSettings]:
    """Greedy, and at temperature 1 where batches of all sizes give the same logits up to the noise of float32.

    A GELU in half precision jumps by 1e-3 now and then, and an 8-bit product may choose another expert: a draw that
    falls between two tokens then falls on the other side.
    """
    exact = model.architecture.tolerance < 1e-3 and not model.architecture.quantised
    return [GREEDY, SAMPLED] if exact else [GREEDY]


@contextmanager
def running(target: Path, draft: Path | None, shape: tuple[int, int, int] = SHAPE, **runtime: Any) -> Iterator[Engine]:
    """An engine of one thread with a float32 cache and a fixed tree, which computes prompts in batches of 16."""
    depth, width, nodes = shape
    pair = PairSettings(target, draft, None if draft else "--no-draft", depth, width, nodes)
    settings = {**tiny.EXACT, "ctx_size": 256, "batch": 16, "threads": 1, **runtime}
    with load_engine(pair, RuntimeSettings(**settings)) as engine:
        yield engine


def answer(
    engine: Engine, sampling: SamplingSettings = GREEDY, prompt: list[int] = PROMPT, most: int = 24
) -> list[int]:
    limits = Limits(max_tokens=most, ignore_eos=True)
    return [piece.token for piece in engine.stream(prompt, sampling, limits) if piece.token is not None]


def script(engine: Engine, propose: Propose) -> None:
    """Empty the caches and let another drafter fill them."""
    engine.decoder.truncate(0)
    engine.decoder.drafter = ScriptedDrafter(propose)


def guess(engine: Engine, text: list[int], seed: int) -> None:
    """Let a drafter propose that knows the text and is right for a random number of tokens."""
    script(engine, random_trees(text, seed))


def close(got: Any, wanted: Any, model: Model) -> None:
    """Equal within the model's tolerance."""
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=model.architecture.tolerance * np.sqrt(np.mean(wanted**2)))
