"""eagle3 from Python: load a pair, and read its answers token by token.

    from eagle3_cli import load

    with load("llama.gguf", "llama-eagle3.gguf") as engine:
        for piece in engine.stream("Why is the sky blue?", temperature=0, max_tokens=200):
            print(piece.text, end="", flush=True)

The records are those of the command line (engine/types.py), the names of settings those of settings.py, and the errors
those of errors.py.  Importing this module is cheap: llama.cpp is loaded by `load`.  docs/python.md explains it all.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BusyError, Eagle3Error, InputError, OptionError
from .messages import checked
from .prompt import clean
from .settings import Limits, Lora, PairSettings, RuntimeSettings, SamplingSettings

if TYPE_CHECKING:
    from .engine.load import Engine
    from .engine.loop import Watch
    from .engine.types import Piece, RoundRecord, Statistics
    from .logprobs import Vocabulary

File = str | os.PathLike[str]
Progress = Callable[[str, float], None]
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A message of the user's, a conversation ({"role": ..., "content": ...}), or token ids."""

_PAIR = ("depth", "width", "nodes", "feedback")  # what of PairSettings goes by its own name
_NEEDS_DRAFTER = ("width", "feedback", "draft_threads")
# annotation of a setting -> what is taken for it, what it becomes, the words for it
_KINDS: Mapping[str, tuple[type, Callable[[Any], Any], str]] = {
    "float": (Real, float, "a number"),
    "int": (Integral, int, "a whole number"),
    "bool": (bool, bool, "True or False"),
    "str": (str, str, "a text"),
}


