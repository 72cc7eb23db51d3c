"""Mutated files through every reader of ours that `eagle3 convert` does not use.

    python tests/fuzz/fuzz_files.py --count 20000 --seed 0

GGUF headers, LoRA adapters, grammars, what budgets learned, prompts, conversations, cost curves, and the small files of
fuzz_texts.py.  A reader takes a file or raises an InputError, in bounded time and memory; what it takes can be used.
Anything else is printed with the number of its case, and the exit code is 1.  One case again: --first N --count 1.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "engine")]

import fuzz_texts  # noqa: E402
import gguf  # noqa: E402
import numpy as np  # noqa: E402
import tiny  # noqa: E402
from fuzz_convert import main, mutate_bytes, mutate_json  # noqa: E402
from worlds import World, curve, decode  # noqa: E402

from eagle3_cli.bench import projection  # noqa: E402
from eagle3_cli.bench.prompts import load_prompts  # noqa: E402
from eagle3_cli.engine.budget import Budget, Machine  # noqa: E402
from eagle3_cli.engine.costs import CPU_DRAFTER_PRIOR, CPU_PRIOR  # noqa: E402
from eagle3_cli.engine.learned import keep, recall  # noqa: E402
from eagle3_cli.errors import InputError  # noqa: E402
from eagle3_cli.llama import check_grammar  # noqa: E402
from eagle3_cli.lora import check_lora  # noqa: E402
from eagle3_cli.model_files import check_target, read_drafter  # noqa: E402
from eagle3_cli.prompt import read_text  # noqa: E402
from eagle3_cli.settings import TreeShape  # noqa: E402
from eagle3_cli.train.chats import read_chats  # noqa: E402

SECONDS = 20  # of one case; a small file that takes longer is a fault
WORLD = World(curve(CPU_PRIOR), curve({1: 0.1, 10: 0.5}))
Edit = Callable[[bytes, random.Random], bytes]


# --- what is done with a file --------------------------------------------------------------------------


def _machine() -> Machine:
    return Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR)


def _read_table(path: Path) -> bool:
    """Whatever is learned from it, the budget goes on with it."""
    machine = _machine()
    if not recall(path, machine):
        return False
    budget = Budget(machine)
    decode(WORLD, budget, rounds=20)
    budget.round(TreeShape(4, 4, 8), context=100_000)
    json.dumps(budget.report())
    return recall(path, _machine())


def _read_prompts(path: Path) -> bool:
    for prompt in load_prompts(path):
        prompt.text.encode()
    return True


def _read_chats(path: Path) -> bool:
    for conversation in read_chats(path, Counter()):
        for message in conversation:
            message["content"].encode()
    return True


def _read_text(path: Path) -> bool:
    read_text(str(path), "-f").encode()
    return True


def _read_curve(path: Path) -> bool:
    projection.load(path, (TreeShape(3, 4, 8),))
    return True


def _read_target(path: Path) -> bool:
    check_target(path, cells=512)
    return True


def _read_drafter(path: Path) -> bool:
    read_drafter(path, path.parent / "target.gguf")
    return True


def _read_pair(path: Path) -> bool:
    read_drafter(path.parent / "drafter.gguf", path)
    return True


def _read_lora(path: Path) -> bool:
    check_lora(path, path.parent / "target.gguf")
    return True


def _read_adapted(path: Path) -> bool:
    check_lora(path.parent / "lora.gguf", path)
    return True


def _read_grammar(path: Path) -> bool:
    check_grammar(read_text(str(path), "--grammar-file"))
    return True


# --- mutations -----------------------------------------------------------------------------------------


def _edit_json(raw: bytes, rng: random.Random) -> bytes:
    value = json.loads(raw)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = mutate_json(value, rng)
    return json.dumps(value).encode()


def _edit_lines(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.split(b"\n")
    i = rng.randrange(len(lines) - 1)
    lines[i] = _edit_json(lines[i], rng)
    return b"\n".join(lines)


def _nest(raw: bytes, rng: random.Random) -> bytes:
    """Deeper than a reader goes, or nearly so: in place of a number or as the whole file."""
    depth = rng.choice([10, 300, 450, 900, 990, 2000, 50_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    nested = opening * depth + b"1" + closing * (depth if rng.random() < 0.8 else 0)
    digits = [i for i, byte in enumerate(raw) if chr(byte).isdigit()]
    if not digits or rng.random() < 0.3:
        return nested
    place = rng.choice(digits)
    return raw[:place] + nested + raw[place + 1 :]


def _stretch(raw: bytes, rng: random.Random) -> bytes:
    """A part that is repeated very often."""
    start = rng.randrange(len(raw))
    part = raw[start : start + rng.choice([1, 2, 8, 64])]
    return raw[:start] + part * rng.choice([100, 5000]) + raw[start:]


def _edit_key(raw: bytes, rng: random.Random) -> bytes:
    """A GGUF key with another type or value, or another length of its name."""
    keys = list(_keys(raw))
    start, end = rng.choice(keys)
    action = rng.random()
    if action < 0.3:
        return raw[:end] + struct.pack("<I", rng.choice([*range(14), 2**31, 2**32 - 1])) + raw[end + 4 :]
    if action < 0.9:
        odd = struct.pack("<q", rng.choice([0, 1, -1, 2, 3, 64, 255, 512, 513, 2**31, 2**32, 2**40, 2**63 - 1]))
        odd = rng.choice([odd, odd, struct.pack("<d", float("nan")), struct.pack("<ff", float("inf"), -1.0)])
        place = end + 4 + rng.choice([0, 0, 0, 4, 12])
        width = rng.choice([1, 4, 8])
        return raw[:place] + odd[:width] + raw[place + width :]
    return raw[: start - 8] + struct.pack("<q", rng.choice([0, 1, 2**20, 2**40, -1])) + raw[start:]


def _keys(raw: bytes) -> Iterator[tuple[int, int]]:
    """Where the names of known keys begin and end."""
    for name in KEYS:
        start = raw.find(name)
        if start >= 8 and struct.unpack_from("<Q", raw, start - 8)[0] == len(name):
            yield start, start + len(name)


KEYS = [name.encode() for arch in ("llama", "eagle3") for name in (
    f"{arch}.block_count", f"{arch}.embedding_length", f"{arch}.attention.head_count",
    f"{arch}.attention.head_count_kv", f"{arch}.attention.key_length", f"{arch}.attention.value_length",
    f"{arch}.attention.layer_norm_rms_epsilon", f"{arch}.rope.dimension_count", f"{arch}.vocab_size",
    f"{arch}.context_length", f"{arch}.target_layers", f"{arch}.target_hidden_size", f"{arch}.norm_before_fc",
)] + [b"general.architecture", b"general.alignment", b"split.count", b"split.no", b"tokenizer.ggml.tokens",
      b"tokenizer.ggml.model", b"eagle3_cli.fc_norm", b"eagle3_cli.norm_output",
      b"eagle3_cli.sliding_window"]  # fmt: skip


# --- cases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A sound file, how it is changed, and what reads it: True if it was taken, False if it counts for nothing."""

    file: str
    edit: Edit
    read: Callable[[Path], bool]


