"""Logits of checkpoints in vLLM's speculators.  Runs in the Python that has it, without eagle3.

    .build/serve-venv/bin/python tests/peer/speculators_logits.py FOLDER

FOLDER holds

    jobs.json            name -> options of speculators' converter; checkpoint and result are named alike
    NAME/                the checkpoint, config.json and model.safetensors
    verifier/            the target in the same two files, for embeddings and vocabulary
    inputs.safetensors   tokens int64 [rows], hidden float32 [rows, 3 * Ht], aligned as in training: row p has the
                         states of position p and the token of position p + 1

and gets NAME.safetensors with `logits`, float32 [steps, rows, Vd], and remarks.json, name -> the converter's warnings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from loguru import logger  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from speculators.convert.entrypoints import convert_model  # type: ignore[import-not-found]
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # type: ignore[import-not-found]
from speculators.utils.loading import load_model_layers  # type: ignore[import-not-found]

STEPS = 4


def main() -> None:
    folder = Path(sys.argv[1])
    inputs = load_file(folder / "inputs.safetensors")
    remarks = {}
    for name, options in json.loads((folder / "jobs.json").read_text(encoding="utf-8")).items():
        remarks[name] = convert(folder, name, options)
        model = load(folder, name)
        save_file({"logits": logits(model, inputs)}, folder / f"{name}.safetensors")
    (folder / "remarks.json").write_text(json.dumps(remarks), encoding="utf-8")


def convert(folder: Path, name: str, options: dict[str, Any]) -> list[str]:
    """The checkpoint in speculators' own format, under converted/; returns the warnings."""
    warnings: list[str] = []
    logger.remove()
    sink = logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    output = folder / "converted" / name
    convert_model(str(folder / name), str(folder / "verifier"), "eagle3", str(output), **options)
    logger.remove(sink)
    return warnings


def load(folder: Path, name: str) -> Any:
    """The converted checkpoint as the module that speculators trains, with attention that a CPU has.

    Set by hand is what speculators 0.9.0 loses: the embeddings, which it reads from the verifier only if it finds NaN
    in them, where transformers has left whatever the memory held; and the norms before fc, which its converter drops.
    """
    path = folder / "converted" / name
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(path, config=config, dtype=torch.float32).eval()
    lost = load_model_layers(["embed_tokens.weight"], str(folder / "verifier"))
    stored = load_file(folder / name / "model.safetensors")
    lost |= {key: value for key, value in stored.items() if key.startswith(("input_norm.", "fc_norm."))}
    unknown = model.load_state_dict(lost, strict=False).unexpected_keys
    if unknown:
        sys.exit(f"{name}: speculators has no {unknown}")
    return model


@torch.no_grad()
def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the head gives at every step of training-time test; forward itself returns tokens only."""
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0].float()))
    tokens, hidden = inputs["tokens"][None], inputs["hidden"][None]
    model(hidden_states=hidden, input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=STEPS)
    hook.remove()
    return torch.stack(seen)


if __name__ == "__main__":
    main()
