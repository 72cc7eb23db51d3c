"""The only importer of llama_cpp: models, contexts and the few library calls that everything else goes through.

Nothing here decides anything about decoding.  Every call that could make llama.cpp abort the process is
preceded by the check that makes it return instead, and every error code becomes a `LlamaError` that carries
the library's last log lines.  Loading the library is slow, so commands import this module late.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _native, grammars, templates, thinking
from .errors import BackendError, FileError, LlamaError, OptionError, PromptError
from .huge_pages import ask_for, new_memory, private_memory
from .interrupt import called_from_c, check, stop_wanted
from .settings import DEVICES, RuntimeSettings

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml's backtrace goes to stdout

import llama_cpp.llama_cpp as lib

Progress = Callable[[float], None]


# --- the library ---------------------------------------------------------------------------------------

_log: deque[str] = deque(maxlen=12)


@lib.llama_log_callback
@called_from_c
def _keep_log(level: int, text: bytes, _user_data: Any) -> None:
    """Keep warnings and errors for our own messages; print nothing."""
    if level in (3, 4):  # GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR
        _log.append(text.decode("utf-8", "replace").strip())


def function(name: str, restype: Any, *argtypes: Any) -> Any:
    """A C function of llama.cpp or ggml by its exported name, with a signature of our own."""
    try:
        found = lib._lib[name]  # dlsym on libllama also searches the ggml libraries that it needs
    except AttributeError as error:
        raise LlamaError(
            f"llama.cpp: the installed library does not export {name}.",
            "Install llama-cpp-python>=0.3.36,<0.4.",
        ) from error
    found.restype, found.argtypes = restype, list(argtypes)
    return found


def _start() -> None:
    lib.llama_log_set(_keep_log, ctypes.c_void_p(0))
    lib.llama_backend_init()
    addresses = {n: ctypes.cast(function(n, None), ctypes.c_void_p).value for n in _native.FUNCTIONS}
    _native.bind(addresses)


_start()


def recent_log() -> str:
    """The library's last warnings and errors, joined; empty if there were none."""
    return "; ".join(line for line in _log if line)


def forget_log() -> None:
    """Call before something that may fail, so that `recent_log` speaks of it alone."""
    _log.clear()


def system_info() -> str:
    """llama.cpp's one-line description of the CPU features and backends it was built with."""
    return str(lib.llama_print_system_info().decode()).strip()


# --- devices -------------------------------------------------------------------------------------------

_PIP = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
_BUILD_HINT = {"cuda": f'CMAKE_ARGS="-DGGML_CUDA=on" {_PIP}', "metal": f'CMAKE_ARGS="-DGGML_METAL=on" {_PIP}'}
_BACKEND = {"cuda": "CUDA", "metal": "MTL"}  # how ggml names the devices: CUDA0, MTL0
_CPU, _ACCEL = 0, 3  # enum ggml_backend_dev_type; the rest are GPUs

_dev_count = function("ggml_backend_dev_count", ctypes.c_size_t)
_dev_get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_dev_name = function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
_dev_type = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)


def device_addresses() -> list[int]:
    """Of every device that the installed library can use, in its order."""
    return [_dev_get(i) for i in range(_dev_count())]


def gpu_devices() -> dict[str, int]:
    """Name -> address of those that are GPUs."""
    return {_dev_name(d).decode(): d for d in device_addresses() if _dev_type(d) not in (_CPU, _ACCEL)}


def choose_devices(runtime: RuntimeSettings) -> tuple[list[int], int, str]:
    """Addresses of the devices, layers to offload (-1 is all) and the devices' names, "cpu" without a GPU.

    Raises BackendError where the installed build has no such device, OptionError for what has no effect on a CPU.
    """
    device, gpu_layers = runtime.device, runtime.gpu_layers
    gpus = _gpus(device)
    if device == "cpu" or not gpus:
        if gpu_layers not in (None, 0):
            why = "with --device cpu" if device == "cpu" else "because this llama-cpp-python build has no GPU backend"
            raise OptionError(f"--gpu-layers {gpu_layers}: has no effect {why}.", "Leave it out or use 0.")
        return [], 0, "cpu"
    if runtime.split_mode == "none":
        main = runtime.main_gpu or 0
        if main >= len(gpus):
            raise OptionError(f"--main-gpu {main}: expected 0 to {len(gpus) - 1}, for there are {', '.join(gpus)}.")
        gpus = dict([list(gpus.items())[main]])
    layers = -1 if gpu_layers is None else gpu_layers
    return list(gpus.values()), layers, ",".join(gpus) if layers else "cpu"


