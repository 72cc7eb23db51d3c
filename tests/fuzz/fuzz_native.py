"""Random arguments through every function of native/, which `make fuzz` builds with the sanitizers.

    python tests/fuzz/fuzz_native.py --count 200000 --seed 0

A call does its work or raises an exception that says what it expected.  Addresses are those of real arrays, since no
function can check them; everything else is anything: other types, sizes, shapes and orders of arrays, indices out of
range, NaN and infinities, numbers that no C type holds.  A sanitizer ends the process with a report; then --first N
--count 1, with the number that was printed last, shows the case again.
"""

from __future__ import annotations

import random
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]

import tiny  # noqa: E402
from fuzz_convert import main  # noqa: E402

from eagle3_cli import _native  # noqa: E402
from eagle3_cli.context import Context, ContextSettings  # noqa: E402
from eagle3_cli.llama import Model  # noqa: E402

REFUSALS = (TypeError, ValueError, OverflowError, BufferError, KeyError)
ROWS, WIDTH = 6, 40  # of the logits that addresses lead to
SEQUENCES = 4
NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 8, WIDTH, 256, 257, 2**31 - 1, 2**31, 2**64, 1.5, None, "3", b"")
FLOATS = (0.0, -0.0, 1.0, -1.0, 30.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))


def ints(rng: random.Random, size: int, low: int = -2, high: int = WIDTH + 2) -> Any:
    """int32; mostly inside, sometimes far outside."""
    values = [rng.choice((-(2**31), 2**31 - 1)) if rng.random() < 0.02 else rng.randint(low, high) for _ in range(size)]
    return np.array(values, np.int32)


def floats(rng: random.Random, *shape: int) -> Any:
    values = [rng.choice(FLOATS) if rng.random() < 0.3 else rng.uniform(-20, 20) for _ in range(int(np.prod(shape)))]
    return np.array(values, np.float32).reshape(shape)


def anything(rng: random.Random) -> Any:
    """What nobody would pass on purpose."""
    made: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS),
        lambda: ints(rng, rng.randint(0, 9)),
        lambda: floats(rng, rng.randint(0, 4), rng.randint(0, 5)),
        lambda: ints(rng, 12)[::2],
        lambda: ints(rng, 12).astype(rng.choice((np.int64, np.uint32, np.int16, np.int8, np.bool_))),
        lambda: floats(rng, 3, 4).T,
        lambda: floats(rng, 8).astype(np.float64),
        lambda: array(rng.choice("ibfdqL"), [1, 2, 3]),
        lambda: bytes(range(rng.randint(0, 9))),
        lambda: memoryview(bytearray(16)),
        lambda: [1, 2, 3],
        lambda: {},
    ]
    return rng.choice(made)()


def frozen(values: Any) -> Any:
    values.flags.writeable = False
    return values


