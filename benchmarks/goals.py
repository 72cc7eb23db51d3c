"""Measure every goal for speed and write docs/benchmarks.md.

    python benchmarks/goals.py --against .venv-peer/server -o .build/goals
    python benchmarks/goals.py --against .venv-peer/server -o .build/goals --target widened-bf16 --prompts-per-task 4
    python benchmarks/goals.py -o .build/goals --part duel --target q4_0
    python benchmarks/goals.py -o .build/goals --only-report --document docs/benchmarks.md --readme README.md

Six targets: the demo target as Q4_1, Q4_0, Q8_0 and BF16, and widened to 0.9 billion weights as BF16 and Q4_0; they are
made in the output folder.  Each has two interleaved runs: one of all contenders, which are plain decoding, auto, fixed
chains and trees, and llama-server with its types of speculation; and a duel of auto and plain decoding alone, which is
quick and so can have more prompts.  Their numbers are in TARGET.json and TARGET-duel.json as soon as they are complete.
The same command goes on after a Ctrl-C or a crash: a result with the same settings is not measured again.  The document
is about all targets that have a result of the first kind.  It takes hours; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goals_document import document, replaced, sentence
from script import exit_code

from eagle3_cli import machine
from eagle3_cli.bench.prompts import NAMES, TASKS, Prompt
from eagle3_cli.bench.server import DEFAULT_TYPES, DRAFTER, is_url, speculation
from eagle3_cli.console import Console, json_ready
from eagle3_cli.convert.json_files import read_json
from eagle3_cli.convert.output import replacing
from eagle3_cli.demo import demo_drafter, demo_target
from eagle3_cli.errors import FileError, OptionError
from eagle3_cli.settings import RuntimeSettings, TreeShape, check_name, check_range

if TYPE_CHECKING:
    from goals_measure import Progress

    from eagle3_cli.bench.run import BenchSettings

SHAPES = ("1,1,1", "3,1,3", "2,2,3", "4,4,8", "5,6,16", "8,10,60")
NOTES = Path(__file__).with_name("benchmarks_notes.md")
PARTS = (ALL, DUEL) = ("contenders", "duel")
ALL_FLAGS = ("against", "shape", "against_type")  # of the first part alone
REPORT_FLAGS = ("output", "only_report", "document", "readme", "machine")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 bad input, 130 Ctrl-C."""
    console = Console()
    parser = _parser()
    args = parser.parse_args(argv)
    return exit_code(console, lambda: _run(parser, args, console))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, console: Console) -> None:
    _check_flags(parser, args)
    if not args.only_report:
        _measured(args, console)
    results = _results(args)
    if not results and DUEL in args.part:
        console.report("no document: it needs a result of all contenders.")
        return
    console.text("".join(f"{path}\n" for path in _reported(args, results)))


# ---- flags ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="goals.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where results, variants and the document go")
    add("--against", metavar="PROGRAM", help="llama-server; llama-bench is looked for beside it")
    add("--target", action="append", default=[], metavar="NAME", help="one of the targets; repeatable (default: all)")
    add("--part", action="append", default=[], metavar="NAME", help="contenders or duel; repeatable (default: both)")
    add("--prompts-per-task", type=int, default=10, metavar="N", help="of each of the five tasks (default: 10)")
    add("-n", "--max-tokens", type=int, default=96, help="per answer (default: 96)")
    add("--repeats", type=int, default=3, help="rounds of all prompts (default: 3)")
    add("--shape", action="append", default=[], metavar="DEPTH,WIDTH,NODES",
        help=f"a fixed tree; repeatable (default: {' '.join(SHAPES)})")  # fmt: skip
    add("--against-type", action="append", default=[], metavar="NAME",
        help=f"speculation of the server; repeatable (default: {' '.join(DEFAULT_TYPES)})")  # fmt: skip
    add("-t", "--threads", type=int, default=0, help="of every contender (default: the physical cores)")
    add("--only-report", action="store_true", help="write the document from the results that there are")
    add("--document", type=Path, metavar="MD", help="where it goes (default: benchmarks.md in the output folder)")
    add("--readme", type=Path, metavar="MD", help="also replace the sentence between its two comments")
    add("--machine", metavar="TEXT", help="its description in the document (default: processor, cores, memory, system)")
    return parser


def _check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """OptionError for a flag without effect, without one that is needed, or out of range."""
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    for name in args.part:
        check_name("--part", name, PARTS)
    mode = ""
    useless: list[str] = []
    if args.only_report:
        mode, useless = "--only-report", [name for name in given if name not in REPORT_FLAGS]
    elif args.part and ALL not in args.part:
        mode, useless = f"--part {DUEL}", [name for name in given if name in ALL_FLAGS]
    elif not args.against:
        raise OptionError("--against: expected the llama-server program.", f"Give it, or --part {DUEL} alone.")
    elif is_url(args.against):
        raise OptionError(
            f"--against {args.against}: expected the llama-server program: every target needs servers of its own."
        )
    for name in useless:
        raise OptionError(f"--{name.replace('_', '-')}: has no effect with {mode}.", "Leave it out.")
    check_range("--prompts-per-task", args.prompts_per_task, 1, min(len(TASKS[name]) for name in NAMES))
    check_range("--max-tokens", args.max_tokens, 2)
    check_range("--repeats", args.repeats, 1)


