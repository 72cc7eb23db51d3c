"""Convert synthetic checkpoints with `eagle3 convert` and with llama.cpp's own script, and compare the files.

    make peer                                        # everything; sets up the script's environment first
    .venv/bin/python tests/peer/compare.py --python .venv-convert/bin/python --script SCRIPT --case rope

Prints one line per file pair and one per difference.  Exit code 1 when a difference is not the expected one, or an
expected one is not there: the tables in the modules named *_cases.py then no longer tell the truth.
What the differences mean: docs/llama_cpp_conversion.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agreeing_cases import agreeing_cases
from cases import Case
from choice_cases import choice_cases
from drafters import write_checkpoint, write_target
from fault_cases import fault_cases
from gguf_difference import counts, differences
from loading import loadable

from eagle3_cli.convert import ConvertSettings, convert
from eagle3_cli.errors import InputError

HERE = Path(__file__).parent
PRE_TOKENIZER = {"bpe": "llama-bpe", "sentencepiece": None}


@dataclass(frozen=True)
class Place:
    """Where one case's files are: below `folder`, the target's shared between cases that have the same."""

    folder: Path
    target: Path

    def ours(self, outtype: str) -> Path:
        return self.folder / f"eagle3-{outtype}.gguf"

    def script(self, outtype: str) -> Path:
        return self.folder / f"script-{outtype}.gguf"

    def log(self, outtype: str) -> Path:
        return self.folder / f"script-{outtype}.log"


def main() -> int:
    args = _arguments()
    cases = [c for c in [*agreeing_cases(), *choice_cases(), *fault_cases()] if args.case in c.name]
    if not cases:
        sys.exit(f"--case {args.case}: no such case")
    with tempfile.TemporaryDirectory(prefix="eagle3-peer-") as temporary:
        work = args.work or Path(temporary)
        places = {case.name: _write(case, work) for case in cases}
        run_script(args.python, args.script, _jobs(cases, places), work)
        return report(cases, places)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the script's environment")
    parser.add_argument("--script", type=Path, required=True, help="convert_hf_to_gguf.py")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--work", type=Path, help="keep all files and logs in this folder")
    return parser.parse_args()


def _write(case: Case, work: Path) -> Place:
    """Write a case's checkpoint and its target's Hugging Face folder."""
    drafter = case.drafter
    place = Place(work / case.name, work / f"target-{drafter.target_width}-{drafter.vocab}-{case.tokenizer}")
    write_checkpoint(place.folder, case.tensors, case.config, 3 if case.file == "parts" else 1)
    write_target(place.target, drafter, case.tokenizer)
    return place


def _jobs(cases: Iterable[Case], places: dict[str, Place]) -> list[dict[str, Any]]:
    """The targets first, then every case with every outtype, as script_jobs.py takes them."""
    targets, jobs = {}, []
    for case in cases:
        place, pre = places[case.name], PRE_TOKENIZER[case.tokenizer]
        if case.file == "bin":
            jobs.append({"pack": str(place.folder), "log": str(place.folder / "pack.log"), "needed": True})
        output = str(place.target / "target.gguf")
        targets[place.target] = {
            "args": [str(place.target), "--vocab-only", "--outfile", output, "--outtype", "f16"],
            "log": str(place.target / "script.log"),
            "pre_tokenizer": pre,
            "needed": True,
        }
        for outtype in case.outtypes:
            output = str(place.script(outtype))
            args = [str(place.folder), "--target-model-dir", str(place.target)]
            args += ["--outfile", output, "--outtype", outtype]
            jobs.append({"args": args, "log": str(place.log(outtype)), "pre_tokenizer": pre})
    return [*targets.values(), *jobs]


def run_script(python: Path, script: Path, jobs: list[dict[str, Any]], work: Path) -> None:
    """Run jobs with the script's own interpreter; a job's failure is in its log."""
    (work / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    command = [str(python), str(HERE / "script_jobs.py"), str(script), str(work / "jobs.json")]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    for job in jobs:
        failure = script_failure(Path(job["log"]))
        if failure and job.get("needed"):
            sys.exit(f"{job['log']}: {failure}")


def report(cases: Iterable[Case], places: dict[str, Place]) -> int:
    """Convert with eagle3, compare, print everything; the exit code."""
    pairs = [(case, outtype, places[case.name]) for case in cases for outtype in case.outtypes]
    refusals = [_convert(case, outtype, place) for case, outtype, place in pairs]
    written = [path for _, outtype, place in pairs for path in (place.ours(outtype), place.script(outtype))]
    loads = loadable(path for path in written if path.exists())
    wrong = 0
    for (case, outtype, place), refusal in zip(pairs, refusals, strict=True):
        text, faults = _judge(case, outtype, place, refusal)
        faults += _loading(case, outtype, place, loads)
        wrong += bool(faults)
        print(f"{'FAIL' if faults else 'ok  '} {case.name} {outtype}: {text}")
        for fault in faults:
            print(f"       {fault}")
    print(f"{len(pairs)} conversions compared, {wrong} not as expected")
    return 1 if wrong else 0


def _judge(case: Case, outtype: str, place: Place, refusal: str) -> tuple[str, list[str]]:
    """(one line on a pair of conversions, what is not as expected)."""
    failure = script_failure(place.log(outtype))
    faults = _outcome("eagle3", refusal, case.refused) + _outcome("script", failure, case.script_fails)
    if refusal or failure:
        return "; ".join(f"{who}: {t}" for who, t in (("eagle3", refusal), ("script", failure)) if t), faults
    found = differences(place.ours(outtype), place.script(outtype))
    special = [f"\n       expected: {name}: {found[name]}" for name in sorted(case.differs.keys() & found.keys())]
    return summary(found, counts(place.ours(outtype))) + "".join(special), faults + surprises(found, case.expected())


def _loading(case: Case, outtype: str, place: Place, loads: dict[Path, bool]) -> list[str]:
    """What llama.cpp's loader makes of the files, where that is not as expected."""
    faults = []
    if loads.get(place.ours(outtype)) is False:
        faults.append("unexpected: llama.cpp does not load eagle3's file")
    if loads.get(place.script(outtype), case.loads) is not case.loads:
        faults.append(f"unexpected: llama.cpp {'does not load' if case.loads else 'loads'} the script's file")
    return faults


