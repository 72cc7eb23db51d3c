"""After writing, llama.cpp itself loads the file; what it refuses, or dies of, is not kept."""

from __future__ import annotations

import subprocess

import checkpoints
import pytest

from eagle3_cli.convert.load import check_loads
from eagle3_cli.errors import FileError

pytestmark = pytest.mark.own_process


def test_a_sound_file_is_kept(convert):
    convert()


def test_a_file_that_llama_cpp_refuses_is_not_kept(refused, monkeypatch):
    monkeypatch.setattr("eagle3_cli.convert.check.check_gguf", lambda *_: None)
    monkeypatch.setattr("eagle3_cli.convert.plan.plan_keys", lambda *_: ())
    monkeypatch.setattr("eagle3_cli.convert.pipeline.plan_keys", lambda *_: ())
    assert "llama.cpp does not load the converted file" in refused()


def test_an_abort_of_llama_cpp_is_an_error_like_any_other(refused, monkeypatch):
    died = subprocess.CompletedProcess([], -6, "", "loading\nGGML_ASSERT(n > 0) failed\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    assert "llama.cpp does not load the converted file: GGML_ASSERT(n > 0) failed" in refused()


def test_the_reason_is_llama_cpps(tmp_path, target):
    path = tmp_path / "x.gguf"
    path.write_bytes(checkpoints.write_target(tmp_path / "t.gguf").read_bytes()[:100])
    with pytest.raises(FileError, match=r"llama\.cpp cannot load it"):
        check_loads(path)