def _gpus(device: str) -> dict[str, int]:
    """Name -> address of the GPUs that a `--device` value means, in its order."""
    gpus = gpu_devices()
    if device in _BACKEND:
        prefix = _BACKEND[device]
        found = {name: d for name, d in gpus.items() if name.startswith(prefix) or name.lower().startswith(device)}
        if not found:
            raise BackendError(
                f"--device {device}: the installed llama-cpp-python has no {device.upper()} device.",
                f"Reinstall it with {_BUILD_HINT[device]}, or use --device cpu.",
            )
        return found
    if device in DEVICES:
        return gpus
    names = device.split(",")
    for name in names:
        if name not in gpus:
            raise BackendError(
                f"--device {device}: expected GPUs among {', '.join(gpus) or 'none'}, got {name}.",
                "eagle3 doctor lists the devices.",
            )
    return {name: gpus[name] for name in names}


def physical_cores() -> int:
    """Physical cores that this process may run on; logical processors where the system does not tell."""
    try:
        allowed = os.sched_getaffinity(0)
        topology = [Path(f"/sys/devices/system/cpu/cpu{c}/topology") for c in allowed]
        cores = {(t / "physical_package_id").read_text() + (t / "core_id").read_text() for t in topology}
        return len(cores)
    except (AttributeError, OSError):
        return os.cpu_count() or 1


# --- models --------------------------------------------------------------------------------------------


# Many tokenizers (GPT-4o's, DeepSeek's, Mistral NeMo's, Falcon's) split a text by std::regex, which calls itself for
# every character of a run of letters, spaces or signs: measured 170 to 340 bytes of stack each.  25,000 fill a usual
# stack, and the process ends.
STACK_PER_BYTE = 512
USUAL_STACK = 4 << 20
LONGEST = 8 << 20  # bytes of a text: a stack of 4 GiB, of which only a text that is one run touches half


