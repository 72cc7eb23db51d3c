"""Reproduce two claims of the EAGLE-3 paper with the data of a run of `eagle3 train`.

1. n-alpha: how often a drafted token is accepted whose input holds n = 0..5 estimated features, for three heads trained
   on the same data for the same number of optimiser steps: EAGLE (feature regression), naive (EAGLE-3 without
   training-time test) and EAGLE-3.
2. scaling: acceptance length of EAGLE-3 heads trained on 1, 2, 4 and 8 times the data.

    python benchmarks/reproduce.py --run my-drafter -o reproduction
    python benchmarks/reproduce.py --run my-drafter -o same-steps --only scaling --scaling-steps 2000
    python benchmarks/reproduce.py -o reproduction --figures-only

Writes results.json, n_alpha.svg and data_scaling.svg, and a folder for every head.  The same command goes on after a
Ctrl-C or a crash; a finished head is not trained again.  Method: docs/reproduction.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import exit_code

from eagle3_cli.console import Console
from eagle3_cli.convert.json_files import read_json
from eagle3_cli.errors import FileError, InputError, OptionError
from eagle3_cli.settings import check_name
from eagle3_cli.train import Hooks, TrainSettings
from eagle3_cli.train.settings import COMPILE, INITS, OPTIMISERS, PRECISIONS

if TYPE_CHECKING:
    from heads import Head, Source

FORMAT = 1
RESULTS = "results.json"
EPOCHS = 4.0
FACTORS = (1, 2, 4, 8)  # of the base tokens
DEFAULTS = TrainSettings.__dataclass_fields__
PARTS = {"n-alpha": "n_alpha", "scaling": "data_scaling"}  # name of a claim -> part of results.json
OF_CLAIM = {"n-alpha": ("epochs", "steps"), "scaling": ("base_tokens", "scaling_epochs", "scaling_steps")}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 bad input, 130 Ctrl-C."""
    console = Console()
    parser = _parser()
    return exit_code(console, lambda: _run(parser, parser.parse_args(argv), console))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, console: Console) -> None:
    _check_flags(parser, args)
    if find_spec("matplotlib") is None:
        raise InputError("The figures need matplotlib, which is not installed.", "pip install matplotlib")
    if args.figures_only:
        results = _stored(args.output)
        if not any(part in results for part in PARTS.values()):
            raise FileError(f"{args.output / RESULTS}: expected results, got none.", "Let a claim be reproduced first.")
    else:
        results = _reproduced(args, console)
    from figures import draw

    files = draw(results, args.output)
    console.text("".join(f"{path}\n" for path in (args.output / RESULTS, *files)))


# ---- flags ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reproduce.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="folder of eagle3 train, its draft vocabulary chosen")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where results, figures and heads go")
    add("--target", type=Path, metavar="GGUF", help="where the run's target is now (default: where it was)")
    add("--only", choices=tuple(PARTS), help="one of the claims (default: both)")
    add("--figures-only", action="store_true", help=f"draw from {RESULTS} and train nothing")
    add("--force", action="store_true", help="start over the heads that the folder holds")
    _add_lengths(parser)
    _add_training(parser)
    return parser


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    first = parser.add_argument_group("n-alpha").add_mutually_exclusive_group()
    first.add_argument("--epochs", type=float, help=f"passes over all training data (default: {EPOCHS:g})")
    first.add_argument("--steps", type=int, help="optimiser steps instead")
    group = parser.add_argument_group("scaling")
    group.add_argument("--base-tokens", type=int, help="1x (default: an eighth of the training data)")
    second = group.add_mutually_exclusive_group()
    second.add_argument(
        "--scaling-epochs", type=float, help=f"passes over each head's own data, as in the paper (default: {EPOCHS:g})"
    )
    second.add_argument("--scaling-steps", type=int, help="the same optimiser steps for every head instead")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("every head").add_argument
    for name, kind, about in (
        ("ttt-steps", int, "training-time test of EAGLE-3 heads"),
        ("batch-tokens", int, "tokens of one optimiser step"),
        ("lr", float, "peak learning rate"),
        ("ffn", int, "width of the feed-forward part"),
        ("init", str, f"where the weights start: {' or '.join(INITS)}"),
        ("optimiser", str, f"{' or '.join(OPTIMISERS)}"),
        ("seed", int, "of the start, the order and the choice of data"),
        ("precision", str, f"of the matrix products: {', '.join(PRECISIONS)}"),
        ("compile", str, f"torch.compile: {', '.join(COMPILE)}"),
    ):
        default = DEFAULTS[name.replace("-", "_")].default
        shown = "the target's" if default is None else f"{default}"
        add(f"--{name}", type=kind, default=default, help=f"{about} (default: {shown})")
    add("--eval-steps", type=int, help="steps between evaluations in metrics.jsonl (default: first and last step)")
    add("-t", "--threads", type=int, default=0, help="of PyTorch (default: its own choice)")


