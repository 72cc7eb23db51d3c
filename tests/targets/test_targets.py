"""Every architecture as a target: hidden states and logits as transformers computes them, answers as without a drafter.

One tiny random model each (architectures.py).  Then what is refused, split files, and the end of a table of positions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from architectures import ARCHITECTURES, OTHERS, Model
from engines import PROMPT, answer, close, drafter_for, guess, running, samplings
from reference import path_to, tokens_to

from eagle3_cli import model_files
from eagle3_cli.engine.tree import ROOT
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.errors import FileError, InputError, OptionError, PairError
from eagle3_cli.gguf_file import main_type
from eagle3_cli.model_files import check_target, read_drafter, target_files
from eagle3_cli.settings import RuntimeSettings
from eagle3_cli.train import TrainSettings
from eagle3_cli.train.inputs import check_inputs

# Branches at every level, to three depths.
TREE = DraftTree(
    tokens=[10, 12, 15, 16, 13, 10, 11, 14],
    parents=[-1, 0, 1, 1, 0, 4, -1, 6],
    depths=[1, 2, 3, 3, 2, 3, 1, 2],
    logps=[-1.0, -1.2, -1.5, -1.6, -1.3, -1.7, -1.1, -1.4],
)
LEAF = 5  # its path is not the first of the tree

QUANTISED = "gpt-oss, MXFP4"  # no numbers to compare with
NOT_FILTERED = "gpt-oss"  # of the last layer llama.cpp computes all rows, of others those that ask for logits


def slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


pytestmark = pytest.mark.usefixtures("one_thread")


# --- every architecture -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ARCHITECTURES, *slow(sorted({*OTHERS} - {QUANTISED}))])
def test_hidden_states_and_logits_are_the_references(models, name):
    """Of a prompt in several batches, of every path of a tree, and of what is kept of the tree."""
    model = models(name)
    chunks: list[np.ndarray] = []
    with running(model.path, drafter_for(model)) as engine:
        target = engine.decoder.target
        target.prefill(PROMPT, lambda tokens, features: chunks.append(features.copy()))
        kept = [*PROMPT, 99, *tokens_to(TREE, LEAF)]
        logits, inputs = model.read(kept)
        features = inputs[:, model.aux].reshape(len(kept), -1)
        close(np.concatenate(chunks), features[: len(PROMPT)], model)
        close(target.logits(ROOT), logits[len(PROMPT) - 1], model)
        target.verify(99, TREE)
        texts = [[*PROMPT, 99, *tokens_to(TREE, node)] for node in range(ROOT, len(TREE))]
        for node, wanted in enumerate(model.logits(texts), ROOT):
            close(target.logits(node), wanted[-1], model)
        close(target.commit(path_to(TREE, LEAF)), features[len(PROMPT) :], model)
        target.verify(7, DraftTree())
        close(target.logits(ROOT), model.logits([[*kept, 7]])[0][-1], model)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *slow(OTHERS)])
def test_answers_are_those_of_plain_decoding(models, name):
    """With a random drafter, and with trees of which a random part is right."""
    model = models(name)
    with running(model.path, None) as plain, running(model.path, drafter_for(model)) as engine:
        wanted = [answer(plain, sampling) for sampling in samplings(model)]
        assert len(wanted) == 1 or len({*wanted[0], *wanted[1]}) > 8
        for sampling, tokens in zip(samplings(model), wanted, strict=True):
            assert answer(engine, sampling) == tokens
            assert engine.statistics.drafted > 100
        for seed, sampling in enumerate(samplings(model)):
            guess(engine, [*PROMPT, *wanted[seed]], seed)
            assert answer(engine, sampling) == wanted[seed]
            assert engine.statistics.accepted > 10


@pytest.mark.parametrize(
    "name", ["llama", NOT_FILTERED, *slow(sorted({*ARCHITECTURES, *OTHERS} - {"llama", NOT_FILTERED, QUANTISED}))]
)
def test_a_drafter_may_read_what_comes_out_of_the_last_layer(models, name):
    model = models(name)
    aux, chunks = (1, 2, model.layers), []
    with running(model.path, drafter_for(model, aux)) as engine:
        engine.decoder.target.prefill(PROMPT, lambda tokens, features: chunks.append(features.copy()))
    close(np.concatenate(chunks), model.read(PROMPT)[1][:, aux].reshape(len(PROMPT), -1), model)


# --- a table of positions ------------------------------------------------------------------------------------------


def test_a_model_with_a_table_of_positions_is_used_to_its_last_row(models):
    """GPT-2 has as many positions as rows; nothing of a tree may lie behind them."""
    model = models("gpt2")
    prompt = (PROMPT * 13)[:497]
    texts = []
    for draft in (None, drafter_for(model)):
        with running(model.path, draft, (8, 10, 60), ctx_size=0, batch=64) as engine:
            assert engine.decoder.cells == 512
            texts.append(answer(engine, prompt=prompt, most=100))
    assert texts[0] == texts[1]
    assert len(prompt) + len(texts[0]) == 512


def test_no_context_reaches_behind_a_table_of_positions(models):
    """llama.cpp would abort at the first position without a row."""
    with (
        pytest.raises(OptionError, match=r"--ctx-size 513: target.gguf knows 512 positions"),
        running(models("gpt2").path, None, ctx_size=513),
    ):
        pass
    with running(models("llama").path, None, ctx_size=513):
        pass


def test_a_drafter_is_not_trained_behind_a_table_of_positions(models, tmp_path):
    runtime = RuntimeSettings(ctx_size=513, device="cpu")
    settings = TrainSettings(target=models("gpt2").path, output=tmp_path / "drafter", max_length=1024, runtime=runtime)
    with pytest.raises(OptionError, match=r"--ctx-size 513: target.gguf knows 512 positions"):
        check_inputs(settings)


# --- what is refused -------------------------------------------------------------------------------------------


def write(path: Path, arch: str, keys: dict[str, Any], weights: tiny.Weights) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    tiny._keys(writer, tiny.TARGET)
    tiny._vocabulary(writer, tiny.TOKENS)
    tiny._finish(writer, weights, {f"{arch}.{key}": value for key, value in keys.items()})
    return path


def normal(seed: int, shapes: dict[str, tuple[int, ...]]) -> tiny.Weights:
    rng = np.random.default_rng(seed)
    return {name: 0.1 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def deci(path: Path, skipped: int) -> Path:
    """A llama without its layer `skipped`, as a search for a smaller architecture leaves it."""
    weights = {name: w for name, w in tiny.target_weights().items() if not name.startswith(f"blk.{skipped}.")}
    sizes = {"attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 96}
    keys = {key: [size * (i != skipped) for i in range(tiny.TARGET.layers)] for key, size in sizes.items()}
    return write(path, "deci", keys, weights)


def test_a_layer_whose_output_llama_does_not_name_is_refused_at_load(tmp_path):
    """In time, and with the layers that the drafter wants; with others the target works."""
    target = deci(tmp_path / "target.gguf", skipped=2)
    draft = tiny.write_drafter(tmp_path / "draft.gguf", replace(tiny.DRAFTER, aux_layers=(1, 3, 4))).path
    read_drafter(draft, target)
    match = r"draft.gguf: reads target layers 1, 3, 4, .* l_out-2: expected 1 rows, got 0"
    with pytest.raises(PairError, match=match), running(target, draft):
        pass
    draft = tiny.write_drafter(tmp_path / "other.gguf", replace(tiny.DRAFTER, aux_layers=(1, 2, 4))).path
    with running(target, None) as plain, running(target, draft) as engine:
        assert answer(engine) == answer(plain)


def test_a_layer_that_only_predicts_further_tokens_is_refused_at_load(tmp_path, tiny_target):
    """The header counts it, the graph has no such layer."""
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    weights = {name: w for name, w in tiny_target.weights.items() if not name.startswith("blk.4.")}
    tiny.write_target(target, weights=weights, llama__nextn_predict_layers=1)
    tiny.write_drafter(draft, replace(tiny.DRAFTER, aux_layers=(1, 2, 5)))
    with pytest.raises(PairError, match="l_out-4: expected 1 rows, got 0"), running(target, draft):
        pass


def test_trying_the_layers_leaves_no_trace(models):
    model = models("llama")
    with running(model.path, drafter_for(model)) as engine:
        assert engine.decoder.target.context.last_position(0) == -1
        assert engine.decoder.committed == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"general__architecture": "bert"}, "this bert model turns text into vectors"),
        ({"general__architecture": "llama-embed"}, "this llama-embed model turns text into vectors"),
        ({"llama__attention__causal": False}, "this llama model turns text into vectors"),
        ({"general__architecture": "llada"}, "llada is a diffusion model; expected one that writes from left to right"),
        ({"general__architecture": "dflash"}, "is a drafter .dflash., but was given as the target"),
    ],
)
def test_models_that_do_not_write_from_left_to_right_are_refused_by_their_header(tmp_path, changes, match):
    tiny.write_target(tmp_path / "target.gguf", **changes)
    with pytest.raises(FileError, match=match):
        check_target(tmp_path / "target.gguf")


def test_a_model_without_a_cache_is_refused_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "_DIFFUSION", ())
    path = write(tmp_path / "target.gguf", "llada", {}, tiny.target_weights())
    with pytest.raises(FileError, match=r"target.gguf: llada .* keeps no KV cache"), running(path, None):
        pass


# --- split files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The llama in parts of 20 tensors; its path is the first of them."""
    model = Model(ARCHITECTURES["llama"], tmp_path_factory.mktemp("split"), parts=20)
    model.path = model.path.with_name("target-00001-of-00003.gguf")
    return model


