"""torch.compile where it works and pays, and what is said where it does not; its results are in test_train_loss.py."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
import torch
from loop_tools import new_loop, write_shards
from states_tools import random_samples

from eagle3_cli.errors import OptionError
from eagle3_cli.settings import RuntimeSettings
from eagle3_cli.train import Hooks, TrainSettings, capture, compiling, loop, torch_states, train
from eagle3_cli.train.inputs import check_inputs


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), [12, 9, 10, 11])


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("No working C++ compiler found\nand a long trace")


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", broken)
    compiling.compile_fault.cache_clear()
    yield
    compiling.compile_fault.cache_clear()


def test_a_fault_is_told_in_one_line(no_compiler):
    assert compiling.compile_fault("cpu") == "RuntimeError: No working C++ compiler found"


def test_asked_for_and_broken_is_an_error_before_any_work(no_compiler, tiny_target, tmp_path):
    settings = runs.settings(tiny_target.path, tmp_path, 1, compile="on")
    with pytest.raises(OptionError, match=r"--compile on: torch\.compile does not work here: RuntimeError: No working"):
        train(settings)
    assert not settings.output.exists()
    check_inputs(replace(settings, compile="auto"))


@pytest.mark.parametrize(("states", "refused"), [("llama.cpp", False), ("transformers", True)])
def test_the_device_of_the_capture_must_compile_too(monkeypatch, tiny_target, tmp_path, states, refused):
    monkeypatch.setattr(torch_states, "torch_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(compiling, "compile_fault", lambda device: "not here" if device == "meta" else None)
    settings = runs.settings(tiny_target.path, tmp_path, 1, compile="on", states=states)
    with pytest.raises(OptionError, match="not here") if refused else contextlib.nullcontext():
        check_inputs(settings)


def test_a_capture_that_goes_uncompiled_says_so(no_compiler, monkeypatch, tiny_target, tmp_path):
    monkeypatch.setattr(capture, "COMPILED_FROM", 10)
    settings = capture.CaptureSettings(tiny_target.path, tmp_path, RuntimeSettings(threads=1, device="cpu"), (1, 2, 4))
    settings = replace(settings, engine="transformers", dtype="f32", compile="auto")
    told: list[str] = []
    assert capture.capture(settings, random_samples([7, 5]), report=told.append).complete
    assert told == [
        "not compiled, which is slower: torch.compile does not work here: RuntimeError: No working C++ compiler found."
    ]


def test_left_to_choice_and_broken_is_said(no_compiler, reader, tmp_path):
    told: list[str] = []
    made = new_loop(tmp_path, reader, Hooks(told.append), steps=10**6, compile="auto")
    assert not made._compiled()
    assert told[0].startswith("not compiled, which is slower")


def test_short_trainings_are_not_worth_it(monkeypatch, reader, tmp_path):
    monkeypatch.setattr(compiling, "compile_fault", lambda device: pytest.fail("was tried"))
    assert not new_loop(tmp_path, reader, steps=2, compile="auto")._compiled()
    assert not new_loop(tmp_path / "off", reader, steps=10**6, compile="off")._compiled()


def test_long_ones_are(monkeypatch, reader, tmp_path):
    monkeypatch.setattr(compiling, "compile_fault", lambda device: None)
    monkeypatch.setattr(loop, "training_step", lambda drafter, settings, compiled: torch.nn.Linear(1, 1 + compiled))
    assert new_loop(tmp_path, reader, steps=10**6, compile="auto").objective.out_features == 2


@pytest.mark.parametrize(("amx", "expected"), [(True, "bf16"), (False, "no")])
def test_precision_is_chosen_by_the_hardware(monkeypatch, amx, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: dict[str, object] = {}
    fake = SimpleNamespace(distributed_type="NO")
    monkeypatch.setattr("accelerate.Accelerator", lambda **values: asked.update(values) or fake)
    loop.accelerator_for(TrainSettings(target=Path("t"), output=Path("o")))
    assert asked["mixed_precision"] == expected


def test_memory_is_kept_only_where_there_is_glibc(monkeypatch):
    compiling.keep_memory()
    monkeypatch.setattr(compiling.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(compiling.ctypes, "CDLL", lambda _: pytest.fail("was called"))
    compiling.keep_memory()
    compiling.give_back_memory()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_between_what_is_in_use_go_back():
    """Every second of many blocks is freed: the process shrinks only when it is told to."""
    code = (
        "import re, sys; from eagle3_cli.train import compiling\n"
        "def rss(): return int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "compiling.keep_memory(); blocks = [bytes(1 << 20) for _ in range(100)]\n"
        "blocks = [b.replace(b'\\0', b'x') for b in blocks]; full = rss(); del blocks[::2]; kept = rss()\n"
        "compiling.give_back_memory(); print(full, kept, rss())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    full, kept, back = map(int, done.stdout.split())
    assert kept > full - 20_000
    assert back < kept - 40_000


THREADS = """
import os, time, torch
from eagle3_cli.train import compiling
def threads(): return len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
a = torch.randn(600, 600)
before = threads()
a @ a
with_pool = threads()
compiling.release_threads()
released = threads()
worker = compiling.Worker("cpu", 3)
worker(lambda: a @ a)
in_worker = threads()
worker.close()
for _ in range(200):  # the system takes note of a thread's end a moment later
    if threads() == before:
        break
    time.sleep(0.05)
print(before, with_pool, released, in_worker, threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_threads_that_wait_for_more_work_end():
    """Those of this thread when told to, those of a worker with it: llama.cpp's would sleep beside them."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    before, with_pool, released, in_worker, closed = map(int, done.stdout.split())
    assert with_pool == before + 2
    assert released == before
    assert in_worker == before + 3
    assert closed == before
