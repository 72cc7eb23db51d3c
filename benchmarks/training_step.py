"""Tokens per second of one training step, beside SpecForge and vLLM's speculators on the same machine.

    .venv/bin/python benchmarks/training_step.py
    .venv/bin/python benchmarks/training_step.py --python PYTHON --speculators --specforge CHECKOUT

PYTHON is an interpreter that has both, CHECKOUT the root of SpecForge's repository; README.md says how to make them.

A step is the target's distributions, forward, loss and backward over all steps of training-time test, without an
optimiser, in bfloat16 as each project trains on a GPU: eagle3 and speculators by autocast, SpecForge by its weights.
All get the same weights and batch.  Each works in a process of its own; the processes take turns, every other round in
reverse order, and the table gives medians.  README.md also says what each runs on a CPU in place of what it runs on a
GPU.  Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TextIO

from step_kinds import Shape, Step, eagle3_step, specforge_step, speculators_step

TOLERANCE = 0.02  # relative difference of the losses of step 0, which are computed in bfloat16

# --- processes ---------------------------------------------------------------------------------------------


def work(name: str, shape: Shape, checkout: str) -> None:
    """Answer every line of stdin by a step; lines of JSON on the true stdout, whatever a library prints on stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(shape.threads)
    makers: dict[str, Callable[[], Step]] = {
        "eagle3": lambda: eagle3_step(shape, False),
        "eagle3 compiled": lambda: eagle3_step(shape, True),
        "specforge": lambda: specforge_step(shape, checkout),
        "speculators": lambda: speculators_step(shape),
    }
    step = makers[name]()
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_mb": peak}), file=answers, flush=True)


class Worker:
    """A process that makes steps when asked."""

    def __init__(self, name: str, args: argparse.Namespace, shape: Shape, log: TextIO) -> None:
        own = name.startswith("eagle3")
        python = sys.executable if own else str(args.python)
        command = [python, __file__, "--worker", name, "--shape", json.dumps(asdict(shape))]
        environment = dict(os.environ)
        if args.same_allocator and not own:  # what keep_memory() sets for ours
            environment |= {
                "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_TOP_PAD_": str(2**28),
            }  # fmt: skip
        self.name, self.log = name, log
        self.process = subprocess.Popen(
            [*command, "--specforge", str(args.specforge or "")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )  # fmt: skip

    def step(self) -> dict[str, float]:
        """Seconds, loss of step 0 and peak resident memory in MB (1e6 bytes) so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            sys.exit(f"{self.name}: ended with code {self.process.returncode}\n{Path(self.log.name).read_text()}")
        made: dict[str, float] = json.loads(line)
        return made

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def measure(names: list[str], args: argparse.Namespace, shape: Shape) -> dict[str, list[dict[str, float]]]:
    """All timed steps by name, after `--warmup` steps each, which compile."""
    import tempfile

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for i, name in enumerate(names):
            workers[name] = Worker(name, args, shape, (folder / f"{i}.log").open("w"))
            stack.callback(workers[name].close)
        for name in names:  # one after the other, as compilers use every core
            for _ in range(args.warmup):
                workers[name].step()
        made: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for i in range(args.repeats):
            for name in names[:: -1 if i % 2 else 1]:
                made[name].append(workers[name].step())
                print(f"{name} {i + 1} of {args.repeats}: {made[name][-1]['seconds']:.2f} s", file=sys.stderr)
        return made


# --- results -----------------------------------------------------------------------------------------------


def results(made: dict[str, list[dict[str, float]]], shape: Shape) -> dict[str, dict[str, float]]:
    """By name: median, least and most seconds, tokens of the batch per second, loss of step 0, peak memory."""
    out = {}
    for name, steps in made.items():
        seconds = [step["seconds"] for step in steps]
        out[name] = {
            "seconds": median(seconds), "least": min(seconds), "most": max(seconds),
            "tokens_per_second": shape.batch * shape.length / median(seconds),
            "loss": steps[0]["loss"], "peak_mb": steps[-1]["peak_mb"],
        }  # fmt: skip
    return out


def check_equal_work(found: dict[str, dict[str, float]]) -> None:
    """All must have computed the same loss; a comparison of unequal work says nothing."""
    losses = {name: values["loss"] for name, values in found.items()}
    if max(losses.values()) - min(losses.values()) > TOLERANCE * max(losses.values()):
        sys.exit(f"the losses of step 0 differ, so the work is not the same: {losses}")


def table(found: dict[str, dict[str, float]]) -> str:
    first = next(iter(found.values()))["seconds"]
    lines = [f"{'':18}{'tokens/s':>10}{'seconds':>22}{'speed':>14}{'peak MB':>10}{'loss':>9}"]
    for name, v in found.items():
        seconds = f"{v['seconds']:.3f} ({v['least']:.3f}..{v['most']:.3f})"
        ratio = f"{first / v['seconds']:.2f} x"
        lines.append(
            f"{name:18}{v['tokens_per_second']:10.0f}{seconds:>22}{ratio:>14}{v['peak_mb']:10.0f}{v['loss']:9.4f}"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "hidden": 576, "ffn": 1536, "heads": 9, "kv-heads": 3, "head-dim": 64, "vocab": 49152, "draft-vocab": 8192,
        "batch": 8, "length": 360, "steps": 7,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--answer-share", type=float, default=1.0, help="part of each sample that counts; default 1")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps of each first")
    parser.add_argument("--specforge", type=Path, help="a checkout of SpecForge; adds it")
    parser.add_argument("--speculators", action="store_true", help="adds speculators")
    parser.add_argument("--python", type=Path, help="interpreter with what those two need")
    parser.add_argument("--teacher", choices=("compact", "full"), default="compact", help="of SpecForge")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of speculators")
    parser.add_argument("--same-allocator", action="store_true", help="malloc of the others keeps memory, as ours does")
    parser.add_argument("--no-compile", action="store_true", help="leaves out ours by torch.compile")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if args.worker:
        work(args.worker, Shape(**json.loads(args.shape)), str(args.specforge or ""))
        return
    if (args.specforge or args.speculators) and not args.python:
        sys.exit("--specforge and --speculators need --python, an interpreter with what they need")
    shape = Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})
    names = ["eagle3"] + ["eagle3 compiled"] * (not args.no_compile)
    names += ["specforge"] * bool(args.specforge) + ["speculators"] * args.speculators
    found = results(measure(names, args, shape), shape)
    check_equal_work(found)
    document = {"shape": asdict(shape), "same_allocator": args.same_allocator, "results": found}
    print(json.dumps(document, indent=2) if args.json else table(found))


if __name__ == "__main__":
    main()
