"""Where the facts of the target come from: a GGUF, the first part of a split one, a folder, or the checkpoint alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tiny
from checkpoints import HT, LAYERS, H, V, config

from eagle3_cli.convert.target import read_target
from eagle3_cli.errors import CheckpointError, FileError, PairError

IDS = {"eagle_aux_hidden_state_layer_ids": [2, 12, 21]}


def write_folder(folder: Path, tokens: list[str] = tiny.TOKENS, **changes: Any) -> Path:
    """A model's config and byte-level BPE tokenizer as Hugging Face stores them, without weights."""
    folder.mkdir()
    facts = {"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HT, "vocab_size": V,
             "max_position_embeddings": 1024, "bos_token_id": tiny.IM_START, "eos_token_id": tiny.IM_END}  # fmt: skip
    facts = {k: v for k, v in {**facts, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(facts))
    plain = [t for t in tokens if t not in tiny.CONTROL]
    tokenizer = {
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(plain)}, "merges": list(tiny.MERGES)},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": len(plain) + i, "content": t, "special": True} for i, t in enumerate(tiny.CONTROL)],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "checkpoint", checkpoints.tensors())


# --- a Hugging Face directory --------------------------------------------------------------------------


def test_a_folder_gives_the_same_tensors_and_tokens_as_the_gguf(source, target, tmp_path):
    folder = write_folder(tmp_path / "target")
    checkpoints.run(source, folder, tmp_path / "a.gguf")
    checkpoints.run(source, target, tmp_path / "b.gguf")
    (keys, tensors), (expected, theirs) = checkpoints.read(tmp_path / "a.gguf"), checkpoints.read(tmp_path / "b.gguf")
    assert all(np.array_equal(tensors[name].data, theirs[name].data) for name in tensors.keys() | theirs.keys())
    assert {k: v for k, v in keys.items() if k.startswith("eagle3.")} == {
        k: v for k, v in expected.items() if k.startswith("eagle3.")
    }
    for name in ("model", "tokens", "merges", "bos_token_id", "eos_token_id"):
        assert keys[f"tokenizer.ggml.{name}"] == expected[f"tokenizer.ggml.{name}"], name
    assert keys["tokenizer.ggml.token_type"][-3:] == [3, 3, 3]


def test_missing_tokens_are_padded_as_llama_cpp_does(source, tmp_path):
    tokens = [*tiny.TOKENS[:200], *tiny.CONTROL]
    checkpoints.run(source, write_folder(tmp_path / "target", tokens), tmp_path / "a.gguf")
    keys = checkpoints.read(tmp_path / "a.gguf")[0]
    assert keys["tokenizer.ggml.tokens"][-2:] == [f"[PAD{V - 2}]", f"[PAD{V - 1}]"]
    assert keys["tokenizer.ggml.token_type"][-1] == 5