CASES = [
    *(Case("target.gguf", edit, read) for edit in (mutate_bytes, _edit_key) for read in (_read_target, _read_pair)),
    *(Case(name, edit, _read_drafter) for edit in (mutate_bytes, _edit_key) for name in ("drafter.gguf", "kinds.gguf")),
    *(Case("lora.gguf", edit, _read_lora) for edit in (mutate_bytes, _edit_key)),
    Case("target.gguf", _edit_key, _read_adapted),
    Case("grammar.gbnf", mutate_bytes, _read_grammar),
    *(Case("x.json", edit, _read_table) for edit in (_edit_json, _edit_json, mutate_bytes, _nest, _stretch)),
    *(Case("prompts.jsonl", edit, _read_prompts) for edit in (_edit_lines, mutate_bytes, _nest, _stretch)),
    *(Case("chats.jsonl", edit, _read_chats) for edit in (_edit_lines, mutate_bytes, _nest, _stretch)),
    *(Case("curve.json", edit, _read_curve) for edit in (_edit_json, mutate_bytes, _nest, _stretch)),
    *(
        Case(name, edit, read)
        for name, read, by_line in fuzz_texts.READERS
        for edit in (_edit_lines if by_line else _edit_json, mutate_bytes, _nest, _stretch)
    ),
    *(Case("config.toml", edit, fuzz_texts.read_config) for edit in (mutate_bytes, _stretch)),
    *(Case("chats.txt", edit, read) for edit in (mutate_bytes, _stretch) for read in (_read_text, _read_chats)),
]


