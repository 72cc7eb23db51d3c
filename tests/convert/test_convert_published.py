"""Every published drafter that is known converts to what it means, or is refused in words that say why."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from published import Expect, Published, Target
from published_code import ANGELSLIM, SPECFORGE
from published_files import scaled, write_header, write_random, write_sparse
from published_hub import AUX, HUB, REFUSED

from eagle3_cli.convert import ConvertSettings, Report, convert
from eagle3_cli.errors import Eagle3Error

ALL = (*SPECFORGE, *ANGELSLIM, *HUB)
GOOD = tuple(e for e in ALL if isinstance(e.expect, Expect))
BAD = (*REFUSED, *(e for e in ALL if isinstance(e.expect, str)))
OPTIONAL = {
    "input_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "embed_tokens.weight": "token_embd.weight",
}  # fmt: skip
FAMILIES = tuple({e.family: e for e in GOOD}.values())


def layer_ids(entry: Published) -> list[int]:
    places = (entry.config, entry.config.get("eagle_config", {}))
    return next((place[AUX] for place in places if place.get(AUX)), [])


def by_name(entries: tuple[Published, ...]) -> Any:
    return pytest.mark.parametrize("entry", [pytest.param(e, id=e.name) for e in entries])


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Target], Path]:
    """The GGUF of a target, written once."""
    folder, written = tmp_path_factory.mktemp("targets"), {}

    def write(target: Target) -> Path:
        if target not in written:
            written[target] = write_header(folder / f"{len(written)}.gguf", target)
        return written[target]

    return write


def dry_run(entry: Published, folder: Path, target: Path | None) -> Report:
    source = write_sparse(folder / "checkpoint", entry)
    return convert(ConvertSettings(source, target, folder / "out.gguf", dry_run=True))


def check(report: Report, entry: Published) -> None:
    """The report says what is expected of the entry."""
    expect = entry.expect
    assert isinstance(expect, Expect)
    assert report.aux_layers == expect.aux
    assert re.match(rf"theta {re.escape(f'{expect.theta:g}')}(, {expect.rope or '$'}|$)", report.rope)
    assert expect.rope in report.rope
    for field in ("embeddings", "head", "d2t", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
                  "final_norm", "sliding_window"):  # fmt: skip
        assert getattr(report, field) == getattr(expect, field), field


@by_name(GOOD)
def test_real_shapes_give_the_expected_facts(entry, tmp_path, target_of):
    report = dry_run(entry, tmp_path, target_of(entry.target))
    check(report, entry)
    heads, kv_heads, head_dim = entry.expect.heads
    rows = {row.gguf: row.gguf_shape for row in report.tensors}
    width = entry.config.get("transformer_layer_config", entry.config)["hidden_size"]
    assert rows["blk.0.attn_q.weight"] == (heads * head_dim, 2 * width)
    assert rows["blk.0.attn_k.weight"] == (kv_heads * head_dim, 2 * width)
    assert rows["fc.weight"] == (width, 3 * entry.target.width)


@by_name(GOOD)
def test_scaled_down_the_file_holds_these_facts_and_the_engine_accepts_it(entry, tmp_path):
    from eagle3_cli.model_files import read_drafter

    small = scaled(entry)
    if small.tensors.kind == "bin":
        pytest.importorskip("torch")
    source = write_random(tmp_path / "checkpoint", small)
    target = checkpoints.write_target(tmp_path / "target.gguf", small.target.width, small.target.layers)
    check(checkpoints.run(source, target, tmp_path / "out.gguf"), small)
    keys, tensors = checkpoints.read(tmp_path / "out.gguf")
    check_keys({k.removeprefix("eagle3."): v for k, v in keys.items()}, small)
    there = small.tensors.optional.split()
    assert {gguf for name, gguf in OPTIONAL.items() if name.removesuffix(".weight") in there} <= tensors.keys()
    assert ("d2t" in tensors) == (small.expect.d2t != "identity")
    info = read_drafter(tmp_path / "out.gguf", target)
    assert (info.aux_layers, info.target_width) == (small.expect.aux, small.target.width)
    assert (info.fc_norm is not None) == small.expect.fc_norm
    for field in ("norm_output", "final_norm", "sliding_window"):
        assert getattr(info, field) == getattr(small.expect, field), field


def check_keys(keys: dict[str, Any], entry: Published) -> None:
    """The keys of llama.cpp's eagle3 architecture, read by gguf's own reader."""
    expect, target = entry.expect, entry.target
    assert isinstance(expect, Expect)
    found = tuple(keys[f"attention.{name}"] for name in ("head_count", "head_count_kv", "key_length"))
    assert found == expect.heads
    assert keys["target_layers"] == list(expect.aux)
    assert keys["target_hidden_size"] == target.width
    assert keys["rope.freq_base"] == pytest.approx(expect.theta)
    assert keys["norm_before_residual"] is expect.norm_before_residual
    assert keys["norm_before_fc"] is expect.norm_before_fc
    assert len(keys["tokenizer.ggml.tokens"]) == target.vocab


@by_name(BAD)
def test_what_cannot_run_is_refused_in_words(entry, tmp_path, target_of):
    with pytest.raises(Eagle3Error) as caught:
        dry_run(entry, tmp_path, target_of(entry.target))
    assert caught.value.exit_code == 2
    assert re.search(entry.expect, f"{caught.value.message} {caught.value.hint}"), caught.value.message


@by_name(tuple(e for e in GOOD if layer_ids(e) and layer_ids(e)[0] in (1, 2)))
def test_without_a_target_the_config_is_enough_where_it_names_the_layers(entry, tmp_path):
    report = dry_run(entry, tmp_path, None)
    check(report, entry)
    assert report.vocabulary == "none"


@by_name(tuple(e for e in HUB if not layer_ids(e) and e.family != "NeMo"))
def test_without_a_target_the_layers_are_never_guessed(entry, tmp_path):
    with pytest.raises(Eagle3Error) as caught:
        dry_run(entry, tmp_path, None)
    assert "depends on the target's number of layers" in caught.value.message


@by_name(FAMILIES)
def test_the_family_is_recognised(entry, tmp_path, target_of):
    assert dry_run(entry, tmp_path, target_of(entry.target)).family == entry.family


def test_every_family_is_there_and_no_name_twice():
    names = [e.name for e in (*ALL, *REFUSED)]
    assert len(set(names)) == len(names)
    assert {e.family for e in FAMILIES} == {
        "SpecForge", "AngelSlim", "SafeAILab", "speculators", "ModelOpt", "NeMo",
    }  # fmt: skip


@by_name((SPECFORGE[0], HUB[0]))
def test_another_target_is_refused(entry, tmp_path, target_of):
    """The data decides, not the name: the same checkpoint with a target of another width or vocabulary."""
    for other in (Target("llama", 32, 3072, 128256, 8192), Target("llama", 32, entry.target.width, 99, 8192)):
        folder = tmp_path / str(other.vocab)
        folder.mkdir()
        with pytest.raises(Eagle3Error) as caught:
            dry_run(entry, folder, target_of(other))
        assert caught.value.exit_code == 2
