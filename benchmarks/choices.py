"""Compare settings of `eagle3 train` on the data of one run: each choice is a run of its own, from the same states.

    python benchmarks/choices.py --run my-drafter -o choices --common "--steps 120" --choice base= \\
        --choice "ffn 3072=--ffn 3072" --choice "lk=--loss lk"
    python benchmarks/choices.py -o choices --time 3

The first trains and measures what is not done yet: tau on the unseen prompts by real decoding. Each choice starts from
the run's settings, then --common, then its own flags of eagle3 train.  The second measures, on an otherwise idle
machine, what the drafters cost: a chain of 3 for every choice in turn, medians of the repeats. Writes results.json.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from script import exit_code

from eagle3_cli.commands.train import train as command
from eagle3_cli.commands.train import train_settings
from eagle3_cli.console import Console
from eagle3_cli.convert.json_files import read_json
from eagle3_cli.errors import FileError, OptionError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, check_range
from eagle3_cli.train import Hooks, TrainSettings, train
from eagle3_cli.train.inputs import check_inputs
from eagle3_cli.train.settings import flag
from eagle3_cli.train.shards import ShardReader
from eagle3_cli.train.state import FORMAT, METRICS, RESULT, RUN, opened, read_metrics, write_json
from eagle3_cli.train.walk import answers_of

SHARED = ("samples", "shards", "unseen_samples", "unseen")
RESULTS = "results.json"
_RUNTIME = ("ctx_size", "flash_attn", "cache_type_k", "cache_type_v")  # as run.json keeps them
_OF_STATES = ("data", "keep_answers", "tokens", "answer_tokens", "max_length", "states", "aux_layers", *_RUNTIME)
_REFUSED = (*_OF_STATES, "force", "dry_run")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 bad input, 130 Ctrl-C."""
    console = Console()
    args = _parser().parse_args(argv)
    try:
        return exit_code(console, lambda: _run(args, console))
    except click.UsageError as error:
        console.error(error.format_message())
        return 2


