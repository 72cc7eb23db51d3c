"""llama.cpp's own server as a contender: started with the same two files, or already running at a URL."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import Eagle3Error, FileError, InputError, OptionError
from ..settings import EVERY_LAYER

PLAIN, DRAFTER = "none", "draft-eagle3"
NGRAM_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
TYPES = (PLAIN, DRAFTER, *NGRAM_TYPES)
DEFAULT_TYPES = (PLAIN, DRAFTER, "ngram-simple", "ngram-mod", "ngram-map-k", "ngram-cache")
REMEMBERS = "ngram-mod"  # keeps the n-grams of earlier answers: asked again, it would copy the answer it gave before
_START_SECONDS = 120
_ANSWER_SECONDS = 600
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy's time is not the server's


# ---- types of speculation ----


def speculation(text: str) -> tuple[str, ...]:
    """The types that one `--against-type` combines with "+".  OptionError for an unknown or senseless one."""
    types = tuple(text.split("+"))
    if "draft-simple" in types:
        raise OptionError(
            "--against-type draft-simple: needs a small model that decodes by itself; an EAGLE-3 drafter does not.",
            "llama-server starts with it all the same, and next to no draft is accepted. Use draft-eagle3.",
        )
    for name in types:
        if name not in TYPES:
            raise OptionError(f"--against-type: expected one of {', '.join(TYPES)}, got {name or 'nothing'}.")
    if len(types) > 1 and (PLAIN in types or len(set(types)) < len(types)):
        raise OptionError(f"--against-type {text}: expected different types of speculation, got {' and '.join(types)}.")
    return types


def contender_name(types: Sequence[str], draft_max: int) -> str:
    if types == (PLAIN,):
        return "llama-server plain"
    return f"llama-server {'+'.join(types)}" + (f" n_max {draft_max}" if DRAFTER in types else "")


def is_url(against: str) -> bool:
    return "://" in against


# ---- a server that runs ----


class Server:
    """A llama-server at a URL, started by somebody else.

    OptionError for a URL that is not http, InputError where nobody answers or the answer is no llama-server's.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:  # brackets that do not close
            raise OptionError(f"--against {url}: expected http://HOST:PORT, got no URL: {error}.") from error
        if parts.scheme != "http" or not parts.hostname:
            raise OptionError(
                f"--against {url}: expected http://HOST:PORT or the path of llama-server, got the scheme"
                f" {parts.scheme or 'none'}.",
                "Start llama-server without a certificate on this machine, or name its program.",
            )
        self.url = url.rstrip("/")
        try:
            self.properties = dict(self._json("/props"))
        except (OSError, ValueError, TypeError) as error:  # URLError is an OSError
            raise InputError(
                f"--against {url}: expected a llama-server that answers GET /props, got: {_reason(error)}.",
                "Start it first: llama-server --model GGUF --port PORT.",
            ) from error

    def described(self) -> dict[str, Any]:
        """What it says about itself: its model's path, the cells of its context, the build; None where it says
        nothing."""
        defaults = self.properties.get("default_generation_settings")
        return {
            "url": self.url,
            "model_path": self.properties.get("model_path"),
            "n_ctx": defaults.get("n_ctx") if isinstance(defaults, dict) else None,
            "build": self.properties.get("build_info"),
        }

    def complete(self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """The server's answer to token ids: its JSON with `tokens` and `timings`.  Eagle3Error where it has none."""
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
        try:
            reply = dict(self._json("/completion", body))
        except (OSError, ValueError, TypeError) as error:
            raise Eagle3Error(f"{self._where()}: did not answer: {_reason(error)}.") from error
        if not isinstance(reply.get("tokens"), list) or not isinstance(reply.get("timings"), dict):
            raise Eagle3Error(
                f"{self._where()}: expected an answer with tokens and timings, got {', '.join(reply) or 'none'}.",
                "Use a llama-server that knows return_tokens.",
            )
        return reply

    def close(self) -> None:
        """It goes on running: it is not ours."""

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with _DIRECT.open(request, timeout=_ANSWER_SECONDS if data else 10) as answer:
            return json.load(answer)

    def _where(self) -> str:
        return f"llama-server at {self.url}"


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


# ---- a server of our own ----


@dataclass(frozen=True)
class ServerSettings:
    """binary: llama-server.  types: as `speculation` gives them.  draft_max: tokens that its drafter proposes per round
    (--spec-draft-n-max); of no effect for types without a drafter.  placed, draft_placed: as the
    functions of these names give them."""

    binary: Path
    target: Path
    draft: Path
    types: tuple[str, ...]
    draft_max: int
    ctx_size: int
    threads: int
    repack: bool
    mmap: bool
    flash_attn: str
    placed: tuple[str, ...] = ()
    draft_placed: tuple[str, ...] = ()


def draft_placed(
    ours: Mapping[str, Any], device: str = "--spec-draft-device", layers: str = "--spec-draft-ngl"
) -> tuple[str, ...]:
    """The flags that put a drafter where ours is.  ours: settings of an engine."""
    if ours["device"] == "cpu":
        return device, "none"
    return device, ours["device"], *((layers, str(ours["gpu_layers"])) if ours["gpu_layers"] != -1 else ())


def placed(ours: Mapping[str, Any]) -> tuple[str, ...]:
    """The same for a target."""
    flags = [*draft_placed(ours, "--device", "--gpu-layers")]
    if ours["split_mode"] is not None:
        flags += ["--split-mode", ours["split_mode"]]
    if ours["tensor_split"]:
        flags += ["--tensor-split", ",".join(f"{share:g}" for share in ours["tensor_split"])]
    if ours["split_mode"] == "row" and ours["main_gpu"] is not None:
        flags += ["--main-gpu", str(ours["main_gpu"])]
    for override in ours["override_tensor"]:
        flags += ["--override-tensor", override]
    if ours["cpu_moe"]:
        flags += ["--cpu-moe"] if ours["cpu_moe"] == EVERY_LAYER else ["--n-cpu-moe", str(ours["cpu_moe"])]
    return tuple(flags)


class StartedServer(Server):
    """One llama-server process on a free local port.  Close it.

    FileError where there is no such program, Eagle3Error with its last error line where it does not start.
    """

    def __init__(self, settings: ServerSettings) -> None:
        if not settings.binary.is_file():
            raise FileError(f"--against {settings.binary}: no such file; expected the llama-server program.")
        self.settings = settings
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._process = subprocess.Popen(
                command(self.settings, port), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._log
            )
        except OSError as error:
            self._log.close()
            binary = self.settings.binary
            raise FileError(
                f"--against {binary}: cannot be run: {error.strerror}; expected the llama-server program."
            ) from error
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        binary, deadline = self.settings.binary, time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise Eagle3Error(
                    f"{binary}: ended with code {self._process.returncode} while starting: {self._last_error()}",
                    f"Its command was: {' '.join(map(str, self._process.args))}",  # type: ignore[arg-type]
                )
            try:
                self._json("/health")
                return
            except (OSError, ValueError):
                time.sleep(0.05)
        raise Eagle3Error(f"{binary}: not ready after {_START_SECONDS} s: {self._last_error()}")

    def _last_error(self) -> str:
        """The last line of its stderr that tells of an error, or the last one."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        told = [line for line in lines if " E " in line or "error" in line.lower()]
        return (told or lines or ["it said nothing on stderr."])[-1]

    def restart(self) -> None:
        """The same server, with nothing remembered."""
        self.close()
        self._start()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _where(self) -> str:
        if self._process.poll() is None:
            return "llama-server"
        return f"llama-server (it ended with code {self._process.returncode}: {self._last_error()})"


def command(settings: ServerSettings, port: int) -> list[str]:
    """The command line that starts it: threads, context, flash attention and weights as ours."""
    arguments = [
        str(settings.binary),
        *("--model", str(settings.target)),
        *("--ctx-size", str(settings.ctx_size)),
        *("--threads", str(settings.threads)),
        *("--threads-batch", str(settings.threads)),
        *("--parallel", "1"),
        *("--flash-attn", settings.flash_attn),
        *settings.placed,
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
    ]
    if not settings.repack:
        arguments.append("--no-repack")
    if not settings.mmap:
        arguments += ["--load-mode", "none"]
    if settings.types != (PLAIN,):
        arguments += ["--spec-type", ",".join(settings.types)]
    if DRAFTER in settings.types:
        arguments += ["--model-draft", str(settings.draft)]
        arguments += ["--spec-draft-n-max", str(settings.draft_max), "--threads-draft", str(settings.threads)]
        arguments += settings.draft_placed
    return arguments


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
