"""The end of a run: acceptance measured by the real decoding loop, and report.html.

The page is one file without scripts and without anything from elsewhere: tables and SVG curves, each with its numbers
in words.  It is valid before the first step, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..convert.output import replacing
from ..settings import Limits, PairSettings, SamplingSettings, TreeShape
from .settings import Hooks, TrainSettings
from .shards import ShardReader
from .state import METRICS, RESULT, read_metrics, write_json
from .walk import answers_of

if TYPE_CHECKING:
    from .inputs import Inputs
    from .loop import Job

SHAPES = {"chain 3": TreeShape(3, 1, 3), "tree 8": TreeShape(4, 4, 8)}
AGREEMENT = 0.05  # tau of training and of decoding may differ by so much
BEYOND = 8  # tokens that an answer may be longer than before: a limit at its end would shorten its last drafts

# ---- the end of a run -----------------------------------------------------------------------------------


def finish(job: Job, inputs: Inputs, evaluation: Mapping[str, Any], hooks: Hooks) -> None:
    """Checkpoint, GGUF, acceptance by real decoding, report.html and, last of all, result.json.

    evaluation   the loop's last one
    """
    from .plan import parameters

    s, folder = job.settings, job.folder
    numbers: dict[str, Any] = {"step": evaluation["step"], "held_out": evaluation["held_out"]}
    numbers["simulated"] = evaluation["simulated"]
    if s.objective == "eagle3":
        _export(job, inputs)
        numbers |= _acceptance(s, folder, numbers["simulated"]["tau"], hooks)
        hooks.report(numbers["agreement"])
    shape = job.drafter.shape
    plan = {"parameters": parameters(shape)[0], "draft_vocab": shape.draft_vocab, "aux_layers": inputs.aux_layers}
    write_page(folder, s, numbers)
    write_json(folder / RESULT, {"plan": plan, "numbers": numbers})


def _acceptance(settings: TrainSettings, folder: Path, simulated: float | None, hooks: Hooks) -> dict[str, Any]:
    """real: of decoding, None where the target is a folder, which cannot be decoded with; agreement: in words."""
    drafter = folder / "drafter.gguf"
    if settings.target.is_dir():
        return {"real": None, "agreement": only_simulated(simulated, drafter)}
    unseen = ShardReader(folder / "unseen", False)
    real = measure(settings, drafter, [unseen.sample(i) for i in range(len(unseen))], hooks)
    return {"real": real, "agreement": compare(simulated, real["chain 3"]["tau"])}


def only_simulated(tau: float | None, drafter: Path) -> str:
    """What to know of a run whose target is a folder."""
    number = "no answer was long enough for a round" if tau is None else f"chain of 3: {tau:.2f}"
    return (
        f"Acceptance is simulated only ({number}): real decoding needs a GGUF of the target. Measure with"
        f" `eagle3 bench --target X.gguf --draft {drafter}`."
    )


def _export(job: Job, inputs: Inputs) -> None:
    """The checkpoint, and the GGUF that `eagle3 convert` makes of it."""
    from ..convert import ConvertSettings, convert
    from ..convert.target import read_target
    from .export import CheckpointFacts, write_checkpoint

    s, folder = job.settings, job.folder
    target = read_target(s.target)
    keys = {field.name: field.value for field in target.tokenizer}
    bos, eos = (keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    context = target.context or s.max_length
    write_checkpoint(job.drafter, folder / "checkpoint", CheckpointFacts(inputs.aux_layers, context, bos, eos))
    convert(ConvertSettings(folder / "checkpoint", s.target, folder / "drafter.gguf", s.outtype, force=True))


def write_page(folder: Path, settings: TrainSettings, numbers: Mapping[str, Any]) -> None:
    """report.html from what is in the folder; numbers: of the finished run, empty before."""
    with replacing(folder / "report.html") as temporary:
        temporary.write_text(page(settings.as_dict(), read_metrics(folder / METRICS), numbers), "utf-8")


# ---- real decoding --------------------------------------------------------------------------------------


def measure(settings: TrainSettings, drafter: Path, samples: Iterable[Any], hooks: Hooks) -> dict[str, Any]:
    """Decode every answer of the samples anew, always the likeliest token, with each of `SHAPES`.

    Returns shape -> {tau, rounds, tokens, accepted_by_depth: share of the rounds that came so far and matched}.
    In a thread of its own: PyTorch's bfloat16 products leave a thread's AMX tiles unconfigured, and llama.cpp, which
    configures them once per thread, would die of it (SIGILL) where both have worked.
    """
    from .compiling import release_threads

    release_threads()
    interrupted = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(_decode, settings, drafter, samples, hooks, interrupted).result()
        except BaseException:
            interrupted.set()
            raise


def _decode(
    settings: TrainSettings, drafter: Path, samples: Iterable[Any], hooks: Hooks, interrupted: threading.Event
) -> dict[str, Any]:
    from ..engine import load_engine

    tasks = [(np.asarray(s.tokens), a) for s in samples for a in answers_of(np.asarray(s.answer, bool)) if a.start > 0]
    deepest = max(SHAPES.values(), key=lambda shape: shape.nodes)
    pair = PairSettings(settings.target, drafter, depth=deepest.depth, width=deepest.width, nodes=deepest.nodes)
    longest = max((len(tokens) for tokens, _ in tasks), default=0) + BEYOND + deepest.nodes + 1
    runtime = replace(settings.runtime, ctx_size=max(settings.runtime.ctx_size, longest))
    sampling = SamplingSettings(temperature=0.0, seed=0)
    measured: dict[str, Any] = {}
    with load_engine(pair, runtime) as engine:
        for number, (name, shape) in enumerate(SHAPES.items()):
            engine.decoder.shape = shape
            statistics = []
            for done, (tokens, answer) in enumerate(tasks):
                if interrupted.is_set():
                    return measured
                ended = engine.decoder.model.is_end(int(tokens[answer.end]))
                length = answer.end + 1 - answer.start + (BEYOND if ended else 0)
                list(engine.stream(tokens[: answer.start].tolist(), sampling, Limits(length)))
                statistics.append(engine.statistics)
                hooks.progress("measuring", (number + (done + 1) / len(tasks)) / len(SHAPES))
            measured[name] = _summary(statistics)
    return measured


def _summary(statistics: Sequence[Any]) -> dict[str, Any]:
    rounds, tokens = sum(s.rounds for s in statistics), sum(s.round_tokens for s in statistics)
    depth = max((len(s.depth_tried) for s in statistics), default=0)
    tried = [sum(s.depth_tried[d] for s in statistics if len(s.depth_tried) > d) for d in range(depth)]
    accepted = [sum(s.depth_accepted[d] for s in statistics if len(s.depth_accepted) > d) for d in range(depth)]
    return {
        "tau": tokens / rounds if rounds else None,
        "rounds": rounds,
        "tokens": tokens,
        "accepted_by_depth": [a / t for a, t in zip(accepted, tried, strict=True) if t],
    }


def compare(simulated: float | None, real: float | None) -> str:
    """One sentence on whether training and decoding agree about the acceptance length of a chain of 3."""
    if simulated is None or real is None:
        return "Acceptance could not be compared: no answer was long enough for a round."
    apart = abs(simulated - real)
    numbers = f"chain of 3: {simulated:.2f} simulated, {real:.2f} in real decoding"
    if apart <= AGREEMENT:
        return f"Training and decoding agree ({numbers})."
    return (
        f"Training and decoding disagree by {apart:.2f} ({numbers}), more than the {AGREEMENT} that rounding explains."
        " Trust the real number, and please report it with report.html."
    )


# ---- the page -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One curve: (x, y) in order of x; a y that is no finite number leaves a gap of one point."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Series]]]:
    """(title, series) of every chart, from the lines of metrics.jsonl."""
    train = [line for line in metrics if line["kind"] == "train"]
    evals = [line for line in metrics if line["kind"] == "eval"]
    held = [line for line in evals if line["held_out"]]
    steps = len(held[0]["held_out"]["accuracy"]) if held else 0
    tau = [(e["step"], e["simulated"]["tau"]) for e in evals if e["simulated"].get("tau") is not None]
    return [
        ("Loss", [
            Series("training", [(line["step"], line["loss"]) for line in train]),
            Series("held out", [(line["step"], line["held_out"]["loss"]) for line in held]),
        ]),
        ("Accuracy per step of training-time test, held out", [
            Series(f"step {i + 1}", [(line["step"], line["held_out"]["accuracy"][i]) for line in held])
            for i in range(steps)
        ]),
        ("Simulated acceptance length, chain of 3, prompts unlike the training set", [Series("tau", tau)]),
        ("Learning rate", [Series("lr", [(line["step"], line["lr"]) for line in train])]),
    ]  # fmt: skip


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 64, 110, 12, 34
COLOURS = ("#0b62a4", "#c4501b", "#2e7d32", "#7b3fa0", "#a8710a", "#00838f", "#ad1457", "#555555")


def chart(title: str, series: Sequence[Series], number: int) -> str:
    """An SVG of the curves over optimiser steps, with a title and a description for those who do not see it."""
    drawn = [s for s in series if s.finite]
    head = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{escape(title)}</title><desc id="d{number}">{escape(_in_words(drawn))}</desc>'
    )
    if not drawn:
        return f'{head}<text x="{WIDTH // 2}" y="{HEIGHT // 2}" text-anchor="middle">no data yet</text></svg>'
    xs = [x for s in drawn for x, _ in s.finite]
    ys = [y for s in drawn for _, y in s.finite]
    across, up = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    scale = _Scale(across[0], across[-1], up[0], up[-1])
    parts = [head, *_axes(scale, across, up)]
    for i, s in enumerate(drawn):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in s.finite)
        dots = s.finite if len(s.finite) == 1 else ()
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 12 + 17 * i}" style="fill:{colour}">{escape(s.name)}</text>'
        )
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Scale:
    """From values to places in the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y0) / (self.y1 - self.y0)


