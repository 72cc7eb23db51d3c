"""The only importer of llama_cpp: models, contexts and the few library calls that everything else goes through.

Nothing here decides anything about decoding.  Every call that could make llama.cpp abort the process is
preceded by the check that makes it return instead, and every error code becomes a `LlamaError` that carries
the library's last log lines.  Loading the library is slow, so commands import this module late.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import _native
from .errors import BackendError, FileError, LlamaError, OptionError, PromptError

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml's backtrace goes to stdout

import llama_cpp.llama_cpp as lib

Progress = Callable[[float], None]

ENCODE, DECODE = 0, 1  # enum llama_process_type


# --- the library ---------------------------------------------------------------------------------------

_log: deque[str] = deque(maxlen=12)


@lib.llama_log_callback
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


def system_info() -> str:
    """llama.cpp's one-line description of the CPU features and backends it was built with."""
    return str(lib.llama_print_system_info().decode()).strip()


# --- devices -------------------------------------------------------------------------------------------

_BUILD_HINT = {
    "cuda": 'CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall --no-binary :all: llama-cpp-python',
    "metal": 'CMAKE_ARGS="-DGGML_METAL=on" pip install --force-reinstall --no-binary :all: llama-cpp-python',
}
_BACKEND = {"cuda": "CUDA", "metal": "MTL"}  # how ggml names the devices: CUDA0, MTL0
_CPU, _ACCEL = 0, 3  # enum ggml_backend_dev_type; the rest are GPUs

_dev_count = function("ggml_backend_dev_count", ctypes.c_size_t)
_dev_get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_dev_name = function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
_dev_type = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)


def gpu_devices() -> dict[str, int]:
    """Name -> address of every GPU device that the installed library can use."""
    devices = [_dev_get(i) for i in range(_dev_count())]
    return {_dev_name(d).decode(): d for d in devices if _dev_type(d) not in (_CPU, _ACCEL)}


def choose_devices(device: str, gpu_layers: int | None) -> tuple[list[int], int, str]:
    """Device addresses, layers to offload (-1 is all) and the backend's name for a `--device` value.

    Raises BackendError where the installed build has no such backend, OptionError for `--gpu-layers` on a CPU.
    """
    gpus = gpu_devices()
    if device in _BACKEND:
        prefix = _BACKEND[device]
        gpus = {name: d for name, d in gpus.items() if name.startswith(prefix) or name.lower().startswith(device)}
        if not gpus:
            raise BackendError(
                f"--device {device}: the installed llama-cpp-python has no {device.upper()} device.",
                f"Reinstall it with {_BUILD_HINT[device]}, or use --device cpu.",
            )
    if device == "cpu" or not gpus:
        if gpu_layers not in (None, 0):
            where = "--device cpu" if device == "cpu" else "this llama-cpp-python build, which has no GPU backend,"
            raise OptionError(f"--gpu-layers {gpu_layers}: has no effect with {where}.", "Leave it out or use 0.")
        return [], 0, "cpu"
    layers = -1 if gpu_layers is None else gpu_layers
    return list(gpus.values()), layers, ",".join(gpus) if layers else "cpu"


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


class Model:
    """One loaded GGUF and its vocabulary.  Free it after its contexts."""

    def __init__(
        self, path: Path, devices: list[int], gpu_layers: int, repack: bool = True, progress: Progress | None = None
    ) -> None:
        """Load the weights.  FileError where llama.cpp refuses the file; check its header first (gguf_file).
        repack: let the CPU keep weights in the layouts of its fastest kernels (AMX and others)."""
        self.path = path
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = repack
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        callback = lib.llama_progress_callback(lambda done, _: progress(done) is None if progress else True)
        params.progress_callback = callback
        _log.clear()
        self.handle = lib.llama_model_load_from_file(os.fsencode(path), params)
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
        room = len(data) + 16
        ids = (lib.llama_token * room)()
        n = lib.llama_tokenize(self.vocab, data, len(data), ids, room, add_special, True)
        if n < 0:
            raise PromptError(f"prompt: the tokenizer of {self.path.name} failed on {len(data)} bytes (code {n}).")
        return list(ids[:n])

    def piece(self, token: int) -> bytes:
        """The bytes that a token prints; empty for control tokens.  May be part of a character."""
        if token not in self._pieces:
            size = 64
            while True:
                buffer = ctypes.create_string_buffer(size)
                n = lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
                if n >= 0:
                    break
                size = -n
            self._pieces[token] = buffer.raw[:n]
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


