"""One target of goals.py: its file, the interleaved run, and what is measured beside it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from goals_bars import AGAIN

import eagle3_cli
from eagle3_cli.bench.prompts import Prompt
from eagle3_cli.bench.report import as_dicts, by_task, geometric_mean, rows
from eagle3_cli.bench.run import BenchSettings, Contenders, Sample, pinned, run
from eagle3_cli.bench.widened import write_variant
from eagle3_cli.console import json_ready
from eagle3_cli.engine import Engine, load_engine
from eagle3_cli.errors import Eagle3Error, FileError
from eagle3_cli.settings import Limits, PairSettings, SamplingSettings, TreeShape
from eagle3_cli.versions import versions

FORMAT = 1
SHORT, LONG = TreeShape(4, 1, 4), TreeShape(8, 1, 8)  # chains: the longer one has so many more passes over one row
STEP_PROMPTS, STEP_TOKENS = 5, 64
BENCH_TOKENS, BENCH_REPEATS = 64, 5
GREEDY = SamplingSettings(temperature=0.0, seed=0)

Progress = Callable[[int, int], None]
"""Gets (answers done, answers in all)."""


@dataclass(frozen=True)
class Target:
    """The demo target, as it is (type None) or as a variant of it.

    name    of its files
    label   for people; about: what else they should know
    ffn     feed-forward length of a widened one
    """

    name: str
    label: str
    type: str | None = None
    ffn: int | None = None
    about: str = ""


_WIDE = {"ffn": 16384, "about": "0.9B weights, same answers"}
TARGETS = (
    Target("q4_1", "Q4_1"),
    Target("q4_0", "Q4_0", "q4_0"),
    Target("q8_0", "Q8_0", "q8_0"),
    Target("bf16", "BF16", "bf16"),
    Target("widened-bf16", "BF16, widened", "bf16", **_WIDE),  # type: ignore[arg-type]
    Target("widened-q4_0", "Q4_0, widened", "q4_0", **_WIDE),  # type: ignore[arg-type]
)


# ---- what a result depends on -----------------------------------------------------------------------------


def identity(
    target: Target, source: Path, settings: BenchSettings, prompts: Sequence[Prompt], machine: str
) -> dict[str, Any]:
    """Everything that two runs must have in common for the later one to be left out, as JSON has it.

    source    the demo target's file
    settings  its target's file need not exist yet
    """
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    found = {
        "target": {"source": sha256(source), "type": target.type, "ffn": target.ffn},
        "drafter": sha256(settings.draft),
        "tasks": tasks,
        "prompts_per_task": len(prompts) // len(tasks),
        "run": pinned(settings, prompts),
        "threads": settings.runtime.threads,
        "ctx_size": settings.runtime.ctx_size,
        "against": {
            "version": server_version(settings.against),
            "types": ["+".join(types) for types in settings.against_types],
            "draft_max": settings.draft_max,
        },
        "machine": machine,
        "versions": versions(),
    }
    same: dict[str, Any] = json.loads(json.dumps(json_ready(found)))
    return same


def engine_digest() -> str:
    """SHA-256 in hex of the files that decode, to tell a result of another state of them."""
    folder = Path(eagle3_cli.__file__).parent
    files = sorted(
        [*folder.glob("engine/*.py"), folder / "context.py", folder / "llama.py", *folder.glob("_native*.so")]
    )
    return hashlib.sha256("".join(sha256(file) for file in files).encode()).hexdigest()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def server_version(program: str | None) -> str | None:
    """What `llama-server --version` tells in its line "version: ..."; None where it tells none.

    FileError where it cannot be run."""
    if program is None:
        return None
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FileError(f"--against {program}: cannot be run: {error}; expected the llama-server program.") from error
    lines = (said.stdout + said.stderr).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("version:")), None)


# ---- one target -------------------------------------------------------------------------------------------


def variant(target: Target, source: Path, folder: Path, digest: str) -> Path:
    """The target's file, written into the folder unless it is there; a file appears complete or not at all.

    digest    of the source, a part of the name: another source makes other variants
    """
    if target.type is None:
        return source
    path = folder / f"{target.name}-{digest[:8]}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_variant(source, path, target.type, target.ffn)
    return path


def measure(settings: BenchSettings, prompts: Sequence[Prompt], learned: Path, progress: Progress) -> dict[str, Any]:
    """All numbers of one target, for JSON.

    learned   folder for what the budget learns; emptied first
    """
    begin = time.monotonic()
    if learned.exists():
        shutil.rmtree(learned)
    with cache_at(learned), Contenders(settings) as contenders:
        samples = list(run(contenders, prompts, progress))
        chosen = list({prompt.task: prompt for prompt in reversed(prompts)}.values())[:STEP_PROMPTS]
        asked = [contenders.plain.render([{"role": "user", "content": prompt.text}]) for prompt in chosen]
        bench = beside_llama_bench(settings, asked[0][:1])
        step = drafter_step(settings, contenders.plain, asked)
    return {**summary(samples), "drafter_step": step, "llama_bench": bench, "seconds": time.monotonic() - begin}


def measure_duel(
    settings: BenchSettings, prompts: Sequence[Prompt], learned: Path, progress: Progress
) -> dict[str, Any]:
    """Rates of plain decoding, auto, and plain decoding again, which tells what noise there is, for JSON.

    learned   folder for what the budget learns; emptied first
    """
    begin = time.monotonic()
    if learned.exists():
        shutil.rmtree(learned)
    with cache_at(learned), Contenders(duel_settings(settings, (SHORT,)), AGAIN) as contenders:
        samples = list(run(contenders, prompts, progress))
    return {**summary(samples), "seconds": time.monotonic() - begin}


def duel_settings(settings: BenchSettings, shapes: tuple[TreeShape, ...] = ()) -> BenchSettings:
    """The same without what a duel has not."""
    return replace(settings, shapes=shapes, against=None, against_types=(), draft_max=())


@contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """What budgets learn is kept in this folder."""
    before = os.environ.get("EAGLE3_CACHE")
    os.environ["EAGLE3_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["EAGLE3_CACHE"]
        else:
            os.environ["EAGLE3_CACHE"] = before


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Rows over all prompts, rows by task, means over the tasks, and time outside llama.cpp.  Pure."""
    tasks = by_task(samples)
    return {
        "rows": as_dicts(rows(samples)),
        "tasks": as_dicts(tasks),
        "geometric_mean": geometric_mean(tasks),
        "overhead": [
            _overhead([s for s in samples if (s.contender, s.temperature) == key], *key)
            for key in dict.fromkeys((s.contender, s.temperature) for s in samples)
            if key[0] in ("plain", "auto")
        ],
    }