@pytest.fixture
def copy(split: Model, tmp_path: Path) -> Callable[[int], Path]:
    """copy(i) -> the path of part i, 1 to 3, in a folder that may be changed."""
    paths = [Path(shutil.copy(path, tmp_path)) for path in target_files(split.path)]
    return lambda number: paths[number - 1]


def test_a_split_target_is_the_same_model(models, split):
    model = models("llama")
    assert [path.name for path in target_files(split.path)] == [f"target-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert main_type(target_files(split.path)) == "F32"
    texts = []
    for path in (model.path, split.path):
        for draft in (None, drafter_for(model)):
            with running(path, draft) as engine:
                texts.append(answer(engine))
    assert texts == texts[:1] * 4


def refused(path: Path, error: type[InputError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        check_target(path)
    assert caught.value.hint
    with pytest.raises(error, match=match), running(path, None):
        pass


def test_a_later_part_is_refused(copy):
    refused(copy(2), FileError, r"target-00002-of-00003.gguf: is part 2 of 3 of a split model; expected the first part")


def test_a_missing_part_is_named(copy):
    copy(3).unlink()
    refused(copy(1), FileError, r"target-00003-of-00003.gguf: no such file; expected part 3 of 3 of a split model")


def test_a_truncated_part_is_named(copy):
    copy(2).write_bytes(copy(2).read_bytes()[:-100])
    refused(copy(1), FileError, r"target-00002-of-00003.gguf: truncated")


def test_a_part_in_the_place_of_another_is_named(copy):
    shutil.copy(copy(3), copy(2))
    refused(copy(1), FileError, r"target-00002-of-00003.gguf: expected part 2 of 3 of a split model, got part 3 of 3")


def test_a_part_of_another_name_is_refused(copy, tmp_path):
    path = copy(1).rename(tmp_path / "model.gguf")
    refused(path, FileError, r"model.gguf: is part 1 of 3 .* expected its name to end in -00001-of-00003.gguf")


def test_a_file_that_claims_to_have_billions_of_parts(tmp_path):
    path = tmp_path / "model-00001-of-2147483647.gguf"
    tiny.write_target(path, split__count=2**31 - 1, split__no=0)
    with pytest.raises(FileError, match=r"expected split.count up to 65535, got 2147483647"):
        check_target(path)


def test_a_split_drafter_is_refused(tmp_path, tiny_target):
    path = tmp_path / "draft.gguf"
    tiny.write_drafter(path, split__count=2, split__no=0)
    with pytest.raises(FileError, match=r"draft.gguf: is part 1 of 2 of a split model; expected a drafter in one file"):
        read_drafter(path, tiny_target.path)
