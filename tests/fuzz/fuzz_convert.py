"""Mutated checkpoints, configs and targets through `eagle3 convert`.

    python tests/fuzz/fuzz_convert.py --count 10000 --seed 0

Every outcome must be exit code 0 with a file that llama.cpp loads, or exit code 2 with one message on stderr, an empty
stdout and no file left behind.  Anything else is printed with the number of its case, and the exit code is 1.  One
case again: --first N --count 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "convert")]

import checkpoints  # noqa: E402
import tiny  # noqa: E402

from eagle3_cli.__main__ import run  # noqa: E402
from eagle3_cli.convert import load as loading  # noqa: E402
from eagle3_cli.errors import FileError  # noqa: E402

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 63, 64, 65, 255, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 0.0, 0.5, 1.0,
    -0.0, 1e-9, 1e38, 1e308, float("nan"), float("inf"), "", "x", "llama3", "yarn", "linear", "dynamic", "default",
    "mrope", "F32", "BF16", "I64", "\0", "\u2028", "silu", [], [0], [1, 2, 3], [2, 12, 21], [[]], {},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
     "original_max_position_embeddings": 64},
]  # fmt: skip
KEYS = [
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config", "sliding_window", "layer_types",
    "use_sliding_window", "eagle_aux_hidden_state_layer_ids", "transformer_layer_config", "architectures",
    "speculators_model_type", "target_hidden_size", "partial_rotary_factor", "use_last_layernorm", "num_hidden_layers",
    "hidden_act", "quantization_config", "max_window_layers", "model_type", "type", "factor", "dtype", "shape",
    "data_offsets", "__metadata__", "weight_map", "model", "vocab", "merges", "added_tokens", "text_config",
]  # fmt: skip


# --- mutations -----------------------------------------------------------------------------------------


def mutate_json(value: Any, rng: random.Random) -> Any:
    """A JSON value with one place changed, added or removed, at a random depth."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        action = rng.random()
        if action < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if action < 0.35:
            return {**value, rng.choice(KEYS): rng.choice(ODD)}
        if action < 0.45:
            other = rng.choice([key + "x", key[:-1], key.replace("midlayer", "layers.0"), "model." + key, ""])
            return {(other if k == key else k): v for k, v in value.items()}
        return {**value, key: mutate_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], mutate_json(value[i], rng), *value[i + 1 :]]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-64, -2, -1, 1, 2, 64])
    return rng.choice(ODD)


