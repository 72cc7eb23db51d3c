"""Every setting with its default and its range, in one place.

Each dataclass checks itself when it is made: a value out of range is an `OptionError` that names the flag.
Defaults of the samplers are llama.cpp's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import OptionError, brief

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}  # ggml_type
FLOAT_CACHE_TYPES = ("f32", "f16", "bf16")  # a V cache of another type needs flash attention
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # llama_flash_attn_type
FEEDBACK = ("auto", "pre", "post")  # what a drafter step hands on: its output before or after the final norm
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ: a context with more cannot be made
MOST_LEVELS = 64  # of a draft tree
DEFAULT_CONTEXT = 8192  # tokens of context where nobody names a number and the target was trained with more
TEMPLATE_VARIABLES = ("messages", "add_generation_prompt", "bos_token", "eos_token")  # of every chat template
DRAFTER_ROWS = 128  # rows of one drafter batch: its logits cover the target's vocabulary, for every row
C_INT_MAX = 2**31 - 1


def check_range(flag: str, value: float, low: float, high: float = math.inf) -> None:
    if not (low <= value <= high):  # also catches NaN
        span = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise OptionError(f"{flag}: expected a value {span}, got {value:g}.")


def check_name(flag: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise OptionError(f"{flag}: expected one of {', '.join(allowed)}, got {value}.")


USUAL_SAMPLERS = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
SAMPLERS = (*USUAL_SAMPLERS, "adaptive_p")
FLAGS = {
    "temperature": "temp",
    "typical_p": "typical",
    "top_n_sigma": "top_nsigma",
    "dynatemp_exponent": "dynatemp_exp",
    "dry_sequence_breakers": "dry_sequence_breaker",
}  # settings of a sampler whose flag has another name


@dataclass(frozen=True)
class SamplingSettings:
    """How the target's distribution is turned into a token; llama.cpp's names, order and defaults.

    temperature <= 0 is greedy.  seed None means: draw one, and report which.  `repeat_last_n` and
    `dry_penalty_last_n` count tokens, -1 is the whole context.  `grammar` is GBNF text.  `top_n_sigma` and
    `adaptive_target` are off below 0.  `mirostat` is 0 (off), 1 or 2.  `samplers` are applied in this order; what is
    not among them is not applied.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_lr: float = 0.1
    mirostat_ent: float = 5.0
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    samplers: tuple[str, ...] = USUAL_SAMPLERS
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            check_range("--" + FLAGS.get(name, name).replace("_", "-"), getattr(self, name), low, high)
        if self.temperature:
            check_range("--temp (if not 0)", self.temperature, 1e-6, 100.0)  # logits over less are no numbers
        for name in self.samplers:
            check_name("--samplers", name, SAMPLERS)
            if self.samplers.count(name) > 1:
                raise OptionError(f"--samplers: expected each sampler once, got {name} twice.")
        if self.seed is not None:
            check_range("--seed", self.seed, 0, 2**32 - 2)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0

    def idle(self) -> Mapping[str, tuple[str, str]]:
        """What has no effect beside the other settings: its name -> (words for it with flags, the setting to blame)."""
        found: dict[str, tuple[str, str]] = {}

        def because(words: str, blamed: str, names: Collection[str]) -> None:
            for name in names:
                found.setdefault(name, (words, blamed))

        if self.greedy:
            because("with --temp 0, which always takes the likeliest token", "temperature", _CHOOSING)
        elif self.mirostat:
            because("with --mirostat, which chooses alone", "mirostat", _BESIDE_MIROSTAT)
        elif "temperature" not in self.samplers:
            because("without temperature in --samplers", "samplers", ("temperature",))
        for sampler, names in _NAMES.items():
            if sampler not in self.samplers:
                because(f"without {sampler} in --samplers", "samplers", names)
        if self.repeat_penalty == 1 and not self.presence_penalty and not self.frequency_penalty:
            penalties = "without --repeat-penalty, --presence-penalty or --frequency-penalty"
            because(penalties, "repeat_penalty", ("repeat_last_n",))
        if not self.dry_multiplier:
            because("without --dry-multiplier", "dry_multiplier", _NAMES["dry"][1:])
        if not self.xtc_probability:
            because("without --xtc-probability", "xtc_probability", ("xtc_threshold",))
        if not self.dynatemp_range:
            because("without --dynatemp-range", "dynatemp_range", ("dynatemp_exponent",))
        if not self.mirostat:
            because("without --mirostat", "mirostat", ("mirostat_lr", "mirostat_ent"))
        if self.adaptive_target < 0:
            because("without --adaptive-target", "adaptive_target", ("adaptive_decay",))
        return found


_RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (0, C_INT_MAX),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 1e6),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "mirostat": (0, 2),
    "mirostat_lr": (0.0, 100.0),
    "mirostat_ent": (0.0, 100.0),
    "adaptive_target": (-1.0, 1.0),
    "adaptive_decay": (0.0, 0.99),
    "repeat_penalty": (1e-6, 100.0),
    "repeat_last_n": (-1, C_INT_MAX),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (0.0, 100.0),
    "dry_allowed_length": (0, C_INT_MAX),
    "dry_penalty_last_n": (-1, C_INT_MAX),
}
_NAMES = {
    "penalties": ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
    "dry": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability", "xtc_threshold"),
    "temperature": ("dynatemp_range", "dynatemp_exponent"),
    "adaptive_p": ("adaptive_target", "adaptive_decay"),
}  # sampler -> its settings, but the temperature itself, which also tells greedy from sampling
_AFTER_HISTORY = tuple(name for sampler in SAMPLERS[2:] for name in _NAMES[sampler])
_CHOOSING = (*_AFTER_HISTORY, "mirostat", "mirostat_lr", "mirostat_ent")
_BESIDE_MIROSTAT = (*_NAMES["penalties"], *_NAMES["dry"], *_AFTER_HISTORY, "samplers")


@dataclass(frozen=True)
class TreeShape:
    """The draft tree of one round: `depth` levels, at most `width` nodes expanded per level, `nodes` kept.

    Width 1 is a chain.  nodes 0 is plain decoding.  Source of the defaults on a GPU: EAGLE-2 and EAGLE-3
    papers (depth 8, width 10, 60 nodes).
    """

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        check_range("--draft-depth", self.depth, 1, MOST_LEVELS)
        check_range("--draft-width", self.width, 1, 64)
        check_range("--draft-tokens", self.nodes, 0, MAX_SEQUENCES - 1)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """From "DEPTH,WIDTH,NODES"."""
        try:
            depth, width, nodes = map(int, text.split(","))
        except ValueError:
            raise OptionError(f"--shape: expected DEPTH,WIDTH,NODES, got {text}.", "For example 4,4,8.") from None
        return cls(depth, width, nodes)

    @property
    def name(self) -> str:
        """For tables: "chain 3", "tree 8"."""
        return f"{'chain' if self.width == 1 else 'tree'} {self.nodes}"


DEVICES = ("auto", "cpu", "cuda", "metal")
GPU_NAMES = re.compile(r"[A-Za-z]+\d+(,[A-Za-z]+\d+)*")  # as llama.cpp has them: CUDA0, MTL0, Vulkan1
SPLIT_MODES = ("none", "layer", "row")
EVERY_LAYER = -1
PLACEMENT = ("split_mode", "tensor_split", "main_gpu", "override_tensor", "cpu_moe")  # fields of RuntimeSettings


def _check_override(text: str) -> None:
    pattern, equals, buffer = text.partition("=")
    try:
        if not (pattern and equals and buffer):
            raise ValueError("nothing on one side of =" if equals else "there is no =")
        re.compile(pattern)
    except (ValueError, re.error) as error:
        raise OptionError(
            f"--override-tensor {text}: expected REGEX=BUFFER: {error}.", r'For example "blk\.\d+\.ffn_.*=CPU".'
        ) from None


