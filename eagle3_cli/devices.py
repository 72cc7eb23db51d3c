"""What the installed llama.cpp was built from, and the devices that it sees."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .errors import LlamaError
from .llama import device_addresses, function

_CPU, _ACCELERATOR = 0, 3  # enum ggml_backend_dev_type; the rest are GPUs
_text, _size, _ptr = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p


@dataclass(frozen=True)
class Device:
    """name   as llama.cpp has it: CPU, CUDA0, MTL0
    free, total   bytes of its memory, as far as llama.cpp knows
    """

    name: str
    description: str
    is_gpu: bool
    free: int
    total: int


def backends() -> list[str]:
    """Names of what the library was built for: CPU, CUDA, Metal."""
    count = function("ggml_backend_reg_count", _size)()
    at, name = function("ggml_backend_reg_get", _ptr, _size), function("ggml_backend_reg_name", _text, _ptr)
    return [name(at(i)).decode("utf-8", "replace") for i in range(count)]


def build() -> str:
    """Version and commit of ggml, which llama.cpp's sources have; what an older build does not tell is left out."""
    return ", ".join(part for part in (_told("ggml_version", "ggml"), _told("ggml_commit", "commit")) if part)


def _told(name: str, label: str) -> str:
    try:
        found = function(name, _text)()
    except LlamaError:
        return ""
    return f"{label} {found.decode('utf-8', 'replace')}" if found else ""


def devices() -> list[Device]:
    """In llama.cpp's order."""
    return [_device(address) for address in device_addresses()]


def _device(address: int) -> Device:
    name = function("ggml_backend_dev_name", _text, _ptr)(address)
    description = function("ggml_backend_dev_description", _text, _ptr)(address) or b""
    kind = function("ggml_backend_dev_type", ctypes.c_int, _ptr)(address)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    sizes = ctypes.POINTER(ctypes.c_size_t)
    function("ggml_backend_dev_memory", None, _ptr, sizes, sizes)(address, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name.decode("utf-8", "replace"),
        description.decode("utf-8", "replace"),
        kind not in (_CPU, _ACCELERATOR),
        free.value,
        total.value,
    )
