"""Every way in which two files do not fit, one test each: an error with the file's name, and never a crash.

What the header can tell is refused before llama.cpp sees the file; `read_drafter` and `check_target` load no model.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from eagle3_cli.engine import load_engine
from eagle3_cli.errors import FileError, PairError
from eagle3_cli.gguf_file import GgufFile
from eagle3_cli.model_files import check_target, read_drafter
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.gguf"


def load(target: Path, draft: Path | None) -> None:
    pair = PairSettings(target, draft, None if draft else "--no-draft", 3, 3, 6)
    with load_engine(pair, RuntimeSettings(ctx_size=256, threads=1)) as engine:
        list(engine.stream([1, 2, 3], SamplingSettings(temperature=0), Limits(max_tokens=5)))


def refuses(draft: Path, target: Path, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        read_drafter(draft, target)
    assert draft.name in str(caught.value)


def changed(name: str, change) -> tiny.Weights:
    """Random drafter weights with one tensor changed, or left out where `change` gives None."""
    weights = tiny.drafter_weights(tiny.DRAFTER, 11)
    value = change(weights.pop(name))
    return weights if value is None else weights | {name: value}


# --- files that fit ---------------------------------------------------------------------------------------------


def test_a_fitting_pair_is_described(tiny_target, tiny_drafters):
    info = read_drafter(tiny_drafters["narrow"].path, tiny_target.path)
    assert (info.aux_layers, info.target_width, info.width) == ((1, 2, 4), 64, 48)
    assert info.d2t.dtype == np.int64
    assert info.d2t.tolist() == tiny_drafters["narrow"].d2t.tolist()


def test_without_a_draft_vocabulary_there_is_no_d2t(tiny_target, tiny_drafters):
    assert read_drafter(tiny_drafters["random"].path, tiny_target.path).d2t is None


def test_the_header_of_a_file_can_be_read(tiny_target):
    with GgufFile(tiny_target.path) as file:
        assert file.get("general.architecture") == "llama"
        assert file.get("llama.block_count") == tiny.TARGET.layers
        assert file.get("llama.rope.freq_base") == 10000.0
        assert file.get("tokenizer.ggml.add_bos_token") is False
        assert file.get("no.such.key") is None
        assert file.strings("tokenizer.ggml.tokens")[tiny.IM_END] == b"<|im_end|>"
        assert file.strings("general.architecture") == []
        assert file.shape("blk.0.attn_k.weight") == (64, 32)
        assert file.shape("no.such.tensor") is None
        assert set(file.names()) == set(tiny_target.weights)


def test_a_draft_vocabulary_of_one_token_fits(tiny_target, path):
    tiny.write_drafter(path, d2t=[tiny.IM_END])
    load(tiny_target.path, path)


def test_an_unsorted_draft_vocabulary_fits(tiny_target, path):
    tiny.write_drafter(path, d2t=[9, 4, 200, 7, 31])
    load(tiny_target.path, path)


def test_without_switches_a_drafter_is_as_llama_runs_it(tiny_target, tiny_drafters):
    info = read_drafter(tiny_drafters["random"].path, tiny_target.path)
    assert (info.fc_norm, info.norm_output, info.final_norm, info.sliding_window) == (None, False, True, None)
    assert info.eps == np.float32(tiny.DRAFTER.eps)


def test_the_switches_of_a_file_are_read(tiny_target, path):
    config = replace(tiny.DRAFTER, fc_norm=True, norm_output=True, window=6)
    drafter = tiny.write_drafter(path, config)
    info = read_drafter(path, tiny_target.path)
    assert (info.norm_output, info.final_norm, info.sliding_window) == (True, True, 6)
    assert info.fc_norm.dtype == np.float32
    assert (info.fc_norm == drafter.weights["fc_norm"]).all()


def test_a_missing_final_norm_is_read(tiny_target, path):
    tiny.write_drafter(path, replace(tiny.DRAFTER, final_norm=False))
    assert read_drafter(path, tiny_target.path).final_norm is False


@pytest.mark.parametrize("missing", ["token_embd.weight", "output.weight"])
def test_a_drafter_may_borrow_one_of_embeddings_and_head(tiny_target, path, missing):
    tiny.write_drafter(path, weights=changed(missing, lambda value: None))
    load(tiny_target.path, path)


def test_a_target_with_tied_embeddings_lends_them_as_head(tiny_target, tiny_drafters, path):
    weights = {name: value for name, value in tiny_target.weights.items() if name != "output.weight"}
    tiny.write_target(path, weights=weights)
    load(path, tiny_drafters["borrowing"].path)


# --- no GGUF at all ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["target", "draft"])
def refused(request, tiny_target, tiny_drafters):
    """refused(path, match): the file is refused in this role."""

    def check(path: Path, match: str) -> None:
        with pytest.raises(FileError, match=match) as caught:
            check_target(path) if request.param == "target" else read_drafter(path, tiny_target.path)
        assert path.name in str(caught.value)

    check.source = (tiny_target if request.param == "target" else tiny_drafters["narrow"]).path
    return check


def test_a_missing_file(refused, path):
    refused(path, "no such file")


def test_a_directory(refused, tmp_path):
    refused(tmp_path, "is a directory")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 something else", b"\x00" * 100])
def test_another_kind_of_file(refused, path, content):
    path.write_bytes(content)
    refused(path, "not a GGUF file")


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF\x03\x00\x00\x00", b"GGUF" + b"\xff" * 60, b"GGUF" + b"\x00" * 60])
def test_a_damaged_header(refused, path, content):
    path.write_bytes(content)
    refused(path, "header is damaged")


@pytest.mark.parametrize("part", [0.002, 0.01, 0.03, 0.1, 0.5, 0.99])
def test_a_file_truncated_anywhere(refused, path, part):
    data = refused.source.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    refused(path, "header is damaged|truncated: expected at least")


def test_a_file_without_its_last_byte(refused, path):
    with GgufFile(refused.source) as file:
        assert file.names()
    data = refused.source.read_bytes().rstrip(b"\x00")
    path.write_bytes(data[:-40])
    refused(path, r"truncated: expected at least \d+ bytes, got \d+")


def test_an_unreadable_file(refused, path):
    path.write_bytes(b"GGUF")
    path.chmod(0)
    try:
        path.open("rb").close()
    except PermissionError:
        refused(path, "cannot be read")
    else:
        pytest.skip("this user may read everything")


# --- the wrong role ------------------------------------------------------------------------------------------------


def test_a_drafter_given_as_the_target(tiny_drafters):
    with pytest.raises(FileError, match="is an EAGLE-3 drafter, but was given as the target"):
        check_target(tiny_drafters["random"].path)


def test_a_target_given_as_the_drafter(tiny_target):
    refuses(tiny_target.path, tiny_target.path, FileError, "expected general.architecture eagle3, got llama")


def test_a_target_without_a_vocabulary(path):
    tiny.write_target(path, tokenizer__ggml__tokens=None)
    with pytest.raises(FileError, match="has no vocabulary"):
        check_target(path)


@pytest.mark.parametrize("key", ["llama__embedding_length", "llama__block_count", "general__architecture"])
def test_a_target_without_a_key_the_pair_needs(tiny_drafters, path, key):
    tiny.write_target(path, **{key: None})
    with pytest.raises(FileError, match=f"expected {key.replace('__', '.')}"):
        read_drafter(tiny_drafters["random"].path, path)


@pytest.mark.parametrize("layers", [513, 2**31, 2**32 - 1])
def test_a_target_with_more_layers_than_llama_counts(path, layers):
    """llama.cpp asserts 1 to 512."""
    tiny.write_target(path, llama__block_count=layers)
    with pytest.raises(FileError, match="block_count"):
        check_target(path)


# --- a drafter that is none, or is broken ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "eagle3__target_layers",
        "eagle3__target_hidden_size",
        "eagle3__block_count",
        "eagle3__embedding_length",
        "eagle3__attention__head_count",
    ],
)
@pytest.mark.parametrize("value", [None, "text"])
def test_a_drafter_without_a_key(tiny_target, path, key, value):
    tiny.write_drafter(path, **{key: value})
    refuses(path, tiny_target.path, FileError, f"expected {key.replace('__', '.')} as")


@pytest.mark.parametrize("layers", [(1, 2), (1, 2, 3, 4), (0, 1, 2), (-1, 2, 3)])
def test_aux_layers_that_are_not_three_layer_inputs(tiny_target, path, layers):
    tiny.write_drafter(path, replace(tiny.DRAFTER, aux_layers=layers))
    refuses(path, tiny_target.path, FileError, "three .*eagle3.target_layers|eagle3.target_layers as list")


def test_an_aux_layer_named_twice(tiny_target, path):
    tiny.write_drafter(path, replace(tiny.DRAFTER, aux_layers=(2, 2, 3)))
    refuses(path, tiny_target.path, FileError, "eagle3.target_layers")


def test_two_decoder_layers(tiny_target, path):
    tiny.write_drafter(path, eagle3__block_count=2)
    refuses(path, tiny_target.path, FileError, "expected one decoder layer, got eagle3.block_count 2")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (0, 1), (4, 0), (2, 4)])
def test_heads_that_cannot_be_shared(tiny_target, path, heads, kv_heads):
    tiny.write_drafter(path, eagle3__attention__head_count=heads, eagle3__attention__head_count_kv=kv_heads)
    refuses(path, tiny_target.path, FileError, "attention heads cannot share")


def test_keys_longer_than_values(tiny_target, path):
    tiny.write_drafter(path, eagle3__attention__key_length=32)
    refuses(path, tiny_target.path, FileError, "keys as long as values")


@pytest.mark.parametrize("dimensions", [0, 1, 15, 18, 64, 2**32 - 1])
def test_a_rope_that_does_not_fit_a_head(tiny_target, path, dimensions):
    """llama.cpp asserts an even number of at most the head's; 0 hangs."""
    tiny.write_drafter(path, eagle3__rope__dimension_count=dimensions)
    refuses(path, tiny_target.path, FileError, "rope.dimension_count")


