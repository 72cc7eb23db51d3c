"""Whether llama.cpp loads a GGUF file.

    .venv/bin/python tests/peer/loading.py FILE...      # prints true or false for each

Each file is tried in a forked child of a fresh process, because some files abort whoever loads them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def loadable(files: Iterable[Path]) -> dict[Path, bool]:
    """File -> whether llama.cpp's loader accepts it."""
    files = list(files)
    command = [sys.executable, __file__, *map(str, files)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return dict(zip(files, map(json.loads, printed.split()), strict=True))


def main() -> None:
    os.environ["GGML_NO_BACKTRACE"] = "1"  # read when the library is loaded; an abort would print to stdout
    import llama_cpp

    llama_cpp.llama_backend_init()
    for file in sys.argv[1:]:
        print(json.dumps(_loads(llama_cpp, file)), flush=True)


def _loads(llama_cpp: Any, file: str) -> bool:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if llama_cpp.llama_model_load_from_file(os.fsencode(file), llama_cpp.llama_model_default_params()):
            code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