def with_stack(size: int, work: Callable[[], int]) -> int:
    """What work returns, called with a stack of that many bytes and more.  It must not raise."""
    if size < USUAL_STACK:
        return work()
    found: list[int] = []
    before = threading.stack_size(USUAL_STACK + size // 4096 * 4096)
    try:
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise LlamaError(f"no room for a stack of {size >> 20} MiB, which so long a text needs.") from error
    finally:
        threading.stack_size(before)
    try:
        thread.join()
    except BaseException:  # Ctrl-C; but what it reads must not be freed now
        thread.join()
        raise
    return found[0]


class Model:
    """One loaded GGUF and its vocabulary.  Free it after its contexts."""

    def __init__(
        self,
        path: Path,
        devices: list[int],
        gpu_layers: int,
        repack: bool = True,
        progress: Progress | None = None,
        weights: bool = True,
        mmap: bool = True,
        placement: Any = None,
    ) -> None:
        """Load a model.  FileError where llama.cpp refuses the file; check its header first (model_files).
        repack: let the CPU keep weights in the layouts of its fastest kernels (AMX and others).
        weights: without them nothing can be computed, but everything about the file has been checked.
        mmap: as in `RuntimeSettings`.  placement: a `Placement`, where llama.cpp's own is not wanted."""
        self.path = path
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = repack
        params.no_alloc = not weights
        if not (weights and mmap):  # without weights it asserts that nothing is mapped
            params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        kept = placement.apply(params) if placement else None
        before, asked = private_memory(), False
        fault: BaseException | None = None

        @called_from_c
        def loading(done: float, _: Any) -> bool:
            """False ends the load."""
            nonlocal asked, fault
            if weights and not asked:
                ask_for(new_memory(before, private_memory()))
                asked = True
            try:
                if progress:
                    progress(done)
            except BaseException as error:
                fault = error
            return fault is None and not stop_wanted()

        callback = lib.llama_progress_callback(loading)
        params.progress_callback = callback
        forget_log()
        self.handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        del kept
        if fault is not None or stop_wanted():
            self.close()
            check()
            raise fault or KeyboardInterrupt
        if not self.handle:
            raise FileError(f"{path}: llama.cpp cannot load it: {recent_log() or 'no reason given'}.")
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self.n_embd = int(lib.llama_model_n_embd(self.handle))
        self.n_layer = int(lib.llama_model_n_layer(self.handle))
        self.n_ctx_train = int(lib.llama_model_n_ctx_train(self.handle))
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        """Token ids of text; control tokens written out in it are recognised."""
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > LONGEST:
            raise PromptError(f"prompt: expected at most {LONGEST >> 20} MiB of text, got {len(data) / 2**20:.1f} MiB.")
        room = len(data) + 16
        ids = (lib.llama_token * room)()
        n = with_stack(
            STACK_PER_BYTE * len(data),
            lambda: lib.llama_tokenize(self.vocab, data, len(data), ids, room, add_special, True),
        )
        if n < 0:
            raise PromptError(f"prompt: the tokenizer of {self.path.name} failed on {len(data)} bytes (code {n}).")
        return list(ids[:n])

    def piece(self, token: int) -> bytes:
        """The bytes that a token prints; empty for control tokens but those around thinking.  May be part of a
        character."""
        if token not in self._pieces:
            size = 64
            while True:
                buffer = ctypes.create_string_buffer(size)
                n = lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
                if n >= 0:
                    break
                size = -n
            printed = buffer.raw[:n]
            if not printed and (tag := self.token_text(token).encode()) in thinking.TAGS:
                printed = tag
            self._pieces[token] = printed
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        """Does this token end an answer (end of text, of turn, of message)?"""
        if token not in self._ends:
            self._ends[token] = bool(lib.llama_vocab_is_eog(self.vocab, token))
        return self._ends[token]

    @property
    def bos(self) -> int:
        """Id of the begin-of-text token, -1 if there is none."""
        return int(lib.llama_vocab_bos(self.vocab))

    @property
    def adds_bos(self) -> bool:
        return bool(lib.llama_vocab_get_add_bos(self.vocab))

    def token_text(self, token: int) -> str:
        """The vocabulary entry of a token as text, control tokens included; empty for -1."""
        return lib.llama_vocab_get_text(self.vocab, token).decode("utf-8", "replace") if token >= 0 else ""

    @property
    def keeps_every_position(self) -> bool:
        """False for recurrent and hybrid models, whose state cannot drop single positions."""
        return not (lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))

    @property
    def generates_text(self) -> bool:
        return bool(lib.llama_model_has_decoder(self.handle)) and not lib.llama_model_has_encoder(self.handle)

    @property
    def chat_template(self) -> str | None:
        found = lib.llama_model_chat_template(self.handle, None)
        return found.decode("utf-8", "replace") if found else None

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.handle, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    def close(self) -> None:
        if self.handle:
            lib.llama_model_free(self.handle)
            self.handle = None


def render_chat(model: Model, messages: Sequence[dict[str, str]], more: Mapping[str, Any] | None = None) -> str:
    """The prompt text of a conversation by the model's own chat template, up to where the answer starts.  more: further
    variables for it."""
    template = model.chat_template
    if template is None:
        raise PromptError(f"{model.path.name}: has no chat template.", "Use --raw to send the prompt as it is.")
    variables = {
        **dict.fromkeys(("functions", "function_call", "tools", "tool_choice")),  # llama-cpp-python: there are none
        **(more or {}),
        "messages": list(messages),
        "add_generation_prompt": True,
        "bos_token": model.token_text(model.bos),
        "eos_token": model.token_text(lib.llama_vocab_eos(model.vocab)),
    }
    return templates.render(model.path.name, template, variables)


# --- the answer's form ---------------------------------------------------------------------------------


def schema_to_gbnf(schema: str) -> str:
    """GBNF grammar for a JSON schema (llama-cpp-python's conversion).  OptionError if it is no valid schema."""
    return grammars.from_schema(schema, Path(lib.__file__).with_name("llama_grammar.py"))


def check_grammar(grammar: str) -> None:
    """OptionError for what llama.cpp cannot parse, or cannot parse without harm.  To be called before it does."""
    grammars.check(grammar, lib._lib._name)
