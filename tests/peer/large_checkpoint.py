"""Write the checkpoint and the target that speed.py converts.  A process of its own, so that speed.py stays small.

.venv/bin/python tests/peer/large_checkpoint.py FOLDER [--small]
"""

from __future__ import annotations

import sys
from pathlib import Path

from drafters import Drafter, write_checkpoint, write_target

# The shape of the published drafters for Llama 3.1 8B, with embeddings of its own
LARGE = Drafter(
    hidden=4096, target_width=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, draft_vocab=32000,
    embeddings=True,
)  # fmt: skip
SMALL = Drafter(hidden=256, target_width=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=2048, embeddings=True)


def main() -> None:
    folder, drafter = Path(sys.argv[1]), SMALL if "--small" in sys.argv[2:] else LARGE
    write_checkpoint(folder / "drafter", drafter.tensors(), drafter.config())
    write_target(folder / "target", drafter)


if __name__ == "__main__":
    main()
