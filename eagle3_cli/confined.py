"""Hostile work in a process of its own, whose time and memory are limited.

A chat template is a program out of a model's file; a JSON schema or a grammar can ask for more than any machine has;
and the parsers of all three recurse.  Most of that happens inside single calls of C: a string of 10^12 characters, a
power with 10^9 digits, a stack that overflows.  Nothing in this process could end such a call: no check in a loop is
reached, no signal handler runs, no thread gets its turn.  Another process can be ended in every case and on every
system.  An interpreter takes a tenth of a second to start, so one is started with the first task and kept.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

from .errors import Eagle3Error

SECONDS = 10.0  # per task
MEMORY = 1 << 30  # bytes of data, where the system can limit them (Linux)
STACK = 4 << 20  # bytes: half of what is usual, so that what passes has room enough in another process
_REASON = 400  # characters of an error's text that are handed on

LIMITS = f"{SECONDS:.0f} seconds or {MEMORY >> 30} GiB of memory"  # for messages


class Refused(Exception):
    """The work raised an error; this is its text."""


class Stopped(Exception):
    """The work was over a limit, or its process died."""


def run(work: str, argument: Any) -> Any:
    """What a function returns, in the confined process.  Argument and result are what JSON can say.

    work    "module:function"; importing the module should not take long
    Raises Refused or Stopped; after both the next task runs as if nothing had been.
    """
    line = json.dumps([work, argument, SECONDS]).encode() + b"\n"
    with _lock:
        answer = _process.exchange(line)
    if answer is None:
        raise Stopped
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer["result"]


class _Process:
    """The child, started when it is needed."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.owner = 0  # of the child: a fork of this process must not share its pipes

    def exchange(self, line: bytes) -> Any:
        """The answer to one line; None where the child died."""
        if self.child is None or self.owner != os.getpid() or self.child.poll() is not None:
            self.child, self.owner = _start(), os.getpid()
        child = self.child
        assert child.stdin is not None
        assert child.stdout is not None
        answer = b""
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            pass
        finally:  # also when Ctrl-C came in between: the answer must not be taken for the next one's
            if not answer.endswith(b"\n"):
                self.end()
        return json.loads(answer) if answer.endswith(b"\n") else None

    def end(self) -> None:
        child, self.child = self.child, None
        if child is None or self.owner != os.getpid():
            return
        child.kill()
        with contextlib.suppress(OSError):  # what could not be sent
            child.communicate()


_lock = threading.Lock()
_process = _Process()
atexit.register(_process.end)


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a Python process that runs a module as `python -m` does, with this process's search path.
    `-m` looks into the current directory first, and that may be a downloaded folder with a json.py in it."""
    code = (
        "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-I", "-c", code, json.dumps([str(path) for path in sys.path]), module, *arguments]


def _start() -> subprocess.Popen[bytes]:
    """In a session of its own, where a Ctrl-C for this process does not reach it."""
    try:
        return subprocess.Popen(
            command(__name__),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise Eagle3Error(f"{sys.executable}: cannot be started: {error.strerror or error}.") from error


# ---- in the child -----------------------------------------------------------------------------------------


def serve() -> None:
    """One line in, one line out, until the parent closes the pipe.  A limit ends the process."""
    _limit()
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a library prints is no answer
        os.dup2(nowhere, stream)
    for line in tasks:
        work, argument, seconds = json.loads(line)
        # a thread that no lock of Python's holds up: it ends the process inside a call of C, too
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        answer = json.dumps(_answer(work, argument)).encode()
        faulthandler.cancel_dump_traceback_later()
        answers.write(answer + b"\n")
        answers.flush()


def _answer(work: str, argument: Any) -> dict[str, Any]:
    module, _, name = work.partition(":")
    try:
        return {"result": getattr(importlib.import_module(module), name)(argument)}
    except MemoryError:
        raise
    except Exception as error:
        return {"refused": str(error)[:_REASON].strip(" \n.") or type(error).__name__}


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_STACK, STACK), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # lower already
            resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    serve()
