"""llama.cpp's own samplers, in llama.cpp's own order.  One draw, one state change per emitted token."""

from __future__ import annotations

import ctypes
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..context import Context, not_numbers
from ..errors import LlamaError, OptionError
from ..llama import Model, check_grammar, function, lib
from ..settings import SamplingSettings

_sample = function("llama_sampler_sample", ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
_logits_row = function("llama_get_logits_ith", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
_apply = function("llama_sampler_apply", None, ctypes.c_void_p, ctypes.c_void_p)
_accept = function("llama_sampler_accept", None, ctypes.c_void_p, ctypes.c_int32)
_MIROSTAT_TOKENS = 100  # likeliest ones, from which its first version estimates how fast probabilities fall
_LARGEST = float(np.finfo(np.float32).max)
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


def with_seed(settings: SamplingSettings) -> SamplingSettings:
    """The same settings with a seed: drawn here if none was given, so that it can be reported."""
    return settings if settings.seed is not None else replace(settings, seed=secrets.randbelow(2**32 - 1))


def check_sampling(settings: SamplingSettings, model: Model) -> None:
    """OptionError for what only the model can tell: a bias for a token it does not have, a broken grammar."""
    for token, bias in settings.logit_bias:
        if not 0 <= token < model.n_vocab:
            raise OptionError(f"--logit-bias: expected a token id from 0 to {model.n_vocab - 1}, got {token}.")
        if not bias <= _LARGEST:
            raise OptionError(f"--logit-bias: expected a bias up to {_LARGEST:.2g}, got {bias:g} for token {token}.")
    if len({token for token, bias in settings.logit_bias if bias < -_LARGEST}) == model.n_vocab:
        raise OptionError("--logit-bias: bans every token of the model.", "Leave one.")
    if settings.grammar is not None:
        lib.llama_sampler_free(_grammar(settings.grammar, model))


def _grammar(text: str, model: Model) -> Any:
    check_grammar(text)
    sampler = lib.llama_sampler_init_grammar(model.vocab, text.encode(), b"root")
    if not sampler:
        raise OptionError("--grammar: llama.cpp cannot parse it.", "It must be GBNF with a rule named root.")
    return sampler


class Sampler:
    """The user's sampler chain for one answer, with the prompt already behind it.

    The grammar stands beside the chain, as in llama.cpp: a token is drawn without it and checked; only if the grammar
    refuses it is the draw repeated over what the grammar allows.  Without truncating samplers that is exactly the
    renormalised law, because P(x) + (1 - P(G)) P(x)/P(G) = P(x)/P(G).

    `seconds` is time spent in llama.cpp.
    """

    def __init__(self, model: Model, settings: SamplingSettings, prompt: Sequence[int], cells: int) -> None:
        """settings: with a seed.  cells: size of the context, the meaning of -1 in the look-back lengths."""
        check_sampling(settings, model)
        self._n_vocab = model.n_vocab
        self._drawn = False  # something
        self.seconds = 0.0
        self._chain = _made(lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params()))
        self._grammar = _grammar(settings.grammar, model) if settings.grammar is not None else None
        history = self._build(model, settings, cells)
        self.is_argmax = settings.greedy and not history and not settings.logit_bias and self._grammar is None
        if history:
            for token in prompt:
                _accept(self._chain, token)

    def _build(self, model: Model, settings: SamplingSettings, cells: int) -> bool:
        """Fill the chain as llama.cpp does.  Does one of its samplers depend on earlier tokens?"""
        if settings.logit_bias:
            self._add(_logit_bias(model, settings))
        seed, mirostat = settings.seed or 0, not settings.greedy and settings.mirostat
        if mirostat:
            self._add(lib.llama_sampler_init_temp(settings.temperature))
            entropy, rate = settings.mirostat_ent, settings.mirostat_lr
            if mirostat == 1:
                self._add(lib.llama_sampler_init_mirostat(model.n_vocab, seed, entropy, rate, _MIROSTAT_TOKENS))
            else:
                self._add(lib.llama_sampler_init_mirostat_v2(seed, entropy, rate))
            return False
        history = False
        for name in settings.samplers:
            if name in _OF_HISTORY:
                for sampler in _OF_HISTORY[name](model, settings, cells):
                    self._add(sampler)
                    history = True
            elif name in _OF_LOGITS and not settings.greedy:
                self._add(_OF_LOGITS[name](settings))
        if settings.greedy:
            self._add(lib.llama_sampler_init_greedy())
        elif "adaptive_p" in settings.samplers:
            self._add(lib.llama_sampler_init_adaptive_p(settings.adaptive_target, settings.adaptive_decay, seed))
        else:
            self._add(lib.llama_sampler_init_dist(seed))
        return history

    def _add(self, sampler: Any) -> None:
        lib.llama_sampler_chain_add(self._chain, _made(sampler))

    @property
    def address(self) -> int | None:
        """Of the llama_sampler that draws; 0 where `is_argmax`, None where a grammar stands beside it."""
        if self._grammar is not None:
            return None
        return 0 if self.is_argmax else ctypes.cast(self._chain, ctypes.c_void_p).value

    def draw(self, context: Context, row: int) -> int:
        """One token from a row of the last batch's logits; advances the state by it."""
        started = time.perf_counter()
        logits = self._logits(context, row)
        if self._grammar is None:
            token = int(_sample(self._chain, context.handle, row))
        else:
            token = self._draw_with_grammar(logits)
        self.seconds += time.perf_counter() - started
        return token

    def _logits(self, context: Context, index: int) -> Any:
        """A row of the last batch's logits, float [n_vocab], where llama.cpp keeps them."""
        address = _logits_row(context.handle, index)
        if not address:
            raise LlamaError(f"{context.name}: llama.cpp has no logits for row {index}.")
        row = (ctypes.c_float * self._n_vocab).from_address(address)
        # weights that are no numbers show at once, a state that became none in every logit
        if math.isnan(row[0]) or (not self._drawn and np.isnan(row).any()):
            raise not_numbers(context.name)
        self._drawn = True
        return row

    def _draw_with_grammar(self, logits: Any) -> int:
        candidates = np.empty(self._n_vocab, _TOKEN_DATA)
        candidates["id"] = np.arange(self._n_vocab, dtype=np.int32)
        candidates["logit"] = np.ctypeslib.as_array(logits)
        candidates["p"] = 0.0
        token = _choose(self._chain, candidates.copy())
        if token is None or not self._allows(token):
            array = _as_array(candidates)
            _apply(self._grammar, ctypes.byref(array))
            token = _choose(self._chain, candidates)
        if token is None:  # taking another one would end the process
            raise OptionError(
                "--grammar: nothing that it allows here is left by the model's vocabulary and --logit-bias.",
                "Allow another continuation.",
            )
        _accept(self._grammar, token)
        _accept(self._chain, token)
        return token

    def _allows(self, token: int) -> bool:
        one = np.array([(token, 1.0, 0.0)], _TOKEN_DATA)
        array = _as_array(one)
        _apply(self._grammar, ctypes.byref(array))
        return bool(np.isfinite(one["logit"][0]))

    def close(self) -> None:
        if self._chain:
            lib.llama_sampler_free(self._chain)
            if self._grammar:
                lib.llama_sampler_free(self._grammar)
            self._chain = self._grammar = None


def _as_array(candidates: Any) -> Any:
    """A llama_token_data_array over the candidates, which must outlive it."""
    data = candidates.ctypes.data_as(lib.llama_token_data_p)
    return lib.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)