def _run(args: argparse.Namespace, console: Console) -> None:
    results = _timed(args.output, args.time, console) if args.time is not None else _compared(args, console)
    console.text("".join(f"{line(name, choice)}\n" for name, choice in results["choices"].items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="folder of eagle3 train, its states captured")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where the runs and results.json go")
    add("--common", default="", metavar="FLAGS", help="flags of eagle3 train for every choice")
    add("--choice", action="append", default=[], metavar="NAME=FLAGS", help="one choice; repeatable")
    add("--time", type=int, metavar="N", help="only measure what the drafters of the output folder cost, N times")
    return parser


def line(name: str, choice: Mapping[str, Any]) -> str:
    """One choice for people."""
    real = ", ".join(f"{shape} {numbers['tau']:.3f}" for shape, numbers in choice["real"].items())
    cost = f", drafter {choice['drafter_ms']:.2f} ms a round" if "drafter_ms" in choice else ""
    return f"{name}: tau {real}; {choice['weights'] / 1e6:.2f} M weights, trained {choice['seconds']:.0f} s{cost}"


# ---- training -------------------------------------------------------------------------------------------


def _compared(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    if args.run is None or not args.choice:
        raise OptionError("Expected --run and at least one --choice, or --time.")
    base = _settings(args.run)
    planned = {}
    for text in args.choice:
        name, separator, flags = text.partition("=")
        if not separator or not name or "/" in name:
            raise OptionError(f"--choice: expected NAME=FLAGS, got {text}.")
        planned[name] = with_flags(replace(base, output=args.output / name), shlex.split(f"{args.common} {flags}"))
    for settings in planned.values():
        check_inputs(settings)
    results: dict[str, Any] = {"format": FORMAT, "run": args.run.name, "common": args.common, "choices": {}}
    if (args.output / RESULTS).is_file():
        results["choices"] = read_json(args.output / RESULTS)["choices"]
    for name, settings in planned.items():
        lay_out(args.run, settings)
        console.report(f"{name}:")
        results["choices"].setdefault(name, {}).update(_facts(settings, train(settings, Hooks(console.report)).plan))
        write_json(args.output / RESULTS, results)
    return results


def _settings(folder: Path) -> TrainSettings:
    """The settings of a run."""
    if not (folder / "shards" / "manifest.json").is_file() or not (folder / RUN).is_file():
        raise FileError(f"{folder}: expected a run of eagle3 train with its states captured.")
    stored = read_json(folder / RUN)["settings"]
    values = {f.name: stored[f.name] for f in fields(TrainSettings) if f.name in stored}
    runtime = RuntimeSettings(**{f.name: stored[f.name] for f in fields(RuntimeSettings) if f.name in stored})
    paths = {"target": Path(stored["target"]), "data": tuple(map(Path, stored["data"]))}
    layers = stored["aux_layers"] and tuple(stored["aux_layers"])
    return TrainSettings(**{**values, **paths, "aux_layers": layers, "output": folder, "runtime": runtime})


def with_flags(settings: TrainSettings, flags: Sequence[str]) -> TrainSettings:
    """The settings with flags of `eagle3 train` over them.  click.UsageError for others, OptionError for those that ask
    for other states or another kind of run."""
    known = ["--target", str(settings.target), "-o", str(settings.output)]
    context = command.make_context("eagle3 train", [*known, *flags])
    values = dict(context.params)
    given = [name for name in values if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    chosen = train_settings(values)
    for name in (name for name in given if name in _REFUSED):
        raise OptionError(
            f"{flag(name)}: choices are whole runs on the states of --run and cannot have it.", "Leave it out."
        )
    own = {f.name for f in fields(TrainSettings)}
    changes = {name: getattr(chosen, name) for name in given if name in own and name not in ("target", "output")}
    kept = {name: getattr(settings.runtime, name) for name in _RUNTIME}
    # steps and epochs exclude each other: the one that is given wins over the run's
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in changes and other not in changes:
            changes[other] = None
    return replace(settings, runtime=replace(chosen.runtime, **kept), **changes)


def lay_out(run: Path, settings: TrainSettings) -> None:
    """The choice's folder with the run's conversations and states in it, as links where the disk allows."""
    with opened(settings, check_inputs(settings).digests) as folder:
        for name in SHARED:
            if not (folder / name).exists():
                shutil.copytree(run / name, folder / name, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _facts(settings: TrainSettings, plan: Mapping[str, Any]) -> dict[str, Any]:
    numbers = read_json(settings.output / RESULT)["numbers"]
    last = [entry for entry in read_metrics(settings.output / METRICS) if entry["kind"] == "train"][-1]
    return {
        "weights": sum(plan["parameters"].values()),
        "draft_vocab": plan["draft_vocab"],
        "tokens_seen": last["tokens"],
        "seconds": last["seconds"],
        "loss": numbers["held_out"].get("loss"),
        "accuracy": numbers["held_out"].get("accuracy"),
        "simulated": numbers["simulated"]["tau"],
        "real": {shape: {"tau": n["tau"], "rounds": n["rounds"]} for shape, n in numbers["real"].items()},
    }


# ---- what a drafter costs -------------------------------------------------------------------------------


def _timed(output: Path, repeats: int, console: Console) -> dict[str, Any]:
    check_range("--time", repeats, 1)
    results = read_json(output / RESULTS)
    seconds: dict[str, list[float]] = {name: [] for name in results["choices"]}
    for repeat in range(repeats):
        for name, found in seconds.items():
            found.append(drafter_seconds(_settings(output / name)))
            console.report(f"{repeat + 1} of {repeats}, {name}: {1e3 * found[-1]:.2f} ms a round")
    for name, found in seconds.items():
        results["choices"][name]["drafter_ms"] = 1e3 * statistics.median(found)
    write_json(output / RESULTS, results)
    return results


def drafter_seconds(settings: TrainSettings) -> float:
    """Of the drafter in one round of a chain of 3, over the answers to the unseen prompts."""
    from eagle3_cli.engine import load_engine

    unseen = ShardReader(settings.output / "unseen", False)
    samples = [unseen.sample(i) for i in range(len(unseen))]
    pair = PairSettings(settings.target, settings.output / "drafter.gguf", depth=3, width=1, nodes=3)
    rounds, seconds = 0, 0.0
    with load_engine(pair, replace(settings.runtime, ctx_size=1024)) as engine:
        for sample in samples:
            answer = answers_of(np.asarray(sample.answer, bool))[0]
            prompt = sample.tokens[: answer.start].tolist()
            list(engine.stream(prompt, SamplingSettings(temperature=0.0, seed=0), Limits(64)))
            rounds, seconds = rounds + engine.statistics.rounds, seconds + engine.statistics.drafter_s
    return seconds / rounds


if __name__ == "__main__":
    sys.exit(main())