def render_chat(model: Model, messages: Sequence[dict[str, str]]) -> str:
    """The prompt text of a conversation by the model's own chat template, up to where the answer starts."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = model.chat_template
    if template is None:
        raise PromptError(f"{model.path.name}: has no chat template.", "Use --raw to send the prompt as it is.")
    eos = model.token_text(lib.llama_vocab_eos(model.vocab))
    try:
        formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=model.token_text(model.bos))
        return str(formatter(messages=list(messages)).prompt)  # type: ignore[arg-type]
    except Exception as error:  # whatever a template, which is a program from the model file, may raise
        raise PromptError(f"{model.path.name}: its chat template refuses this conversation: {error}.") from error


def schema_to_gbnf(schema: str) -> str:
    """GBNF grammar for a JSON schema (llama.cpp's own conversion).  OptionError if it is no valid schema."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return str(json_schema_to_gbnf(schema))
    except Exception as error:  # the converter raises bare ValueError, KeyError, AssertionError, ...
        reason = f"{type(error).__name__}: {error}"
        raise OptionError(f"--json-schema: cannot be turned into a grammar: {reason}.") from error


# --- contexts ------------------------------------------------------------------------------------------

_logits = function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)
_process = function("llama_process", ctypes.c_int32, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_seq_rm = function("llama_memory_seq_rm", ctypes.c_bool, ctypes.c_void_p, *[ctypes.c_int32] * 3)
_seq_cp = function("llama_memory_seq_cp", None, ctypes.c_void_p, *[ctypes.c_int32] * 4)
_seq_keep = function("llama_memory_seq_keep", None, ctypes.c_void_p, ctypes.c_int32)
_STATE_SEQ = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32)
_STATE_DATA = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_uint32)
_state_size = function("llama_state_seq_get_size_ext", ctypes.c_size_t, *_STATE_SEQ)
_state_get = function("llama_state_seq_get_data_ext", ctypes.c_size_t, *_STATE_DATA)
_state_set = function("llama_state_seq_set_data_ext", ctypes.c_size_t, *_STATE_DATA)
_EVERY_SEQUENCE = -1

_PROCESS_ERRORS = {
    1: "found no room in the KV cache",
    2: "was aborted",
    -1: "refused the batch",
    -2: "could not allocate or compute",
}


@dataclass(frozen=True)
class ContextSettings:
    """What a context is made of.

    cells       KV cells, shared by all sequences
    rows        largest batch, computed as one ubatch
    sequences   1 to 256
    flash_attention, type_k, type_v   llama.cpp's numbers for them
    """

    cells: int
    rows: int
    sequences: int
    threads: int
    flash_attention: int = -1
    type_k: int = 1
    type_v: int = 1


