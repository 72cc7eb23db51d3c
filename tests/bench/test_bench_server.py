"""llama-server as a contender: command lines, a server at a URL, what is refused.  The server is fake."""

from __future__ import annotations

import json
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_server
import pytest

from eagle3_cli.bench.run import BenchSettings, Contenders
from eagle3_cli.bench.server import (
    TYPES,
    Server,
    ServerSettings,
    StartedServer,
    command,
    contender_name,
    draft_placed,
    placed,
    speculation,
)
from eagle3_cli.errors import Eagle3Error, FileError, InputError, OptionError
from eagle3_cli.settings import RuntimeSettings, TreeShape

SETTINGS = ServerSettings(
    Path("llama-server"), Path("t.gguf"), Path("d.gguf"), ("none",), 0, 1024, 2, True, True, "off"
)
SAME = (
    "llama-server --model t.gguf --ctx-size 1024 --threads 2 --threads-batch 2 --parallel 1 --flash-attn off"
    " --host 127.0.0.1 --port 80"
)
DRAFTS = " --model-draft d.gguf --spec-draft-n-max 3 --threads-draft 2"


CPU = {"device": "cpu", "gpu_layers": 0, "split_mode": None, "tensor_split": (), "main_gpu": None,
       "override_tensor": (), "cpu_moe": None}  # fmt: skip


GPUS = {"device": "CUDA0,CUDA1", "gpu_layers": 20, "split_mode": "row", "tensor_split": (3.0, 1.0), "main_gpu": 1,
        "override_tensor": ("a=CPU", "b=CPU"), "cpu_moe": 5}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "target", "drafter"),
    [
        (CPU, "--device none", "--spec-draft-device none"),
        ({**CPU, "device": "CUDA1", "gpu_layers": -1, "cpu_moe": -1}, "--device CUDA1 --cpu-moe",
         "--spec-draft-device CUDA1"),
        (GPUS, "--device CUDA0,CUDA1 --gpu-layers 20 --split-mode row --tensor-split 3,1 --main-gpu 1"
         " --override-tensor a=CPU --override-tensor b=CPU --n-cpu-moe 5",
         "--spec-draft-device CUDA0,CUDA1 --spec-draft-ngl 20"),
    ],
)  # fmt: skip
def test_the_server_is_told_where_our_models_are(ours, target, drafter):
    drafts = replace(SETTINGS, types=("draft-eagle3",), placed=placed(ours), draft_placed=draft_placed(ours))
    assert f" {target} --host" in " ".join(command(drafts, 80))
    assert " ".join(command(drafts, 80)).endswith(f" {drafter}")
    assert drafter not in " ".join(command(replace(drafts, types=("none",)), 80))