def mutate_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, a number replaced, or a part cut, repeated or removed; mostly near the front."""
    place = int(len(raw) * rng.random() ** 3)
    action = rng.random()
    if action < 0.4:
        changed = bytearray(raw)
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[min(place + rng.randrange(16), len(raw) - 1)] = rng.randrange(256)
        return bytes(changed)
    if action < 0.7:
        number = struct.pack("<q", rng.choice([0, 1, -1, 8, 2**16, 2**31, 2**32 - 1, 2**40, 2**62]))
        number = number[: rng.choice([1, 4, 8])]
        return raw[:place] + number + raw[place + len(number) :]
    length = rng.choice([1, 4, 8, 64, 4096])
    if action < 0.8:
        return raw[:place]
    return raw[:place] + raw[place + length :] if action < 0.9 else raw[: place + length] + raw[place:]


def _edit_json(path: Path, rng: random.Random) -> None:
    value = json.loads(path.read_text())
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        value = mutate_json(value, rng)
    path.write_text(json.dumps(value))


def _edit_bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(mutate_bytes(path.read_bytes(), rng))


def _edit_header(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    for _ in range(rng.choice([1, 1, 2])):
        header = mutate_json(header, rng)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


# --- cases ---------------------------------------------------------------------------------------------


def _materials(folder: Path) -> None:
    """Sound inputs of every kind; each case changes a copy of some of them."""
    checkpoints.write(folder / "plain", checkpoints.tensors())
    norms = {f"fc_norm.{i}.weight": ("F32", checkpoints.np.ones(checkpoints.HT, "<f4")) for i in range(3)}
    checkpoints.write(folder / "new", checkpoints.tensors() | norms, checkpoints.config(fc_norm=True, norm_output=True))
    checkpoints.write_shards(folder / "shards", checkpoints.tensors())
    for name in ("plain", "new", "shards"):
        path = folder / name / "config.json"
        ids = {"eagle_aux_hidden_state_layer_ids": [2, 12, 21]}
        path.write_text(json.dumps({**json.loads(path.read_text()), **ids}))
    checkpoints.write_target(folder / "target.gguf")
    _write_bin(folder / "bin")
    (folder / "hf").mkdir()
    facts = {"num_hidden_layers": 24, "hidden_size": 64, "vocab_size": checkpoints.V, "max_position_embeddings": 1024}
    (folder / "hf" / "config.json").write_text(json.dumps({**facts, "model_type": "llama"}))
    plain = [t for t in tiny.TOKENS if t not in tiny.CONTROL]
    added = [{"id": len(plain) + i, "content": t} for i, t in enumerate(tiny.CONTROL)]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(plain)}, "merges": list(tiny.MERGES)}
    tokenizer = {"model": model, "decoder": {"type": "ByteLevel"}, "added_tokens": added}
    (folder / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer))


def _write_bin(folder: Path) -> None:
    import torch

    folder.mkdir()
    kinds = {"F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool}
    state = {n: torch.from_numpy(values.copy()).to(kinds[k]) for n, (k, values) in checkpoints.tensors().items()}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(checkpoints.config()))


Edit = Callable[[Path, random.Random], None]
# what is converted, for which target (None: without), the file that is changed, and how
CASES: list[tuple[str, str | None, str, Edit]] = [
    ("plain", "target.gguf", "plain/model.safetensors", _edit_header),
    ("plain", "target.gguf", "plain/model.safetensors", _edit_bytes),
    ("plain", "target.gguf", "plain/config.json", _edit_json),
    ("plain", "target.gguf", "plain/config.json", _edit_bytes),
    ("plain", "target.gguf", "target.gguf", _edit_bytes),
    ("plain", None, "plain/config.json", _edit_json),
    ("new", "target.gguf", "new/config.json", _edit_json),
    ("new", None, "new/model.safetensors", _edit_header),
    ("shards", "target.gguf", "shards/model.safetensors.index.json", _edit_json),
    ("plain", "hf", "hf/config.json", _edit_json),
    ("plain", "hf", "hf/tokenizer.json", _edit_json),
    ("bin", "target.gguf", "bin/pytorch_model.bin", _edit_bytes),
]


def one_case(number: int, seed: int, materials: Path, folder: Path) -> tuple[str, str | None]:
    """Run one case in an empty folder: (what happened, fault or None)."""
    rng = random.Random(f"{seed} {number}")
    source, target, changed, edit = rng.choice(CASES)
    for name in {source, target, changed.split("/")[0]} - {None}:
        original, copy = materials / str(name), folder / str(name)
        shutil.copytree(original, copy) if original.is_dir() else shutil.copy(original, copy)
    edit(folder / changed, rng)
    (folder / "out").mkdir()
    output = folder / "out" / "drafter.gguf"
    args = [
        "convert",
        str(folder / source),
        "-o",
        str(output),
        "--outtype",
        rng.choice(["f32", "f16", "q8_0", "q4_k_m"]),
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*args, *(["--target", str(folder / target)] if target else [])])
    left = [path.name for path in (folder / "out").iterdir()]
    return f"{changed}: exit {code}", _fault(code, out.getvalue(), err.getvalue(), left)


def _fault(code: int, out: str, err: str, left: list[str]) -> str | None:
    if code == 0:
        return None if left == ["drafter.gguf"] and out and not err else f"exit 0, but {left} and {err!r}"
    lines = err.splitlines()
    if code != 2 or not lines or not lines[0].startswith("error: ") or "Traceback" in err:
        return f"exit {code}: {err}"
    if sum(line.startswith("error: ") for line in lines) != 1:
        return f"several messages: {err}"
    return f"exit 2, but stdout {out!r} and files {left}" if out or left else None


def load_in_child(path: Path) -> None:
    """As `check_loads`, but in a forked child, which is a hundred times quicker than a new interpreter."""
    child = os.fork()
    if not child:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        code = 1
        with contextlib.suppress(BaseException):
            loading.load(path)
            code = 0
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise FileError("llama.cpp does not load the converted file.")


def fuzz(first: int, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Outcomes by kind, and the faults."""
    import eagle3_cli.llama  # noqa: F401  # once, before the children are forked

    seen: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name, mock.patch.object(loading, "check_loads", load_in_child):
        materials = Path(name) / "sound"
        materials.mkdir()
        _materials(materials)
        for number in range(first, first + count):
            folder = Path(name) / "case"
            folder.mkdir()
            kind, fault = one_case(number, seed, materials, folder)
            seen[kind] += 1
            if fault:
                faults.append(f"case {number} ({kind}): {fault}")
            shutil.rmtree(folder)
    return seen, faults


MEMORY = 8 << 30  # bytes of address space; a small input that fills it is a fault


Fuzz = Callable[[int, int, int], tuple[Counter[str], list[str]]]
"""(first case, count, seed) -> how often what was seen, faults."""


def main(fuzz: Fuzz, count: int, about: str | None, memory: int | None = MEMORY) -> int:
    """Run cases as the command line asks, so many if it does not say; the exit code.

    memory   bytes of addresses that the process may use; None: no limit
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    seen, faults = fuzz(options.first, options.count, options.seed)
    for kind, times in sorted(seen.items()):
        print(f"{times:6} {kind}")
    print(f"{sum(seen.values())} cases, {len(faults)} faults", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(fuzz, 10_000, __doc__))
