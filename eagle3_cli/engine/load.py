"""Load a pair and hand out an `Engine`: the front door for commands and for Python users."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import _native
from ..context import DECODE, Context, ContextSettings, target_settings
from ..errors import FileError, LlamaError, OptionError, PairError
from ..gguf_file import main_type
from ..llama import Model, choose_devices, physical_cores, render_chat
from ..lora import Adapter, adapt, check_lora
from ..model_files import DrafterInfo, check_target, read_drafter, target_files
from ..placement import Placement, placement
from ..probe import AMX_NOTE, amx_crashes
from ..settings import (
    DRAFTER_ROWS,
    FLASH_ATTENTION,
    MAX_SEQUENCES,
    MOST_LEVELS,
    PLACEMENT,
    Limits,
    PairSettings,
    RuntimeSettings,
    SamplingSettings,
    TreeShape,
    context_cells,
)
from ..versions import versions
from .budget import Budget, Machine
from .costs import CPU_DRAFTER_PRIOR, GPU_DRAFTER_PRIOR, GPU_PRIOR, cpu_prior
from .drafter import Eagle3Drafter
from .learned import keep, place, recall
from .lookup import Lookup
from .loop import NOTHING, Decoder, Watch
from .sampler import with_seed
from .target import Target
from .types import Piece, Statistics

Progress = Callable[[str, float], None]

FED_BACK = {"pre": "eagle3_prenorm-0", "post": "result_norm"}  # graph tensors of the decoder


class Engine:
    """A loaded pair.  One answer at a time; not thread-safe.  Use as a context manager, or call `close`.

    settings     every effective value, for JSON
    notes        what the user should know about how the pair runs
    statistics   of the answer in progress, or of the last one
    """

    def __init__(self, decoder: Decoder, settings: dict[str, Any], reason: str | None, owned: Sequence[Any]) -> None:
        self.decoder = decoder
        self.settings = settings
        self.notes = () if settings["repack"] else (AMX_NOTE,)
        self._reason = reason
        self._owned = owned
        self.models: Mapping[Path, Model] = {}  # by file
        self.template_variables: Mapping[str, Any] = {}  # what its chat template gets beside the conversation
        self.learned: Path | None = None  # the file that what the budget learns is kept in
        self.load_s = 0.0
        self.statistics = self._new_statistics()

    def _new_statistics(self) -> Statistics:
        decoder = self.decoder
        enabled = (decoder.drafter is not None or decoder.lookup is not None) and decoder.shape.nodes > 0
        reason = None if enabled else self._reason or "--draft-tokens 0"
        return Statistics(enabled=enabled, reason=reason, load_s=self.load_s)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a raw prompt; BOS in front where the model wants it."""
        return self.decoder.model.tokenize(text, add_special=True)

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation by the target's chat template, up to where the answer starts."""
        return render_prompt(self.decoder.model, messages, self.template_variables)

    def effective(self, sampling: SamplingSettings) -> SamplingSettings:
        """The same with the seed that `stream` will use."""
        return with_seed(sampling)

    def stream(
        self, prompt: Sequence[int], sampling: SamplingSettings, limits: Limits | None = None, watch: Watch = NOTHING
    ) -> Generator[Piece, None, None]:
        """The answer to a prompt, token by token; see `Decoder.answer`."""
        self.statistics = self._new_statistics()
        return self.decoder.answer(prompt, with_seed(sampling), limits or Limits(), self.statistics, watch)

    def logit_gap(self, tokens: Sequence[int], likelier: int, other: int) -> float:
        """How far apart the target's logits of two tokens are after these tokens."""
        logits = self.decoder.logits_after(tokens)
        return float(logits[likelier] - logits[other])

    def close(self) -> None:
        if self._owned and self.learned and self.decoder.budget:
            keep(self.learned, self.decoder.budget.machine)
        for part in self._owned:
            part.close()
        self._owned = ()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def render_prompt(model: Model, messages: Sequence[dict[str, str]], more: Mapping[str, Any] | None = None) -> list[int]:
    """Token ids of a conversation by the model's own chat template, up to where the answer starts; one BOS in front
    where the model wants it.  more: variables of the template.  PromptError where the template refuses."""
    return tokenize_rendered(model, render_chat(model, messages, more))


def tokenize_rendered(model: Model, text: str) -> list[int]:
    """Token ids of what a chat template gave, which may begin with the BOS that the model wants."""
    bos = model.token_text(model.bos) if model.adds_bos else ""
    return model.tokenize(text, add_special=not (bos and text.startswith(bos)))