@dataclass(frozen=True)
class Answer:
    """A whole answer; `str` of it is its text.

    tokens         the emitted ids, without the end token
    finish_reason  "stop" (an end token or a stop string) or "length"
    seed           of the draws
    pieces         as `Pair.stream` gave them: what had proposed each token, and its likelihood where it was asked for
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    seed: int
    pieces: tuple[Piece, ...] = field(repr=False)
    statistics: Statistics = field(repr=False)

    def __str__(self) -> str:
        return self.text


def load(
    target: File | None = None,
    draft: File | None = None,
    *,
    lookup: bool = True,
    loras: Iterable[File | Lora] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Pair:
    """Load a target and its drafter.  InputError subclasses before llama.cpp sees a file that it cannot use.

    target    the GGUF that answers, or the name of a pair of `eagle3 models`; without it the demo pair does
    draft     its EAGLE-3 drafter; without it n-gram matches of the text are proposed, or nothing where lookup is False
    lookup    such matches join the drafter's tree, too, unless `nodes` fixes it
    loras     adapters on the target
    chat_template_kwargs   further variables of its chat template, like {"enable_thinking": False}
    progress  is given ("target" or "drafter", fraction done), in another thread; what it raises ends the load
    options   fields of RuntimeSettings (ctx_size, threads, ...) and depth, width, nodes, feedback of PairSettings
    """
    known = [*_PAIR, *(f.name for f in fields(RuntimeSettings))]
    _refuse_unknown(options, known)
    options = _with_lists(options)
    pair = _pair_settings(target, draft, lookup, loras, options)
    if chat_template_kwargs:
        pair = replace(pair, chat_template_kwargs=_json("chat_template_kwargs", chat_template_kwargs))
    return Pair(_load(pair, RuntimeSettings(**_typed(RuntimeSettings, options)), progress))


def _load(pair: PairSettings, runtime: RuntimeSettings, progress: Progress | None) -> Engine:
    """llama.cpp calls Python functions while it loads, and a KeyboardInterrupt that is raised in one of them is lost:
    ctypes prints it and goes on.  It is raised in the main thread alone, so the load gets another one."""
    from .engine import load_engine

    stopped = threading.Event()

    def told(name: str, done: float) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        if progress:
            progress(name, done)

    with ThreadPoolExecutor(1, "eagle3-load") as pool:
        loading = pool.submit(load_engine, pair, runtime, told)
        try:
            return loading.result()
        except BaseException:
            stopped.set()
            if loading.exception() is None:
                loading.result().close()
            raise


def _pair_settings(
    target: File | None, draft: File | None, lookup: bool, loras: Iterable[File | Lora], options: Mapping[str, Any]
) -> PairSettings:
    """OptionError for options that have no effect without a drafter, or without anything that is proposed."""
    target, draft = _files(target, draft)
    if draft is None:
        for name in _NEEDS_DRAFTER if lookup else (*_PAIR, *_NEEDS_DRAFTER):
            if name in options:
                raise OptionError(f"{name}: has no effect without a drafter.", "Leave it out, or give draft.")
    chosen = {name: value for name, value in options.items() if name in _PAIR}
    settings = PairSettings(
        target=_path(target),
        draft=None if draft is None else _path(draft),
        no_draft=None if draft is not None or lookup else "no drafter was given",
        lookup=lookup and (draft is None or chosen.get("nodes") is None),
        loras=tuple(lora if isinstance(lora, Lora) else Lora(_path(lora)) for lora in loras),
        **_typed(PairSettings, chosen),
    )
    settings.tree(on_gpu=False)  # checks the ranges before a model is loaded
    return settings


def _files(target: File | None, draft: File | None) -> tuple[File, File | None]:
    """The target and its drafter, if it has one: those given, those of a name, or the demo pair."""
    if target is None:
        if draft is not None:
            raise OptionError("draft: needs target, the model that this drafter was made for.", "Give target.")
        from . import demo

        return demo.demo_target(), demo.demo_drafter()
    from . import registry

    known = registry.find(target) if isinstance(target, str) else None
    if known is None:
        return target, draft
    return known.target, draft or (None if known.draft == registry.LOOKUP else known.draft)


class Pair:
    """A loaded target, with its drafter if it has one.  Use it in a `with` statement, or call `close`.

    It gives one answer at a time, to whichever thread asks.  Another one is a BusyError until the first has been read
    to its end, was closed, or was dropped.  Nothing here handles signals or ends the process.

    engine   what the command line works with, for all that this class leaves out
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._guard = threading.Lock()
        self._user: object | None = None  # who computes, or has begun an answer
        self._open = True
        self._streams: weakref.WeakSet[Generator[Piece, None, None]] = weakref.WeakSet()

    @property
    def statistics(self) -> Statistics:
        """Of the answer in progress, or of the last one."""
        return self.engine.statistics

    @property
    def settings(self) -> dict[str, Any]:
        """Every effective value of the load, for JSON."""
        return self.engine.settings

    @property
    def notes(self) -> tuple[str, ...]:
        """What one should know about how the pair runs; mostly nothing."""
        return self.engine.notes

    # --- answers

    def stream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        likeliest: int | None = None,
        rounds: Callable[[RoundRecord], None] | None = None,
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """The answer, token by token.  It is computed as it is read, from the first piece on.

        prompt     a message, a conversation, both put through the target's chat template, or token ids
        raw        a message goes to the model as it is
        likeliest  every piece tells so many of the target's likeliest tokens, and the likelihood of its own
        rounds     is called after every round
        options    fields of SamplingSettings and Limits, and `schema`, a JSON schema as a dict or as text
        OptionError and InputError at the call, PromptError for a prompt without room before the first piece.
        """
        return self._begin(prompt, raw, _watch(likeliest, rounds), options)[1]

    def answer(self, prompt: Prompt, **options: Any) -> Answer:
        """The whole answer at once.  Everything is as for `stream`."""
        rounds, likeliest = options.pop("rounds", None), options.pop("likeliest", None)
        seed, stream = self._begin(prompt, options.pop("raw", False), _watch(likeliest, rounds), options)
        with closing(stream):
            pieces = tuple(stream)
        return Answer(
            text="".join(piece.text for piece in pieces),
            tokens=tuple(piece.token for piece in pieces if piece.token is not None),
            finish_reason=pieces[-1].finish_reason or "",
            seed=seed,
            pieces=pieces,
            statistics=self.engine.statistics,
        )

    def _begin(
        self, prompt: Prompt, raw: bool, watch: Watch, options: Mapping[str, Any]
    ) -> tuple[int, Generator[Piece, None, None]]:
        """(the seed, the answer that has not begun yet)."""
        sampling, limits = _answer_settings(options)
        with self._alone():
            tokens = self._tokens(prompt, raw)
            sampling = self.engine.effective(sampling)
        stream = self._pieces(tokens, sampling, limits, watch)
        self._streams.add(stream)
        return sampling.seed or 0, stream

    def _pieces(
        self, tokens: list[int], sampling: SamplingSettings, limits: Limits, watch: Watch
    ) -> Generator[Piece, None, None]:
        with self._alone():
            yield from self.engine.stream(tokens, sampling, limits, watch)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within: nobody else uses the engine.  Whatever ends it, also a Ctrl-C on any line, lets the next one in."""
        me = object()
        try:
            with self._guard:
                if self._user is not None:
                    raise BusyError(
                        "engine: one answer at a time, and another one has begun.",
                        "Read that to its end, or call its close().",
                    )
                self._user = me
            self._check_open()
            yield
        finally:
            if self._user is me:
                self._user = None

    # --- tokens

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text as it is, with what the model wants in front."""
        self._check_open()
        return self.engine.tokenize(clean(text, "text"))

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation by the target's chat template, up to where the answer starts."""
        self._check_open()
        return self.engine.render(_conversation(list(messages)))

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's tokens, for a `Trace`."""
        self._check_open()
        return self.engine.decoder.model

    def token_bytes(self, token: int) -> bytes:
        """What a token prints, perhaps a part of a character; nothing for control tokens."""
        self._check_open()
        model = self.engine.decoder.model
        if not 0 <= token < model.n_vocab:
            raise InputError(f"token: expected an id from 0 to {model.n_vocab - 1}, got {token}.")
        return model.piece(token)

    def _tokens(self, prompt: Prompt, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            text = clean(prompt, "the prompt")
            if not text.strip():
                raise InputError("the prompt is empty.", "Give some text.")
            return self.engine.tokenize(text) if raw else self.engine.render([{"role": "user", "content": text}])
        if raw:
            raise OptionError("raw: has no effect on a conversation or on token ids.", "Leave it out, or give a text.")
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Integral) and not isinstance(prompt, bytes):
            return _ids(items)
        return self.engine.render(_conversation(items))

    # --- the end

    def close(self) -> None:
        """End an answer that was begun, free both models, and keep what was learned about their costs.

        BusyError while another thread computes; then nothing is freed.
        """
        for stream in list(self._streams):
            if inspect.getgeneratorstate(stream) == inspect.GEN_CREATED:  # its first piece will say that this is closed
                continue
            try:
                stream.close()
            except ValueError as error:  # it is running
                raise BusyError("close: an answer is being computed.", "Wait for its next piece.") from error
        if self._open:
            with self._alone():
                self._open = False
                self.engine.close()

    def _check_open(self) -> None:
        if not self._open:
            raise Eagle3Error("engine: is closed.", "Load the pair again.")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- what callers write -> what the engine takes --------------------------------------------------------