GPU_TREE = TreeShape(depth=8, width=10, nodes=60)
CPU_TREE = TreeShape(depth=6, width=6, nodes=32)


@dataclass(frozen=True)
class RuntimeSettings:
    """How llama.cpp runs both models.

    ctx_size    KV cells per model; 0 is the target's trained context, at most `DEFAULT_CONTEXT`
    batch       rows of one prompt chunk
    threads     0 is the number of physical cores
    gpu_layers  layers of each model on the GPU; None is all of them where there is a GPU
    device      auto, cpu, cuda or metal, or names of GPUs ("CUDA0,CUDA2")
    split_mode  how several GPUs share the models: none, layer or row; None is by layer
    tensor_split   shares of these GPUs, in their order; empty: by their free memory
    main_gpu    the one that is used with "none", and for what is not split with "row"; counted from 0
    override_tensor   "REGEX=BUFFER": the target's tensors of these names go to that kind of memory
    cpu_moe     the target's first layers whose experts stay in the CPU's memory; EVERY_LAYER: all
    flash_attn  auto, on or off, for the target
    cache_type_k, cache_type_v   types of the target's KV cache
    mmap        weights that no kernel wants in another layout stay in the file's pages; else they are read into memory
    """

    ctx_size: int = 0
    batch: int = 512
    threads: int = 0
    draft_threads: int = 0
    gpu_layers: int | None = None
    device: str = "auto"
    split_mode: str | None = None
    tensor_split: tuple[float, ...] = ()
    main_gpu: int | None = None
    override_tensor: tuple[str, ...] = ()
    cpu_moe: int | None = None
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mmap: bool = True

    def __post_init__(self) -> None:
        check_range("--ctx-size", self.ctx_size, 0, 2**24)
        if self.ctx_size == 1:
            raise OptionError("--ctx-size: expected 0 or at least 2, one token to read and one to write, got 1.")
        check_range("--batch-size", self.batch, 1, 2**16)
        check_range("--threads", self.threads, 0, 512)
        check_range("--draft-threads", self.draft_threads, 0, 512)
        if self.gpu_layers is not None:
            check_range("--gpu-layers", self.gpu_layers, -1, 100_000)
        self._check_placement()
        check_name("--flash-attn", self.flash_attn, FLASH_ATTENTION)
        check_name("--cache-type-k", self.cache_type_k, CACHE_TYPES)
        check_name("--cache-type-v", self.cache_type_v, CACHE_TYPES)
        if self.flash_attn == "off" and self.cache_type_v not in FLOAT_CACHE_TYPES:
            raise OptionError(
                f"--cache-type-v {self.cache_type_v}: needs flash attention, which --flash-attn off forbids."
            )

    def _check_placement(self) -> None:
        if not GPU_NAMES.fullmatch(self.device):
            check_name("--device", self.device, DEVICES)
        if self.split_mode is not None:
            check_name("--split-mode", self.split_mode, SPLIT_MODES)
        for share in self.tensor_split:
            check_range("--tensor-split", share, 0.0, 1e9)
        if self.tensor_split and not sum(self.tensor_split):
            raise OptionError("--tensor-split: expected a share above 0 for one GPU at least.")
        if self.tensor_split and self.split_mode == "none":
            raise OptionError("--tensor-split: has no effect with --split-mode none.", "Leave one of them out.")
        if self.main_gpu is not None:
            check_range("--main-gpu", self.main_gpu, 0, 255)
            if self.split_mode not in ("none", "row"):
                raise OptionError("--main-gpu: has no effect without --split-mode none or row.", "Leave it out.")
        if self.cpu_moe is not None:
            check_range("--n-cpu-moe", self.cpu_moe, EVERY_LAYER, 4000)
        for text in self.override_tensor:
            _check_override(text)

    def flash_attention(self, on_gpu: bool) -> str:
        """What "auto" means.  llama.cpp's own auto switches it on, but its CPU kernel takes the rows of a batch one by
        one in half precision: measured 1.4 to 3 times slower for one row and 2 to 7 times for nine (docs/tuning.md).
        A quantised V cache cannot do without."""
        if self.flash_attn != "auto" or on_gpu:
            return self.flash_attn
        return "off" if self.cache_type_v in FLOAT_CACHE_TYPES else "on"


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter on the target: its GGUF, and a factor of what it adds."""

    path: Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_range("--lora-scaled", self.scale, -1000.0, 1000.0)

    @classmethod
    def parse(cls, text: str) -> Lora:
        """From "FILE:SCALE"."""
        path, colon, scale = text.rpartition(":")
        try:
            if not (path and colon):
                raise ValueError(text)
            return cls(Path(path).expanduser(), float(scale))
        except ValueError:
            raise OptionError(
                f"--lora-scaled: expected FILE:SCALE, got {text}.", "For example style.gguf:0.5."
            ) from None


@dataclass(frozen=True)
class PairSettings:
    """Which two files to load, and how to draft.

    draft       the drafter's GGUF; None: there is none
    no_draft    why there is none, one clause for the statistics ("--no-draft")
    depth, width   None takes the default of the device (`GPU_TREE` or `CPU_TREE`)
    nodes       None: chosen round by round, at most the default of the device
    feedback    the next step's feature is the drafter's output before (pre) or after (post) its final norm; auto is
                what the drafter's file says
    lookup      n-gram matches of the text are candidates, too: with a chosen budget, or alone without a drafter
    loras       adapters on the target
    chat_template_kwargs   further variables of the target's chat template, a JSON object as text; empty: none
    """

    target: Path
    draft: Path | None
    no_draft: str | None = None
    depth: int | None = None
    width: int | None = None
    nodes: int | None = None
    feedback: str = "auto"
    lookup: bool = False
    loras: tuple[Lora, ...] = ()
    chat_template_kwargs: str = ""

    def __post_init__(self) -> None:
        check_name("--feedback", self.feedback, FEEDBACK)
        self.template_variables()

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, read.  OptionError where it is no JSON object, or sets what a conversation sets."""
        try:
            found = json.loads(self.chat_template_kwargs or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise OptionError(
                f"--chat-template-kwargs: expected a JSON object, got {brief(self.chat_template_kwargs, 60)}.",
                "For example '{\"enable_thinking\": false}'.",
            )
        for name in found:
            if name in TEMPLATE_VARIABLES:
                raise OptionError(f"--chat-template-kwargs: {name} is set by the conversation.", "Leave it out.")
        return found

    @property
    def drafts(self) -> bool:
        """Whether anything is proposed."""
        return (self.draft is not None or self.lookup) and self.nodes != 0

    def tree(self, on_gpu: bool) -> TreeShape:
        """The draft tree of every round, or the largest one where the budget chooses."""
        base = GPU_TREE if on_gpu else CPU_TREE
        return TreeShape(
            depth=base.depth if self.depth is None else self.depth,
            width=base.width if self.width is None else self.width,
            nodes=base.nodes if self.nodes is None else self.nodes,
        )


@dataclass(frozen=True)
class Limits:
    """Where an answer ends besides the end token: after `max_tokens` (None: the end of the context), or
    before any of the `stop` strings."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_range("--max-tokens", self.max_tokens, 1)
        if "" in self.stop:
            raise OptionError("--stop: expected a non-empty string.")


def context_cells(ctx_size: int | None, trained: int) -> int:
    """Tokens of context.  ctx_size: as asked for, 0 or None where nobody did; trained: the target's own."""
    return ctx_size or min(trained, DEFAULT_CONTEXT)


def as_dict(settings: Any) -> dict[str, Any]:
    """The effective values for JSON; paths as text."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
