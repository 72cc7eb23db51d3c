"""`eagle3 train` as a process of its own, ended by the system."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3_cli.train.state import read_metrics

PATIENCE = 120  # seconds


def steps(output: Path) -> list[int]:
    path = output / "metrics.jsonl"
    return [line["step"] for line in read_metrics(path) if line["kind"] == "train"] if path.is_file() else []


def until_terminated(command: list[str], output: Path, step: int) -> tuple[int, str]:
    """Run it, send SIGTERM behind this step; its exit code and stderr."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + PATIENCE
        while step not in steps(output) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert out == ""
    return process.returncode, err


@pytest.mark.slow
def test_sigterm_ends_a_real_training_which_goes_on_later(tiny_target, tmp_path):
    """As a batch system does before it takes the machine away."""
    data, output = tmp_path / "data.jsonl", tmp_path / "out"
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cdefghijkl" * 4}]
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(40)))
    flags = ["--target", str(tiny_target.path), "-o", str(output), "--data", str(data), "--keep-answers"]
    flags += ["--aux-layers", "2,3,4", "--draft-vocab", "64", "--hidden", "32", "--heads", "2", "--kv-heads", "1"]
    flags += ["--ffn", "32", "--ttt-steps", "2", "--batch-tokens", "128", "--epochs", "1000", "--log-steps", "1"]
    command = [sys.executable, "-m", "eagle3_cli", "train", *flags, "--threads", "1"]
    code, err = until_terminated(command, output, step=3)
    first = steps(output)
    assert code == 128 + signal.SIGTERM
    assert f"stopped after step {first[-1]} of" in err
    assert err.rstrip().endswith("the state is saved.")
    code, err = until_terminated(command, output, step=first[-1] + 3)
    assert code == 128 + signal.SIGTERM
    assert steps(output) == list(range(1, steps(output)[-1] + 1))
    assert steps(output)[: len(first)] == first
