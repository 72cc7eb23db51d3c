"""Captured states equal those of the engine and, within rounding, those of transformers on the same weights."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from states_tools import contents, random_samples, save_llama

from eagle3_cli.errors import FileError, LlamaError, OptionError
from eagle3_cli.llama import Model
from eagle3_cli.settings import RuntimeSettings
from eagle3_cli.train import llama_states
from eagle3_cli.train.answers import AnswerWriter
from eagle3_cli.train.capture import CaptureSettings, aux_layers, batches, capture
from eagle3_cli.train.dialogue import AnswerSettings
from eagle3_cli.train.samples import Sample
from eagle3_cli.train.shards import ShardReader

LAYERS = (1, 2, 4)
LENGTHS = [7, 20, 3, 50, 1, 12, 9]  # with 32 tokens to a batch: 0..2, 3 in two parts, 4..6
SAMPLES = random_samples(LENGTHS, tiny.VOCAB)


def settings(target: Path, folder: Path, **changes: Any) -> CaptureSettings:
    runtime = RuntimeSettings(
        **{**tiny.EXACT, "batch": 32, "threads": 1, "device": "cpu", **changes.pop("runtime", {})}
    )
    return CaptureSettings(target, folder, runtime, **{"aux_layers": LAYERS, "shard_tokens": 60, **changes})


def captured(target: Path, folder: Path, samples: list[Sample] = SAMPLES, **changes: Any) -> list[Any]:
    capture(settings(target, folder, **changes), samples)
    reader = ShardReader(folder)
    return [reader.sample(i) for i in range(len(reader))]


def engine_states(target: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features and logits of each position by the engine's own target, and the states after the final norm."""
    from eagle3_cli import _native
    from eagle3_cli.context import Context, ContextSettings
    from eagle3_cli.engine.target import Target
    from eagle3_cli.llama import Model

    model = Model(target, [], 0)
    capture = _native.Capture([*(f"l_out-{i - 1}" for i in LAYERS), "result_norm"], model.n_embd, 64)
    context = Context(model, "target", ContextSettings(64, 64, 1, 1, 0, 0, 0), capture)
    rows, logits = [], []
    engine = Target(context, every_row=True)
    for token in tokens:  # one by one, as decoding goes
        engine.prefill([int(token)], lambda _, features: rows.append(features[0].copy()))
        logits.append(engine.logits(-1))
    context.close()
    model.close()
    states = np.array(rows)
    return states[:, : 3 * model.n_embd], states[:, 3 * model.n_embd :], np.array(logits)


def close(found: torch.Tensor, expected: np.ndarray) -> bool:
    """Within one rounding to bfloat16, half a unit in the last of 8 bits, and what batches of other widths change."""
    return bool(torch.allclose(found.float(), torch.from_numpy(expected), rtol=2**-8, atol=1e-4))


