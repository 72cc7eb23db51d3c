"""The AMX probe says the same however it looks, also beside the threads of PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eagle3_cli import probe
from eagle3_cli.llama import system_info

pytestmark = pytest.mark.skipif("AMX_INT8 = 1" not in system_info(), reason="a CPU without AMX")

WITH_THREADS = """
import threading
event = threading.Event()
threading.Thread(target=event.wait).start()
from eagle3_cli import probe
probe._dies_forked = None  # a fork beside threads may hang
print(probe.amx_crashes())
event.set()
"""


def test_both_children_agree():
    assert probe._dies_anew() is probe._dies_forked()


def test_beside_threads_a_new_interpreter_is_asked():
    done = subprocess.run([sys.executable, "-c", WITH_THREADS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(probe._dies_anew())


def test_a_child_that_dies_is_a_crash(monkeypatch):
    monkeypatch.setattr(probe, "__name__", "no_such_module")
    assert probe._dies_anew() is True