def _convert(case: Case, outtype: str, place: Place) -> str:
    """Our conversion; the refusal's message, or empty."""
    output, target = place.ours(outtype), place.target if case.folder else place.target / "target.gguf"
    try:
        convert(ConvertSettings(place.folder, target, output, outtype, force=True))
    except InputError as error:
        return str(error.message).replace(f"{place.folder}/", "").replace(str(place.folder), "checkpoint")
    return ""


def script_failure(log: Path) -> str:
    """The last line that the script wrote before it failed, or empty when it succeeded."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "" if lines[-1] == "exit 0" else lines[-2] if len(lines) > 1 else lines[-1]


def _outcome(who: str, got: str, expected: str) -> list[str]:
    if expected and not got:
        return [f"unexpected: {who} succeeded, expected {expected!r}"]
    return [f"unexpected: {who}: {got}"] if got and (not expected or expected not in got) else []


def surprises(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """One line per difference that is not expected, and per expected one that is not there."""
    more = [f"unexpected: {name}: {kind}" for name, kind in sorted(found.items()) if expected.get(name) != kind]
    less = [f"no longer there: {name}: {kind}" for name, kind in sorted(expected.items()) if name not in found]
    return more + less


def summary(found: dict[str, str], size: tuple[int, int]) -> str:
    """Counts by kind; keys and tensors are told apart by their names, `tensor` names end in .weight or are d2t."""
    tensors = {name for name in found if name.endswith(".weight") or name == "d2t"}
    kinds = Counter(("tensors" if name in tensors else "keys", kind) for name, kind in found.items())
    text = []
    for what, total in zip(("keys", "tensors"), size, strict=True):
        unequal = {kind: n for (w, kind), n in kinds.items() if w == what}
        same = total - sum(n for kind, n in unequal.items() if kind != "only script")
        text.append(f"{what} {same} identical" + "".join(f", {n} {kind}" for kind, n in sorted(unequal.items())))
    return "; ".join(text)


if __name__ == "__main__":
    sys.exit(main())
