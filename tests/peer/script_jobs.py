"""Run llama.cpp's convert_hf_to_gguf.py many times in one process.  Needs the environment of that script only.

    .venv-convert/bin/python tests/peer/script_jobs.py .build/convert/convert_hf_to_gguf.py jobs.json

jobs.json: a list of {"args": [...], "log": path, "pre_tokenizer": name or null}.  The script is imported once, and
each job runs its `main` in a forked child with those arguments, so a crash ends one job and no state is shared.
A job's exit code is appended to its log as the last line, "exit N".  A job {"pack": folder, "log": path} instead turns
a checkpoint's model.safetensors into pytorch_model.bin, which needs torch.

The script itself is unchanged.  Where pre_tokenizer is given, the one function is replaced that knows a byte-level BPE
tokenizer by a hash over its token ids: no small made-up vocabulary can have a hash that it knows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def load(script: Path) -> Any:
    """The script as a module, with the folder `conversion` beside it importable."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location("convert_hf_to_gguf", script)
    if spec is None or spec.loader is None:
        sys.exit(f"{script}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: Any, job: dict[str, Any]) -> None:
    """One job, in a child process that this function waits for."""
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        with Path(job["log"]).open("a", encoding="utf-8") as log:
            log.write(f"\nexit {os.waitstatus_to_exitcode(status)}\n")
        return
    code = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if "pack" in job:
            pack(Path(job["pack"]))
        else:
            convert(module, job)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def convert(module: Any, job: dict[str, Any]) -> None:
    """The script's main with the job's arguments."""
    if job["pre_tokenizer"]:
        sys.modules["conversion.base"].TextModel.get_vocab_base_pre = lambda *_: job["pre_tokenizer"]
    sys.argv = ["convert_hf_to_gguf.py", *job["args"]]
    module.main()


def pack(folder: Path) -> None:
    """Replace model.safetensors by pytorch_model.bin with the same tensors."""
    import torch
    from safetensors.torch import load_file

    source = folder / "model.safetensors"
    torch.save(load_file(source), folder / "pytorch_model.bin")
    source.unlink()


def main() -> None:
    script, jobs = map(Path, sys.argv[1:3])
    module = load(script.resolve())
    for job in json.loads(jobs.read_text(encoding="utf-8")):
        run(module, job)


if __name__ == "__main__":
    main()
