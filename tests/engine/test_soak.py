"""Many rounds with whatever can happen between and inside them: after each, both KV caches hold the committed tokens
and nothing else.

Trees of random form, at random temperatures, so that nothing, something or everything is accepted; chat turns, retries
that share a beginning, prompts of other things; answers that are closed early, run into the end of the context, or are
broken off by an exception in the middle of a round.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from _pytest.monkeypatch import derive_importpath
from seconds import tell_seconds

from eagle3_cli import context as contexts
from eagle3_cli.demo import demo_drafter, demo_target
from eagle3_cli.engine import load_engine, loop
from eagle3_cli.engine.tree import FixedShape
from eagle3_cli.errors import FileError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings, TreeShape

CELLS = 160  # few, so that the end of the context is reached often
LARGEST = TreeShape(depth=5, width=4, nodes=14)
TEMPERATURES = (0.0, 0.7, 1.6)
ENDINGS = ("whole", "whole", "closed", "broken", "full")  # of five answers, in random order
# Where an answer may be broken off, before or after the call.
BREAKABLE = (
    "context.Context.process",
    "context.Context.decode_plain",
    "context.Context.remove",
    "context.Context.copy",
    "context.Context.keep",
    "engine.loop.verify",
    "engine.loop.Decoder.commit",
    "engine.target.Target.commit",
    "engine.drafter.Eagle3Drafter.extend",
    "engine.drafter._Growth._process",
)


class Broken(Exception):
    """Comes in the middle of a round."""


# --- what is in a cache --------------------------------------------------------------------------------------------


def positions(context: Any) -> list[int]:
    """Positions of all KV cells in use, ascending; each must be in sequence 0 alone.

    Read from what llama.cpp saves of all sequences: two words, the number of streams, the number of cells, then of each
    cell its position, how many sequences it is in, and which.
    """
    size = contexts._state_size(context.handle, -1, 0)
    state = ctypes.create_string_buffer(size)
    assert contexts._state_get(context.handle, state, size, -1, 0) == size
    streams, cells = np.frombuffer(state, np.int32, 2, offset=8)
    assert streams == 1
    found = np.frombuffer(state, np.int32, 3 * cells, offset=16).reshape(cells, 3)
    assert (found[:, 1:] == (1, 0)).all()
    return sorted(found[:, 0].tolist())


def in_sequence_0_alone(context: Any) -> int:
    """How many cells are in use, by the first and last position of sequence 0; nothing is in any other.  Cheaper."""
    sizes = [contexts._state_size(context.handle, sequence, 0) for sequence in (-1, 0)]
    assert sizes[0] == sizes[1]
    first = contexts.lib.llama_memory_seq_pos_min(context.memory, 0)
    assert first <= 0
    return context.last_position(0) - first + 1 if first == 0 else 0


def check(decoder: Any) -> None:
    """Between rounds.  A drafter whose `since` is not 0 was paused and began anew there."""
    committed, drafter = len(decoder.committed), decoder.drafter
    assert decoder.target.past == committed
    assert positions(decoder.target.context) == list(range(committed))
    if decoder.lookup is not None:
        assert len(decoder.lookup) == committed
    if drafter is None:
        return
    waiting = [*drafter._tokens, *drafter._waiting_tokens]
    assert waiting == decoder.committed[drafter._pairs :]
    assert len(drafter._g) == len(drafter._tokens)
    found = positions(drafter._decoder)
    assert found == list(range(drafter._pairs - len(found), drafter._pairs))
    assert decoder.budget is not None or len(found) == drafter._pairs


# --- what happens to it --------------------------------------------------------------------------------------------


class Soak:
    """Random answers of one engine.  counts: how often what happened."""

    def __init__(self, engine: Any, seed: int, patch: pytest.MonkeyPatch, check: Callable[[Any], None] = check) -> None:
        self.engine, self.decoder, self.check = engine, engine.decoder, check
        self.rng = random.Random(seed)
        self.rounds = 0
        self.left: int | None = None  # breakable calls until one is broken off
        self.endings: list[str] = []  # of the answers to come
        ways = ("closed", "broken", "full", "turn", "cut", "fresh", "truncated", "at once")
        self.counts = dict.fromkeys(("accepted", "rejected", "aside", *ways), 0)
        self._watch_rounds(patch)
        for name in BREAKABLE:
            self._make_breakable(patch, name)
        if self.decoder.budget is not None:
            self._invent_times(patch)

    def _watch_rounds(self, patch: pytest.MonkeyPatch) -> None:
        round_, plain_rounds = loop._Answer.round, loop._Answer.plain_rounds

        def check() -> None:
            left, self.left = self.left, None  # what is only looked at is not broken off
            self.check(self.decoder)
            self.left = left

        def watched_plain(answer: Any, root: int, started: float) -> Any:
            before = answer.stats.rounds
            result = plain_rounds(answer, root, started)
            check()
            self.rounds += answer.stats.rounds - before
            self.counts["at once"] += answer.stats.rounds - before > 1
            return result

        def watched(answer: Any, root: int) -> Any:
            tree, verdict = round_(answer, root)
            check()
            self.rounds += 1
            self.counts["accepted"] += len(verdict.accepted)
            self.counts["rejected"] += len(tree) - len(verdict.accepted)
            self.counts["aside"] += list(verdict.accepted) != list(range(len(verdict.accepted)))
            return tree, verdict

        patch.setattr(loop._Answer, "round", watched)
        patch.setattr(loop._Answer, "plain_rounds", watched_plain)
        if self.decoder.budget is None:
            patch.setattr(loop._Answer, "_policy", lambda answer, root: self._policy(*answer.room))

    def _policy(self, depth: int, nodes: int) -> FixedShape | None:
        """A tree of any form that there is room for, or none."""
        rng, most = self.rng, self.decoder.shape
        nodes = rng.randint(0, min(nodes, most.nodes))
        if depth < 1 or nodes < 1:
            return None
        return FixedShape(TreeShape(rng.randint(1, min(depth, most.depth)), rng.randint(1, most.width), nodes))

    def _make_breakable(self, patch: pytest.MonkeyPatch, name: str) -> None:
        attribute, owner = derive_importpath(f"eagle3_cli.{name}", raising=True)
        call = getattr(owner, attribute)

        def breakable(*arguments: Any, **named: Any) -> Any:
            self._count_down()
            result = call(*arguments, **named)
            self._count_down()
            return result

        patch.setattr(owner, attribute, breakable)

    def _count_down(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise Broken

    def _invent_times(self, patch: pytest.MonkeyPatch) -> None:
        """Let drafting pay and not pay by turns: the budget draws trees of all sizes, pauses and begins anew."""

        def dear() -> int:
            return self.rounds // 40 % 2

        tell_seconds(
            self.decoder.budget,
            patch,
            verify=lambda nodes: 0.01 * (1 + (nodes if dear() else 0.02 * nodes)),
            drafting=lambda usual: usual * (1 + 20 * dear()),
        )

    # --- answers

    def run(self, rounds: int) -> None:
        while self.rounds < rounds:
            self.answer()

    def answer(self) -> None:
        """One prompt and its answer, which may be closed, broken off or run into the end of the context."""
        rng = self.rng
        if not self.endings:
            self.endings = rng.sample(ENDINGS, len(ENDINGS))
            self.counts["truncated"] += 1
            self.decoder.truncate(rng.randint(0, len(self.decoder.committed)))
            self.check(self.decoder)
        ending = self.endings.pop()
        prompt = self._prompt(25 if ending == "full" else None)
        sampling = SamplingSettings(rng.choice(TEMPERATURES), top_k=0, seed=rng.randrange(2**32 - 1))
        limits = Limits(None if ending == "full" else rng.randint(1, 40), ignore_eos=True)
        pieces = self.engine.stream(prompt, sampling, limits)
        self.left = rng.randint(0, 80) if ending == "broken" else None
        try:
            got = list(itertools.islice(pieces, rng.randint(0, 20) if ending == "closed" else None))
            pieces.close()
            self.counts["closed"] += ending == "closed"
            if ending == "full":
                self.counts["full"] += 1
                assert len(prompt) + len(got) == self.decoder.cells
        except Broken:
            self.counts["broken"] += 1
        self.left = None
        self.check(self.decoder)

    def _prompt(self, room: int | None) -> list[int]:
        """The conversation so far and a new message, or its beginning and another one, or something else.

        room: so many cells, or fewer, are left for the answer
        """
        rng, known = self.rng, self.decoder.committed
        new = [rng.randrange(tiny.END_OF_TEXT) for _ in range(rng.randint(1, 40))]
        kind = rng.choice(("turn", "turn", "turn", "cut", "fresh"))
        keep = {"turn": len(known), "cut": rng.randint(0, len(known)), "fresh": 0}[kind]
        if keep + len(new) >= self.decoder.cells:
            kind, keep = "fresh", 0
        self.counts[kind] += 1
        prompt = [*known[:keep], *new]
        if room is not None:
            missing = self.decoder.cells - rng.randint(1, room) - len(prompt)
            prompt += [rng.randrange(tiny.END_OF_TEXT) for _ in range(missing)]
        return prompt


def soak(engine: Any, rounds: int, patch: pytest.MonkeyPatch, seed: int = 1) -> Soak:
    made = Soak(engine, seed, patch)
    made.run(rounds)
    return made


# drafter, its changes, what else the pair is made of
PAIRS = {
    "good": ("good", {}),
    "narrow": ("narrow", {}),
    "window": ("window", {}),
    "flash attention": ("good", {"flash_attn": "on"}),
    "auto": ("good", {"auto": True}),
}


@pytest.fixture
def pair(tiny_target: Any, tiny_drafters: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """pair(name) -> Engine; closed after the test."""
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))
    opened = []

    def open_one(name: str) -> Any:
        draft, changes = PAIRS[name]
        auto = changes.get("auto", False)
        if draft == "window":
            path = tmp_path / "window.gguf"
            tiny.write_drafter(path, replace(tiny_drafters["good"].config, window=7), tiny_drafters["good"].weights)
        else:
            path = tiny_drafters[draft].path
        shape = {"nodes": None if auto else LARGEST.nodes, "depth": LARGEST.depth, "width": LARGEST.width}
        flash = changes.get("flash_attn", "off")
        runtime = RuntimeSettings(**{**tiny.EXACT, "flash_attn": flash}, ctx_size=CELLS, batch=24, threads=1)
        opened.append(load_engine(PairSettings(tiny_target.path, path, lookup=auto, **shape), runtime))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def saw_everything(made: Soak, name: str) -> None:
    """Nothing was tested if it never happened."""
    useless = {"accepted", "aside"} if name == "narrow" else set()
    if name != "auto":  # plain rounds come several at once where the target's states are not wanted
        useless |= {"at once"}
    assert all(count or what in useless for what, count in made.counts.items()), made.counts


@pytest.mark.parametrize("name", PAIRS)
def test_after_every_round_both_caches_hold_the_committed_tokens(pair, monkeypatch, name):
    made = soak(pair(name), 220, monkeypatch)
    saw_everything(made, name)


def test_the_check_notices_a_cell_too_many_and_one_too_few(pair):
    engine = pair("good")
    decoder = engine.decoder
    decoder.prefill(list(range(30)))
    check(decoder)
    target, drafter = decoder.target.context, decoder.drafter._decoder
    for spoil in (
        lambda: target.copy(0, 3, 10, 12),
        lambda: target.remove(0, 29),
        lambda: drafter.copy(0, 2, 0, 1),
        lambda: drafter.remove(0, decoder.drafter._pairs - 1),
    ):
        spoil()
        with pytest.raises(AssertionError):
            check(decoder)
        decoder.truncate(0)
        check(decoder)
        decoder.prefill(list(range(30)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_thousand_rounds(pair, monkeypatch, name):
    """20,000 of each pair; the process does not grow."""
    made = soak(pair(name), 2_000, monkeypatch)
    before = resident()
    made.run(20_000)
    saw_everything(made, name)
    assert resident() - before < 16 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [8, None], ids=["tree", "auto"])
def test_a_long_run_of_the_demo_pair(monkeypatch, tmp_path, nodes):
    try:
        target = demo_target()
    except FileError:
        pytest.skip("the demo extra is not installed")
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    settings = PairSettings(target, demo_drafter(), nodes=nodes, lookup=nodes is None)
    rounds = itertools.count()

    def check_most(decoder: Any) -> None:
        """Reading a whole cache takes longer than a round."""
        if next(rounds) % 100 == 0:
            check(decoder)
        assert in_sequence_0_alone(decoder.target.context) == decoder.target.past == len(decoder.committed)

    with load_engine(settings, RuntimeSettings(ctx_size=1024)) as engine:
        made = Soak(engine, 5, monkeypatch, check_most)
        made.run(300)
        before = resident()
        made.run(1_500)
        assert made.counts["accepted"] > 100
        assert resident() - before < 64 * 2**20


def resident() -> int:
    """Bytes of memory that this process holds."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        pytest.skip("this system does not tell")