def bench_settings(args: argparse.Namespace) -> BenchSettings:
    """Of every target's run; the target itself is the demo one."""
    from eagle3_cli.bench.run import BenchSettings
    from eagle3_cli.llama import physical_cores

    shapes = tuple(map(TreeShape.parse, args.shape or SHAPES))
    types = tuple(dict.fromkeys(speculation(name) for name in args.against_type or DEFAULT_TYPES))
    return BenchSettings(
        target=demo_target(),
        draft=demo_drafter(),
        runtime=RuntimeSettings(ctx_size=1024, threads=args.threads or physical_cores()),
        shapes=shapes,
        repeats=args.repeats,
        max_tokens=args.max_tokens,
        against=args.against,
        against_types=types,
        draft_max=(1, 2, 3) if any(DRAFTER in each for each in types) else (),
    )


# ---- measuring ------------------------------------------------------------------------------------------


def _measured(args: argparse.Namespace, console: Console) -> None:
    """A result of each part for every target that was asked for."""
    import goals_measure as measuring

    names = [target.name for target in measuring.TARGETS]
    for name in args.target:
        check_name("--target", name, names)
    wanted = [target for target in measuring.TARGETS if not args.target or target.name in args.target]
    prompts = [Prompt(name, text) for name in NAMES for text in TASKS[name][: args.prompts_per_task]]
    settings, source = bench_settings(args), demo_target()
    parts = {
        ALL: ("", settings, measuring.measure),
        DUEL: (f"-{DUEL}", measuring.duel_settings(settings), measuring.measure_duel),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for target, part in ((target, part) for target in wanted for part in args.part or PARTS):
        suffix, asked, how = parts[part]
        console.report(f"{target.name}, {part}")
        facts: dict[str, Any] = {
            "format": measuring.FORMAT,
            **{
                "target": target.name,
                "label": target.label,
                "about": target.about,
                "engine": measuring.engine_digest(),
            },
            "settings": measuring.identity(target, source, asked, prompts, machine_description()),
        }
        path = args.output / f"{target.name}{suffix}.json"
        if is_measured(path, facts, console):
            continue
        file = measuring.variant(target, source, args.output / "targets", measuring.sha256(source))
        learned = args.output / "learned" / path.stem
        found = how(replace(asked, target=file), prompts, learned, told(console))
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(json_ready({**facts, **found}), indent=1) + "\n", "utf-8")


def is_measured(path: Path, facts: Mapping[str, Any], console: Console) -> bool:
    """Whether the file holds a result with these settings; tells what differs where it does not.

    A result of another state of eagle3's engine counts, for not every change of its files changes its speed; that is
    told.
    """
    if not path.is_file():
        return False
    found = _stored(path)
    stored, settings = found["settings"], facts["settings"]
    changed = sorted(name for name in {*stored, *settings} if stored.get(name) != settings.get(name))
    if changed:
        console.report(f"  {path}: made with other settings ({', '.join(changed)}), so it is measured again")
    elif found["engine"] != facts["engine"]:
        console.report(f"  {path}: there already, made before eagle3_cli/engine changed; remove it to measure again")
    else:
        console.report(f"  {path}: there already")
    return not changed


def told(console: Console) -> Progress:
    """Progress as a line at every twentieth, with an estimate of what is left."""
    begin, last = time.monotonic(), 0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if 20 * done // total != last:
            last = 20 * done // total
            left = (time.monotonic() - begin) * (total - done) / done
            console.report(f"  {done} of {total} answers, about {left / 60:.0f} minutes left")

    return progress


def machine_description() -> str:
    """Processor, cores, memory and system, nothing that names the host."""
    total = machine.memory().total
    memory = f", {total / 2**30:.0f} GiB" if total is not None else ""
    return f"{machine.processor()}, {os.cpu_count()} cores{memory}, {machine.system()}"


# ---- the document ---------------------------------------------------------------------------------------


def _reported(args: argparse.Namespace, results: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write the document, and the README's sentence if asked for, from all results in the folder."""
    if not results:
        raise FileError(f"{args.output}: expected results, got none.", "Leave out --only-report to measure first.")
    page = args.document or args.output / "benchmarks.md"
    texts = {page: document(results, args.machine, NOTES.read_text("utf-8"))}
    if args.readme:
        try:
            before = args.readme.read_text("utf-8")
        except OSError as error:
            raise FileError(f"--readme {args.readme}: cannot be read: {error.strerror}.") from error
        texts[args.readme] = replaced(str(args.readme), before, sentence(results, args.machine))
    for path, text in texts.items():
        try:
            with replacing(path) as temporary:
                temporary.write_text(text, "utf-8")
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror}.") from error
    return list(texts)


def _results(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of all contenders, for every target that has one."""
    from goals_measure import TARGETS

    paths = [args.output / f"{target.name}.json" for target in TARGETS]
    return [_with_duel(path) for path in paths if path.is_file()]


def _with_duel(path: Path) -> dict[str, Any]:
    """The result in a file; its duel, if there is one, as "duel"."""
    duel = path.with_name(f"{path.stem}-{DUEL}.json")
    return {**_stored(path), DUEL: _stored(duel) if duel.is_file() else None}


def _stored(path: Path) -> dict[str, Any]:
    from goals_measure import FORMAT

    found = read_json(path)
    if found.get("format") != FORMAT:
        raise FileError(f"{path}: expected format {FORMAT}, got {found.get('format')}.", "Remove it to measure again.")
    return found


if __name__ == "__main__":
    sys.exit(main())