def _check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """OptionError for a flag without effect, or without one that is needed."""
    given = {name: value for name, value in vars(args).items() if value != parser.get_default(name)}
    flags = {name: "--" + name.replace("_", "-") for name in given}
    if args.figures_only:
        for name in given.keys() - {"output", "figures_only"}:
            raise OptionError(f"{flags[name]}: has no effect with --figures-only.", "Leave it out.")
        return
    for claim in PARTS.keys() - {args.only or claim for claim in PARTS}:
        for name in given.keys() & set(OF_CLAIM[claim]):
            raise OptionError(f"{flags[name]}: has no effect with --only {args.only}.", "Leave it out.")
    check_name("--init", args.init, INITS)
    if args.run is None:
        raise OptionError("--run: expected the folder of a run of eagle3 train.", "Give --run DIR.")
    for name in given.keys() & {"base_tokens", "epochs", "steps", "scaling_epochs", "scaling_steps", "eval_steps"}:
        if not given[name] > 0:
            raise OptionError(f"{flags[name]}: expected a positive number, got {given[name]:g}.")


# ---- both claims ----------------------------------------------------------------------------------------


def _reproduced(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The results, with those of a claim that is not worked on as they were."""
    from heads import check, open_source

    from eagle3_cli.train.inputs import processes
    from eagle3_cli.train.state import write_json

    if processes() > 1:
        raise OptionError(f"Expected one process, got {processes()}.", "Start it without accelerate launch.")
    source = open_source(args.run, args.target, args.ffn)
    makers = {"n-alpha": n_alpha_heads, "scaling": scaling_heads}
    planned = {claim: makers[claim](source, args) for claim in PARTS if args.only in (None, claim)}
    for head in (head for heads in planned.values() for head in heads):
        check(source, head)
    results: dict[str, Any] = _stored(args.output) if (args.output / RESULTS).is_file() else {"format": FORMAT}
    for claim, heads in planned.items():
        results[PARTS[claim]] = {**_about(claim, args, source), "heads": _trained(source, heads, console)}
        write_json(args.output / RESULTS, results)
    return results


def _stored(folder: Path) -> dict[str, Any]:
    found = read_json(folder / RESULTS)
    if found.get("format") != FORMAT:
        raise FileError(f"{folder / RESULTS}: expected format {FORMAT}, got {found.get('format')}.")
    return found


def _trained(source: Source, heads: Sequence[Head], console: Console) -> list[dict[str, Any]]:
    from heads import trained

    found = []
    for number, head in enumerate(heads, start=1):
        tokens, steps = source.tokens(head.indices), head.settings.steps
        console.report(
            f"{head.settings.output.name} ({number} of {len(heads)}): {len(head.indices)} samples, {tokens} tokens,"
            f" {steps} optimiser steps"
        )
        result = {"title": head.title, **trained(source, head, told(console))}
        console.report(summary(result))
        found.append(result)
    return found


def told(console: Console) -> Hooks:
    """Progress as a line at every tenth of a stage."""
    last = -1

    def progress(stage: str, fraction: float) -> None:
        nonlocal last
        if int(10 * fraction) != last:
            last = int(10 * fraction)
            console.report(f"  {stage}, {fraction:.0%}")

    return Hooks(console.report, progress)


def summary(result: Mapping[str, Any]) -> str:
    """A head's numbers on the unseen prompts in one line."""
    unseen = result["unseen"]
    tau = "none" if unseen["tau"] is None else f"{unseen['tau']:.3f}"
    rates = " ".join("-" if rate is None else f"{rate:.3f}" for rate in unseen["n_alpha_everywhere"])
    return f"  unseen prompts: acceptance length {tau}; n-alpha at every position {rates}"


def _about(claim: str, args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """What a claim's heads have in common."""
    from heads import CHAIN

    from eagle3_cli.train.manifest import read_manifest

    names = ("batch_tokens", "lr", "ffn", "init", "optimiser", "seed", "precision", *OF_CLAIM[claim])
    settings = {"ttt_steps": args.ttt_steps, **{name: getattr(args, name) for name in names}}
    data = {
        "target": source.settings.target.name,
        "training_samples": len(source.training),
        "training_tokens": source.tokens(source.training),
        "held_out_samples": len(source.held_out),
        "held_out_tokens": source.tokens(source.held_out),
        "unseen_samples": len(source.unseen),
        "unseen_answer_tokens": read_manifest(source.folder / "unseen").answer_tokens,
    }
    about = {"chain": CHAIN, "settings": settings, "data": data}
    return about if claim == "n-alpha" else {"rule": rule(args), **about}


# ---- the heads of each claim ----------------------------------------------------------------------------


def _settings(source: Source, args: argparse.Namespace, name: str) -> TrainSettings:
    """Of a head in the folder of this name; its steps are still to be set."""
    names = ("ttt_steps", "batch_tokens", "lr", "ffn", "init", "optimiser", "seed", "precision", "compile", "force")
    runtime = replace(source.settings.runtime, threads=args.threads)
    chosen = {name: getattr(args, name) for name in names}
    return replace(source.settings, output=args.output / "heads" / name, runtime=runtime, **chosen)


def _timed(settings: TrainSettings, steps: int, args: argparse.Namespace) -> TrainSettings:
    return replace(settings, steps=steps, eval_steps=args.eval_steps or steps)


def n_alpha_heads(source: Source, args: argparse.Namespace) -> list[Head]:
    """EAGLE, naive and EAGLE-3, on all training samples."""
    from heads import Head, steps_of

    base = _settings(source, args, "n-alpha")
    steps = args.steps or steps_of(source, source.training, base, args.epochs or EPOCHS)
    kinds: dict[str, dict[str, Any]] = {
        "EAGLE": {"objective": "eagle", "ttt_steps": 1},
        "naive": {"ttt_steps": 1},
        "EAGLE-3": {"ttt_steps": args.ttt_steps},
    }
    heads = []
    for title, changes in kinds.items():
        settings = replace(base, output=base.output.with_name(f"n-alpha-{title.lower()}"), **changes)
        heads.append(Head(title, _timed(settings, steps, args), source.training))
    return heads


def scaling_heads(source: Source, args: argparse.Namespace) -> list[Head]:
    """EAGLE-3 on growing parts of the training samples.  OptionError where there is too little for the largest."""
    from heads import Head, nested, steps_of

    there = source.tokens(source.training)
    base = args.base_tokens or there // FACTORS[-1]
    if not 0 < base * FACTORS[-1] <= there:
        raise OptionError(
            f"--base-tokens: {FACTORS[-1]} times {base} tokens were asked for, and {args.run} has {there} to train on.",
            f"Give at most --base-tokens {there // FACTORS[-1]}, or a run with more data.",
        )
    heads = []
    for factor, indices in zip(FACTORS, nested(source, [f * base for f in FACTORS], args.seed), strict=True):
        settings = _settings(source, args, f"scaling-{factor}x")
        steps = args.scaling_steps or steps_of(source, indices, settings, args.scaling_epochs or EPOCHS)
        heads.append(Head(f"{factor}x", _timed(settings, steps, args), indices))
    return heads


def rule(args: argparse.Namespace) -> str:
    """What the heads of the second claim have in common: "epochs" or "steps"."""
    return "epochs" if args.scaling_steps is None else "steps"


if __name__ == "__main__":
    sys.exit(main())