def load_engine(
    pair: PairSettings, runtime: RuntimeSettings, progress: Progress | None = None, beside: Engine | None = None
) -> Engine:
    """Check both files, load them, make the contexts.  Raises InputError subclasses before llama.cpp sees bad input.

    progress gets ("target" or "drafter", fraction done).  beside: an engine with the same runtime whose weights are
    used where the files are the same; it has to be closed after this one.
    """
    started = time.perf_counter()
    check_target(pair.target, runtime.ctx_size)
    for lora in pair.loras:
        check_lora(lora.path, pair.target)
    info = read_drafter(pair.draft, pair.target) if pair.draft else None
    if info:
        pair = replace(pair, feedback=_feedback(pair, info))
    devices, layers, backend = choose_devices(runtime)
    where = placement(runtime, pair.target, backend)
    shape = pair.tree(on_gpu=backend != "cpu")
    loader = _Loader(runtime, devices, layers, where, progress, pair.lookup, beside.models if beside else {})
    try:
        engine = loader.engine(pair, info, shape, backend)
    except BaseException:
        loader.close()
        raise
    engine.load_s = engine.statistics.load_s = time.perf_counter() - started
    return engine


def _template_variables(pair: PairSettings, model: Model) -> dict[str, Any]:
    """What the chat template gets beside the conversation.  OptionError for what it does not look at."""
    variables = pair.template_variables()
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", model.chat_template or ""):
            raise OptionError(
                f"--chat-template-kwargs: the chat template of {pair.target.name} does not use {name}.",
                "Leave it out.",
            )
    return variables


def _feedback(pair: PairSettings, info: DrafterInfo) -> str:
    """What "auto" means for this drafter: pre or post."""
    if pair.feedback == "post" and not info.final_norm:
        raise OptionError(f"--feedback post: {info.path} has no final norm to feed back.", "Leave it out.")
    if pair.feedback == "auto":
        return "post" if info.norm_output else "pre"
    return pair.feedback


def _chain(pair: PairSettings, shape: TreeShape, model: Model) -> TreeShape:
    """The largest chain for a model with recurrent layers: their state belongs to one text, not to a tree of them."""
    if pair.width not in (None, 1):
        raise OptionError(
            f"--draft-width {pair.width}: {model.path.name}, a {model.description} model, has recurrent layers, which"
            " cannot hold a tree.",
            "Use 1, a chain, or leave it out.",
        )
    depth = shape.depth if pair.depth is not None or not pair.nodes else min(pair.nodes, MOST_LEVELS)
    return TreeShape(depth, 1, min(shape.nodes, depth))


def _try_capture(context: Context, info: DrafterInfo, model: Model) -> None:
    """Compute one token.  Not every graph of llama.cpp has one row per token behind every layer; PairError for those
    that have none where the drafter reads, before anyone waits for an answer."""
    one = np.zeros(1, np.int32)
    try:
        context.process(DECODE, one, one, outputs=np.ones(1, np.int8))
    except LlamaError as error:
        fault = context.capture.check(1)
        if fault is None:
            raise
        raise PairError(
            f"{info.path}: reads target layers {', '.join(map(str, info.aux_layers))}, but llama.cpp does not give"
            f" their inputs for {model.path.name}, a {model.description} model: {fault}.",
            "Use --no-draft, or a drafter that reads other layers.",
        ) from error
    context.remove(0, 0)


