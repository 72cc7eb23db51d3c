"""A Hugging Face directory as the target: what the same model's GGUF gives, from rendering to a whole run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from data_tools import CHATML, DROPS_THINKING, NO_SYSTEM, THINKS_NOTHING, letters_target, letters_weights, talk, user
from folder_tools import added, bracket, byte_level, change, write_folder

from eagle3_cli.convert.json_files import read_json
from eagle3_cli.errors import FileError, OptionError, PromptError
from eagle3_cli.llama import Model
from eagle3_cli.model_files import read_drafter
from eagle3_cli.settings import RuntimeSettings, SamplingSettings
from eagle3_cli.train import Hooks, TrainSettings, dialogue, engines, train
from eagle3_cli.train.answers import AnswerWriter
from eagle3_cli.train.dialogue import AnswerSettings
from eagle3_cli.train.hf_tokenizer import HfTokenizer
from eagle3_cli.train.inputs import check_inputs
from eagle3_cli.train.render import Renderer
from eagle3_cli.train.shards import ShardReader
from eagle3_cli.train.state import SampleStore
from eagle3_cli.train.torch_answers import TorchAnswerWriter, sample
from eagle3_cli.train.vocab import unskippable

RUNTIME = RuntimeSettings(**tiny.EXACT, ctx_size=320, batch=24, threads=1, device="cpu")
GREEDY = AnswerSettings(sequences=3, max_tokens=36, mix=((1.0, 0.0),), seed=5)
MIXED = replace(GREEDY, mix=((0.4, 0.0), (0.3, 0.7), (0.3, 2.0)))
CHATS = [
    user("Hi"),
    user("How are you?", "And now?", "x"),
    [{"role": "system", "content": "Be brief."}, *user("Hi", "Why?")],
    talk("What?", "a given answer, which is passed over", "Where?"),
    user("a long question " * 8),
    user("word " * 100),
]
TEXTS = [
    "Hi the hen",
    "say <|im_end|> twice\n\n",
    "",
    " \t  x",
    "Zoë 🐧 in 東京",
    "A" * 40,
    "<|im_start|><|endoftext|>",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """(GGUF, folder) of the target that says the alphabet."""
    path = tmp_path_factory.mktemp("letters")
    weights = letters_weights(clear=False)
    gguf = letters_target(path / "target.gguf", clear=False)
    return gguf, write_folder(path / "hf", weights, CHATML)


@pytest.fixture
def gguf(tiny_target):
    model = Model(tiny_target.path, [], 0)
    yield model
    model.close()


def write(path, conversations, settings, **how):
    """(everything written, what was left out)"""
    made = TorchAnswerWriter(path, RUNTIME, settings, dtype="f32") if path.is_dir() else None
    with made or AnswerWriter(path, RUNTIME, settings) as writer:
        return list(writer.write(conversations, **how)), dict(writer.left_out)


def plain(written):
    """Numbers, messages, tokens and masks as lists."""
    return [
        (w.number, w.messages, [(s.tokens.tolist(), s.answer.tolist()) for s in w.samples])
        for w in written
    ]  # fmt: skip


# --- tokens ---------------------------------------------------------------------------------------------------


def test_tokens_and_their_bytes_are_those_of_the_gguf(folder, gguf):
    found = HfTokenizer(folder)
    for text in TEXTS:
        assert found.tokenize(text, add_special=False) == gguf.tokenize(text, add_special=False)
    assert list(map(found.piece, range(tiny.VOCAB))) == list(map(gguf.piece, range(tiny.VOCAB)))
    assert list(map(found.is_end, range(tiny.VOCAB))) == list(map(gguf.is_end, range(tiny.VOCAB)))


def test_an_added_token_that_is_not_special_prints_its_text(tmp_path):
    tokens = [*byte_level()["added_tokens"][:2], added(tiny.IM_END, "naïve", special=False)]
    found = HfTokenizer(write_folder(tmp_path, tokenizer={"added_tokens": tokens}))
    assert [found.piece(token) for token in range(tiny.VOCAB - 3, tiny.VOCAB)] == [b"", b"", "naïve".encode()]


def test_pieces_of_sentencepiece_print_spaces_and_bytes(tmp_path):
    vocab = {"<unk>": 0, "<0xC3>": 1, "\u2581the": 2, "a": 3, "\u2581": 4}
    steps = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
             {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]  # fmt: skip
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True, "unk_token": "<unk>"}
    decoder = {"type": "Sequence", "decoders": steps}
    write_folder(tmp_path, tokenizer={"model": model, "decoder": decoder, "pre_tokenizer": None}, eos_token_id=3)
    change(tmp_path / "generation_config.json", eos_token_id=3)
    found = HfTokenizer(tmp_path)
    assert [found.piece(token) for token in range(1, 5)] == [b"\xc3", b" the", b"a", b" "]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML, THINKS_NOTHING, DROPS_THINKING])
def test_samples_of_given_answers_are_those_of_the_gguf(tmp_path, adds_bos, template):
    chats = [
        talk("Hi", "the hen\n", "Really?", "<T>no</T>yes, indeed"),
        [{"role": "system", "content": "Be brief."}, *talk("Hi", "Ho")],
        talk("Hi", "the<|im_end|>end"),
        talk("x " * 300, "y"),
    ]
    path = tiny.write_target(
        tmp_path / "t.gguf", tokenizer__chat_template=template, tokenizer__ggml__add_bos_token=adds_bos
    ).path
    model = Model(path, [], 0)
    ours = Renderer(HfTokenizer(write_folder(tmp_path / "hf", template=template, bos=adds_bos)), 200)
    theirs = Renderer(model, 200)
    for chat in chats:
        for found, expected in zip(ours.samples(chat), theirs.samples(chat), strict=True):
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert found.answer.tolist() == expected.answer.tolist()
    assert ours.left_out == theirs.left_out
    assert ours.user_opening(chats[0]) == theirs.user_opening(chats[0])
    assert ours.user_end == theirs.user_end
    model.close()


def test_a_template_that_refuses_system_messages_says_so(tmp_path):
    renderer = Renderer(HfTokenizer(write_folder(tmp_path, template=NO_SYSTEM)), 200)
    with pytest.raises(PromptError, match="refuses system messages"):
        renderer.samples([{"role": "system", "content": "S"}, *talk("Hi", "Ho")])


def test_every_draft_vocabulary_has_the_control_and_end_tokens(folder, tiny_target, tmp_path):
    assert unskippable(folder) == unskippable(tiny_target.path)
    tokens = [added(token, tiny.TOKENS[token], special=False) for token in range(tiny.VOCAB - 3, tiny.VOCAB)]
    other = write_folder(tmp_path, tokenizer={"added_tokens": tokens})
    change(other / "generation_config.json", eos_token_id=[7])
    assert 7 in unskippable(other)


# --- answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, THINKS_NOTHING])
def test_greedy_answers_are_those_of_the_gguf(tmp_path, template):
    gguf = letters_target(tmp_path / "t.gguf", template)
    folder = write_folder(tmp_path / "hf", letters_weights(), template)
    (found, ours), (expected, theirs) = (write(path, CHATS, GREEDY) for path in (folder, gguf))
    assert plain(found) == plain(expected)
    assert ours == theirs
    assert any(int(s.tokens[-1]) == tiny.IM_END for w in found for s in w.samples)


def test_a_greedy_answer_that_loops_is_cut_as_with_the_gguf(tmp_path):
    gguf = letters_target(tmp_path / "t.gguf", ends=False)
    folder = write_folder(tmp_path / "hf", letters_weights(ends=False), CHATML)
    (found, ours), (expected, theirs) = (
        write(path, [user("Hi", "Why?")], replace(GREEDY, max_tokens=250)) for path in (folder, gguf)
    )
    assert plain(found) == plain(expected)
    assert ours == theirs == {dialogue.LOOP_CUT: 1}


def test_sampled_answers_depend_on_their_conversation_alone(letters):
    whole, _ = write(letters[1], CHATS, MIXED)
    assert len({MIXED.temperature(w.number) for w in whole}) == 3
    assert plain(write(letters[1], CHATS, replace(MIXED, sequences=7))[0]) == plain(whole)
    assert plain(write(letters[1], CHATS, MIXED, skip=2)[0]) == plain(whole)[2:]
    assert plain(write(letters[1], CHATS, replace(MIXED, seed=6))[0]) != plain(whole)


def test_user_turns_of_its_own_do_not_depend_on_sequences_or_interruption(letters):
    asked = [user("")] * 3 + [user("Hi", "")] * 2
    whole, _ = write(letters[1], asked, MIXED)
    assert any(w.samples for w in whole)
    assert plain(write(letters[1], asked, replace(MIXED, sequences=7))[0]) == plain(whole)
    said = [m["content"] for w in whole[:2] for m in w.messages if m["role"] == "user"]
    assert plain(write(letters[1], asked, MIXED, skip=2, seen=said)[0]) == plain(whole)[2:]


def test_progress_counts_conversations_and_tokens(letters):
    seen = []
    with TorchAnswerWriter(letters[1], RUNTIME, MIXED, seen.append, "f32") as writer:
        written = list(writer.write(CHATS))
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)
    assert seen[-1].tokens == sum(int(s.answer.sum()) for w in written for s in w.samples)
    assert all(p.conversations <= len(CHATS) for p in seen)


@pytest.mark.parametrize(
    "law",
    [
        SamplingSettings(temperature=0.7, top_k=3, top_p=1.0, min_p=0.0),
        SamplingSettings(temperature=1.0, top_k=0, top_p=0.8, min_p=0.0),
        SamplingSettings(temperature=2.0, top_k=5, top_p=0.95, min_p=0.3),
        SamplingSettings(temperature=1.0, top_k=0, top_p=0.0, min_p=0.0),
    ],
)
def test_tokens_are_drawn_from_the_law_in_llama_cpps_order(law):
    """Evenly spaced random numbers give each token its chance, counted by hand."""
    logits = np.array([0.3, 2.0, -1.0, 1.5, 0.0, 1.0])
    chances = np.exp(logits) / np.exp(logits).sum()
    kept, total = [], 0.0
    for token in np.argsort(-logits)[: law.top_k or None]:
        kept.append(token)
        total += chances[token] / np.sort(chances)[::-1][: law.top_k or None].sum()
        if total >= law.top_p:
            break
    kept = [token for token in kept if chances[token] >= law.min_p * chances.max()]
    expected = np.zeros(6)
    expected[kept] = np.exp(logits[kept] / law.temperature)
    uniform = (torch.arange(4000) + 0.5) / 4000
    drawn = sample(torch.from_numpy(logits).expand(4000, 6), law, uniform)
    assert np.bincount(drawn, minlength=6) / 4000 == pytest.approx(expected / expected.sum(), abs=1e-3)


# --- checks ---------------------------------------------------------------------------------------------------


def settings(target, output, **values):
    defaults = {"aux_layers": (2, 3, 4), "runtime": RuntimeSettings(threads=1, ctx_size=512, batch=64, device="cpu")}
    return TrainSettings(target=target, output=output, **{**defaults, **values})


def test_a_folder_has_the_sizes_of_its_gguf(folder, tiny_target, tmp_path):
    ours, theirs = (check_inputs(settings(path, tmp_path / "o")) for path in (folder, tiny_target.path))
    assert ours.sizes.eps == pytest.approx(theirs.sizes.eps)  # float32 in a GGUF
    assert replace(ours.sizes, eps=theirs.sizes.eps) == theirs.sizes
    assert (ours.longest, ours.aux_layers) == (theirs.longest, theirs.aux_layers)


NO_BRACKETS = r"at most a BOS in front of a text"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: change(f / "tokenizer_config.json", chat_template=None), "expected a chat template"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.model, tokenizer.json or vocab.json"),
        (lambda f: (f / "config.json").unlink(), r"no config\.json"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (lambda f: change(f / "tokenizer.json", post_processor=bracket([], ["<|im_end|>"])), NO_BRACKETS),
        (lambda f: change(f / "generation_config.json", eos_token_id=[tiny.VOCAB]), "eos_token_id from 0 to 263"),
        (lambda f: change(f / "tokenizer_config.json", tokenizer_class=None,
                          auto_map={"AutoTokenizer": [None, "code.Tokenizer"]}), "cannot load its tokenizer"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_a_target_is_refused(tmp_path, damage, words):
    folder = write_folder(tmp_path / "hf")
    damage(folder)
    with pytest.raises(FileError, match=words) as caught:
        check_inputs(settings(folder, tmp_path / "o"))
    assert caught.value.exit_code == 2


def test_a_tokenizer_whose_tokens_have_no_known_bytes_is_refused(tmp_path):
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(FileError, match="got the decoder WordPiece"):
        HfTokenizer(write_folder(tmp_path, tokenizer={"decoder": decoder}))


def test_a_folder_without_an_end_token_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=None)
    change(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(FileError, match="expected an end token"):
        HfTokenizer(folder)


@pytest.mark.parametrize(
    "runtime", [{"gpu_layers": 3}, {"flash_attn": "on"}, {"cache_type_k": "f32"}, {"draft_threads": 2}]
)
def test_what_only_llama_cpp_heeds_is_refused(folder, tmp_path, runtime):
    with pytest.raises(OptionError, match="has no effect where the target is a folder"):
        check_inputs(settings(folder, tmp_path / "o", runtime=RuntimeSettings(**runtime)))


def test_the_last_layers_output_cannot_be_read(folder, tmp_path):
    with pytest.raises(OptionError, match="three ascending layers from 1 to 4"):
        check_inputs(settings(folder, tmp_path / "o", aux_layers=(2, 3, 5)))


# --- folders from strangers -----------------------------------------------------------------------------------


def test_code_in_a_folder_is_not_run(tmp_path):
    folder, marker = write_folder(tmp_path / "hf"), tmp_path / "ran"
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Tokenizer: pass\n")
    change(folder / "tokenizer_config.json", tokenizer_class=None, auto_map={"AutoTokenizer": [None, "code.Tokenizer"]})
    with pytest.raises(FileError, match="cannot load its tokenizer"):
        check_inputs(settings(folder, tmp_path / "o"))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "refuses"),
        ("{{ range(10 ** 9) | list }}", "too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "was stopped"),
    ],
)
def test_a_folders_template_has_the_limits_of_a_ggufs(tmp_path, monkeypatch, template, words):
    monkeypatch.setattr("eagle3_cli.confined.SECONDS", 2.0)
    found = HfTokenizer(write_folder(tmp_path, template=template))
    with pytest.raises(PromptError, match=words):
        found.chat_text(user("Hi"))


# --- a whole run ----------------------------------------------------------------------------------------------


@pytest.fixture
def whole(letters, tmp_path, monkeypatch):
    """whole(target, **changes): settings of a run that takes a second or two."""
    before = torch.get_num_threads()
    monkeypatch.setattr("eagle3_cli.train.prompts.held_out_prompts", lambda: [user("WHY"), user("HOW", "SO")])
    monkeypatch.setattr("eagle3_cli.train.plan.PROBE_ANSWER", 2)
    asked = [{"prompt": f"say {i} again", "answer": "the hen"} for i in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, asked)))
    defaults = {
        "data": (tmp_path / "data.jsonl",),
        "answer_tokens": 12,
        "max_length": 64,
        "draft_vocab": 64,
        "ttt_steps": 2,
        "steps": 4,
        "batch_tokens": 128,
        "outtype": "f32",
        "precision": "no",
        "runtime": RuntimeSettings(threads=1, batch=64, device="cpu"),
    }
    yield lambda target, **values: settings(target, tmp_path / target.name, **{**defaults, **values})
    torch.set_num_threads(before)


def stored(output, name):
    return [(s.tokens.tolist(), s.answer.tolist()) for s in SampleStore(output / name).samples]


def test_a_run_on_a_folder_ends_with_a_drafter_for_the_models_gguf(letters, whole):
    said = []
    result = train(whole(letters[1]), Hooks(said.append))
    output = result.output
    exact = RuntimeSettings(**tiny.EXACT, threads=1, batch=64, device="cpu")
    theirs = train(whole(letters[0], runtime=exact)).output
    assert stored(output, "unseen_samples") == stored(theirs, "unseen_samples")
    greedy = [i for i in range(12) if AnswerSettings().temperature(i) == 0]
    assert len(greedy) >= 3
    ours, expected = stored(output, "samples"), stored(theirs, "samples")
    assert [ours[i] for i in greedy] == [expected[i] for i in greedy]
    assert ShardReader(output / "shards").manifest.header.engine == "transformers f32"
    assert read_drafter(result.drafter, letters[0]).aux_layers == (2, 3, 4)
    config, other = (read_json(path / "checkpoint" / "config.json") for path in (output, theirs))
    assert config.pop("rms_norm_eps") == pytest.approx(other.pop("rms_norm_eps"))  # float32 in a GGUF
    assert config == other
    numbers = read_json(output / "result.json")["numbers"]
    assert numbers["real"] is None
    assert numbers["simulated"]["tau"] >= 1
    assert numbers["agreement"] in said
    assert numbers["agreement"].endswith(
        f"`eagle3 bench --target X.gguf --draft {output / 'drafter.gguf'}`."
    )  # fmt: skip
    page = (output / "report.html").read_text()
    assert "Acceptance is simulated only" in page
    assert '<th scope="row">real</th><td>not measured</td>' in page
    assert any("answers" in line for line in said if line.startswith("time, from short measurements"))
    assert train(whole(letters[1])) == result


def test_given_answers_are_kept_as_with_the_gguf(letters, whole):
    ours, theirs = (train(whole(path, keep_answers=True, steps=1)).output for path in reversed(letters))
    assert stored(ours, "samples") == stored(theirs, "samples")
    assert len(stored(ours, "samples")) == 12


class Died(Exception):
    pass


def die(*_args, **_values):
    raise Died


def test_a_run_that_died_while_writing_and_later_ends_as_an_unbroken_one(letters, whole, tmp_path, monkeypatch):
    unbroken = train(replace(whole(letters[1]), output=tmp_path / "unbroken"))
    with monkeypatch.context() as patch:
        patch.setattr(engines, "open_writer", dies_after(5, engines.open_writer, calls=3))
        with pytest.raises(Died):
            train(whole(letters[1]))
    assert SampleStore(tmp_path / "hf" / "samples").conversations == 5
    for stage in ("stages.Run._choose_vocabulary", "report.finish"):
        with monkeypatch.context() as patch:
            patch.setattr(f"eagle3_cli.train.{stage}", die)
            with pytest.raises(Died):
                train(whole(letters[1]))
    result = train(whole(letters[1]))
    assert result.numbers["simulated"] == unbroken.numbers["simulated"]
    assert (result.output / "drafter.gguf").read_bytes() == (unbroken.output / "drafter.gguf").read_bytes()


def dies_after(conversations, opened, calls):
    """open_writer whose writer of so many-th call dies after some conversations."""
    made = []

    def open_one(*args):
        writer = opened(*args)
        made.append(writer)
        if len(made) == calls:
            write = writer.write

            def some(*given):
                for number, written in enumerate(write(*given)):
                    if number == conversations:
                        raise Died
                    yield written

            writer.write = some
        return writer

    return open_one
