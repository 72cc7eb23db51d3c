"""Loading a converted file once in llama.cpp, in a process of its own: llama.cpp aborts on some files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..confined import command
from ..errors import Eagle3Error, FileError


def check_loads(path: Path) -> None:
    """FileError with llama.cpp's reason unless it loads the file."""
    done = subprocess.run(
        command(__name__, str(path)),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise FileError(
            f"llama.cpp does not load the converted file: {lines[-1] if lines else f'exit code {done.returncode}'}",
            "Nothing was kept. Is the target's GGUF sound? Otherwise please report this.",
        )


def load(path: Path) -> None:
    """Load keys, tensor table and vocabulary; the weights stay on the disk, they were compared before."""
    from ..llama import Model

    Model(path, [], 0, weights=False).close()


if __name__ == "__main__":
    try:
        load(Path(sys.argv[1]))
    except Eagle3Error as error:
        sys.exit(error.message)