def test_an_fc_of_another_shape(tiny_target, path):
    tiny.write_drafter(path, weights=changed("fc.weight", lambda fc: fc[:, :-1].copy()))
    refuses(path, tiny_target.path, FileError, r"expected fc.weight \[192, 64\], got")


def test_a_missing_fc(tiny_target, path):
    tiny.write_drafter(path, weights=changed("fc.weight", lambda fc: None))
    refuses(path, tiny_target.path, FileError, "expected fc.weight")


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight", "output_norm.weight"])
def test_a_norm_that_is_not_float32(tiny_target, path, name):
    """llama.cpp loads it and aborts in the first pass."""
    tiny.write_drafter(path, weights=changed(name, lambda norm: norm.astype(np.float16)))
    refuses(path, tiny_target.path, FileError, name)


@pytest.mark.parametrize("name", ["fc.weight", "blk.0.attn_q.weight", "token_embd.weight", "output.weight"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_a_matrix_of_a_type_llama_cannot_multiply(tiny_target, path, name, dtype):
    """llama.cpp loads it and dies with a segmentation fault in the first pass."""
    tiny.write_drafter(path, weights=changed(name, lambda matrix: matrix.astype(dtype)))
    refuses(path, tiny_target.path, FileError, name)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_a_d2t_of_another_type(tiny_target, path, dtype):
    tiny.write_drafter(path, weights=tiny.drafter_weights(tiny.DRAFTER, 1, 3) | {"d2t": np.arange(3).astype(dtype)})
    refuses(path, tiny_target.path, FileError, "d2t of type I64")


def test_an_empty_d2t(tiny_target, path):
    tiny.write_drafter(path, d2t=[])
    refuses(path, tiny_target.path, FileError, "d2t|damaged|output.weight")


def test_a_d2t_that_names_a_token_twice(tiny_target, path):
    """SpecForge 76: a vocabulary that was padded with one id."""
    tiny.write_drafter(path, d2t=[6, 5, 9, 5, 5])
    refuses(path, tiny_target.path, FileError, "d2t names token 5 3 times")


@pytest.mark.parametrize("eps", [-1e-5, float("inf"), float("nan"), 1, None])
def test_an_epsilon_that_no_norm_can_have(tiny_target, path, eps):
    """llama.cpp asserts that it is not negative."""
    tiny.write_drafter(path, eagle3__attention__layer_norm_rms_epsilon=eps)
    refuses(path, tiny_target.path, FileError, "layer_norm_rms_epsilon as")


@pytest.mark.parametrize("name", ["norm_output", "final_norm"])
@pytest.mark.parametrize("value", [1, "true", [True]], ids=str)
def test_a_switch_that_is_no_truth_value(tiny_target, path, name, value):
    tiny.write_drafter(path, **{f"eagle3_cli__{name}": value})
    refuses(path, tiny_target.path, FileError, f"expected eagle3_cli.{name} as bool")


@pytest.mark.parametrize("value", [True, "6", [6], 6.0], ids=str)
def test_a_window_that_is_no_number_of_positions(tiny_target, path, value):
    tiny.write_drafter(path, eagle3_cli__sliding_window=value)
    refuses(path, tiny_target.path, FileError, "expected eagle3_cli.sliding_window as int")


def test_a_window_of_nothing(tiny_target, path):
    tiny.write_drafter(path, eagle3_cli__sliding_window=0)
    refuses(path, tiny_target.path, FileError, "expected eagle3_cli.sliding_window from 1 on, got 0")


@pytest.mark.parametrize("value", [[1.0] * 191, [1.0] * 193, [1] * 192], ids=len)
def test_an_fc_norm_that_is_not_three_rows_of_floats(tiny_target, path, value):
    tiny.write_drafter(path, eagle3_cli__fc_norm=value)
    refuses(path, tiny_target.path, FileError, "expected eagle3_cli.fc_norm as 192 floats")


@pytest.mark.parametrize("value", [1.0, ["1.0"] * 192], ids=["number", "text"])
def test_an_fc_norm_that_is_no_array_of_numbers(tiny_target, path, value):
    tiny.write_drafter(path, eagle3_cli__fc_norm=value)
    refuses(path, tiny_target.path, FileError, "expected eagle3_cli.fc_norm as list")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_fc_norm_that_is_not_finite(tiny_target, path, value):
    tiny.write_drafter(path, eagle3_cli__fc_norm=[1.0] * 100 + [value] + [1.0] * 91)
    refuses(path, tiny_target.path, FileError, "expected finite numbers in eagle3_cli.fc_norm")


def test_fc_norm_together_with_norm_before_fc(tiny_target, path):
    tiny.write_drafter(path, replace(tiny.DRAFTER, norm_before_fc=True, fc_norm=True))
    refuses(path, tiny_target.path, FileError, "has both eagle3_cli.fc_norm and eagle3.norm_before_fc")


def test_norm_output_without_a_final_norm(tiny_target, path):
    tiny.write_drafter(path, replace(tiny.DRAFTER, norm_output=True, final_norm=False))
    refuses(path, tiny_target.path, FileError, "norm_output is true, but final_norm is false")


def test_a_missing_final_norm_whose_weights_are_not_ones(tiny_target, path):
    tiny.write_drafter(path, weights=tiny.drafter_weights(tiny.DRAFTER, 11), eagle3_cli__final_norm=False)
    refuses(path, tiny_target.path, FileError, "final_norm is false, so expected output_norm.weight as ones")


# Missing or surplus tensors, and wrong shapes inside the layer, are llama.cpp's to report.


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.attn_norm_2.weight", "output_norm.weight"])
@pytest.mark.parametrize("change", [lambda value: None, lambda value: value[..., :-1].copy()], ids=["missing", "short"])
def test_a_layer_that_is_incomplete(tiny_target, path, name, change):
    tiny.write_drafter(path, weights=changed(name, change))
    with pytest.raises(FileError, match=f"model.gguf: llama.cpp cannot load it: .*{name}"):
        load(tiny_target.path, path)


@pytest.mark.parametrize("name", ["fc.bias", "blk.1.attn_q.weight", "extra.weight"])
def test_a_tensor_that_nobody_reads(tiny_target, path, name):
    tiny.write_drafter(path, weights=tiny.drafter_weights(tiny.DRAFTER, 1) | {name: np.ones(64, np.float32)})
    with pytest.raises(FileError, match="wrong number of tensors"):
        load(tiny_target.path, path)


def test_norm_before_fc_without_its_norm(tiny_target, path):
    tiny.write_drafter(path, replace(tiny.DRAFTER, norm_before_fc=True), tiny.drafter_weights(tiny.DRAFTER, 1))
    with pytest.raises(FileError, match=r"enc\.output_norm\.weight"):
        load(tiny_target.path, path)


# --- a drafter of another target ------------------------------------------------------------------------------------


def test_another_target_width(tiny_target, path):
    config = replace(tiny.DRAFTER, target_width=96)
    tiny.write_drafter(path, config, tiny.drafter_weights(config, 1))
    refuses(path, tiny_target.path, PairError, "made for target width 96, but target.gguf has 64")


def test_an_aux_layer_beyond_the_target(tiny_target, path):
    tiny.write_drafter(path, replace(tiny.DRAFTER, aux_layers=(1, 2, 6)))
    refuses(path, tiny_target.path, PairError, "target layer 6, but target.gguf has 5")


def test_the_output_of_the_last_layer_as_aux_layer_works_or_is_refused(tiny_target, path):
    """llama.cpp computes it only for rows that ask for logits, so a prompt does not have it for every token."""
    tiny.write_drafter(path, replace(tiny.DRAFTER, aux_layers=(1, 2, tiny.TARGET.layers)))
    try:
        read_drafter(path, tiny_target.path)
    except PairError as error:
        assert "layer" in str(error)  # noqa: PT017  (either outcome is right)
    else:
        load(tiny_target.path, path)


def test_another_vocabulary_size(tiny_target, path):
    weights = changed("token_embd.weight", lambda rows: rows[:-1].copy())
    tiny.write_drafter(path, weights=weights, tokens=[t for t in tiny.TOKENS if t != "the"])
    refuses(path, tiny_target.path, PairError, "vocabulary of 263 tokens, but target.gguf has 264")


@pytest.mark.parametrize("model", ["no_vocab", "none"])
def test_another_vocabulary_size_without_a_vocabulary(tiny_target, path, model):
    tiny.write_drafter(path, tokens=[], tokenizer__ggml__model=model, eagle3__vocab_size=263)
    refuses(path, tiny_target.path, PairError, "vocabulary of 263 tokens, but target.gguf has 264")


@pytest.mark.parametrize("size", [None, "264"])
def test_no_vocabulary_and_no_size_of_it(tiny_target, path, size):
    tiny.write_drafter(path, tokens=[], eagle3__vocab_size=size)
    refuses(path, tiny_target.path, FileError, "expected eagle3.vocab_size as int")


def test_tokens_left_out_of_a_vocabulary_that_should_have_them(tiny_target, path):
    tiny.write_drafter(path, tokens=[], tokenizer__ggml__model="gpt2")
    refuses(path, tiny_target.path, PairError, "vocabulary of 0 tokens, but target.gguf has 264")


def test_the_same_size_but_other_tokens(tiny_target, path):
    tokens = list(tiny.TOKENS)
    tokens[70], tokens[71] = tokens[71], tokens[70]
    tiny.write_drafter(path, tokens=tokens)
    refuses(path, tiny_target.path, PairError, "its token 70 is b'.*', but target.gguf has b'.*'")


@pytest.mark.parametrize("d2t", [[-1, 2], [tiny.VOCAB, 1], [0, 2**31], [2**32 + 5, 6], [2**40, 1], [-(2**32) + 3, 1]])
def test_a_d2t_outside_the_vocabulary(tiny_target, path, d2t):
    """2**32 + 5 is 5 once it is squeezed into 32 bits."""
    tiny.write_drafter(path, d2t=d2t)
    refuses(path, tiny_target.path, PairError, "d2t names token")


def test_embeddings_for_another_vocabulary(tiny_target, path):
    tiny.write_drafter(path, weights=changed("token_embd.weight", lambda rows: rows[:-1].copy()))
    refuses(path, tiny_target.path, PairError, r"expected token_embd.weight \[64, 264\]")


def test_a_head_for_another_vocabulary(tiny_target, path):
    tiny.write_drafter(path, weights=changed("output.weight", lambda rows: rows[:-1].copy()))
    refuses(path, tiny_target.path, PairError, r"expected output.weight \[64, 264\]")


def test_a_head_that_is_not_as_long_as_d2t(tiny_target, path):
    tiny.write_drafter(path, weights=tiny.drafter_weights(tiny.DRAFTER, 1, 4), d2t=[1, 2, 3])
    refuses(path, tiny_target.path, PairError, r"expected output.weight \[64, 3\]")


def test_a_d2t_without_a_head(tiny_target, path):
    tiny.write_drafter(path, weights=changed("output.weight", lambda rows: None), d2t=[1, 2, 3])
    refuses(path, tiny_target.path, PairError, "no output.weight and cannot borrow")


NARROW = replace(tiny.DRAFTER, width=48, heads=6, kv_heads=3, ffn=80)


def test_a_narrow_drafter_cannot_borrow_embeddings(tiny_target, path):
    weights = tiny.drafter_weights(NARROW, 1)
    del weights["token_embd.weight"]
    tiny.write_drafter(path, NARROW, weights)
    refuses(path, tiny_target.path, PairError, "no token embeddings of its own and cannot borrow")


def test_a_narrow_drafter_cannot_borrow_the_head(tiny_target, path):
    weights = tiny.drafter_weights(NARROW, 1)
    del weights["output.weight"]
    tiny.write_drafter(path, NARROW, weights)
    refuses(path, tiny_target.path, PairError, "no output.weight and cannot borrow")


# --- in a process of its own, because a fault would take the tests with it ------------------------------------------


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-1500:]}"
    return done.stdout