class FakeEngine:
    """Says the same tokens to everything."""

    def __init__(self, tokens=(5, 6, 7)):
        self.settings = {"ctx_size": 512, "threads": 1, "repack": True, "mmap": True, "flash_attn": "off", **CPU}
        self.tokens = tokens

    def stream(self, prompt, sampling, limits):
        return (SimpleNamespace(token=token) for token in self.tokens[: limits.max_tokens])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def running():
    """A fake server in this process."""
    server = fake_server.listen()
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """(path of a fake llama-server, how it was called so far)"""
    path, log = tmp_path / "llama-server", tmp_path / "log"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(fake_server.__file__)} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("FAKE_SERVER_LOG", str(log))
    return path, lambda: [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def contenders(monkeypatch):
    """Contenders whose own engines are fake."""

    def make(against, *types, **more):
        monkeypatch.setattr("eagle3_cli.bench.run.load_engine", lambda *_, **__: FakeEngine())
        settings = BenchSettings(
            Path("t.gguf"), Path("d.gguf"), RuntimeSettings(), (TreeShape(3, 1, 3),), against=str(against), **more
        )
        return Contenders(replace(settings, against_types=types) if types else settings)

    return make


def servers(found):
    return [name for name in found.answers if name.startswith("llama-server")]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- types and command lines ----


@pytest.mark.parametrize(
    ("types", "added", "name"),
    [
        ("none", "", "llama-server plain"),
        ("draft-eagle3", f" --spec-type draft-eagle3{DRAFTS}", "llama-server draft-eagle3 n_max 3"),
        *((name, f" --spec-type {name}", f"llama-server {name}") for name in TYPES[2:]),
        (
            "draft-eagle3+ngram-mod",
            f" --spec-type draft-eagle3,ngram-mod{DRAFTS}",
            "llama-server draft-eagle3+ngram-mod n_max 3",
        ),
    ],
)
def test_a_type_is_one_flag_beside_the_same_settings_for_all(types, added, name):
    settings = replace(SETTINGS, types=speculation(types), draft_max=3)
    assert " ".join(command(settings, 80)) == SAME + added
    assert contender_name(settings.types, 3) == name


def test_weights_are_left_as_they_are_where_ours_are():
    assert command(replace(SETTINGS, repack=False), 80)[-1] == "--no-repack"
    assert command(replace(SETTINGS, mmap=False), 80)[-2:] == ["--load-mode", "none"]


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ("ngram", r"--against-type: expected one of none, draft-eagle3, ngram-simple, .*, got ngram\."),
        ("draft-eagle3+", r"--against-type: expected one of .*, got nothing\."),
        ("none+ngram-mod", r"expected different types of speculation, got none and ngram-mod\."),
        ("ngram-mod+ngram-mod", r"expected different types of speculation"),
        ("draft-simple", r"draft-simple: needs a small model that decodes by itself; an EAGLE-3 drafter does not\."),
    ],
)
def test_types_that_cannot_be_are_refused(types, said):
    with pytest.raises(OptionError, match=said):
        speculation(types)


# ---- a program ----


def test_every_type_is_a_contender_and_the_drafter_one_for_each_draft_max(program, contenders):
    path, calls = program
    types = ("none",), ("draft-eagle3",), ("ngram-simple",)
    with contenders(path, *types, draft_max=(1, 4)) as found:
        assert servers(found) == [
            "llama-server plain", "llama-server draft-eagle3 n_max 1", "llama-server draft-eagle3 n_max 4",
            "llama-server ngram-simple",
        ]  # fmt: skip
        sample = found.answers["llama-server ngram-simple"]([1, 2], 0.0, 7)
        assert sample == {"tokens": (5, 6, 7), "rounds": 1, "seconds": 0.03}
        assert found.against == {
            "program": str(path), "types": ["none", "draft-eagle3", "ngram-simple"], "draft_max": [1, 4],
        }  # fmt: skip
    assert ["--spec-draft-n-max" in call for call in calls()] == [False, True, True, False]


def test_one_that_remembers_its_answers_starts_anew_when_a_prompt_comes_again(program, contenders):
    path, calls = program
    with contenders(path, ("ngram-mod",)) as found:
        ask = found.answers["llama-server ngram-mod"]
        for prompt in ([1], [2], [1], [2], [1]):
            ask(prompt, 0.0, 0)
    assert len(calls()) == 3


def test_the_reason_why_it_does_not_start_is_told(program, contenders, monkeypatch):
    monkeypatch.setenv("FAKE_SERVER_FAILS", "failed to load model 't.gguf'")
    path, _ = program
    said = r"llama-server: ended with code 3 while starting: 0\.02 E failed to load model 't\.gguf'"
    with pytest.raises(Eagle3Error, match=said) as caught:
        contenders(path, ("none",))
    assert f"{path} --model t.gguf" in caught.value.hint


def test_what_is_no_program_is_refused(tmp_path):
    with pytest.raises(FileError, match="absent: no such file; expected the llama-server program"):
        StartedServer(replace(SETTINGS, binary=tmp_path / "absent"))
    text = tmp_path / "notes.txt"
    text.write_text("Hello")
    with pytest.raises(FileError, match=r"notes\.txt: cannot be run: Permission denied; expected the llama-server"):
        StartedServer(replace(SETTINGS, binary=text))