class Calls:
    """One call of each function with arguments that are right in a sense; `one` spoils some of them."""

    def __init__(self, context: Context, vocab: int) -> None:
        self.context, self.vocab = context, vocab
        self.logits = np.zeros((ROWS, WIDTH), np.float32)

    def fill(self, rng: random.Random) -> tuple[Any, ...]:
        n = rng.randint(1, 9)
        counts = [rng.randint(1, 3) for _ in range(n)]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        seqs = ints(rng, int(starts[-1]) + rng.randint(0, 2), 0, SEQUENCES - 1)
        tokens = ints(rng, n, 0, tiny.VOCAB - 1)
        outputs = np.array([rng.randint(0, 1) for _ in range(n)], np.int8)
        features = floats(rng, n, rng.choice((tiny.TARGET.width, 1, 3)))
        return (
            self.context.batch,
            rng.choice((tokens, None)),
            ints(rng, n, 0, 300),
            rng.choice((starts, None, frozen(starts.copy()))),
            seqs,
            rng.choice((outputs, None)),
            rng.choice((features, None)),
        )

    def plain(self, rng: random.Random) -> tuple[Any, ...]:
        n, most = rng.randint(1, 9), rng.randint(1, 5)
        text = ints(rng, n + most + rng.randint(0, 2), 0, tiny.VOCAB - 1)
        past = self.context.last_position() + 1
        if past + most > 40:
            self.context.remove(0, 0)
            past = 0
        return (
            self.context.handle,
            self.context.batch,
            rng.choice((0, self.vocab)),
            0,
            self.context.n_vocab,
            text,
            n,
            rng.choice((past, past, past + 3)),
            rng.randint(0, 4),
            rng.choice((0.0, 1.0)),
            floats(rng, most),
        )

    def topk(self, rng: random.Random) -> tuple[Any, ...]:
        self.logits[:] = floats(rng, ROWS, WIDTH)
        stride = rng.choice((WIDTH, 7, 1))
        n = rng.randint(1, stride)
        rows, k = rng.randint(0, ROWS), rng.randint(1, n + 3)
        d2t = rng.choice((None, ints(rng, n, 0, stride - 1)))
        ids, logps = np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float32)
        scales = rng.choice((None, floats(rng, rows)))
        return self.logits.ctypes.data, stride, d2t, n, ids, logps, k, scales

    def argmax(self, rng: random.Random) -> tuple[Any, ...]:
        self.logits[:] = floats(rng, ROWS, WIDTH)
        return self.logits.ctypes.data, rng.randint(1, ROWS * WIDTH)

    def gather(self, rng: random.Random) -> tuple[Any, ...]:
        rows, width, m = rng.randint(1, 5), rng.randint(1, 6), rng.randint(0, 6)
        return floats(rng, rows, width), ints(rng, m, 0, rows - 1), np.zeros((m, width), np.float32)

    def matches(self, rng: random.Random) -> tuple[Any, ...]:
        shortest = rng.randint(1, 4)
        text = array("i", [rng.randint(0, 2) for _ in range(rng.randint(0, 60))])
        return text, shortest, shortest + rng.randint(0, 20), rng.choice((0, 1, 3, 64, 256))

    def Capture(self, rng: random.Random) -> tuple[Any, ...]:
        names = [rng.choice(("l_out-0", "x" * rng.choice((63, 64, 200)), "\0", "")) for _ in range(rng.randint(0, 9))]
        return names, rng.randint(-1, 50), rng.randint(-1, 50)

    NAMES = ("fill", "plain", "topk", "argmax", "gather", "matches", "Capture")
    CHECKED_BY_NOBODY: ClassVar = {"fill": (0,), "plain": (0, 1, 2, 3, 4), "topk": (0, 1, 4, 5, 6), "argmax": (0, 1)}
    """Arguments that say where memory is and how much of it there is."""

    def one(self, rng: random.Random) -> str:
        """Make a call; how it ended."""
        name = rng.choice(self.NAMES)
        arguments = list(getattr(self, name)(rng))
        for i in range(len(arguments)):
            if i not in self.CHECKED_BY_NOBODY.get(name, ()) and rng.random() < 0.07:
                arguments[i] = anything(rng)
        if rng.random() < 0.02:
            arguments.pop()
        try:
            made = getattr(_native, name)(*arguments)
        except REFUSALS:
            return f"{name}: refused"
        if name == "Capture":
            return self._use(made, rng)
        return f"{name}: done"

    @staticmethod
    def _use(capture: Any, rng: random.Random) -> str:
        """Its methods with anything at all."""
        rows = np.asarray(memoryview(capture))
        rows[:] = 1.0
        capture.reset()
        for value in (rng.choice(NUMBERS), True, False):
            try:
                capture.check(value)
                capture.paused = value
            except REFUSALS:
                continue
        return "Capture: done"


def fuzz(first: int, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How calls ended, and the faults."""
    seen: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Model(tiny.write_target(Path(folder) / "target.gguf").path, [], 0)
        context = Context(model, "fuzz", ContextSettings(64, 16, SEQUENCES, threads=1))
        calls = Calls(context, model.vocab)
        for number in range(first, first + count):
            if number % 1000 == 0:
                print(f"case {number}", file=sys.stderr, flush=True)
            try:
                seen[calls.one(random.Random(f"{seed} {number}"))] += 1
            except Exception as error:
                seen["fault"] += 1
                faults.append(f"case {number}: {type(error).__name__}: {error}")
        context.close()
        model.close()
    return seen, faults


if __name__ == "__main__":
    sys.exit(main(fuzz, 200_000, __doc__, memory=None))  # the sanitizers reserve terabytes of addresses