class Context:
    """One llama_context with a unified KV cache, and the batch that feeds it.

    `seconds` adds up the time spent inside llama.cpp since it was last set to 0.  The capture, if any, is
    checked after every process: all of its tensors must have been seen for every row.
    """

    def __init__(
        self, model: Model, name: str, settings: ContextSettings, capture: Any = None, other: Context | None = None
    ) -> None:
        """other: the target's context, for a drafter that borrows its embeddings or head."""
        params = lib.llama_context_default_params()
        params.n_ctx = max(settings.cells, settings.rows, settings.sequences)  # it asserts that a batch fits
        params.n_batch = params.n_ubatch = settings.rows
        params.n_seq_max, params.kv_unified, params.swa_full = settings.sequences, True, True
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = settings.flash_attention
        params.type_k, params.type_v = settings.type_k, settings.type_v
        params.no_perf = True
        if capture is not None:
            params.cb_eval = ctypes.cast(capture.callback, lib.ggml_backend_sched_eval_callback)
            params.cb_eval_user_data = capture.user_data
        if other is not None:
            params.ctx_other = other.handle
        self.name, self.capture, self.seconds = name, capture, 0.0
        # float32 [capacity, width]: the rows that the last process captured; valid until the next one
        self.captured: Any = None if capture is None else np.asarray(memoryview(capture))
        _log.clear()
        self.handle: Any = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            reason = recent_log() or "no reason given"
            raise LlamaError(
                f"{name}: llama.cpp could not make a context of {settings.cells} cells: {reason}.",
                "Try a smaller --ctx-size.",
            )
        self.n_vocab = model.n_vocab
        self.rows = settings.rows
        self.cells = settings.cells
        self.memory = lib.llama_get_memory(self.handle)
        self.batch = lib.llama_batch_ext_init(self.handle)

    def process(
        self,
        kind: int,
        pos: Any,
        tokens: Any = None,
        seq_start: Any = None,
        seqs: Any = None,
        outputs: Any = None,
        features: Any = None,
    ) -> None:
        """Fill the batch (arrays as in native/eagle3.h, e3_rows) and run it.  LlamaError on any other code than 0."""
        _native.fill(self.batch, tokens, pos, seq_start, seqs, outputs, features)
        if self.capture is not None:
            self.capture.reset()
        started = time.perf_counter()
        code = _process(self.handle, kind, self.batch)
        self.seconds += time.perf_counter() - started
        if code:
            what = _PROCESS_ERRORS.get(code, "failed")
            raise LlamaError(f"{self.name}: llama.cpp {what} for {len(pos)} rows (code {code}): {recent_log()}.")
        fault = self.capture.check(len(pos)) if self.capture is not None else None
        if fault:
            raise LlamaError(f"{self.name}: hidden states were not captured: {fault}.")

    def logits(self) -> int:
        """Address of the last batch's logits, float [rows that asked, n_vocab], in batch order."""
        started = time.perf_counter()
        address = _logits(self.handle)
        self.seconds += time.perf_counter() - started
        if not address:
            raise LlamaError(f"{self.name}: llama.cpp has no logits for the last batch.")
        return int(address)

    def remove(self, seq: int, start: int) -> None:
        """Drop positions >= start of a sequence."""
        started = time.perf_counter()
        done = _seq_rm(self.memory, seq, start, -1)
        self.seconds += time.perf_counter() - started
        if not done:
            raise LlamaError(f"{self.name}: this model's memory cannot drop positions from {start} on.")

    def copy(self, source: int, destination: int, start: int = -1, end: int = -1) -> None:
        """Let positions start..end-1 of one sequence also belong to another; -1 leaves a side open."""
        started = time.perf_counter()
        _seq_cp(self.memory, source, destination, start, end)
        self.seconds += time.perf_counter() - started

    def keep(self, seq: int) -> None:
        """Drop every cell that is not in this sequence, and every other sequence's claim on its cells."""
        started = time.perf_counter()
        _seq_keep(self.memory, seq)
        self.seconds += time.perf_counter() - started

    def make_contiguous(self, source: int, start: int, end: int, scratch: int) -> None:
        """Move the cells of positions start..end-1 of `source` into the first free cells, in order, as part of
        sequence 0; every other cell from `start` on is dropped.  Through llama.cpp's own saving and restoring of a
        sequence, `scratch`, which must be empty and is empty afterwards."""
        self.copy(source, scratch, start, end)
        started = time.perf_counter()
        size = _state_size(self.handle, scratch, 0)
        state = ctypes.create_string_buffer(size)
        saved = _state_get(self.handle, state, size, scratch, 0)
        _seq_rm(self.memory, _EVERY_SEQUENCE, start, -1)
        restored = _state_set(self.handle, state, size, scratch, 0)
        self.seconds += time.perf_counter() - started
        if saved != size or restored == 0:
            raise LlamaError(f"{self.name}: llama.cpp could not move {end - start} KV cells: {recent_log()}.")
        self.copy(scratch, 0)
        self.keep(0)

    def last_position(self, seq: int = 0) -> int:
        """Largest position in a sequence, -1 if it is empty."""
        return int(lib.llama_memory_seq_pos_max(self.memory, seq))

    def close(self) -> None:
        if self.handle:
            lib.llama_batch_ext_free(self.batch)
            lib.llama_free(self.handle)
            self.handle = None