def test_one_that_ends_during_the_run_is_told(program):
    server = StartedServer(replace(SETTINGS, binary=program[0]))
    server._process.kill()
    server._process.wait()
    with pytest.raises(Eagle3Error, match=r"llama-server \(it ended with code -9: .*\): did not answer: "):
        server.complete([1], 3, 0.0, 0)
    server.close()


# ---- a URL ----


def test_a_server_at_a_url_is_one_contender_with_the_settings_it_tells(running, contenders):
    with contenders(f"{running.url}/") as found:
        assert servers(found) == [f"llama-server at {running.url}"]
        for seed in (3, 4):
            sample = found.answers[f"llama-server at {running.url}"]([1, 2], 1.0, seed)
        assert sample == {"tokens": (5, 6, 7), "rounds": 1, "seconds": 0.03}
        assert found.against == {
            "url": running.url, "model_path": "/models/served.gguf", "n_ctx": 512, "build": "b1",
        }  # fmt: skip
    first, *others = running.asked  # the first compares the models
    assert (first["n_predict"], first["temperature"]) == (1, 0.0)
    assert [(each["prompt"], each["temperature"], each["seed"]) for each in others] == [
        ([1, 2], 1.0, 3),
        ([1, 2], 1.0, 4),
    ]


def test_the_end_token_is_no_part_of_an_answer(running, contenders):
    running.stop_type = "eos"
    with contenders(running.url) as found:
        sample = found.answers[f"llama-server at {running.url}"]([1, 2], 0.0, 0)
    assert sample == {"tokens": (5, 6), "rounds": 1, "seconds": 0.03}


def test_another_model_is_refused_by_its_first_token(running, contenders):
    running.tokens = (9, 6, 7)
    said = (
        r"expected the token 5 at the start of a greedy answer, as t\.gguf gives it, got the token 9:"
        r" it serves /models/served\.gguf\."
    )
    with contenders(running.url) as found, pytest.raises(InputError, match=said):
        found.answers[f"llama-server at {running.url}"]([1, 2], 0.0, 0)


def test_one_that_tells_no_tokens_is_refused(running):
    running.tokens = ()
    with pytest.raises(Eagle3Error, match=r"expected an answer with tokens and timings, got content\."):
        Server(running.url).complete([1], 3, 0.0, 0)


def test_an_answer_that_ends_at_once_is_the_same_where_both_do(running, contenders):
    running.tokens, running.stop_type = (2,), "eos"
    with contenders(running.url) as found:
        ask = found.answers[f"llama-server at {running.url}"]
        with pytest.raises(InputError, match=r"expected the token 5 .*, got the end: it serves"):
            ask([1, 2], 0.0, 0)
        found.plain.tokens = (None,)
        assert ask([1, 2], 0.0, 0)["tokens"] == ()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://127.0.0.1:1", r"expected http://HOST:PORT or the path of llama-server, got the scheme https\."),
        ("ftp://127.0.0.1", r"got the scheme ftp\."),
        ("http://[", "got no URL: Invalid IPv6 URL"),
    ],
)
def test_another_scheme_is_refused(url, said):
    with pytest.raises(OptionError, match=said):
        Server(url)


def test_one_that_does_not_answer_is_refused_before_models_are_loaded(monkeypatch):
    monkeypatch.setattr("eagle3_cli.bench.run.load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(InputError, match=r"expected a llama-server that answers GET /props, got: .*refused"):
        Contenders(BenchSettings(Path("t.gguf"), Path("d.gguf"), RuntimeSettings(), against=url))


def test_one_that_is_no_llama_server_is_refused(running, monkeypatch):
    monkeypatch.setattr(fake_server, "PROPERTIES", None)
    with pytest.raises(InputError, match=r"answers GET /props, got: .*Not Found"):
        Server(running.url)
