"""llama.cpp's own server as a contender: started with the same two files, asked with the same token ids."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Eagle3Error, FileError

_START_SECONDS = 120


@dataclass(frozen=True)
class ServerSettings:
    """binary: llama-server.  draft_max: drafted tokens per round (--spec-draft-n-max), 0 for plain decoding."""

    binary: Path
    target: Path
    draft: Path
    draft_max: int
    ctx_size: int
    threads: int
    repack: bool
    flash_attn: str


class Server:
    """One llama-server process on a free local port.  Close it."""

    def __init__(self, settings: ServerSettings) -> None:
        if not settings.binary.is_file():
            raise FileError(f"--against {settings.binary}: no such file; expected the llama-server program.")
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._process = subprocess.Popen(
            _command(settings, self.url.rpartition(":")[2]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait(settings.binary)
        except BaseException:
            self.close()
            raise

    def _wait(self, binary: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise Eagle3Error(f"{binary}: ended with code {self._process.returncode} while starting.")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise Eagle3Error(f"{binary}: not ready after {_START_SECONDS} s.")

    def complete(self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """The server's answer to token ids: its JSON with `tokens` and `timings`."""
        body = {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return dict(json.load(answer))
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise Eagle3Error(f"llama-server: did not answer: {error}.") from error

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _command(settings: ServerSettings, port: str) -> list[str]:
    command = [
        str(settings.binary),
        *("--model", str(settings.target)),
        *("--ctx-size", str(settings.ctx_size)),
        *("--threads", str(settings.threads)),
        *("--threads-batch", str(settings.threads)),
        *("--parallel", "1"),
        *("--flash-attn", settings.flash_attn),
        *("--host", "127.0.0.1"),
        *("--port", port),
    ]
    if not settings.repack:
        command.append("--no-repack")
    if settings.draft_max:
        command += ["--model-draft", str(settings.draft), "--spec-type", "draft-eagle3"]
        command += ["--spec-draft-n-max", str(settings.draft_max), "--threads-draft", str(settings.threads)]
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