def _overhead(samples: Sequence[Sample], contender: str, temperature: float) -> dict[str, Any]:
    other = sum(s.other_s or 0.0 for s in samples)
    share = other / max(sum(s.seconds for s in samples), 1e-9)
    per_round = 1e3 * other / max(sum(s.rounds for s in samples), 1)
    return {"contender": contender, "temperature": temperature, "share": share, "ms_per_round": per_round}


# ---- beside the run ---------------------------------------------------------------------------------------


def drafter_step(settings: BenchSettings, plain: Engine, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Milliseconds of a drafter pass over one row, and of a token of plain decoding at that time; medians over prompts.

    A chain of 8 makes four such passes a round more than a chain of 4, and else next to nothing.
    """
    steps, tokens = [], []
    pair = PairSettings(settings.target, settings.draft, depth=LONG.depth, width=1, nodes=LONG.nodes)
    with load_engine(pair, settings.runtime) as engine:
        for prompt in [prompts[0], *prompts]:  # the first is a warm-up
            short, long = (_drafter_ms(engine, shape, prompt) for shape in (SHORT, LONG))
            steps.append((long - short) / (LONG.depth - SHORT.depth))
            tokens.append(_plain_ms(plain, prompt))
    ms = steps[1:]
    return {"ms": statistics.median(ms), "low": min(ms), "high": max(ms), "plain_ms": statistics.median(tokens[1:])}


def _drafter_ms(engine: Engine, shape: TreeShape, prompt: Sequence[int]) -> float:
    """Of a round of one greedy answer."""
    engine.decoder.shape = shape
    _answer(engine, prompt, STEP_TOKENS)
    return 1e3 * engine.statistics.drafter_s / engine.statistics.rounds


def _plain_ms(engine: Engine, prompt: Sequence[int]) -> float:
    _answer(engine, prompt, STEP_TOKENS)
    return 1e3 * engine.statistics.decode_s / engine.statistics.rounds


def _answer(engine: Engine, prompt: Sequence[int], tokens: int) -> None:
    engine.decoder.truncate(0)
    for _ in engine.stream(prompt, GREEDY, Limits(tokens, ignore_eos=True)):
        pass


def beside_llama_bench(settings: BenchSettings, prompt: Sequence[int]) -> dict[str, float] | None:
    """Plain decoding and llama.cpp's llama-bench, by turns, both with a cache for what they write and no more, for a
    pass takes longer with a larger one; None where the folder of llama-server has no such program.  Rates in tokens per
    second are medians, and so is the ratio of ours to theirs.

    prompt   a token to begin with; llama-bench takes any
    """
    program = Path(settings.against).resolve().with_name("llama-bench") if settings.against else None
    if program is None or not program.is_file():
        return None
    ours, theirs = [], []
    runtime = replace(settings.runtime, ctx_size=BENCH_TOKENS + 2)
    with load_engine(PairSettings(settings.target, None, lookup=False), runtime) as plain:
        for _ in range(BENCH_REPEATS):
            _answer(plain, prompt, BENCH_TOKENS // 2)  # a warm-up, as llama-bench has one
            _answer(plain, prompt, BENCH_TOKENS + 1)  # the first token belongs to the prompt
            ours.append(plain.statistics.tokens_per_second or 0.0)
            theirs.append(_llama_bench(program, settings.target, plain.settings))
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    medians = {"ours": statistics.median(ours), "theirs": statistics.median(theirs)}
    return {"tokens": BENCH_TOKENS, **medians, "ratio": ratio}


def _llama_bench(program: Path, target: Path, ours: Mapping[str, Any]) -> float:
    """Tokens per second of its test of generation, with our threads, flash attention and weights."""
    command = [str(program), "-m", str(target), "-p", "0", "-n", str(BENCH_TOKENS), "-r", "1", "-o", "json"]
    command += ["-t", str(ours["threads"]), "-fa", str(ours["flash_attn"]), "--repack", str(int(ours["repack"]))]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(said.stdout)[0]["avg_ts"])
    except (ValueError, LookupError, TypeError) as error:
        last = (said.stderr.strip().splitlines() or ["it said nothing on stderr"])[-1]
        raise Eagle3Error(f"{program}: expected JSON with avg_ts, code {said.returncode}: {last}") from error