SMALL_CONTEXTS = """if True:
    import sys
    from pathlib import Path
    from eagle3_cli.engine import load_engine
    from eagle3_cli.errors import Eagle3Error
    from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings, SamplingSettings

    target, draft, ctx, depth, width, nodes = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
    try:
        runtime = RuntimeSettings(ctx_size=ctx, threads=1)
        with load_engine(PairSettings(target, draft, None, depth, width, nodes), runtime) as engine:
            pieces = list(engine.stream([1, 2, 3], SamplingSettings(temperature=0), Limits()))
            print(len([p for p in pieces if p.token is not None]) + 3, engine.decoder.cells)
    except Eagle3Error as error:
        print(error)
    """


@pytest.mark.parametrize(("ctx", "shape"), [(1, (4, 4, 8)), (8, (8, 10, 60)), (64, (64, 64, 255)), (5, (1, 64, 3))])
def test_a_context_smaller_than_the_tree_does_not_crash(tiny_target, tiny_drafters, ctx, shape):
    out = run(SMALL_CONTEXTS, tiny_target.path, tiny_drafters["good"].path, ctx, *shape)
    if ctx > 3 and out[0].isdigit():
        tokens, cells = map(int, out.split())
        assert tokens == cells


FUZZ = """if True:
    import random, sys
    from pathlib import Path
    from eagle3_cli.errors import Eagle3Error
    from eagle3_cli.model_files import check_target, read_drafter

    source, header, target, draft, copy = Path(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:])
    data = source.read_bytes()
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        broken = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 6])):
            at = rng.randrange(min(header, rng.choice([64, 2000, header])))
            broken[at] = rng.choice([0, 255, 127, broken[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
        if rng.random() < 0.1:
            del broken[rng.randrange(len(broken)) :]
        copy.write_bytes(broken)
        print("seed", seed, file=sys.stderr)
        try:
            if source == target:
                check_target(copy)
                read_drafter(draft, copy)
            else:
                read_drafter(copy, target)
        except Eagle3Error:
            refused += 1
    print(refused)
    """


@pytest.mark.parametrize("role", ["target", "draft"])
def test_damaged_headers_raise_nothing_but_our_errors(tiny_target, tiny_drafters, path, role):
    """400 files with some bytes of the header changed; the last seed is in the error if the process died."""
    draft = tiny_drafters["narrow"].path
    source = tiny_target.path if role == "target" else draft
    with GgufFile(source) as file:
        weights = sum(np.prod(file.shape(name)) * 4 for name in file.names() if name != "d2t")
    header = source.stat().st_size - int(weights)
    refused = int(run(FUZZ, source, header, tiny_target.path, draft, path))
    assert refused > 100