def _made(sampler: Any) -> Any:
    if not sampler:
        raise LlamaError("sampler: llama.cpp could not make one.")
    return sampler


def _choose(chain: Any, candidates: Any) -> int | None:
    """Apply the chain to candidates (which it overwrites) and return the token that its last sampler selected; None
    where none is left: all logits are -inf."""
    array = _as_array(candidates)
    _apply(chain, ctypes.byref(array))
    if not 0 <= array.selected < array.size:
        raise LlamaError("sampler: llama.cpp's chain selected no token.")
    chosen = array.data[array.selected]
    return int(chosen.id) if math.isfinite(chosen.logit) else None


def _logit_bias(model: Model, settings: SamplingSettings) -> Any:
    biases = (lib.llama_logit_bias * len(settings.logit_bias))(
        *(lib.llama_logit_bias(token, bias) for token, bias in settings.logit_bias)
    )
    return lib.llama_sampler_init_logit_bias(model.n_vocab, len(biases), biases)


def _penalties(model: Model, settings: SamplingSettings, cells: int) -> list[Any]:
    penalties = (settings.repeat_penalty, settings.frequency_penalty, settings.presence_penalty)
    last_n = cells if settings.repeat_last_n == -1 else min(settings.repeat_last_n, cells)  # it allocates so many
    if last_n == 0 or penalties == (1.0, 0.0, 0.0):
        return []
    return [lib.llama_sampler_init_penalties(model.n_vocab, last_n, *penalties)]


def _dry(model: Model, settings: SamplingSettings, cells: int) -> list[Any]:
    if settings.dry_multiplier <= 0:
        return []
    words = [word.encode() for word in settings.dry_sequence_breakers]
    breakers = (ctypes.c_char_p * len(words))(*words)
    scale, base, length = settings.dry_multiplier, settings.dry_base, settings.dry_allowed_length
    last = cells if settings.dry_penalty_last_n == -1 else min(settings.dry_penalty_last_n, cells)
    return [lib.llama_sampler_init_dry(model.vocab, scale, base, length, last, breakers, len(words))]


# Samplers by name.  Those that look at earlier tokens are none where they are off.
_OF_HISTORY: Mapping[str, Callable[[Model, SamplingSettings, int], list[Any]]] = {"penalties": _penalties, "dry": _dry}
_OF_LOGITS: Mapping[str, Callable[[SamplingSettings], Any]] = {
    "top_n_sigma": lambda s: lib.llama_sampler_init_top_n_sigma(s.top_n_sigma),
    "top_k": lambda s: lib.llama_sampler_init_top_k(s.top_k),
    "typ_p": lambda s: lib.llama_sampler_init_typical(s.typical_p, 0),
    "top_p": lambda s: lib.llama_sampler_init_top_p(s.top_p, 0),
    "min_p": lambda s: lib.llama_sampler_init_min_p(s.min_p, 0),
    "xtc": lambda s: lib.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, 0, s.seed or 0),
    "temperature": lambda s: lib.llama_sampler_init_temp_ext(s.temperature, s.dynatemp_range, s.dynatemp_exponent),
}
