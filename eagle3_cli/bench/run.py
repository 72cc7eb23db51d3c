"""The interleaved run: every contender answers every prompt in turn, so that a drifting machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..engine import Engine, load_engine
from ..errors import InputError, OptionError
from ..settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape
from .prompts import Prompt, digest
from .server import (
    DEFAULT_TYPES,
    DRAFTER,
    REMEMBERS,
    Server,
    ServerSettings,
    StartedServer,
    contender_name,
    draft_placed,
    is_url,
    placed,
)

SHAPES: tuple[TreeShape, ...] = (TreeShape(3, 1, 3), TreeShape(4, 4, 8), TreeShape(5, 6, 16), TreeShape(8, 10, 60))


@dataclass(frozen=True)
class BenchSettings:
    """against: path of llama-server, URL of one that runs, or None.  against_types: types of speculation of the first,
    each as `speculation` gives it.  draft_max: its --spec-draft-n-max values.  feedback: as `PairSettings.feedback`."""

    target: Path
    draft: Path
    runtime: RuntimeSettings
    shapes: tuple[TreeShape, ...] = SHAPES
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 3
    max_tokens: int = 96
    against: str | None = None
    against_types: tuple[tuple[str, ...], ...] = tuple((name,) for name in DEFAULT_TYPES)
    draft_max: tuple[int, ...] = (1, 2, 3)
    feedback: str = "auto"

    def __post_init__(self) -> None:
        names = [shape.name for shape in self.shapes]
        for name in (name for name in names if names.count(name) > 1):
            raise OptionError(f"--shape: expected one {name}, got several, which would share a row of the table.")


@dataclass(frozen=True)
class Sample:
    """One answer of one contender.

    task      of the prompt
    prompt    its number in the run, from 0
    rounds    target passes after the first token
    seconds   decoding, the prompt not included
    other_s   seconds of it outside llama.cpp calls; None where it is not known
    shape     the tree of every round; None where it is chosen, or where there is none
    drafter_s   seconds of it in passes of the drafter; None where they are not known
    draft_rounds to budget   as of `Statistics`; empty where they are not known, as with a server
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
    shape: TreeShape | None = None
    drafter_s: float | None = None
    draft_rounds: int = 0
    depth_tried: Sequence[int] = ()
    depth_accepted: Sequence[int] = ()
    sizes: Mapping[int, int] = field(default_factory=dict)
    drafted_from: Mapping[int, int] = field(default_factory=dict)
    accepted_from: Mapping[int, int] = field(default_factory=dict)
    budget: Mapping[str, Any] | None = None


COUNTS = ("drafter_s", "draft_rounds", "depth_tried", "depth_accepted", "sizes", "drafted_from", "accepted_from",
          "budget")  # fmt: skip
"""Fields of a Sample that are called as in `Statistics`."""

Answer = Callable[[Sequence[int], float, int], dict[str, Any]]
"""(prompt ids, temperature, seed) -> the fields of a Sample from `tokens` on."""


