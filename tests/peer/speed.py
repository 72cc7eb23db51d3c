"""Time and memory of `eagle3 convert` and of llama.cpp's own script on a drafter for an 8B model (1.9 GB of BF16).

    make peer-speed FOLDER=FOLDER
    .venv/bin/python tests/peer/speed.py FOLDER --python .venv-convert/bin/python --script SCRIPT

FOLDER is filled with up to 6 GB and emptied again.  Both convert the same checkpoint to the same --outtype, taking
turns, each in a fresh process; printed are medians (and the range) of --repeats runs:

    seconds   wall time of the whole process.  eagle3 also flushes its file to the disk, compares it with its source
              and has llama.cpp load it.
    peak      largest resident memory in MB, pages of mapped files included, of the process or of a child that it
              waited for, whichever is larger (ru_maxrss)
    private   of the process alone, without mapped files, sampled every 20 ms (RssAnon)

"above the interpreter" subtracts the peak of a Python that imports nothing.  Linux only.  Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).parent
STATUS = "import re; print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"


class Run(NamedTuple):
    """One conversion: wall seconds, and MB (1e6 bytes) of resident memory."""

    seconds: float
    peak: float
    private: float


def main() -> None:
    args = _arguments()
    drafter, target, output = args.folder / "drafter", args.folder / "target", args.folder / "output.gguf"
    args.folder.mkdir(parents=True, exist_ok=True)
    if any(args.folder.iterdir()):
        sys.exit(f"{args.folder}: expected an empty folder")
    try:
        make = [
            sys.executable,
            str(HERE / "large_checkpoint.py"),
            str(args.folder),
            *(["--small"] if args.small else []),
        ]
        subprocess.run(make, check=True)
        script = [str(args.python), str(args.script)]
        gguf = str(target / "target.gguf")
        _checked([*script, str(target), "--vocab-only", "--outfile", gguf, "--outtype", "f16"])
        common = ["--outtype", args.outtype]
        eagle3 = [str(Path(sys.executable).with_name("eagle3")), "convert", str(drafter), "--target", gguf, "--quiet"]
        peer = [*script, str(drafter), "--target-model-dir", str(target)]
        commands = {
            "eagle3": [*eagle3, "-o", str(output), *common],
            "script": [*peer, "--outfile", str(output), *common],
        }
        report(measure(commands, output, args.repeats), interpreter())
    finally:
        for made in (drafter, target):
            shutil.rmtree(made, ignore_errors=True)
        output.unlink(missing_ok=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty folder for the checkpoint and the output")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the script's environment")
    parser.add_argument("--script", type=Path, required=True, help="convert_hf_to_gguf.py")
    parser.add_argument("--outtype", default="f16", choices=("f32", "f16", "bf16", "q8_0"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny shape, only to see that this program works")
    return parser.parse_args()


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")


def measure(commands: dict[str, list[str]], output: Path, repeats: int) -> dict[str, list[Run]]:
    """Runs by name; every other round in reverse order, and each with nothing left to write from the one before."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for i in range(repeats):
        for name in list(commands)[:: -1 if i % 2 else 1]:
            output.unlink(missing_ok=True)
            os.sync()
            runs[name].append(run(commands[name]))
            print(f"{name} {i + 1} of {repeats}: {runs[name][-1].seconds:.2f} s", file=sys.stderr)
    return runs


def run(command: list[str]) -> Run:
    """Run a command to its end.

    This process must stay smaller than what it measures: ru_maxrss of a child starts with its parent's size.
    """
    with tempfile.TemporaryFile("w+") as log:
        private, start = 0, time.perf_counter()
        child = subprocess.Popen(command, stdout=log, stderr=log)
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            private = max(private, _private(child.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)  # already reaped
        if child.returncode:
            log.seek(0)
            sys.exit(f"exit code {child.returncode}: {' '.join(command)}\n{log.read()}")
    return Run(seconds, usage.ru_maxrss * 1024 / 1e6, private * 1024 / 1e6)


def _private(pid: int) -> int:
    """KiB of memory that is not backed by a file; 0 for a process that has just ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0


def interpreter() -> float:
    """Peak resident memory in MB of a Python that imports nothing, by its own account."""
    return (
        int(subprocess.run([sys.executable, "-c", STATUS], capture_output=True, text=True, check=True).stdout)
        * 1.024e-3
    )


def report(runs: dict[str, list[Run]], bare: float) -> None:
    """Medians with ranges, and the ratios of the medians."""
    print(f"{'':10}{'seconds':>24}{'peak MB':>24}{'private MB':>24}{'above the interpreter':>24}")
    for name, of_name in runs.items():
        columns = "".join(f"{_range([r[i] for r in of_name]):>24}" for i in range(3))
        print(f"{name:10}{columns}{median(r.peak for r in of_name) - bare:24.0f}")
    middle = {name: [median(column) for column in zip(*of_name, strict=True)] for name, of_name in runs.items()}
    ratios = [a / b for a, b in zip(middle["script"], middle["eagle3"], strict=True)]
    print(f"{'ratio':10}" + "".join(f"{ratio:24.2f}" for ratio in ratios))
    print(f"a Python that imports nothing: {bare:.0f} MB")


def _range(values: list[float]) -> str:
    digits = 2 if max(values) < 100 else 0
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
