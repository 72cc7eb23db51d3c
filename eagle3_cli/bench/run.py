"""The interleaved run: every contender answers every prompt in turn, so that a drifting machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine import Engine, load_engine
from ..settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape
from .prompts import Prompt
from .server import Server, ServerSettings

SHAPES: tuple[TreeShape, ...] = (TreeShape(3, 1, 3), TreeShape(4, 4, 8), TreeShape(5, 6, 16), TreeShape(8, 10, 60))


@dataclass(frozen=True)
class BenchSettings:
    """against: path of llama-server, or None.  draft_max: its --spec-draft-n-max values.
    feedback: as `PairSettings.feedback`."""

    target: Path
    draft: Path
    runtime: RuntimeSettings
    shapes: tuple[TreeShape, ...] = SHAPES
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 3
    max_tokens: int = 96
    against: Path | None = None
    draft_max: tuple[int, ...] = (1, 2, 3)
    feedback: str = "auto"


@dataclass(frozen=True)
class Sample:
    """One answer of one contender.

    task      of the prompt
    prompt    its number in the run, from 0
    rounds    target passes after the first token
    seconds   decoding, the prompt not included
    other_s   seconds of it outside llama.cpp calls; None where it is not known
    """

    contender: str
    temperature: float
    repeat: int
    task: str
    prompt: int
    tokens: tuple[int, ...]
    rounds: int
    seconds: float
    other_s: float | None = None


Answer = Callable[[Sequence[int], float, int], dict[str, Any]]
"""(prompt ids, temperature, seed) -> the fields of a Sample from `tokens` on."""


def shape_name(shape: TreeShape) -> str:
    return f"chain {shape.nodes}" if shape.width == 1 else f"tree {shape.nodes}"


class Contenders:
    """All contenders of a run, loaded.  `engine` renders the prompts and decodes with fixed trees, `auto` with those
    that a budget chooses, `plain` without a drafter."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self._stack = ExitStack()
        try:
            self._load()
        except BaseException:
            self._stack.close()
            raise

    def _load(self) -> None:
        s = self.settings
        depth, width = max(x.depth for x in s.shapes), max(x.width for x in s.shapes)
        nodes = max(x.nodes for x in s.shapes)
        pair = PairSettings(s.target, s.draft, depth=depth, width=width, nodes=nodes, feedback=s.feedback)
        self.engine = self._stack.enter_context(load_engine(pair, s.runtime))
        self.plain = self._stack.enter_context(load_engine(PairSettings(s.target, None, "plain"), s.runtime))
        chosen = PairSettings(s.target, s.draft, feedback=s.feedback, lookup=True)
        self.auto = self._stack.enter_context(load_engine(chosen, s.runtime))
        self.answers: dict[str, Answer] = {
            "plain": self._ours(self.plain, None),
            "auto": self._ours(self.auto, None),
        }
        for shape in s.shapes:
            self.answers[shape_name(shape)] = self._ours(self.engine, shape)
        for draft_max in (0, *s.draft_max) if s.against else ():
            name = f"llama-server draft-eagle3 n_max {draft_max}" if draft_max else "llama-server plain"
            self.answers[name] = self._server(draft_max)

    def _ours(self, engine: Engine, shape: TreeShape | None) -> Answer:
        def answer(prompt: Sequence[int], temperature: float, seed: int) -> dict[str, Any]:
            if shape is not None:
                engine.decoder.shape = shape
            sampling = SamplingSettings(temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
            pieces = list(engine.stream(prompt, sampling, Limits(self.settings.max_tokens)))
            stats = engine.statistics
            tokens = tuple(piece.token for piece in pieces if piece.token is not None)
            return {"tokens": tokens, "rounds": stats.rounds, "seconds": stats.decode_s, "other_s": stats.other_s}

        return answer

    def _server(self, draft_max: int) -> Answer:
        s, ours = self.settings, self.engine.settings
        assert s.against is not None
        same = (ours["ctx_size"], ours["threads"], ours["repack"], ours["flash_attn"])
        server = Server(ServerSettings(s.against, s.target, s.draft, draft_max, *same))
        self._stack.callback(server.close)

        def answer(prompt: Sequence[int], temperature: float, seed: int) -> dict[str, Any]:
            reply = server.complete(prompt, s.max_tokens, temperature, seed)
            timings = reply["timings"]
            rounds = timings["predicted_n"] - timings.get("draft_n_accepted", 0) - 1
            return {"tokens": tuple(reply["tokens"]), "rounds": rounds, "seconds": timings["predicted_ms"] / 1000}

        return answer

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(
    contenders: Contenders, prompts: Sequence[Prompt], progress: Callable[[int, int], None] | None
) -> Iterator[Sample]:
    """Every sample of the run, contender after contender for each prompt; the first answers of all are a warm-up.

    progress gets (answers done, answers in all).
    """
    s = contenders.settings
    rendered = [contenders.engine.render([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    for answer in contenders.answers.values():
        answer(rendered[0], 0.0, 0)
    total = s.repeats * len(s.temperatures) * len(rendered) * len(contenders.answers)
    done = 0
    for repeat in range(s.repeats):
        for temperature in s.temperatures:
            for number, prompt in enumerate(rendered):
                for name, answer in contenders.answers.items():
                    seed = 1000 * repeat + number
                    fields = answer(prompt, temperature, seed)
                    yield Sample(name, temperature, repeat, prompts[number].task, number, **fields)
                    done += 1
                    if progress:
                        progress(done, total)
