"""Flags -> the settings dataclasses, and the rules about which flags go together.

A flag that has no effect in this mode is an error when it was typed.  The same value from an EAGLE3_ variable or from
the configuration file is a habit, not a request: it gives way silently.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .. import demo, registry
from ..errors import FileError, OptionError
from ..prompt import read_text
from ..settings import EVERY_LAYER, FLAGS, SAMPLERS, Limits, Lora, PairSettings, RuntimeSettings, SamplingSettings
from .options import set_by

Flags = Mapping[str, Any]
LOOKUP = "lookup"  # as --draft: n-gram matches alone
SHAPE = ("draft_depth", "draft_width", "draft_tokens")
FORMS = ("grammar", "grammar_file", "json_schema", "json_schema_file")
SHORT_SAMPLERS = {"typ": "typ_p", "temp": "temperature", "nucleus": "top_p"}
BIAS = re.compile(r"(-?\d+)(?:=\s*([+-]?)|([+-]))(.+)", re.DOTALL)


TYPED = 3
_STRENGTHS = {ParameterSource.COMMANDLINE: TYPED, ParameterSource.ENVIRONMENT: 2, ParameterSource.DEFAULT_MAP: 1}


def typed(name: str) -> bool:
    """Whether the flag stands on the command line, not in a variable or the configuration file."""
    return strength(name) == TYPED


def strength(name: str) -> int:
    """Of what sets a flag: 3 the command line, 2 a variable, 1 the configuration file, 0 nothing."""
    source = click.get_current_context().get_parameter_source(name)
    return _STRENGTHS.get(source, 0) if source else 0


def flag(name: str) -> str:
    return "--json" if name == "as_json" else "--" + name.replace("_", "-")


Useless = tuple[tuple[str, ...], Callable[[Flags], bool], str, str]
"""Flags, what makes them useless, the words for it, the flag that does."""
_USELESS: list[Useless] = [
    ((*SHAPE, "draft_threads", "feedback", "no_lookup"), lambda f: f["no_draft"], "with --no-draft", "no_draft"),
    (
        ("draft_width", "draft_threads", "feedback", "no_lookup"),
        lambda f: f["draft"] == LOOKUP,
        "with --draft lookup",
        "draft",
    ),
    (("no_lookup",), lambda f: f["draft_tokens"] is not None, "with a fixed --draft-tokens", "draft_tokens"),
    (("gpu_layers",), lambda f: f["device"] == "cpu" and f["gpu_layers"] != 0, "with --device cpu", "device"),
    (("n_cpu_moe",), lambda f: f["cpu_moe"], "with --cpu-moe", "cpu_moe"),
    (
        ("system", "chat_template_kwargs"),
        lambda f: f.get("raw", False),
        "with --raw, which sends the prompt as it is",
        "raw",
    ),
    (("quiet",), lambda f: f.get("stats", False), "with --stats", "stats"),
    (("show_drafts",), lambda f: f["no_draft"], "with --no-draft", "no_draft"),
    (("show_drafts",), lambda f: f["draft_tokens"] == 0, "with --draft-tokens 0", "draft_tokens"),
    (("raw_output",), lambda f: f.get("markdown", False), "with --markdown", "markdown"),
]


def refuse_useless_flags(flags: Flags, more: Sequence[Useless] = ()) -> None:
    """OptionError for the first typed flag that another flag makes useless, wherever that one is set.  more: rules of
    the command's own."""
    pair = _named(flags)
    flags = {**flags, "draft": pair.draft, "no_draft": pair.no_draft is not None}
    for names, useless, words, cause in (*_USELESS, *more):
        for name in names:
            if name in flags and typed(name) and useless(flags):
                raise _useless(name, words, cause)
    if "temp" in flags:
        for setting, (words, cause) in _without_form(flags).idle().items():
            if typed(FLAGS.get(setting, setting)):
                raise _useless(FLAGS.get(setting, setting), words, FLAGS.get(cause, cause))


def _useless(name: str, words: str, cause: str) -> OptionError:
    setter = _setter(cause)
    hint = f"{setter} sets {flag(cause)}: change it there, or leave {flag(name)} out." if setter else None
    return OptionError(f"{flag(name)}: has no effect {words}.", hint or "Leave one of them out.")


