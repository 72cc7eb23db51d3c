"""LoRA adapters on a tiny target, against the same target with B A added to its weights by numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from gguf import GGUFWriter

from eagle3_cli.engine import load_engine
from eagle3_cli.errors import FileError, OptionError, PairError
from eagle3_cli.lora import check_lora
from eagle3_cli.settings import Limits, Lora, PairSettings, RuntimeSettings, SamplingSettings

RANK, ALPHA = 4, 8.0
ADAPTED = ("blk.0.attn_q.weight", "blk.2.ffn_down.weight", "blk.4.attn_output.weight", "token_embd.weight")
PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, tiny.END_OF_TEXT, 20)]
RUNTIME = RuntimeSettings(ctx_size=256, threads=1, **tiny.EXACT)
KEYS = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": ALPHA}


def matrices(weights: tiny.Weights, seed: int = 1) -> tiny.Weights:
    """A and B of each adapted weight, as PEFT has them: [rank, in] and [out, rank]; those of embeddings change places
    in the file."""
    rng = np.random.default_rng(seed)
    found: tiny.Weights = {}
    for name in ADAPTED:
        rows, columns = weights[name].shape
        a, b = (0.3 * rng.standard_normal(shape).astype(np.float32) for shape in ((RANK, columns), (rows, RANK)))
        if name == "token_embd.weight":
            a, b = b, np.ascontiguousarray(a.T)
        found |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    return found


def write(path: Path, parts: tiny.Weights, arch: str = "llama", **keys) -> Path:
    """keys: `__` for a dot; None leaves one out."""
    writer = GGUFWriter(path, arch)
    tiny._finish(writer, parts, KEYS | {key.replace("__", "."): value for key, value in keys.items()})
    return path


def merged(weights: tiny.Weights, parts: tiny.Weights, scale: float) -> tiny.Weights:
    found = dict(weights)
    for name in ADAPTED:
        a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
        change = a @ b.T if name == "token_embd.weight" else b @ a
        found[name] = weights[name] + scale * ALPHA / RANK * change
    return found


@pytest.fixture(scope="module")
def parts(tiny_target) -> tiny.Weights:
    return matrices(tiny_target.weights)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, parts) -> Path:
    return write(tmp_path_factory.mktemp("lora") / "adapter.gguf", parts)


def logits(target: Path, *loras: Lora) -> np.ndarray:
    with load_engine(PairSettings(target, None, "none", loras=loras), RUNTIME) as engine:
        return np.array(engine.decoder.logits_after(PROMPT))


def answer(pair: PairSettings, temperature: float) -> list[int | None]:
    with load_engine(pair, RUNTIME) as engine:
        sampling = SamplingSettings(temperature=temperature, seed=4)
        return [piece.token for piece in engine.stream(PROMPT, sampling, Limits(max_tokens=40))]


# --- it works ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_logits_are_those_of_merged_weights(tiny_target, parts, adapter, tmp_path, scale):
    other = tiny.write_target(tmp_path / "merged.gguf", weights=merged(tiny_target.weights, parts, scale)).path
    plain, adapted = logits(tiny_target.path), logits(tiny_target.path, Lora(adapter, scale))
    np.testing.assert_allclose(adapted, logits(other), rtol=1e-4, atol=1e-3)
    assert np.abs(adapted - plain).max() > 0.5


def test_two_adapters_add_up_and_one_of_scale_0_adds_nothing(tiny_target, parts, adapter, tmp_path):
    second = matrices(tiny_target.weights, seed=2)
    weights = merged(merged(tiny_target.weights, parts, 1.0), second, 0.5)
    other = tiny.write_target(tmp_path / "merged.gguf", weights=weights).path
    loras = Lora(adapter), Lora(write(tmp_path / "second.gguf", second), 0.5)
    np.testing.assert_allclose(logits(tiny_target.path, *loras), logits(other), rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(logits(tiny_target.path, Lora(adapter, 0.0)), logits(tiny_target.path))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_nothing_under_an_adapter(tiny_target, tiny_drafters, adapter, temperature):
    loras = (Lora(adapter, 0.5),)
    plain = answer(PairSettings(tiny_target.path, None, "none", loras=loras), temperature)
    for draft in ("good", "random", "borrowing"):
        pair = PairSettings(tiny_target.path, tiny_drafters[draft].path, None, 4, 4, 8, loras=loras)
        assert answer(pair, temperature) == plain
    assert plain != answer(PairSettings(tiny_target.path, None, "none"), temperature)


def test_engines_beside_each_other_have_adapters_of_their_own(tiny_target, adapter):
    pair = PairSettings(tiny_target.path, None, "none")
    with load_engine(pair, RUNTIME) as plain:
        before = np.array(plain.decoder.logits_after(PROMPT))
        other = PairSettings(tiny_target.path, None, "none", loras=(Lora(adapter),))
        with load_engine(other, RUNTIME, None, plain) as adapted:
            assert np.abs(np.array(adapted.decoder.logits_after(PROMPT)) - before).max() > 0.5
            assert adapted.settings["loras"] == [{"path": str(adapter), "scale": 1.0}]
        plain.decoder.truncate(0)
        np.testing.assert_array_equal(plain.decoder.logits_after(PROMPT), before)


def test_costs_and_acceptance_are_learned_apart(tiny_target, tiny_drafters, adapter):
    places = set()
    for loras in ((), (Lora(adapter),), (Lora(adapter, 0.5),)):
        pair = PairSettings(tiny_target.path, tiny_drafters["good"].path, loras=loras)
        with load_engine(pair, RUNTIME) as engine:
            places.add(engine.learned)
    assert len(places) == 3


# --- it is refused -----------------------------------------------------------------------------------------

WRONG_KEYS = {
    "no adapter": ({"general__type": "model"}, "expected general.type adapter, got model"),
    "a number for a type": ({"general__type": 3}, "expected general.type adapter, got 3"),
    "a control vector": ({"adapter__type": "cvec"}, "expected adapter.type lora, got cvec"),
    "alpha is missing": ({"adapter__lora__alpha": None}, "expected adapter.lora.alpha as float, got nothing"),
    "alpha is a text": ({"adapter__lora__alpha": "8"}, "expected adapter.lora.alpha as float"),
    "alpha is no number": ({"adapter__lora__alpha": float("nan")}, "finite"),
    "activated later": ({"adapter__alora__invocation_tokens": [1, 2]}, "activated LoRA"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_a_file_that_is_no_plain_adapter(tiny_target, parts, tmp_path, case):
    keys, message = WRONG_KEYS[case]
    path = write(tmp_path / "adapter.gguf", parts, **keys)
    with pytest.raises(FileError, match=message) as caught:
        check_lora(path, tiny_target.path)
    assert str(path) in str(caught.value)


def test_an_adapter_of_another_architecture(tiny_target, parts, tmp_path):
    path = write(tmp_path / "adapter.gguf", parts, arch="qwen2")
    with pytest.raises(PairError, match=r"was made for a qwen2 model, but target.gguf is a llama model"):
        check_lora(path, tiny_target.path)


def test_files_that_are_none(tiny_target, tmp_path, adapter):
    for name, data in (("missing.gguf", None), ("text.gguf", b"hello"), ("cut.gguf", adapter.read_bytes()[:-64])):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(FileError, match=name):
            check_lora(tmp_path / name, tiny_target.path)


A = f"{ADAPTED[0]}.lora_a"
WRONG_PARTS = {
    "integers": (lambda p: p | {A: p[A].astype(np.int32)}, "floating-point or quantised type, got I32"),
    "a third dimension": (lambda p: p | {A: np.stack([p[A], p[A]])}, "has shape"),
    "half a pair": (lambda p: {name: value for name, value in p.items() if name != A}, "missing one component"),
    "another width": (lambda p: p | {A: p[A][:, :32].copy()}, "incorrect shape"),
    "another rank": (lambda p: p | {A: p[A][:2].copy()}, "not transposed"),
    "an unknown weight": (lambda p: p | {"blk.9.x.weight.lora_a": p[A], "blk.9.x.weight.lora_b": p[A]}, "not exist"),
    "an unknown part": (lambda p: p | {"blk.0.attn_q.bias": p[A][0]}, "unexpected suffix"),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_matrices_that_do_not_fit(tiny_target, parts, tmp_path, case):
    change, message = WRONG_PARTS[case]
    path = write(tmp_path / "adapter.gguf", change(parts))
    with pytest.raises((FileError, PairError), match=message) as caught:
        load_engine(PairSettings(tiny_target.path, None, "none", loras=(Lora(path),)), RUNTIME)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["a.gguf", "a.gguf:", ":0.5", "a.gguf:much", "a.gguf:nan", "a.gguf:1e9"])
def test_a_scale_that_is_none(text):
    with pytest.raises(OptionError, match="--lora-scaled: expected"):
        Lora.parse(text)


def test_a_colon_may_be_part_of_the_name():
    assert Lora.parse("c:/style.gguf:0.5") == Lora(Path("c:/style.gguf"), 0.5)