def _materials(folder: Path) -> None:
    """Sound files of every kind."""
    target = tiny.Config(width=16, heads=2, kv_heads=1, head_dim=8, ffn=16, layers=4)
    drafter = tiny.DrafterConfig(
        width=16, heads=2, kv_heads=1, head_dim=8, ffn=16, target_width=16, aux_layers=(1, 2, 4)
    )
    tiny.write_target(folder / "target.gguf", target, split__count=1, split__no=0, general__alignment=32)
    ids = list(range(0, tiny.VOCAB, 9))
    tiny.write_drafter(folder / "drafter.gguf", drafter, tiny.drafter_weights(drafter, 1, len(ids)), ids)
    kinds = tiny.replace(drafter, fc_norm=True, norm_output=True, window=20)
    tiny.write_drafter(folder / "kinds.gguf", kinds, tokens=[], eagle3__vocab_size=tiny.VOCAB)
    _write_lora(folder / "lora.gguf", target)
    grammar = 'root ::= item ("," ws item)* # a list\nitem ::= [a-z0-9_]{1,3} | "\\"" [^"\\\\]* "\\""\nws ::= " "?\n'
    (folder / "grammar.gbnf").write_text(grammar)
    budget = Budget(_machine())
    decode(WORLD, budget, rounds=60)
    budget.machine.at(10_000)
    keep(folder / "x.json", budget.machine)
    prompts = [{"prompt": "why?"}, {"prompt": "how \u2028 so?", "task": "b"}, {"prompt": "1"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    turns = [("user", "hi"), ("assistant", "yes"), ("user", [{"type": "text", "text": "1 more"}])]
    chats = [
        {"messages": [{"role": role, "content": text} for role, text in turns]},
        {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "hi"}]},
        {"prompt": "2", "answer": "4"},
        "hello",
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    (folder / "chats.txt").write_bytes("\ufeffwhy is 1\r\nna\u00efve?\n\n\U0001f600\n".encode())
    costs = {"plain_ms": 30, "verify": {"1": 1.0, "64": 1.3}, "draft": {"1": 0.05, "16": 0.06}}
    (folder / "curve.json").write_text(json.dumps(costs))
    fuzz_texts.write(folder)


def _write_lora(path: Path, target: tiny.Config) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    rank, rows = 2, {"attn_q": target.heads * target.head_dim, "ffn_down": target.width}
    columns = {"attn_q": target.width, "ffn_down": target.ffn}
    weights = {}
    for name in rows:
        weights[f"blk.1.{name}.weight.lora_a"] = np.ones((rank, columns[name]), np.float32)
        weights[f"blk.1.{name}.weight.lora_b"] = np.ones((rows[name], rank), np.float32)
    tiny._finish(writer, weights, keys)


class TooSlowError(Exception):
    pass


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"more than {SECONDS} s")


def one_case(number: int, seed: int, folder: Path) -> tuple[str, str | None]:
    """Run one case in a folder of sound files, which are so again afterwards: (what happened, fault or None)."""
    rng = random.Random(f"{seed} {number}")
    case = rng.choice(CASES)
    path = folder / case.file
    sound = path.read_bytes()
    path.write_bytes(case.edit(sound, rng))
    kind = f"{case.file}, {case.read.__name__}"
    signal.alarm(SECONDS)
    try:
        return f"{kind}: {'taken' if case.read(path) else 'counts for nothing'}", None
    except InputError as error:
        fault = None if 0 < len(error.message) < 2000 else f"a message of {len(error.message)} characters"
        return f"{kind}: refused", fault
    except Exception as error:
        return f"{kind}: fault", f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        path.write_bytes(sound)


def fuzz(first: int, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Outcomes by kind, and the faults.  In forked children: ggml's parser may take the whole process with it."""
    seen: Counter[str] = Counter()
    faults: list[str] = []
    end = first + count
    with tempfile.TemporaryDirectory() as name, mmap.mmap(-1, 8) as at:
        folder = Path(name)
        _materials(folder)
        sound = {path: path.read_bytes() for path in folder.iterdir()}
        while first < end:
            found, died = _in_child(lambda start=first: _cases(start, end, seed, folder, at))
            for kind, fault in found:
                seen[kind] += 1
                faults += [fault] if fault else []
            first = end
            if died:
                number = struct.unpack("q", at[:8])[0]
                faults.append(f"case {number}: the process died of signal {died}")
                first = number + 1
            for path, raw in sound.items():
                path.write_bytes(raw)
    return seen, faults


def _cases(first: int, end: int, seed: int, folder: Path, at: mmap.mmap) -> Iterator[tuple[str, str | None]]:
    signal.signal(signal.SIGALRM, _too_slow)
    for number in range(first, end):
        at[:8] = struct.pack("q", number)
        kind, fault = one_case(number, seed, folder)
        yield kind, fault and f"case {number} ({kind}): {fault}"


def _in_child(work: Callable[[], Iterator[tuple[str, str | None]]]) -> tuple[list[tuple[str, str | None]], int]:
    """What it yields in a forked child, and the signal that the child died of; 0: of none."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        code = 1
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as pipe:
            for item in work():
                pipe.write(json.dumps(item) + "\n")
                pipe.flush()
            code = 0
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found: list[Any] = [json.loads(line) for line in pipe]
    status = os.waitpid(child, 0)[1]
    return found, os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(fuzz, 20_000, __doc__))