class Contenders:
    """All contenders of a run, loaded.  `engine` renders the prompts and decodes with fixed trees, `auto` with those
    that a budget chooses, `plain` without a drafter.

    again   leaves only plain decoding, auto and, by this name, another engine that decodes plainly: what it differs
            from the first is noise.  Who comes after another context starts slowly, so it has one of its own
    """

    def __init__(self, settings: BenchSettings, again: str | None = None) -> None:
        self.settings, self.again = settings, again
        self.against: dict[str, Any] | None = None  # the server's side of the run, for JSON
        self._stack = ExitStack()
        self.load()

    def load(self) -> None:
        """Load everything, anew where it is loaded: where in memory an engine's buffers lie makes it up to 7% faster or
        slower than another one."""
        self._stack.close()
        try:
            self._load()
        except BaseException:
            self._stack.close()
            raise

    def _load(self) -> None:
        s = self.settings
        remote = Server(s.against) if s.against and is_url(s.against) else None  # asked before models are loaded
        depth, width = max(x.depth for x in s.shapes), max(x.width for x in s.shapes)
        nodes = max(x.nodes for x in s.shapes)
        pair = PairSettings(s.target, s.draft, depth=depth, width=width, nodes=nodes, feedback=s.feedback)
        self.engine = self._stack.enter_context(load_engine(pair, s.runtime))
        # one copy of the weights for all: where in memory a copy lies can make it some percent faster than another
        self.plain = self._another_plain()
        chosen = PairSettings(s.target, s.draft, feedback=s.feedback, lookup=True)
        self.auto = self._stack.enter_context(load_engine(chosen, s.runtime, beside=self.engine))
        self.answers: dict[str, Answer] = {
            "plain": self._ours(self.plain, None),
            "auto": self._ours(self.auto, None),
        }
        if self.again:
            self.answers[self.again] = self._ours(self._another_plain(), None)
            return
        for shape in s.shapes:
            self.answers[shape.name] = self._ours(self.engine, shape)
        if remote:
            self.answers[f"llama-server at {remote.url}"] = self._remote(remote)
            self.against = remote.described()
        elif s.against:
            for types in s.against_types:
                for draft_max in s.draft_max if DRAFTER in types else (0,):
                    self.answers[contender_name(types, draft_max)] = self._started(Path(s.against), types, draft_max)
            types_used = ["+".join(types) for types in s.against_types]
            self.against = {"program": s.against, "types": types_used, "draft_max": list(s.draft_max)}

    def _another_plain(self) -> Engine:
        plain = PairSettings(self.settings.target, None, "plain")
        return self._stack.enter_context(load_engine(plain, self.settings.runtime, beside=self.engine))

    def _ours(self, engine: Engine, shape: TreeShape | None) -> Answer:
        def answer(prompt: Sequence[int], temperature: float, seed: int) -> dict[str, Any]:
            if shape is not None:
                engine.decoder.shape = shape
            sampling = SamplingSettings(temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
            pieces = list(engine.stream(prompt, sampling, Limits(self.settings.max_tokens)))
            stats = engine.statistics
            tokens = tuple(piece.token for piece in pieces if piece.token is not None)
            found = {"tokens": tokens, "rounds": stats.rounds, "seconds": stats.decode_s, "other_s": stats.other_s}
            return {**found, "shape": shape, **{name: getattr(stats, name) for name in COUNTS}}

        return answer

    def _started(self, binary: Path, types: tuple[str, ...], draft_max: int) -> Answer:
        """A server with the same files and settings.  One that remembers its answers starts anew before it is asked a
        prompt again, for otherwise it would copy in a repeat what it wrote before."""
        s, ours = self.settings, self.engine.settings
        same = (ours["ctx_size"], ours["threads"], ours["repack"], ours["mmap"], ours["flash_attn"])
        where = placed(ours), draft_placed(ours)
        server = StartedServer(ServerSettings(binary, s.target, s.draft, types, draft_max, *same, *where))
        self._stack.callback(server.close)
        asked: set[tuple[int, ...]] = set()

        def answer(prompt: Sequence[int], temperature: float, seed: int) -> dict[str, Any]:
            if REMEMBERS in types:
                if tuple(prompt) in asked:
                    server.restart()
                    asked.clear()
                asked.add(tuple(prompt))
            return _answer_of(server, prompt, s.max_tokens, temperature, seed)

        return answer

    def _remote(self, server: Server) -> Answer:
        """A server that somebody else started.  Its first answer is compared with plain decoding's."""
        agreed = False

        def answer(prompt: Sequence[int], temperature: float, seed: int) -> dict[str, Any]:
            nonlocal agreed
            if not agreed:
                self._check_same_model(server, prompt)
                agreed = True
            return _answer_of(server, prompt, self.settings.max_tokens, temperature, seed)

        return answer

    def _check_same_model(self, server: Server, prompt: Sequence[int]) -> None:
        """InputError unless its greedy answer to a prompt starts with the token of plain decoding."""
        greedy = SamplingSettings(temperature=0.0, seed=0)
        first = tuple(piece.token for piece in self.plain.stream(prompt, greedy, Limits(1)) if piece.token is not None)
        got = _answer_of(server, prompt, 1, 0.0, 0)["tokens"]
        if got[:1] != first[:1]:
            expected, found = (f"the token {tokens[0]}" if tokens else "the end" for tokens in (first, got))
            serves = server.properties.get("model_path") or "a model that it does not name"
            raise InputError(
                f"--against {server.url}: expected {expected} at the start of a greedy answer, as"
                f" {self.settings.target} gives it, got {found}: it serves {serves}.",
                "Start it with the same GGUF as --target.",
            )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer_of(server: Server, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """A server's answer as the fields of a Sample.  Its end token is not part of the answer, as with our own."""
    reply = server.complete(prompt, max_tokens, temperature, seed)
    timings = reply["timings"]
    tokens = reply["tokens"][:-1] if reply.get("stop_type") == "eos" else reply["tokens"]
    rounds = timings["predicted_n"] - timings.get("draft_n_accepted", 0) - 1
    return {"tokens": tuple(tokens), "rounds": rounds, "seconds": timings["predicted_ms"] / 1000}


SEED = "1000 * repeat + prompt, both counted from 0"  # in words, for `pinned`


def seed_of(repeat: int, prompt: int) -> int:
    """Of every contender's answer alike."""
    return 1000 * repeat + prompt


def pinned(settings: BenchSettings, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a second run has to have in common with this one to be compared with it, for JSON."""
    return {
        "prompts": {"count": len(prompts), "sha256": digest(prompts)},
        "max_tokens": settings.max_tokens,
        "repeats": settings.repeats,
        "temperatures": list(settings.temperatures),
        "shapes": {shape.name: asdict(shape) for shape in settings.shapes},
        "seed": SEED,
    }


def _from(answers: Mapping[str, Answer], turn: int) -> list[tuple[str, Answer]]:
    """All contenders, each prompt another one first: who comes after a slow one finds other data in the caches."""
    order, first = list(answers.items()), turn % len(answers)
    return order[first:] + order[:first]


def run(
    contenders: Contenders, prompts: Sequence[Prompt], progress: Callable[[int, int], None] | None
) -> Iterator[Sample]:
    """Every sample of the run, contender after contender for each prompt.  Each repeat has all loaded anew, and begins
    with an answer of each that does not count.

    progress gets (answers done, answers in all).
    """
    s = contenders.settings
    rendered = [contenders.engine.render([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    total = s.repeats * len(s.temperatures) * len(rendered) * len(contenders.answers)
    done = 0
    for repeat in range(s.repeats):
        if repeat:
            contenders.load()
        for answer in contenders.answers.values():
            answer(rendered[0], 0.0, 0)
        for temperature in s.temperatures:
            for number, prompt in enumerate(rendered):
                for name, answer in _from(contenders.answers, repeat + number):
                    fields = answer(prompt, temperature, seed_of(repeat, number))
                    yield Sample(name, temperature, repeat, prompts[number].task, number, **fields)
                    done += 1
                    if progress:
                        progress(done, total)