class _Loader:
    """Makes the parts in order and frees them in reverse order."""

    def __init__(
        self,
        runtime: RuntimeSettings,
        devices: list[int],
        layers: int,
        where: Placement,
        progress: Progress | None,
        lookup: bool,
        loaded: Mapping[Path, Model],
    ) -> None:
        self.models = dict(loaded)
        self.runtime, self.devices, self.layers, self.progress = runtime, devices, layers, progress
        self.placement = where
        self.lookup = lookup
        self.flash_attention = runtime.flash_attention(on_gpu=bool(devices))
        self.repack = not amx_crashes()
        self.owned: list[Any] = []

    def close(self) -> None:
        for part in self.owned:
            part.close()

    def engine(self, pair: PairSettings, info: DrafterInfo | None, shape: TreeShape, backend: str) -> Engine:
        model = self._model("target", pair.target)
        if not model.generates_text:
            raise FileError(f"{pair.target}: {model.description} does not generate text.")
        variables = _template_variables(pair, model)
        recurrent = not model.keeps_every_position
        if recurrent and pair.drafts:
            shape = _chain(pair, shape, model)
        # before the context, which reserves room for them
        adapters = [self._own(Adapter(model, lora)) for lora in pair.loras]
        target = self._target(model, info, shape, recurrent)
        if adapters:
            adapt(target.context, adapters)
        drafter = self._drafter(info, target, shape, pair.feedback) if info else None
        settings = self._settings(pair, shape, target, backend)
        budget = self._budget(pair, backend) if pair.drafts and pair.nodes is None else None
        lookup = Lookup() if pair.lookup else None
        decoder = Decoder(model, target, drafter, shape, budget, lookup, chain=recurrent)
        engine = Engine(decoder, settings, pair.no_draft, self.owned)
        engine.models, engine.template_variables = self.models, variables
        if budget:
            files = {"target": pair.target, "draft": pair.draft}
            files |= {f"lora {i} x {lora.scale}": lora.path for i, lora in enumerate(pair.loras)}
            engine.learned = place(files, self._that_costs(settings))
            recall(engine.learned, budget.machine)
        return engine

    def _budget(self, pair: PairSettings, backend: str) -> Budget:
        """One that knows nothing yet."""
        on_gpu = backend != "cpu"
        prior = GPU_PRIOR if on_gpu else cpu_prior(main_type(target_files(pair.target)))
        # on a GPU the drafter's threads only wait, and whoever names a number gets it
        threads = 0 if on_gpu or self.runtime.draft_threads or not pair.draft else self._threads()
        machine = Machine(prior, GPU_DRAFTER_PRIOR if on_gpu else CPU_DRAFTER_PRIOR, threads)
        return Budget(machine, can_draft=pair.draft is not None)

    @staticmethod
    def _that_costs(settings: dict[str, Any]) -> dict[str, Any]:
        """The settings that costs and acceptance depend on."""
        names = ("device", "gpu_layers", *PLACEMENT, "threads", "draft_threads", "repack", "mmap", "flash_attn",
                 "cache_type_k", "cache_type_v", "feedback")  # fmt: skip
        return {**{name: settings[name] for name in names}, "llama-cpp-python": versions()["llama-cpp-python"]}

    def _own(self, part: Any) -> Any:
        self.owned.insert(0, part)
        return part

    def _model(self, name: str, path: Path) -> Model:
        if path in self.models:
            return self.models[path]
        report = self.progress
        progress = (lambda done: report(name, done)) if report else None
        where = self.placement if name == "target" else replace(self.placement, overrides=())
        model = Model(path, self.devices, self.layers, self.repack, progress, mmap=self.runtime.mmap, placement=where)
        self.models[path] = self._own(model)
        return model

    def _threads(self) -> int:
        return self.runtime.threads or physical_cores()

    def _target(self, model: Model, info: DrafterInfo | None, shape: TreeShape, recurrent: bool) -> Target:
        cells = context_cells(self.runtime.ctx_size, model.n_ctx_train)
        rows = min(max(self.runtime.batch, shape.nodes + 1), cells)
        drafts = info is not None or self.lookup
        # one per leaf, and a spare one
        sequences = min(MAX_SEQUENCES, max(shape.nodes, 1) + 1) if drafts and not recurrent else 1
        rollback = min(shape.nodes, cells - 2) if drafts and recurrent else 0
        capture = None
        if info:
            names = [f"l_out-{layer - 1}" for layer in info.aux_layers]
            capture = _native.Capture(names, model.n_embd, rows)
        settings = target_settings(self.runtime, bool(self.devices), cells, rows, sequences)
        # llama.cpp computes the last layer's output only for rows that ask for logits
        every_row = info is not None and max(info.aux_layers) == model.n_layer
        in_order = not self.devices and self.flash_attention == "on"
        context = self._own(Context(model, "target", replace(settings, rollback=rollback), capture))
        if context.rollback < rollback:
            raise FileError(
                f"{model.path}: {model.description} has recurrent layers, whose state cannot drop rejected tokens.",
                "Use --no-draft; nothing can be drafted for it.",
            )
        if info:
            _try_capture(context, info, model)
        return Target(context, every_row, in_order, recurrent)

    def _drafter(self, info: DrafterInfo, target: Target, shape: TreeShape, feedback: str) -> Eagle3Drafter:
        model = self._model("drafter", info.path)
        rows = max(DRAFTER_ROWS, shape.width)
        cells = target.context.cells + shape.width * shape.depth
        threads = self.runtime.draft_threads or self._threads()
        fused = _native.Capture(["fc_out"], info.width, rows)
        flash = FLASH_ATTENTION["auto" if self.devices else "off"]
        settings = ContextSettings(rows, rows, 1, threads, flash)
        encoder = self._own(Context(model, "drafter's encoder", settings, fused, target.context))
        outputs = _native.Capture([FED_BACK[feedback]], info.width, rows)
        settings = ContextSettings(cells, rows, 2 * shape.width, threads, flash)
        decoder = self._own(Context(model, "drafter", settings, outputs, target.context))
        return Eagle3Drafter(encoder, decoder, info)

    def _settings(self, pair: PairSettings, shape: TreeShape, target: Target, backend: str) -> dict[str, Any]:
        drafts = pair.draft is not None
        return {
            "target": str(pair.target),
            "draft": str(pair.draft) if pair.draft else None,
            "loras": [{"path": str(lora.path), "scale": lora.scale} for lora in pair.loras],
            "ctx_size": target.context.cells,
            "batch_size": self.runtime.batch,
            "threads": self._threads(),
            "draft_threads": (self.runtime.draft_threads or self._threads()) if drafts else None,
            "device": backend,
            "gpu_layers": self.layers,
            **{name: getattr(self.runtime, name) for name in PLACEMENT},
            "repack": self.repack,
            "mmap": self.runtime.mmap,
            "flash_attn": self.flash_attention,
            "cache_type_k": self.runtime.cache_type_k,
            "cache_type_v": self.runtime.cache_type_v,
            "chat_template_kwargs": pair.template_variables(),
            "lookup": pair.lookup,
            "draft_depth": shape.depth if drafts or pair.lookup else None,
            "draft_width": shape.width if drafts else None,
            "draft_tokens": None if not (drafts or pair.lookup) else "auto" if pair.nodes is None else shape.nodes,
            "feedback": pair.feedback if drafts else None,
        }
