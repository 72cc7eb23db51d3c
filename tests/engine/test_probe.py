"""The AMX probe says the same however it looks, also beside the threads of PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eagle3_cli import probe
from eagle3_cli.llama import system_info

pytestmark = pytest.mark.skipif("AMX_INT8 = 1" not in system_info(), reason="a CPU without AMX")

BESIDE_TORCH = """
import torch
product = torch.randn(512, 512) @ torch.randn(512, 512)
from eagle3_cli import probe
print(probe.amx_crashes())
"""


def test_both_children_agree():
    """In a process of their own: one that has computed with several threads leaves a fork without them."""
    code = "from eagle3_cli import probe; print(probe._dies_forked())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(probe._dies_anew())


def test_beside_pytorch_nothing_waits_for_its_threads():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", BESIDE_TORCH], capture_output=True, text=True, check=True, timeout=15)
    assert done.stdout.strip() == str(probe._dies_anew())


def test_a_child_that_dies_is_a_crash(monkeypatch):
    monkeypatch.setattr(probe, "__name__", "no_such_module")
    assert probe._dies_anew() is True