def test_states_are_those_of_the_engine(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    for sample, states in zip(SAMPLES, captured(tiny_target.path, tmp_path), strict=True):
        hidden, final, logits = engine_states(tiny_target.path, sample.tokens)
        assert close(states.hidden, hidden)
        assert close(states.final, final)
        assert np.array_equal(states.best, logits.argmax(1))
        assert np.array_equal(states.tokens, sample.tokens)
        assert np.array_equal(states.answer, sample.answer)


def test_final_state_times_head_is_the_target_s_distribution(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    states = captured(tiny_target.path, tmp_path)[3]
    _, _, logits = engine_states(tiny_target.path, SAMPLES[3].tokens)
    again = states.final.float() @ torch.from_numpy(tiny_target.weights["output.weight"]).T
    assert torch.allclose(again, torch.from_numpy(logits), atol=0.02 * float(np.abs(logits).max()))


def test_neighbours_in_a_batch_change_nothing(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    together = captured(tiny_target.path, tmp_path / "together")
    for i, sample in enumerate(SAMPLES):
        alone = captured(tiny_target.path, tmp_path / f"{i}", [sample], runtime={"batch": 64})[0]
        assert torch.equal(alone.hidden, together[i].hidden)
        assert torch.equal(alone.final, together[i].final)
        assert torch.equal(alone.best, together[i].best)


def test_transformers_gives_the_same_states(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    folder = save_llama(tmp_path / "hf", tiny_target.config, tiny_target.weights)
    from_hf = captured(folder, tmp_path / "a", dtype="f32")
    for ours, theirs in zip(captured(tiny_target.path, tmp_path / "b"), from_hf, strict=True):
        assert torch.allclose(ours.hidden.float(), theirs.hidden.float(), rtol=2**-7, atol=1e-3)
        assert torch.allclose(ours.final.float(), theirs.final.float(), rtol=2**-7, atol=1e-3)
        assert torch.equal(ours.best, theirs.best)


def test_transformers_gives_the_same_states_from_the_gguf_itself(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    """Samples of several lengths, so that some are padded."""
    turned_back = captured(tiny_target.path, tmp_path / "a", engine="transformers", dtype="f32")
    for ours, theirs in zip(captured(tiny_target.path, tmp_path / "b"), turned_back, strict=True):
        assert torch.allclose(ours.hidden.float(), theirs.hidden.float(), rtol=2**-7, atol=1e-3)
        assert torch.allclose(ours.final.float(), theirs.final.float(), rtol=2**-7, atol=1e-3)
        assert torch.equal(ours.best, theirs.best)


def test_states_of_one_engine_are_not_those_of_the_other(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    capture(settings(tiny_target.path, tmp_path), SAMPLES)
    with pytest.raises(FileError, match=r"engine transformers f32 wanted, llama\.cpp found"):
        capture(settings(tiny_target.path, tmp_path, engine="transformers", dtype="f32"), SAMPLES)


def test_transformers_refuses_weights_that_are_not_there(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_llama(tmp_path / "hf", tiny_target.config, tiny_target.weights)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FileError, match=r"lack model\.layers\.0\.mlp\.up_proj\.weight"):
        capture(settings(folder, tmp_path / "shards"), SAMPLES)


# --- batches and resuming ------------------------------------------------------------------------------


def test_batches_end_at_their_rows_and_at_shards() -> None:
    assert list(batches(LENGTHS, 0, 32, 10**6)) == [range(0, 3), range(3, 4), range(4, 7)]
    assert list(batches(LENGTHS, 0, 32, 25)) == [range(0, 2), range(2, 3), range(3, 4), range(4, 7)]
    assert list(batches(LENGTHS, 2, 32, 25)) == [range(2, 3), range(3, 4), range(4, 7)]
    assert list(batches([1] * 600, 0, 1000, 10**6)) == [range(0, 256), range(256, 512), range(512, 600)]
    assert list(batches(LENGTHS, 7, 32, 25)) == []


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from test_train_capture import SAMPLES, capture, settings
def die(progress):
    if progress.done >= 80:
        os.kill(os.getpid(), signal.SIGKILL)
capture(settings(Path(sys.argv[1]), Path(sys.argv[2])), SAMPLES, die)
"""


def test_killed_capture_resumes_to_the_same_bytes(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    capture(settings(tiny_target.path, whole), SAMPLES)
    places = [str(Path(__file__).parent), str(Path(tiny.__file__).parent)]
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tiny_target.path), str(folder), *places])
    assert ended.returncode == -signal.SIGKILL
    assert "shard-00001.safetensors" not in os.listdir(folder)
    seen: list[Any] = []
    capture(settings(tiny_target.path, folder), SAMPLES, seen.append)
    assert contents(folder) == contents(whole)
    assert (seen[0].done, seen[0].total) == (80, sum(LENGTHS))
    assert seen[-1].done == sum(LENGTHS)


def test_estimate_comes_first_and_says_what_is_written(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    seen: list[Any] = []
    capture(settings(tiny_target.path, tmp_path), SAMPLES, seen.append)
    assert (seen[0].done, seen[0].bytes_left) == (0, sum(LENGTHS) * (8 * tiny.TARGET.width + 9))
    assert seen[0].seconds_left > 0
    stored = sum(len(data) for name, data in contents(tmp_path).items() if name.startswith("shard"))
    assert seen[0].bytes_left < stored < seen[0].bytes_left + 3000


def test_finished_capture_loads_no_model(
    tmp_path: Path, tiny_target: tiny.TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(settings(tiny_target.path, tmp_path), SAMPLES)
    before = contents(tmp_path)
    monkeypatch.setattr(llama_states, "LlamaRunner", None)
    capture(settings(tiny_target.path, tmp_path), SAMPLES)
    assert contents(tmp_path) == before


# --- refusals ------------------------------------------------------------------------------------------


def refuses(target: Path, folder: Path, message: str, samples: list[Sample] = SAMPLES, **changes: Any) -> None:
    """With exit code 2, and without any shard written."""
    with pytest.raises((OptionError, FileError), match=message) as error:
        capture(settings(target, folder, **changes), samples)
    assert error.value.exit_code == 2
    assert not list(folder.glob("shard*"))


def test_aux_layers_are_three_ascending_layers_of_the_target() -> None:
    assert aux_layers(None, 30, False) == (2, 15, 27)
    assert aux_layers((1, 3, 5), 5, False) == (1, 3, 5)
    assert aux_layers((1, 3, 5), 6, True) == (1, 3, 5)
    for wrong in [(0, 2, 4), (1, 1, 4), (4, 2, 1), (1, 2), (1, 2, 6)]:
        with pytest.raises(OptionError, match="three ascending layers from 1 to 5"):
            aux_layers(wrong, 5, False)
        with pytest.raises(OptionError, match="three ascending layers from 1 to 5"):
            aux_layers(wrong, 6, True)
    with pytest.raises(OptionError, match="does not fit a target of 5 layers"):
        aux_layers(None, 5, False)


def test_last_layer_s_output_can_be_an_aux_layer(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    states = captured(tiny_target.path, tmp_path, SAMPLES[:1], aux_layers=(1, 2, 5))[0]
    norm = torch.from_numpy(tiny_target.weights["output_norm.weight"])
    last = states.hidden[:, 128:].float()
    normed = norm * last / (last.square().mean(1, keepdim=True) + tiny.TARGET.eps).sqrt()
    assert torch.allclose(normed, states.final.float(), rtol=0.02, atol=0.01)


def test_last_layer_s_output_is_not_in_transformers_hidden_states(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    folder = save_llama(tmp_path / "hf", tiny_target.config, tiny_target.weights)
    refuses(folder, tmp_path / "shards", "from 1 to 4", aux_layers=(1, 2, 5))


def test_samples_that_cannot_be_computed_are_refused(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    path = tiny_target.path
    refuses(path, tmp_path, "no samples", [])
    refuses(path, tmp_path, "sample 1: has no tokens", [SAMPLES[0], SAMPLES[0].__class__(*(np.zeros(0, int),) * 2)])
    outside = Sample(np.array([3, tiny.VOCAB], np.int32), np.ones(2, bool))
    refuses(path, tmp_path, "from 0 to 263, got 3 to 264", [SAMPLES[0], outside])
    refuses(path, tmp_path, "A sample has 50 tokens, but the context has 40", runtime={"ctx_size": 40})


def test_other_samples_than_those_on_disk_are_refused(tmp_path: Path, tiny_target: tiny.TinyModel) -> None:
    capture(settings(tiny_target.path, tmp_path), SAMPLES)
    changed = [*SAMPLES[:2], Sample(SAMPLES[2].tokens, ~SAMPLES[2].answer), *SAMPLES[3:]]
    for samples, first in [(changed, 2), (SAMPLES[:5], 5)]:
        with pytest.raises(FileError, match=f"sample {first} there is not sample {first} of this data"):
            capture(settings(tiny_target.path, tmp_path), samples)


def test_disk_that_is_too_small_is_known_before_the_model_is_loaded(
    tmp_path: Path, tiny_target: tiny.TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_states, "LlamaRunner", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    refuses(tiny_target.path, tmp_path, "MB are needed and 0 MB are free")


def test_target_whose_states_have_no_name_is_refused(
    tmp_path: Path, tiny_target: tiny.TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_states, "FINAL", "no_such_state")
    refuses(tiny_target.path, tmp_path, "cannot be captured: no_such_state: expected 32 rows, got 0")


def test_target_whose_logits_are_scaled_is_refused(tmp_path: Path) -> None:
    """Granite's graph divides the logits by logit_scale; here the final state is not what the head alone reads."""
    scaled = tiny.write_target(tmp_path / "t.gguf", general__architecture="granite", **_granite_keys())
    refuses(scaled.path, tmp_path / "shards", "not the product of its head and its final state: they differ by 300%")


def _granite_keys() -> dict[str, Any]:
    c = tiny.TARGET
    sizes = {"block_count": c.layers, "context_length": 8192, "embedding_length": c.width}
    sizes |= {"feed_forward_length": c.ffn, "vocab_size": tiny.VOCAB}
    sizes |= {"attention__head_count": c.heads, "attention__head_count_kv": c.kv_heads}
    sizes |= {"attention__layer_norm_rms_epsilon": c.eps, "rope__dimension_count": c.head_dim, "logit_scale": 4.0}
    return {f"granite__{name}": value for name, value in sizes.items()}


@pytest.mark.parametrize(
    ("lacking", "message"),
    [("generates_text", "does not generate text"), ("keeps_every_position", "has recurrent layers")],
)
def test_target_that_cannot_be_drafted_for_is_refused(
    tmp_path: Path, tiny_target: tiny.TinyModel, monkeypatch: pytest.MonkeyPatch, lacking: str, message: str
) -> None:
    monkeypatch.setattr(Model, lacking, False)
    refuses(tiny_target.path, tmp_path, message)
    with pytest.raises(FileError, match=message):
        AnswerWriter(tiny_target.path, RuntimeSettings(), AnswerSettings())


def test_states_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    weights = tiny.target_weights()
    weights["token_embd.weight"][5] = np.inf
    broken = tiny.write_target(tmp_path / "t.gguf", weights=weights)
    with pytest.raises(LlamaError, match="NaN or infinite"):
        capture(settings(broken.path, tmp_path / "shards"), [Sample(np.array([5, 6], np.int32), np.ones(2, bool))])
