"""A target whose every layer is recurrent, in a llama.cpp that cannot take its state back."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from engines import PROMPT, answer, running
from test_targets import normal, write

from eagle3_cli.errors import FileError

pytestmark = pytest.mark.usefixtures("one_thread")


def mamba(path: Path) -> Path:
    """Recurrent layers only."""
    width, inner, state, rank = 64, 128, 8, 4
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (tiny.VOCAB, width), "output_norm.weight": (width,)}
    for i in range(tiny.TARGET.layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (width,),
            f"blk.{i}.ssm_in.weight": (2 * inner, width),
            f"blk.{i}.ssm_conv1d.weight": (inner, 4),
            f"blk.{i}.ssm_conv1d.bias": (inner,),
            f"blk.{i}.ssm_x.weight": (rank + 2 * state, inner),
            f"blk.{i}.ssm_dt.weight": (inner, rank),
            f"blk.{i}.ssm_dt.bias": (inner,),
            f"blk.{i}.ssm_a": (inner, state),
            f"blk.{i}.ssm_d": (inner,),
            f"blk.{i}.ssm_out.weight": (width, inner),
        }
    keys = {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "feed_forward_length": 0,
    }
    return write(path, "mamba", keys, normal(1, shapes))


def test_it_is_refused_with_a_drafter_and_decodes_plainly_without_one(tmp_path):
    path = mamba(tmp_path / "target.gguf")
    drafter = tiny.write_drafter(tmp_path / "draft.gguf").path
    match = r"target.gguf: .* has recurrent layers, whose state cannot drop rejected tokens"
    with pytest.raises(FileError, match=match) as caught, running(path, drafter, (4, 1, 4)):
        pass
    assert caught.value.hint.startswith("Use --no-draft")
    with running(path, None) as engine:
        first = answer(engine)
        assert answer(engine) == first
        assert engine.statistics.cached_tokens == 0
        assert answer(engine, prompt=[*PROMPT, *first, 5]) != first
        assert engine.statistics.cached_tokens == len(PROMPT) + len(first) - 1