def ticks(low: float, high: float) -> list[float]:
    """Three to twelve round numbers, evenly spaced, the first at most low and the last at least high."""
    if high <= low:
        wide = abs(low) / 2 or 0.5
        low, high = low - wide, high + wide
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _axes(scale: _Scale, across: Sequence[float], up: Sequence[float]) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<line x1="{LEFT}" x2="{right}" y1="{scale.y(v):.1f}" y2="{scale.y(v):.1f}" class="grid"/>' for v in up]
    parts += [f'<text x="{LEFT - 7}" y="{scale.y(v) + 4:.1f}" text-anchor="end">{v:.4g}</text>' for v in up]
    parts += [f'<text x="{scale.x(v):.1f}" y="{bottom + 17}" text-anchor="middle">{v:.6g}</text>' for v in across]
    return [*parts, f'<text x="{right + 10}" y="{bottom + 17}">step</text>']


def _in_words(series: Sequence[Series]) -> str:
    if not series:
        return "No data yet."
    said = [
        f"{s.name}: {s.finite[0][1]:.4g} at step {s.finite[0][0]:g}, {s.finite[-1][1]:.4g} at step {s.finite[-1][0]:g}"
        for s in series
    ]
    return "; ".join(said) + "."


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: #444; } .grid { stroke: #ddd; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top;
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums; font-weight: normal; }
h2 { margin-top: 2rem; font-size: 1.2rem; }
@media (prefers-color-scheme: dark) { body { color: #eee; background: #161616; } svg { background: #fafafa; } }
"""


def page(settings: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]) -> str:
    """report.html: the final numbers, the curves, the settings."""
    charts = [f"<h2>{escape(t)}</h2>{chart(t, s, i)}" for i, (t, s) in enumerate(curves(metrics))]
    final = _table(_flat(numbers), "not measured") if numbers else "<p>The run is not finished.</p>"
    chosen = _table(_flat(settings), "default")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>eagle3 train</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>Drafter for {escape(Path(str(settings['target'])).name)}</h1>"
        f"<h2>Numbers</h2>{final}{''.join(charts)}<h2>Settings</h2>{chosen}</body></html>\n"
    )


def _table(rows: Iterable[tuple[str, Any]], none: str) -> str:
    """none: how None is shown."""
    shown = [(name, none if value is None else _shown(value)) for name, value in rows]
    cells = [f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in shown]
    return f"<table>{''.join(cells)}</table>"


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        place = f"{before}{name}".replace("_", " ")
        rows += _flat(value, f"{place}, ") if isinstance(value, Mapping) else [(place, value)]
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return str(value)
