"""Does the installed llama.cpp survive its own AMX kernels?

Built by GCC before 14 for a CPU with AMX, it does not: the compiler drops most of the tile configuration that
`ggml_tile_config_init` writes, and the first matrix product ends the process with SIGSEGV (ggml-org/llama.cpp
issue 20824 and pull request 26954).  So, where the library says it has AMX, one small product is tried in a child
process first.  The Makefile compiles llama-cpp-python with the flags that keep the configuration.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from typing import Any

from .confined import command
from .llama import function, system_info

AMX_NOTE = (
    "llama.cpp's AMX kernels crash in this llama-cpp-python build; it runs without them and without repacked weights,"
    ' which is slower. Reinstall it with CXXFLAGS="-fno-tree-dse -fno-dse" to repair them.'
)

_SECONDS = 20  # a child that hangs is as bad as one that dies
_Q8_0, _F32 = 8, 0  # enum ggml_type
_WIDTH, _ROWS = 256, 64


@functools.cache
def amx_crashes() -> bool:
    """True if a matrix product in an AMX buffer kills a process.  Tries once per process, in a child.

    A fork takes some milliseconds, a new interpreter a third of a second; but beside PyTorch, whose OpenMP threads a
    fork loses, the child's product would wait for them for ever.
    """
    if "AMX_INT8 = 1" not in system_info():
        return False
    return _dies_forked() if hasattr(os, "fork") and "torch" not in sys.modules else _dies_anew()


def _dies_forked() -> bool:
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        status = 1
        try:
            _multiply()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] != 0


def _dies_anew() -> bool:
    try:
        done = subprocess.run(
            command(__name__), stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _amx_buffer_type() -> Any:
    """The CPU device's AMX buffer type, or None."""
    ptr = ctypes.c_void_p
    device = function("ggml_backend_dev_by_type", ptr, ctypes.c_int)(0)
    registry = function("ggml_backend_dev_backend_reg", ptr, ptr)(device)
    find = function("ggml_backend_reg_get_proc_address", ptr, ptr, ctypes.c_char_p)
    address = find(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ptr), ptr)(address)(device)
    name = function("ggml_backend_buft_name", ctypes.c_char_p, ptr)
    for i in range(64):
        if not types[i]:
            return None
        if name(types[i]) == b"AMX":
            return types[i]
    return None


def _multiply() -> None:
    """One product of a Q8_0 matrix in an AMX buffer with a batch of rows, in this process."""
    buffer_type = _amx_buffer_type()
    if buffer_type is None:
        return
    ptr, i64 = ctypes.c_void_p, ctypes.c_int64
    init = function("ggml_init", ptr, _InitParams)
    tensor_2d = function("ggml_new_tensor_2d", ptr, ptr, ctypes.c_int, i64, i64)
    fill = function("ggml_backend_tensor_set", None, ptr, ptr, ctypes.c_size_t, ctypes.c_size_t)
    size = function("ggml_nbytes", ctypes.c_size_t, ptr)

    def zero(tensor: Any) -> None:
        fill(tensor, ctypes.create_string_buffer(size(tensor)), 0, size(tensor))

    weights, products = init(_InitParams(1 << 16, None, True)), init(_InitParams(1 << 20, None, True))
    matrix = tensor_2d(weights, _Q8_0, _WIDTH, _WIDTH)
    function("ggml_backend_alloc_ctx_tensors_from_buft", ptr, ptr, ptr)(weights, buffer_type)
    rows = tensor_2d(products, _F32, _WIDTH, _ROWS)
    product = function("ggml_mul_mat", ptr, ptr, ptr, ptr)(products, matrix, rows)
    backend = function("ggml_backend_init_by_type", ptr, ctypes.c_int, ctypes.c_char_p)(0, None)
    function("ggml_backend_alloc_ctx_tensors", ptr, ptr, ptr)(products, backend)
    zero(matrix)
    zero(rows)
    graph = function("ggml_new_graph", ptr, ptr)(products)
    function("ggml_build_forward_expand", None, ptr, ptr)(graph, product)
    function("ggml_backend_graph_compute", ctypes.c_int, ptr, ptr)(backend, graph)


if __name__ == "__main__":
    _multiply()
