"""How PyTorch computes here: compiled parts, bfloat16 products, memory that is kept, and in which thread."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import ParamSpec, TypeVar

import torch

from .settings import TrainSettings

PAYS = 1_000_000  # rows of all steps together from which on compiling, about a minute, saves time


def training_device(settings: TrainSettings) -> str:
    """ "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() and settings.runtime.device != "cpu" else "cpu"


P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """Calls functions that compute with PyTorch: on a CPU in a thread of its own, on a GPU in the caller's.

    On a CPU with AMX bfloat16 products leave their thread's tiles unconfigured.  llama.cpp configures them once per
    thread, so where it has computed before, it dies at its next product: SIGILL.
    """

    def __init__(self, device: str, threads: int = 0) -> None:
        """threads: of PyTorch there, for OpenMP keeps a number per thread; 0: as it chooses."""
        self._thread = ThreadPoolExecutor(1, "pytorch") if device == "cpu" else None
        if threads:
            self(torch.set_num_threads, threads)

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._thread is None:
            return function(*args, **kwargs)
        return self._thread.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        if self._thread:
            self._thread.submit(release_threads)
            self._thread.shutdown()


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next work.

    PyTorch and llama.cpp share one OpenMP.  Once it has more threads than there are cores, one that waits sleeps
    instead of spinning, and llama.cpp, which waits after every operation, decodes four times slower.  Where OpenMP does
    not know how, nothing is done.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(2)  # omp_pause_hard


@cache
def compile_fault(device: str) -> str | None:
    """Why torch.compile does not work here ("no C++ compiler"), found by trying; None where it does."""
    try:
        torch.compile(lambda x: x.sin() + 1, dynamic=True)(torch.ones(8, device=device))
    except Exception as error:  # whatever a toolchain can do wrong
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def compiles(device: str, report: Callable[[str], None]) -> bool:
    """Whether torch.compile works here.  report is told where it does not."""
    fault = compile_fault(device)
    if fault:
        report(f"not compiled, which is slower: torch.compile does not work here: {fault}.")
    return fault is None


def fast_bfloat16(device: str) -> bool:
    """Whether bfloat16 products are faster than float32's: on a GPU, or a CPU with AMX."""
    return device == "cuda" or (device == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16")))


def mixed_precision(settings: TrainSettings) -> str:
    """What the products of the training are computed in, as accelerate says it: bf16 or no."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if fast_bfloat16(training_device(settings)) else "no"


def keep_memory() -> None:
    """Let glibc keep freed memory: a training step asks for the same again, and new pages are filled with zeros first.

    1.3 times the tokens per second on the demo pair.  One arena for all threads: a thread's own arena is made of pieces
    of 64 MB, into which tensors of ever other sizes fit so badly that a training grew by 10 GB in half an hour.
    Elsewhere than on Linux with glibc nothing is done.
    """
    if not _glibc():
        return
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # malloc.h
    mallopt(arena_max, 1)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)


def give_back_memory() -> None:
    """Give the pages of freed memory back to the system.  Tensors of ever other sizes leave gaps that the next ones do
    not fit in: without this a training grows by half a gigabyte a minute.  Every few steps it costs no time that could
    be measured."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
