"""A checkpoint of `eagle3 train` in vLLM's speculators: converted, loaded and run, it must give our logits.

Skipped where speculators is not installed (requirements-speculators.txt says how).
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from eagle3_cli.train.export import CheckpointFacts, write_checkpoint
from eagle3_cli.train.model import Drafter, DrafterShape

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".build/serve-venv/bin/python"
AUX = (2, 3, 4)
ROWS, STEPS = 11, 4
TARGET = tiny.target_weights()
WIDTH = tiny.TARGET.width
IDS = torch.arange(1, tiny.VOCAB, 3)
SHAPE = DrafterShape(WIDTH, WIDTH, 4, 2, 16, 96, tiny.VOCAB, len(IDS))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "rope_and_eps": {"rope_theta": 500000.0, "eps": 1e-3},
    "grouped": {"heads": 8, "kv_heads": 1, "head_dim": 8, "ffn": 40},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle_3_1": {"fc_norm": True, "norm_output": True},
}

pytestmark = pytest.mark.skipif(not PYTHON.is_file(), reason="speculators is not installed")


@dataclass(frozen=True)
class Peer:
    """What speculators made of the checkpoints: logits float32 [steps, rows, Vd] and the converter's warnings."""

    logits: dict[str, torch.Tensor]
    remarks: dict[str, list[str]]


def drafter(kind: str) -> Drafter:
    """A random one, its norms far from 1.  Seeded by its name."""
    torch.manual_seed(list(KINDS).index(kind))
    embedding, head = (torch.from_numpy(TARGET[f"{name}.weight"]) for name in ("token_embd", "output"))
    shape = replace(SHAPE, **KINDS[kind])
    scale = None if shape.normed_features else torch.rand(3 * WIDTH) + 0.5
    made = Drafter(shape, IDS, embedding, head[IDS], scale)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def batch() -> dict[str, torch.Tensor]:
    """One sample of ROWS + 1 random tokens and states; what only a loss needs is left out."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, tiny.VOCAB, (1, ROWS + 1), generator=draw)
    return {"tokens": tokens, "hidden": torch.randn(1, ROWS + 1, 3 * WIDTH, generator=draw)}


def write_verifier(folder: Path) -> None:
    """What speculators reads of a target: its sizes, embeddings, head and last norm."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tiny.VOCAB, "hidden_size": WIDTH,
        "num_hidden_layers": tiny.TARGET.layers, "num_attention_heads": tiny.TARGET.heads,
        "num_key_value_heads": tiny.TARGET.kv_heads, "head_dim": tiny.TARGET.head_dim,
        "intermediate_size": tiny.TARGET.ffn, "rms_norm_eps": tiny.TARGET.eps,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    names = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
    tensors = {f"{theirs}.weight": torch.from_numpy(TARGET[f"{ours}.weight"]) for theirs, ours in names.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """All kinds through one process of speculators."""
    folder = tmp_path_factory.mktemp("speculators")
    write_verifier(folder / "verifier")
    jobs = {}
    for kind in KINDS:
        made = drafter(kind)
        write_checkpoint(made, folder / kind, CheckpointFacts(AUX, 8192))
        # The converter takes both from its caller alone, not from the checkpoint's config.
        jobs[kind] = {
            "norm_before_residual": made.shape.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": list(AUX),
        }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    sample = batch()
    inputs = {"tokens": sample["tokens"][0, 1:].clone(), "hidden": sample["hidden"][0, :-1].clone()}
    save_file(inputs, folder / "inputs.safetensors")
    command = [str(PYTHON), str(HERE / "speculators_logits.py"), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    logits = {kind: load_file(folder / f"{kind}.safetensors")["logits"] for kind in KINDS}
    return Peer(logits, json.loads((folder / "remarks.json").read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_speculators_gives_our_logits_at_every_step(kind: str, peer: Peer) -> None:
    made = drafter(kind)
    with torch.no_grad():
        ours = torch.stack([made.logits(s)[0] for s in made.unroll(batch(), STEPS)])
    assert ours.shape == peer.logits[kind].shape == (STEPS, ROWS, len(IDS))
    for step in range(STEPS):  # the last rows of later steps read padding
        real = slice(0, ROWS - step)
        torch.testing.assert_close(ours[step, real], peer.logits[kind][step, real], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_converter_takes_every_tensor_but_norms_before_fc(kind: str, peer: Peer) -> None:
    left_out = [name for name in drafter(kind).state_dict() if name.startswith(("input_norm.", "fc_norm."))]
    assert peer.remarks[kind] == ([f"Unexpected keys in checkpoint: {left_out}"] if left_out else [])