def _path(file: File) -> Path:
    return Path(file).expanduser()


def _watch(likeliest: int | None, rounds: Callable[[RoundRecord], None] | None) -> Watch:
    from .engine.loop import Watch

    if likeliest is not None and likeliest < 0:
        raise OptionError(f"likeliest: expected a value at least 0, got {likeliest}.")
    return Watch(likeliest, rounds)


def _ids(prompt: Sequence[Any]) -> list[int]:
    for place, token in enumerate(prompt):
        if not isinstance(token, Integral):
            raise InputError(f"prompt, place {place}: expected a token id, got {token!r:.60}.")
    return [int(token) for token in prompt]


def _conversation(messages: Sequence[Any]) -> list[dict[str, str]]:
    return checked([dict(each) if isinstance(each, Mapping) else each for each in messages], "prompt")


def _answer_settings(options: Mapping[str, Any]) -> tuple[SamplingSettings, Limits]:
    known = [f.name for kind in (SamplingSettings, Limits) for f in fields(kind)]
    _refuse_unknown(options, [*known, "schema"])
    options = _with_lists(options)
    if options.get("schema") is not None:
        if options.get("grammar") is not None:
            raise OptionError("schema: cannot be used with grammar.", "Leave one of them out.")
        options = {**options, "grammar": _grammar(options["schema"])}
    return SamplingSettings(**_typed(SamplingSettings, options)), Limits(**_typed(Limits, options))


def _grammar(schema: Mapping[str, Any] | str) -> str:
    from .llama import schema_to_gbnf

    return schema_to_gbnf(schema if isinstance(schema, str) else _json("schema", schema))


def _json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name}: expected what JSON can say: {error}.") from error


def _with_lists(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with one form for what may be given in several: stop strings, breakers, samplers, biases, overrides,
    shares."""
    found = dict(options)
    for name in ("stop", "dry_sequence_breakers", "samplers", "override_tensor"):
        if name in found:
            texts = (found[name],) if isinstance(found[name], str) else tuple(found[name])
            if not all(isinstance(text, str) for text in texts):
                raise OptionError(f"{name}: expected texts, got {found[name]!r:.60}.")
            found[name] = texts
    if "tensor_split" in found:
        try:
            found["tensor_split"] = tuple(float(share) for share in found["tensor_split"])
        except (TypeError, ValueError) as error:
            raise OptionError(f"tensor_split: expected numbers, got {options['tensor_split']!r:.60}.") from error
    if "logit_bias" in found:
        given = found["logit_bias"]
        try:
            pairs = given.items() if isinstance(given, Mapping) else given
            found["logit_bias"] = tuple((int(token), float(bias)) for token, bias in pairs)
        except (TypeError, ValueError) as error:
            raise OptionError(f"logit_bias: expected {{token id: bias}}, got {given!r:.60}.") from error
    return found


def _refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}."
            raise OptionError(f"{name}: no such setting.", hint)


def _typed(settings: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of a settings class, as its types.  Ranges are checked there."""
    return {f.name: _as_type(f.name, str(f.type), options[f.name]) for f in fields(settings) if f.name in options}


def _as_type(name: str, annotation: str, value: Any) -> Any:
    plain, _, optional = annotation.partition(" | ")
    if plain not in _KINDS or (optional and value is None):
        return value
    kind, convert, words = _KINDS[plain]
    if not isinstance(value, kind) or (isinstance(value, bool) and plain != "bool"):
        raise OptionError(f"{name}: expected {words}, got {value!r:.60}.")
    return convert(value)
