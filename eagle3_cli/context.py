"""A llama.cpp context: one KV cache, the batch that feeds it, and what is done with sequences of cells."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _native
from .errors import FileError, LlamaError, OptionError
from .huge_pages import ask_for, collapse, new_memory, private_memory
from .interrupt import called_from_c, can_wait, check, stop_wanted
from .llama import Model, forget_log, function, lib, physical_cores, recent_log
from .settings import CACHE_TYPES, FLASH_ATTENTION, RuntimeSettings

ENCODE, DECODE = 0, 1  # enum llama_process_type

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
_meta = function(
    "llama_model_meta_val_str", ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t
)
_block_size = function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)

# A pass that may take long can be stopped: llama.cpp asks after every node of its graph, which costs about 1 ms.
_MANY_ROWS, _LONG = 64, 0.25  # rows of it, seconds of the pass before
AT_A_TIME = 0.02  # seconds of plain decoding in one call: text appears, and Ctrl-C is heard, that much later at most


@lib.ggml_abort_callback
@called_from_c
def _stops(_data: Any) -> bool:
    return stop_wanted()


_NEVER_STOPS = lib.ggml_abort_callback()

_PROCESS_ERRORS = {
    1: "found no room in the KV cache",
    2: "was aborted",
    -1: "refused the batch",
    -2: "could not allocate or compute",
}


@dataclass(frozen=True)
class ContextSettings:
    """What a context is made of.

    cells       KV cells, shared by all sequences; where the cache is not unified each has its equal part of them
    rows        largest batch, computed as one ubatch; no more than there are cells
    sequences   1 to 256
    flash_attention, type_k, type_v   llama.cpp's numbers for them
    unified     one cache in which a cell may belong to several sequences; else a part for each, and attention reads no
                other sequence's cells
    rollback    newest positions that recurrent layers should be able to drop; `Context.rollback` says what they can
    """

    cells: int
    rows: int
    sequences: int
    threads: int
    flash_attention: int = -1
    type_k: int = 1
    type_v: int = 1
    unified: bool = True
    rollback: int = 0


def target_settings(runtime: RuntimeSettings, on_gpu: bool, cells: int, rows: int, sequences: int) -> ContextSettings:
    """How a target runs, whoever runs it: chat, the writer of answers and the capture of states see one model."""
    return ContextSettings(
        cells,
        rows,
        sequences,
        runtime.threads or physical_cores(),
        FLASH_ATTENTION[runtime.flash_attention(on_gpu)],
        CACHE_TYPES[runtime.cache_type_k],
        CACHE_TYPES[runtime.cache_type_v],
    )


def _check_cache_types(model: Model, settings: ContextSettings) -> None:
    """OptionError for a packed cache type whose blocks do not fit into a head: without flash attention llama.cpp takes
    it and computes nonsense."""
    names = {number: name for name, number in CACHE_TYPES.items()}
    for flag, part, kind in (("k", "key", settings.type_k), ("v", "value", settings.type_v)):
        block = _block_size(kind)
        for size in _head_sizes(model, part):
            if size % block:
                raise OptionError(
                    f"--cache-type-{flag} {names[kind]}: packs {block} values at a time, but {model.path.name} has"
                    f" attention heads of {size}.",
                    f"Use --cache-type-{flag} f16, bf16 or f32.",
                )


def _head_sizes(model: Model, part: str) -> set[int]:
    """Values of one head's "key" or "value", of full attention and of a sliding window.  Empty if nothing says so."""
    arch = _metadata(model, "general.architecture")
    heads = lib.llama_model_n_head(model.handle)
    found = {
        _metadata(model, f"{arch}.attention.{part}_length") or str(model.n_embd // heads if heads > 0 else ""),
        _metadata(model, f"{arch}.attention.{part}_length_swa"),
    }
    return {int(size) for size in found if size.isdigit()}


def _metadata(model: Model, key: str) -> str:
    """A value of the model's file as text; empty where it has none."""
    buffer = ctypes.create_string_buffer(128)
    return buffer.value.decode("utf-8", "replace") if _meta(model.handle, key.encode(), buffer, 128) >= 0 else ""


def not_numbers(name: str) -> LlamaError:
    """What to say of logits that nothing can be drawn from."""
    return LlamaError(
        f"{name}: the model's logits are not numbers.",
        "Its file may be damaged, or its values too large: try --cache-type-k f32 --cache-type-v f32.",
    )


class Context:
    """One llama_context, and the batch that feeds it.

    `seconds` adds up the time spent inside llama.cpp since it was last set to 0.  The capture, if any, is
    checked after every process, unless it is paused: all of its tensors must have been seen for every row.
    """

    def __init__(
        self, model: Model, name: str, settings: ContextSettings, capture: Any = None, other: Context | None = None
    ) -> None:
        """other: the target's context, for a drafter that borrows its embeddings or head."""
        _check_cache_types(model, settings)
        params = lib.llama_context_default_params()
        params.n_ctx = max(settings.cells, settings.sequences)
        self.rows = min(settings.rows, params.n_ctx)  # it asserts that a batch fits ...
        # ... and holds a row of each sequence, and more rows than can be dropped
        params.n_batch = params.n_ubatch = max(self.rows, settings.sequences, settings.rollback + 2)
        params.n_rs_seq = settings.rollback
        params.n_seq_max, params.kv_unified, params.swa_full = settings.sequences, settings.unified, True
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
        self._last_pass, self._stoppable = 0.0, False
        # float32 [capacity, width]: the rows that the last process captured; valid until the next one
        self.captured: Any = None if capture is None else np.asarray(memoryview(capture))
        forget_log()
        before = private_memory()
        self.handle: Any = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            reason = recent_log()
            raise LlamaError(
                f"{name}: llama.cpp could not make a context of {settings.cells} cells: {reason or 'no reason given'}.",
                "Try a smaller --ctx-size or --batch-size." if "alloc" in reason or not reason else None,
            )
        buffers = new_memory(before, private_memory())
        ask_for(buffers)
        collapse(buffers)
        self._threads = settings.threads
        self.n_vocab = model.n_vocab
        self.cells = settings.cells
        self.rollback = int(lib.llama_n_rs_seq(self.handle))
        self.memory = lib.llama_get_memory(self.handle)
        if not self.memory:
            lib.llama_free(self.handle)
            raise FileError(f"{model.path}: {model.description} keeps no KV cache, so it cannot answer token by token.")
        self.batch = lib.llama_batch_ext_init(self.handle)
        if not self.batch:
            lib.llama_free(self.handle)
            raise LlamaError(f"{name}: llama.cpp could not make a batch.")

    @property
    def threads(self) -> int:
        """Of the passes to come."""
        return self._threads

    @threads.setter
    def threads(self, number: int) -> None:
        if number != self._threads:
            lib.llama_set_n_threads(self.handle, number, number)
            self._threads = number

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
        stoppable = (len(pos) > _MANY_ROWS or self._last_pass > _LONG) and can_wait()
        if stoppable != self._stoppable:
            self._let_stop(stoppable)
        started = time.perf_counter()
        code = _process(self.handle, kind, self.batch)
        self._last_pass = time.perf_counter() - started
        self.seconds += self._last_pass
        check()
        self._check_code(code, len(pos))
        if self.capture is None or self.capture.paused:
            return
        fault = self.capture.check(len(pos))
        if fault:
            raise LlamaError(f"{self.name}: hidden states were not captured: {fault}.")

    def _check_code(self, code: int, rows: int) -> None:
        if code:
            what = _PROCESS_ERRORS.get(code, "failed")
            raise LlamaError(f"{self.name}: llama.cpp {what} for {rows} rows (code {code}): {recent_log()}.")

    def decode_plain(
        self, text: Any, n: int, position: int, seconds: Any, *, vocab: int = 0, sampler: int = 0, repeating: int = 0
    ) -> tuple[int, float]:
        """Plain decoding in one call, for at most `AT_A_TIME`; native/eagle3.h, e3_plain, says what the arguments are.
        The capture, if there is one, has to be paused.

        Returns how many tokens were emitted, and the sampler's seconds.  LlamaError as `process`, and where the logits
        are no numbers.
        """
        emitted, sampling, code, no_numbers = _native.plain(
            self.handle, self.batch, vocab, sampler, self.n_vocab, text, n, position, repeating, AT_A_TIME, seconds
        )
        self.seconds += float(seconds[:emitted].sum())
        if emitted:
            self._last_pass = float(seconds[emitted - 1])
        check()
        if no_numbers:
            raise not_numbers(self.name)
        self._check_code(code, 1)
        return emitted, sampling

    @property
    def quick(self) -> bool:
        """Whether the time of a call of `decode_plain` is enough for more than a pass or two."""
        return 0 < self._last_pass < AT_A_TIME / 2 and not self._stoppable

    def _let_stop(self, wanted: bool) -> None:
        """Whether a signal may stop the pass to come (on a CPU; others do not ask)."""
        lib.llama_set_abort_callback(self.handle, _stops if wanted else _NEVER_STOPS, None)
        self._stoppable = wanted

    def logits(self) -> int:
        """Address of the last batch's logits, float [rows that asked, n_vocab], in batch order."""
        started = time.perf_counter()
        address = _logits(self.handle)
        self.seconds += time.perf_counter() - started
        if not address:
            raise LlamaError(f"{self.name}: llama.cpp has no logits for the last batch.")
        return int(address)

    def remove(self, seq: int, start: int, end: int = -1) -> None:
        """Drop positions start..end-1 of a sequence; end -1 is open."""
        started = time.perf_counter()
        done = _seq_rm(self.memory, seq, start, end)
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
        removed = _seq_rm(self.memory, _EVERY_SEQUENCE, start, -1)
        restored = _state_set(self.handle, state, size, scratch, 0)
        self.seconds += time.perf_counter() - started
        if saved != size or not removed or restored == 0:
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
