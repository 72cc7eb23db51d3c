"""One case: a checkpoint for both converters, and what is expected of the two files they write.

agreeing_cases.py   the layouts of the published families: everything must be identical
choice_cases.py     differences by choice: both files mean the same, or one converter refuses what the other accepts
fault_cases.py      the script writes nothing, or a file that does not load or means something else
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drafters import Drafter
from stored_files import Tensor

OUTTYPES = ("f32", "f16", "bf16", "q8_0")

# Differences of every pair of files, by key: what kind (see gguf_difference.py) and why.
ALWAYS: dict[str, tuple[str, str]] = {
    "general.name": ("differs", "eagle3 names the target, the script the checkpoint's folder"),
    "general.size_label": ("only script", "for model lists; nothing reads it when a model runs"),
    "eagle3_cli.target_name": ("only eagle3", "for messages about a wrong pair"),
    "eagle3_cli.target_architecture": ("only eagle3", "for messages about a wrong pair"),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint and the expected outcome.

    about       the point of the case, one phrase; for a difference also what follows from it
    drafter     sizes; the target is made to fit them
    tokenizer   of the target: sentencepiece or bpe
    folder      eagle3 gets the target's Hugging Face folder, as the script does, instead of its GGUF
    file        model.safetensors, "parts" for three with an index, "bin" for pytorch_model.bin
    outtypes    to convert with
    differs     key or tensor -> expected kind of difference, beyond ALWAYS
    script_fails   part of the last line of the script's log when it must fail, otherwise empty
    refused     part of our error when we must refuse, otherwise empty
    loads       whether llama.cpp must load the script's file; ours must always load
    """

    name: str
    about: str
    drafter: Drafter
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    tokenizer: str = "sentencepiece"
    folder: bool = False
    file: str = "safetensors"
    outtypes: tuple[str, ...] = OUTTYPES
    differs: Mapping[str, str] = field(default_factory=dict)
    script_fails: str = ""
    refused: str = ""
    loads: bool = True

    def expected(self) -> dict[str, str]:
        """Every expected difference by key or tensor."""
        return {name: kind for name, (kind, _) in ALWAYS.items()} | dict(self.differs)