def _setter(name: str) -> str | None:
    """The variable or the configuration file that sets a flag, by name; None where neither does."""
    return set_by(click.get_current_context(), lambda param: param.name == name)


@dataclass(frozen=True)
class _Named:
    """A pair as the flags name it.

    target, draft   as given, or the files of the model that is registered under the name given
    no_draft        why there is no drafter, where none is wanted
    """

    target: str | None
    draft: str | None
    no_draft: str | None


def _named(flags: Flags) -> _Named:
    target, no_draft = flags["target"], flags["no_draft"]
    draft = None if _left_behind(flags, "draft") else flags["draft"]
    if no_draft and draft:
        if strength("no_draft") == strength("draft"):
            raise OptionError("--no-draft: cannot be used with --draft.", "Leave one of them out.")
        draft, no_draft = (None, True) if strength("no_draft") > strength("draft") else (draft, False)
    why = "--no-draft" if no_draft else None
    model = registry.find(target) if target else None
    if model is None:
        return _Named(target, draft, why)
    if not draft and not why:
        draft, why = model.draft, None if model.draft else f"{target} is registered without a drafter"
    return _Named(model.target, draft, why)


def _left_behind(flags: Flags, name: str) -> bool:
    """Whether this flag, a drafter or adapters, was set for a target that something stronger has replaced: the
    configuration file names a pair, say, and --target another model."""
    ctx = click.get_current_context()
    if not flags[name] or flags[name] == LOOKUP:
        return False
    if any(flags[each] != ctx.params.get(each) for each in ("target", name)):  # the caller's own, not what was parsed
        return False
    weaker = strength(name)
    if strength("target") <= weaker:
        return False
    return bool(os.environ.get("EAGLE3_TARGET") if weaker > 1 else ctx.lookup_default("target"))


def pair_settings(flags: Flags) -> PairSettings:
    """Which two files: the named pair, or the demo pair where none is named."""
    pair = _named(flags)
    target, draft, lookup = pair.target, pair.draft, pair.draft == LOOKUP
    if target and registry.is_name(target) and not os.path.lexists(target):
        raise FileError(
            f"--target {target}: no such file, and no model is registered under this name.",
            "eagle3 models list shows the names.",
        )
    if draft and not target and not lookup:
        raise OptionError("--draft: needs --target, the model that this drafter was made for.", "Give --target.")
    if target and not draft and not pair.no_draft:
        raise OptionError(
            "--target: no drafter for this model.",
            "Give --draft GGUF, --draft lookup, or --no-draft to answer without a drafter.",
        )
    drafting = {
        "depth": flags["draft_depth"],
        "width": flags["draft_width"],
        "nodes": flags["draft_tokens"],
        "feedback": flags["feedback"],
        "lookup": lookup or (flags["draft_tokens"] is None and not flags["no_lookup"]),
    }
    settings = PairSettings(
        target=Path(target).expanduser() if target else demo.demo_target(),
        draft=None if pair.no_draft or lookup else Path(draft).expanduser() if draft else demo.demo_drafter(),
        no_draft=pair.no_draft,
        loras=_loras(flags),
        chat_template_kwargs=flags.get("chat_template_kwargs") or "",
        **({} if pair.no_draft else drafting),
    )
    settings.tree(on_gpu=False)  # checks the ranges before a model is loaded
    return settings


def _loras(flags: Flags) -> tuple[Lora, ...]:
    plain = () if _left_behind(flags, "lora") else flags["lora"]
    scaled = () if _left_behind(flags, "lora_scaled") else flags["lora_scaled"]
    return (*(Lora(Path(path).expanduser()) for path in plain), *map(Lora.parse, scaled))


def runtime_settings(flags: Flags) -> RuntimeSettings:
    layers = flags["gpu_layers"]
    return RuntimeSettings(
        ctx_size=flags["ctx_size"],
        batch=flags["batch_size"],
        threads=flags["threads"],
        draft_threads=flags["draft_threads"],
        gpu_layers=None if layers == -1 else layers,
        device=flags["device"],
        split_mode=flags["split_mode"],
        tensor_split=_shares(flags["tensor_split"]),
        main_gpu=flags["main_gpu"],
        override_tensor=tuple(each for text in flags["override_tensor"] for each in text.split(",")),
        cpu_moe=EVERY_LAYER if flags["cpu_moe"] else flags["n_cpu_moe"],
        flash_attn=flags["flash_attn"],
        cache_type_k=flags["cache_type_k"],
        cache_type_v=flags["cache_type_v"],
        mmap=not flags["no_mmap"],
    )