def test_added_tokens_keep_their_kind_wherever_they_are_listed(source, tmp_path):
    folder = write_folder(tmp_path / "target")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][1]["special"] = False
    tokenizer["added_tokens"].append({"id": 7, "content": tiny.TOKENS[7], "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    checkpoints.run(source, folder, tmp_path / "a.gguf")
    types = checkpoints.read(tmp_path / "a.gguf")[0]["tokenizer.ggml.token_type"]
    assert [types[i] for i in (6, 7, V - 3, V - 2, V - 1)] == [1, 3, 3, 4, 3]


def test_sizes_may_be_in_text_config(tmp_path):
    sizes = {"num_hidden_layers": 9, "hidden_size": 48, "vocab_size": V, "max_position_embeddings": 77}
    folder = write_folder(tmp_path / "t", hidden_size=None, text_config=sizes)
    found = read_target(folder)
    assert (found.layers, found.width, found.vocab, found.context, found.name) == (9, 48, V, 77, "t")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json in this directory"),
        (lambda f: (f / "tokenizer.json").unlink(), r"no tokenizer\.model, tokenizer\.json or vocab\.json"),
        (lambda f: (f / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}'), "its tokenizer cannot be read"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "its tokenizer cannot be read"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "expected an object"),
        (lambda f: (f / "config.json").write_text('{"hidden_size": 64}'), "no vocab_size"),
        (lambda f: (f / "config.json").write_text('{"vocab_size": -1}'), "vocab_size: expected a positive"),
    ],
)
def test_an_unusable_folder_says_what_is_wrong(tmp_path, change, words):
    folder = write_folder(tmp_path / "t")
    change(folder)
    with pytest.raises(FileError, match=words):
        read_target(folder)


def test_a_tokenizer_that_needs_another_package_says_which(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "t")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["byte_fallback"], tokenizer["decoder"] = True, {"type": "Sequence"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FileError, match="install the `transformers` package") as caught:
        read_target(folder)
    assert caught.value.hint == "Or give the target's GGUF."


@pytest.mark.parametrize("size", [100, 2**31 - 1])
def test_another_number_of_tokens_than_the_config_says(tmp_path, size):
    """A few tokens more in the config are padding; two billion would only fill the memory."""
    with pytest.raises(FileError, match=f"the tokenizer has {V} tokens, but vocab_size is {size}"):
        read_target(write_folder(tmp_path / "t", vocab_size=size))


# --- GGUF files ----------------------------------------------------------------------------------------


def test_only_the_first_part_of_a_split_model_will_do(tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "llama-00002-of-00002.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.no", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FileError, match=r"part 1 .* of a split model"):
        read_target(path)


def test_a_drafter_is_no_target(tmp_path):
    path = tiny.write_drafter(tmp_path / "d.gguf").path
    with pytest.raises(FileError, match="this is a drafter"):
        read_target(path)


# --- vocabularies that only look alike -----------------------------------------------------------------


def test_the_checkpoints_own_tokenizer_must_be_the_targets(source, target, tmp_path, refused):
    other = [t for t in tiny.TOKENS if t not in tiny.CONTROL]
    other[5], other[6] = other[6], other[5]
    text = (write_folder(tmp_path / "other", other) / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text)
    with pytest.raises(PairError, match="token 5 is "):
        checkpoints.run(source, target, tmp_path / "o.gguf")
    (source / "tokenizer.json").write_text((write_folder(tmp_path / "same") / "tokenizer.json").read_text())
    checkpoints.run(source, target, tmp_path / "o.gguf")


# --- no target -----------------------------------------------------------------------------------------


def test_without_a_target_the_file_has_no_vocabulary(source, tmp_path):
    (source / "config.json").write_text(json.dumps(config(**IDS)))
    report = checkpoints.run(source, None, tmp_path / "o.gguf")
    keys, _ = checkpoints.read(tmp_path / "o.gguf")
    assert (report.target, report.vocabulary, report.aux_layers) == (None, "none", (2, 12, 21))
    assert keys["tokenizer.ggml.model"] == "no_vocab"
    assert (keys["eagle3.vocab_size"], keys["eagle3.target_hidden_size"]) == (V, HT)
    assert not {"tokenizer.ggml.tokens", "eagle3_cli.target_name"} & keys.keys()


def test_without_a_target_everything_else_is_as_with_one(source, target, tmp_path):
    (source / "config.json").write_text(json.dumps(config(**IDS)))
    checkpoints.run(source, None, tmp_path / "a.gguf")
    checkpoints.run(source, target, tmp_path / "b.gguf")
    (keys, tensors), (expected, theirs) = checkpoints.read(tmp_path / "a.gguf"), checkpoints.read(tmp_path / "b.gguf")
    assert all(np.array_equal(tensors[name].data, theirs[name].data) for name in tensors.keys() | theirs.keys())
    same = [k for k in expected if k.startswith("eagle3.")]
    assert [keys[k] for k in same] == [expected[k] for k in same]


@pytest.mark.parametrize(
    ("changes", "words", "hint"),
    [
        ({}, "the default depends on the target's number of layers", "Give --target, or add eagle_aux_hidden"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}},
            "counts layer inputs or outputs",
            "--aux-",
        ),
        ({**IDS, "max_position_embeddings": None}, "no max_position_embeddings, and no --target", None),
        ({**IDS, "vocab_size": 2**31 - 1}, "expected at most 4194304 tokens", None),
        ({**IDS, "vocab_size": 300}, "t2d: shape .264., expected .300.", None),
    ],
)
def test_the_fact_that_is_missing_is_named(source, tmp_path, changes, words, hint):
    (source / "config.json").write_text(json.dumps(config(**changes)))
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoints.run(source, None, tmp_path / "o.gguf")
    assert hint is None or hint in caught.value.hint


def test_the_vocabulary_may_be_told_by_a_tensor_alone(source, tmp_path):
    (source / "config.json").write_text(json.dumps(config(**IDS, vocab_size=None)))
    checkpoints.run(source, None, tmp_path / "o.gguf")
    assert checkpoints.read(tmp_path / "o.gguf")[0]["eagle3.vocab_size"] == V


def test_a_vocabulary_that_nothing_tells(tmp_path):
    stored = checkpoints.tensors()
    del stored["t2d"]
    source = checkpoints.write(tmp_path / "c", stored, config(**IDS, vocab_size=None))
    with pytest.raises(CheckpointError, match="no vocab_size, and no tensor tells"):
        checkpoints.run(source, None, tmp_path / "o.gguf")


def test_another_width_than_the_drafters_follows_from_the_fusion_layer(tmp_path):
    stored = checkpoints.tensors(hidden=32) | {"embed_tokens.weight": ("F16", np.zeros((V, 32), "<f2"))}
    source = checkpoints.write(tmp_path / "c", stored, config(hidden_size=32, **IDS))
    checkpoints.run(source, None, tmp_path / "o.gguf")
    keys = checkpoints.read(tmp_path / "o.gguf")[0]
    assert (keys["eagle3.target_hidden_size"], keys["eagle3.embedding_length"]) == (HT, 32)
    assert H != 32