def _shares(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(",")) if text is not None else ()
    except ValueError:
        raise OptionError(f"--tensor-split: expected numbers with commas between them, got {text}.") from None


def limits(flags: Flags) -> Limits:
    most = flags["max_tokens"]
    return Limits(max_tokens=None if most == -1 else most, stop=tuple(flags["stop"]), ignore_eos=flags["ignore_eos"])


def sampling_settings(flags: Flags) -> SamplingSettings:
    return replace(_without_form(flags), grammar=_grammar(flags))


def _without_form(flags: Flags) -> SamplingSettings:
    """All but the grammar, whose file may be a pipe and whose schema takes a process to translate."""
    numbers = {
        name: flags[FLAGS.get(name, name)] for name, value in vars(SamplingSettings()).items() if _is_number(value)
    }
    return SamplingSettings(
        **numbers,
        samplers=samplers(flags["samplers"]),
        dry_sequence_breakers=_breakers(tuple(flags["dry_sequence_breaker"])),
        logit_bias=tuple(logit_bias(text) for text in flags["logit_bias"]),
        seed=None if flags["seed"] == -1 else flags["seed"],
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def samplers(text: str) -> tuple[str, ...]:
    """Names in the spellings that llama.cpp takes ("top-k;topp;temp"), as settings has them."""
    known = {name.replace("_", ""): name for name in SAMPLERS} | SHORT_SAMPLERS
    names = [name.strip().lower() for name in re.split("[;,]", text)]
    return tuple(known.get(name.replace("_", "").replace("-", ""), name) for name in names if name)


def logit_bias(text: str) -> tuple[int, float]:
    """(token id, bias) of 15043+1, 15043-1 or 15043-inf as llama.cpp writes it, or of 15043=-1."""
    match = BIAS.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError(text)
        sign, size = match[2] or match[3] or "+", match[4].strip()
        if size[:1] in "+-":  # 15043+-1 is a slip, not a bias
            raise ValueError(text)
        token, bias = int(match[1]), float(size) * (-1.0 if sign == "-" else 1.0)
        if token < 0 or math.isnan(bias) or bias == math.inf:
            raise ValueError(text)
    except ValueError:
        raise OptionError(
            f"--logit-bias: expected ID+BIAS or ID-BIAS, got {text}.", "For example 15043+1, 15043-0.5 or 15043-inf."
        ) from None
    return token, bias


def _breakers(given: tuple[str, ...]) -> tuple[str, ...]:
    if not given:
        return SamplingSettings().dry_sequence_breakers
    if "none" in given and len(given) > 1:
        raise OptionError("--dry-sequence-breaker: none cannot be used with others.", "Leave one of them out.")
    if "" in given:
        raise OptionError("--dry-sequence-breaker: expected a non-empty string.")
    return () if given == ("none",) else given


def _grammar(flags: Flags) -> str | None:
    """GBNF from whichever of the four flags is given."""
    given = [name for name in FORMS if flags[name] is not None]
    given = [name for name in given if strength(name) == max(map(strength, given))]
    if len(given) > 1:
        raise OptionError(f"{flag(given[1])}: cannot be used with {flag(given[0])}.", "Leave one of them out.")
    if not given:
        return None
    name, value = given[0], flags[given[0]]
    text = value
    if name.endswith("_file"):
        text = read_text(value, flag(name))
    elif name == "json_schema" and value.startswith("@"):
        text = read_text(value[1:], flag(name))
    elif name == "json_schema" and os.path.isfile(value):
        raise OptionError(f"{flag(name)}: expected a schema, got the name of a file.", f"Give @{value} to read it.")
    if not text.strip():
        raise OptionError(f"{flag(name)}: is empty.")
    return _gbnf(text) if name.startswith("json_schema") else text


def _gbnf(schema: str) -> str:
    from ..llama import schema_to_gbnf

    return schema_to_gbnf(schema)
